"""The list of backends (ADD A BACKEND HERE), each a renderer and a runtime, and the choice of a device.

A backend is imported and probed on first use. The result of a probe is kept for the life of the process.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import logging
import os
import threading
from dataclasses import dataclass
from typing import cast

from aule import settings
from aule.artifact import Artifact
from aule.errors import (
    AuleError,
    BackendUnavailableError,
    ClosedError,
    DeviceLostError,
    InvalidArgumentError,
    OutOfMemoryError,
)
from aule.ir import KernelIR
from aule.runtime._exit import in_flight
from aule.runtime._gpu_files import may_have_gpu
from aule.runtime.base import Device
from aule.target import Target

log = logging.getLogger("aule")


@dataclass(frozen=True)
class Backend:
    """A renderer and a runtime.

    Attributes
    ----------
    render_module, runtime_module : str
        Modules with ``render(kernel, target) -> Artifact`` and ``devices() -> list[Device]``.
    """

    name: str
    language: str
    render_module: str
    runtime_module: str

    def render(self, kernel: KernelIR, target: Target) -> Artifact:
        """Render a kernel in the backend's language."""
        return cast(Artifact, importlib.import_module(self.render_module).render(kernel, target))

    def devices(self) -> list[Device]:
        """List the runtime's devices, without caching; see `devices` of this module."""
        return cast("list[Device]", importlib.import_module(self.runtime_module).devices())


BACKENDS: tuple[Backend, ...] = (
    Backend("cuda", "ptx", "aule.render.ptx", "aule.runtime.cuda"),
    Backend("hip", "hip", "aule.render.hip", "aule.runtime.hip"),
    Backend("metal", "msl", "aule.render.msl", "aule.runtime.metal"),
    Backend("vulkan", "spirv", "aule.render.spirv", "aule.runtime.vulkan"),
    Backend("opencl", "opencl", "aule.render.opencl", "aule.runtime.opencl"),
    Backend("webgpu", "wgsl", "aule.render.wgsl", "aule.runtime.webgpu"),
    Backend("cpu", "llvm", "aule.render.llvm", "aule.runtime.cpu"),
)
"""All backends in order of preference. NumPy, which needs no device, comes last."""

_WITH_SOFTWARE = ("vulkan", "opencl", "webgpu")
"""Backends whose drivers exist in software too. Listing their devices takes a tenth of a second and more."""

NUMPY = "numpy"
NAMES: tuple[str, ...] = (*(b.name for b in BACKENDS), NUMPY)

_MEANT = {
    "gpu": "name its backend: 'cuda' (NVIDIA), 'hip' (AMD), 'metal' (Apple), 'vulkan', 'opencl' or 'webgpu'",
    "auto best default any": "pass None for the best device",
    "rocm amd": "AMD GPUs are served by 'hip' (ROCm), 'vulkan' or 'opencl'",
    "xpu sycl oneapi intel": "Intel GPUs are served by 'vulkan' or 'opencl'",
    "mps mlx apple": "Apple GPUs are served by 'metal'",
    "directml dml dx12 d3d12": "on Windows, GPUs are served by 'cuda' (NVIDIA), 'vulkan' or 'webgpu'",
    "nvidia triton cudnn ptx": "NVIDIA GPUs are served by 'cuda'",
    "wgpu wgsl": "it is called 'webgpu'",
    "llvm x86 arm host": "processors are served by 'cpu'",
    "torch pytorch jax": "pass its arrays as they are, and None for the device they are on",
}
"""What to say about names that other libraries have for devices."""

_lock = threading.RLock()
_found: dict[str, list[Device]] = {}
_errors: dict[str, AuleError] = {}
_pid = os.getpid()


def backend(name: str) -> Backend:
    """Return the backend with a name."""
    for candidate in BACKENDS:
        if candidate.name == name:
            return candidate
    raise _unknown(name, f"[backend] expected one of {', '.join(NAMES)}, got {name!r}")


def by_language(language: str) -> Backend:
    """Return the backend for a kernel language or a backend's name."""
    for candidate in BACKENDS:
        if isinstance(language, str) and language in (candidate.language, candidate.name):
            return candidate
    known = ", ".join(b.language for b in BACKENDS)
    raise _unknown(str(language), f"[codegen] expected a kernel language of {known}, got {language!r}; choose one")


def _unknown(name: str, message: str) -> BackendUnavailableError:
    error = BackendUnavailableError(name, message)
    error.code = "AULE_ERROR_UNKNOWN_BACKEND"  # the default code would contain the unknown name
    return error


