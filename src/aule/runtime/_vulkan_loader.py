"""The Vulkan loader library: finding it, calling its functions, turning results into errors, and the instance."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from aule import settings
from aule.errors import AuleError, BackendUnavailableError, DeviceLostError, LaunchError, OutOfMemoryError
from aule.runtime import _vulkan_api as api

log = logging.getLogger("aule.vulkan")

API_VERSION = (1 << 22) | (3 << 12)
"""Vulkan 1.3, the newest version that this runtime supports."""
MINIMUM_VERSION = (1 << 22) | (2 << 12)
VALIDATION_LAYER = b"VK_LAYER_KHRONOS_validation"


def result_name(result: int) -> str:
    """Return the name of a VkResult."""
    return api.RESULTS.get(result, f"VkResult {result}")


def error_of(function: str, result: int) -> AuleError:
    """Make the error for a failed Vulkan call."""
    name = result_name(result)
    if result == api.VK_ERROR_DEVICE_LOST:
        return DeviceLostError(f"[vulkan] {function} answered {name}: the device stopped answering; open it again")
    if result in (api.VK_ERROR_OUT_OF_HOST_MEMORY, api.VK_ERROR_OUT_OF_DEVICE_MEMORY):
        return OutOfMemoryError(f"[vulkan] {function} answered {name}; free tensors or use smaller ones")
    if result in (
        api.VK_ERROR_INITIALIZATION_FAILED,
        api.VK_ERROR_INCOMPATIBLE_DRIVER,
        api.VK_ERROR_LAYER_NOT_PRESENT,
        api.VK_ERROR_EXTENSION_NOT_PRESENT,
        api.VK_ERROR_FEATURE_NOT_PRESENT,
    ):
        return BackendUnavailableError("vulkan", f"[vulkan] {function} answered {name}; {driver_remedy()}")
    return LaunchError(f"[vulkan] {function} answered {name}")


def driver_remedy() -> str:
    """Return how to install a Vulkan driver on this system, for error messages."""
    if sys.platform == "win32":
        return "install the GPU vendor's current driver, which brings Vulkan"
    if sys.platform == "darwin":
        return "install MoltenVK (`brew install molten-vk vulkan-loader`)"
    return (
        "install a Vulkan driver: `apt install mesa-vulkan-drivers` (AMD, Intel, software), "
        "or NVIDIA's driver with its file in /usr/share/vulkan/icd.d"
    )


class Functions:
    """Vulkan's functions as attributes, looked up on first use. A negative result raises an error."""

    def __init__(self, address_of: Callable[[str], int | None]) -> None:
        self._address_of = address_of

    def __getattr__(self, name: str) -> Any:
        if name not in api.PROTOTYPES:
            raise AttributeError(name)
        address = self._address_of(name)
        if not address:
            raise BackendUnavailableError("vulkan", f"[vulkan] the driver has no {name}; {driver_remedy()}")
        restype, *argtypes = api.PROTOTYPES[name]
        function = api.FUNCTYPE(restype, *argtypes)(address)
        if restype is ctypes.c_int32:

            def check(result: int, _function: object, _arguments: object) -> int:
                if result < 0:
                    raise error_of(name, result)
                return result

            function.errcheck = check
        setattr(self, name, function)
        return function


def chain(*structs: Any) -> Any:
    """Link structs through ``pNext`` and return the first, which keeps the others alive."""
    for one, following in pairwise(structs):
        one.pNext = ctypes.addressof(following)
    structs[0].chained = structs[1:]
    return structs[0]


def strings(names: Sequence[bytes]) -> Any:
    """Make a C array of strings."""
    return (ctypes.c_char_p * len(names))(*names)


def enumerate_all(call: Callable[[Any, Any], int], struct: Any) -> list[Any]:
    """Return all items of a two-call enumeration: one call for the count, one for the items."""
    while True:
        count = ctypes.c_uint32()
        call(ctypes.byref(count), None)
        items = (struct * count.value)()
        if hasattr(struct, "STYPE"):
            for item in items:
                item.sType = struct.STYPE
        if count.value == 0 or call(ctypes.byref(count), items) != api.VK_INCOMPLETE:
            return list(items[: count.value])


def _library_names() -> list[str]:
    if sys.platform == "win32":
        return ["vulkan-1.dll"]
    if sys.platform == "darwin":
        names = ["libvulkan.dylib", "libvulkan.1.dylib", "libMoltenVK.dylib"]
        folders = ["/opt/homebrew/lib", "/usr/local/lib"]
        sdk = settings.vulkan_sdk()
        if sdk is not None:
            folders.insert(0, str(sdk / "lib"))
        return names + [f"{folder}/{name}" for folder in folders for name in names]
    return ["libvulkan.so.1", "libvulkan.so"]


def _load_library() -> Any:
    names = _library_names()
    library: Any = getattr(ctypes, "WinDLL", ctypes.CDLL)
    for name in names:
        try:
            return library(name)
        except OSError:
            continue
    if sys.platform.startswith("linux"):
        remedy = "`apt install libvulkan1 mesa-vulkan-drivers` (or your system's package of the same name)"
    else:
        remedy = driver_remedy()
    raise BackendUnavailableError(
        "vulkan", f"[vulkan] expected the Vulkan loader, found none of {', '.join(names)}; {remedy}"
    )


_messages: list[str] = []


def validation_messages() -> list[str]:
    """Return the validation layer's warnings and errors (``AULE_VULKAN_VALIDATION=1``), oldest first."""
    return list(_messages)


