"""What the drivers of devices with streams (CUDA, HIP) share: functions by common names, and their constants."""

from __future__ import annotations

import ctypes
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from aule.errors import AuleError, BackendUnavailableError, OutOfMemoryError

INT, UINT, SIZE = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
PTR = ctypes.c_void_p  # every pointer and every opaque handle
DEV = ctypes.c_uint64  # an address of device memory

Table = Mapping[str, tuple[Any, ...]]
"""For each common name the exported symbol and the types of its arguments."""

# Numbers that are the same in CUDA and HIP.
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
FUNC_MAX_THREADS = 0
FUNC_STATIC_SHARED = 1
FUNC_LOCAL = 3
FUNC_REGISTERS = 4


class Functions:
    """A library's functions as attributes with common names.

    Raises `AttributeError` if the library lacks one.
    """

    def __init__(self, library: ctypes.CDLL, table: Table) -> None:
        for name, (symbol, *argtypes) in table.items():
            function = library[symbol]  # a new object, so that nobody else's argtypes change
            function.argtypes = argtypes
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(name)


class StreamDriver(ABC):
    """A loaded driver. One per library and process.

    Attributes
    ----------
    api : Functions
        The functions that every call of `StreamDevice` needs.
    launch_kernel : callable
        Takes the arguments of cuLaunchKernel. It has no argtypes: ctypes then passes ctypes objects through unchecked,
        which is faster on the hot path.
    wrong_context : frozenset of int
        Results of a launch while the kernel's context is not current.
    lost : frozenset of int
        Results after which every call fails.
    """

    backend: str
    manual: str
    """Where errors are explained."""
    remedy: str
    """What to check if a device does not answer."""
    lost: frozenset[int]
    wrong_context: frozenset[int] = frozenset()
    api: Functions
    launch_kernel: Callable[..., int]

    def __init__(self) -> None:
        self.forked = False
        self.devices: weakref.WeakSet[Any] = weakref.WeakSet()
        """Objects whose ``after_fork()`` is called in a forked child."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self.forked = True
        for device in list(self.devices):
            device.after_fork()

    @abstractmethod
    def describe(self, code: int) -> str:
        """Return the driver's name and text for an error code."""

    @abstractmethod
    def forget_error(self) -> None:
        """Clear the error that the driver keeps for this thread, if it keeps any."""

    def attribute(self, device: int, attribute: int) -> int:
        """Return a number that describes a device; 0 if an old driver does not know it."""
        value = INT()
        code = self.api.device_attribute(ctypes.byref(value), attribute, device)
        if code not in (0, INVALID_VALUE):
            raise self.probe_error(code, "an attribute of the device")
        if code:
            self.forget_error()
        return 0 if code else value.value

    def probe_error(self, code: int, expected: str) -> AuleError:
        """Make the error for a question about devices that the driver does not answer."""
        text = f"[{self.backend}] expected {expected}, got {self.describe(code)}"
        if code == OUT_OF_MEMORY:
            return OutOfMemoryError(f"{text}; free some memory")
        return BackendUnavailableError(self.backend, f"{text}; {self.remedy}")

    def name_and_memory(self, device: int) -> tuple[str, int]:
        """Return the name of a device and its bytes of memory."""
        name, memory = ctypes.create_string_buffer(256), SIZE()
        code = self.api.device_name(name, len(name), device)
        code = code or self.api.device_memory(ctypes.byref(memory), device)
        if code:
            raise self.probe_error(code, "the device's name and memory")
        return name.value.decode(errors="replace"), memory.value

    def count(self) -> int:
        """Return the number of devices."""
        value = INT()
        code = self.api.device_count(ctypes.byref(value))
        if code:
            raise self.probe_error(code, "a count of devices")
        return value.value

    def refuse_fork(self) -> None:
        """Raise if the driver was loaded before a fork: drivers do not survive one."""
        if self.forked:
            raise BackendUnavailableError(
                self.backend,
                f"[{self.backend}] expected a process that starts the driver itself, got one forked after it was "
                "started; start it with the multiprocessing method 'spawn' or 'forkserver'",
            )


def load_library(names: Iterable[str]) -> ctypes.CDLL | str:
    """Load the first library that loads, or return why none of them does."""
    tried, reasons = [], []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            tried.append(name)
            if "No such file" not in str(error):  # the library exists but does not load
                reasons.append(str(error))
    return "; ".join(reasons) or f"none of {', '.join(tried)}"