def devices(name: str) -> list[Device]:
    """List the devices of a backend; raises `BackendUnavailableError` with the remedy if there are none."""
    global _pid
    with in_flight, _lock:
        if os.getpid() != _pid:  # in a forked child the parent's devices do not work
            _found.clear()
            _errors.clear()
            _pid = os.getpid()
        if name in _errors:
            # Raise a copy: an exception that is raised repeatedly collects every caller's frames.
            raise copy.copy(_errors[name])
        if name not in _found or any(device.closed for device in _found[name]):
            candidate = backend(name)
            try:
                _found[name] = candidate.devices()
            except (InvalidArgumentError, OutOfMemoryError, DeviceLostError):
                # A wrong environment variable, or a shortage: the next probe may succeed.
                raise
            except BackendUnavailableError as error:
                _errors[name] = copy.copy(error)
                log.debug("backend %s: %s", name, error)
                raise
            except Exception as error:  # a broken driver or package must not affect the other backends
                log.warning("backend %s could not be probed", name, exc_info=True)
                _errors[name] = BackendUnavailableError(
                    name,
                    f"[{name}] expected a working driver, got {type(error).__name__}: {error}; repair or update its "
                    "driver or Python package",
                )
                raise copy.copy(_errors[name]) from error
        return _found[name]


def available() -> dict[str, list[Device]]:
    """Return the devices of every backend that has any."""
    result = {}
    for candidate in BACKENDS:
        try:
            result[candidate.name] = devices(candidate.name)
        except AuleError:
            continue
    return result


def errors() -> dict[str, str]:
    """Return why each other backend is unavailable, with the remedy."""
    result = {}
    for candidate in BACKENDS:
        try:
            devices(candidate.name)
        except AuleError as error:
            result[candidate.name] = error.message
    return result


def passed_over(chosen: str) -> dict[str, str]:
    """Return why backends before a chosen one, in order of preference, are not chosen: of those that were probed."""
    if os.getpid() != _pid:
        return {}
    result = {name: error.message for name, error in list(_errors.items())}
    for name, group in list(_found.items()):
        if group and all(device.target.software for device in group):
            result[name] = f"[{name}] {group[0].target.name} is a software device, which only backend={name!r} chooses"
    return {name: result[name] for name in NAMES[: NAMES.index(chosen)] if name in result}


def choose(spec: str | None = None) -> Device | None:
    """Choose the device for arrays in host memory; None means NumPy.

    ``spec`` (else ``AULE_BACKEND``) forces a backend (``"vulkan"``) or a device (``"vulkan:1"``) and raises if it is
    missing. Without it the first hardware device in order of preference is chosen, never a software renderer; drivers
    are asked in that order, until one has it, and not at all where the system shows no GPU (`may_have_gpu`). An
    invalid environment variable raises too, instead of silently excluding a device.
    """
    wanted = settings.backend() if spec is None else requested_backend(spec)
    if wanted is not None:
        return find(wanted)
    for candidate in BACKENDS:
        if candidate.name in _errors and os.getpid() == _pid:
            continue  # raising the error again would take longer than a small attention call
        if candidate.name in _WITH_SOFTWARE and candidate.name not in _found and not may_have_gpu():
            continue  # its driver would list software devices only, which are not chosen
        try:
            hardware = [d for d in devices(candidate.name) if not d.target.software]
        except (InvalidArgumentError, ClosedError):
            raise
        except AuleError:
            continue
        if hardware:
            return hardware[0]
    return None


def requested_backend(spec: str | None) -> str | None:
    """Return the backend that a call's ``backend=`` forces, else ``AULE_BACKEND``; None if neither is set.

    Case and surrounding spaces do not matter.
    """
    if spec is not None and not isinstance(spec, str):
        raise InvalidArgumentError(
            f"[backend] expected a name such as 'vulkan' or 'cuda:1', got {spec!r}; pass None for the best device"
        )
    return (spec and spec.strip().lower()) or settings.backend()


def find(spec: str) -> Device | None:
    """Return the device named by ``"backend"`` or ``"backend:index"``; None for ``"numpy"``."""
    spec = requested_backend(spec) or ""
    name, colon, number = spec.partition(":")
    if spec == NUMPY:
        return None
    if name == NUMPY:
        raise BackendUnavailableError(
            name, f"[{name}] expected {name!r} without an index, got {spec!r}; drop the index, NumPy is not a device"
        )
    if name not in NAMES:
        raise _unknown(name, f"[backend] expected one of {', '.join(NAMES)}, got {spec!r}; {_meant(name)}")
    found = devices(name)
    if not colon:
        return found[0]
    if not (number.isascii() and number.isdigit()) or int(number) >= len(found):
        have = ", ".join(f"{name}:{d.index} ({d.target.name})" for d in found)
        raise BackendUnavailableError(name, f"[{name}] expected one of {have}, got {spec!r}; choose one of these")
    return found[int(number)]


def _meant(name: str) -> str:
    """The remedy for an unknown backend."""
    for names, remedy in _MEANT.items():
        if name in names.split():
            return remedy
    close = difflib.get_close_matches(name, NAMES, 1)
    return f"did you mean {close[0]!r}?" if close else "aule.print_backend_info() lists devices"


def forget() -> None:
    """Close every device and probe again at the next use."""
    with _lock:
        for group in _found.values():
            for device in group:
                device.close()
        _found.clear()
        _errors.clear()


def _after_fork() -> None:
    # A thread of the parent may have held the lock; nothing in the child would release it.
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