@api.PFN_vkDebugUtilsMessengerCallbackEXT  # type: ignore[untyped-decorator]
def _on_message(severity: int, _types: int, data: Any, _user: int) -> int:
    text = (data.contents.pMessage or b"").decode(errors="replace")
    _messages.append(text)
    error = severity >= api.VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT
    log.log(logging.ERROR if error else logging.WARNING, "%s", text)
    return 0


class Instance:
    """A VkInstance and its physical devices."""

    def __init__(self) -> None:
        library = _load_library()
        get: Any = library.vkGetInstanceProcAddr
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
        self.pid = os.getpid()
        self.handle = ctypes.c_void_p()
        self.vk = Functions(lambda name: get(self.handle, name.encode()))
        self._messenger = ctypes.c_uint64()
        self.version = self._loader_version(get)
        self._create()
        try:
            self.physical: list[int] = enumerate_all(
                lambda n, p: self.vk.vkEnumeratePhysicalDevices(self.handle, n, p), ctypes.c_void_p
            )
        except AuleError:
            self.close()
            raise

    def _loader_version(self, get: Any) -> int:
        # A Vulkan 1.0 loader lacks this function.
        if not get(None, b"vkEnumerateInstanceVersion"):
            return 1 << 22
        version = ctypes.c_uint32()
        self.vk.vkEnumerateInstanceVersion(ctypes.byref(version))
        return version.value

    def _create(self) -> None:
        if self.version < MINIMUM_VERSION:
            raise BackendUnavailableError(
                "vulkan",
                f"[vulkan] expected a loader of Vulkan 1.2 or newer, got {version_text(self.version)}; "
                f"{driver_remedy()}",
            )
        vk = self.vk
        available = {
            e.extensionName
            for e in enumerate_all(
                lambda n, p: vk.vkEnumerateInstanceExtensionProperties(None, n, p), api.VkExtensionProperties
            )
        }
        extensions, layers, flags = [], [], 0
        if b"VK_KHR_portability_enumeration" in available:
            # The loader hides MoltenVK from programs that do not declare that they accept a subset of Vulkan.
            extensions.append(b"VK_KHR_portability_enumeration")
            flags = api.VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR
        messenger = self._validation_messenger() if settings.vulkan_validation() else None
        if messenger is not None:
            layers.append(VALIDATION_LAYER)
            extensions.append(b"VK_EXT_debug_utils")
        application = api.VkApplicationInfo(
            pApplicationName=b"aule", pEngineName=b"aule", apiVersion=min(API_VERSION, self.version)
        )
        info = chain(
            api.VkInstanceCreateInfo(
                flags=flags,
                pApplicationInfo=ctypes.pointer(application),
                enabledLayerCount=len(layers),
                ppEnabledLayerNames=strings(layers),
                enabledExtensionCount=len(extensions),
                ppEnabledExtensionNames=strings(extensions),
            ),
            # Chained to the instance as well, the messenger hears of leaks that only vkDestroyInstance can see.
            *([] if messenger is None else [messenger]),
        )
        try:
            vk.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(self.handle))
        except AuleError as error:
            if isinstance(error, (BackendUnavailableError, OutOfMemoryError)):  # its message includes the remedy
                raise
            raise BackendUnavailableError("vulkan", f"{error.message}; {driver_remedy()}") from None
        if messenger is not None:
            vk.vkCreateDebugUtilsMessengerEXT(self.handle, ctypes.byref(messenger), None, ctypes.byref(self._messenger))

    def _validation_messenger(self) -> Any:
        vk = self.vk
        known = {p.layerName for p in enumerate_all(vk.vkEnumerateInstanceLayerProperties, api.VkLayerProperties)}
        if VALIDATION_LAYER not in known:
            raise BackendUnavailableError(
                "vulkan",
                "[vulkan] AULE_VULKAN_VALIDATION=1 expects the layer VK_LAYER_KHRONOS_validation, which is not "
                "installed; `apt install vulkan-validationlayers`, or unset the variable",
            )
        return api.VkDebugUtilsMessengerCreateInfoEXT(
            messageSeverity=api.VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT
            | api.VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT,
            messageType=api.VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT
            | api.VK_DEBUG_UTILS_MESSAGE_TYPE_PERFORMANCE_BIT_EXT,
            pfnUserCallback=ctypes.cast(_on_message, ctypes.c_void_p).value,
        )

    def close(self) -> None:
        """Destroy the instance, or in a forked child only forget it."""
        if self.handle and self.pid == os.getpid():
            if self._messenger:
                self.vk.vkDestroyDebugUtilsMessengerEXT(self.handle, self._messenger, None)
            self.vk.vkDestroyInstance(self.handle, None)
        self.handle = ctypes.c_void_p()


def version_text(version: int) -> str:
    """Format a packed Vulkan version."""
    return f"{version >> 22 & 0x7F}.{version >> 12 & 0x3FF}.{version & 0xFFF}"


_lock = threading.Lock()
_current: Instance | None = None


def instance() -> Instance:
    """Return the process's instance, created on first use and again after a fork."""
    global _current, _lock
    if _current is not None and _current.pid != os.getpid():
        # A thread of the parent may have held the lock at the fork.
        _current, _lock = None, threading.Lock()
    with _lock:
        if _current is None:
            _current = Instance()
        return _current


def close_instance() -> None:
    """Destroy the process's instance, if there is one."""
    global _current
    if _current is not None:
        _current.close()
        _current = None
