"""ADD A BACKEND HERE: which renderer feeds which runtime, and how a device is chosen.

Nothing is imported or probed until it is asked for. What a probe found is remembered for the life of the process.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import threading
from dataclasses import dataclass
from typing import cast

from aule import settings
from aule.artifact import Artifact
from aule.errors import AuleError, BackendUnavailableError, InvalidArgumentError
from aule.ir import KernelIR
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
        return cast(Artifact, importlib.import_module(self.render_module).render(kernel, target))

    def devices(self) -> list[Device]:
        return cast("list[Device]", importlib.import_module(self.runtime_module).devices())


BACKENDS: tuple[Backend, ...] = (
    Backend("cuda", "ptx", "aule.render.ptx", "aule.runtime.cuda"),
    Backend("metal", "msl", "aule.render.msl", "aule.runtime.metal"),
    Backend("vulkan", "spirv", "aule.render.spirv", "aule.runtime.vulkan"),
    Backend("opencl", "opencl", "aule.render.opencl", "aule.runtime.opencl"),
    Backend("webgpu", "wgsl", "aule.render.wgsl", "aule.runtime.webgpu"),
    Backend("cpu", "llvm", "aule.render.llvm", "aule.runtime.cpu"),
)
"""In order of preference. NumPy comes after them all; it needs no device."""

NUMPY = "numpy"
NAMES: tuple[str, ...] = (*(b.name for b in BACKENDS), NUMPY)

_lock = threading.RLock()
_found: dict[str, list[Device]] = {}
_errors: dict[str, AuleError] = {}
_pid = os.getpid()


def backend(name: str) -> Backend:
    """The backend of a name."""
    for candidate in BACKENDS:
        if candidate.name == name:
            return candidate
    raise _unknown(name, f"[backend] expected one of {', '.join(NAMES)}, got {name!r}")


def by_language(language: str) -> Backend:
    """The backend that a kernel language belongs to."""
    for candidate in BACKENDS:
        if isinstance(language, str) and language in (candidate.language, candidate.name):
            return candidate
    known = ", ".join(b.language for b in BACKENDS)
    raise _unknown(str(language), f"[codegen] expected a kernel language of {known}, got {language!r}; choose one")


def _unknown(name: str, message: str) -> BackendUnavailableError:
    error = BackendUnavailableError(name, message)
    error.code = "AULE_ERROR_UNKNOWN_BACKEND"  # not one of whatever was typed
    return error


def devices(name: str) -> list[Device]:
    """Devices of a backend; raises `BackendUnavailableError` with the remedy when there are none."""
    global _pid
    with _lock:
        if os.getpid() != _pid:  # a forked child finds its own devices; the parent's refuse to work here
            _found.clear()
            _errors.clear()
            _pid = os.getpid()
        if name in _errors:
            # A copy: an exception that is raised again and again collects every caller's frames.
            raise copy.copy(_errors[name])
        if name not in _found or any(device.closed for device in _found[name]):
            served = backend(name)
            try:
                _found[name] = served.devices()
            except InvalidArgumentError:  # a variable of the environment, which the program may correct
                raise
            except AuleError as error:
                _errors[name] = copy.copy(error)
                log.debug("backend %s: %s", name, error)
                raise
            except Exception as error:  # one broken driver or package must not take the other backends away
                log.warning("backend %s could not be probed", name, exc_info=True)
                _errors[name] = BackendUnavailableError(
                    name,
                    f"[{name}] expected a working driver, got {type(error).__name__}: {error}; repair or update its "
                    "driver or Python package",
                )
                raise copy.copy(_errors[name]) from error
        return _found[name]


def available() -> dict[str, list[Device]]:
    """Every backend that has devices."""
    result = {}
    for candidate in BACKENDS:
        try:
            result[candidate.name] = devices(candidate.name)
        except AuleError:
            continue
    return result


def errors() -> dict[str, str]:
    """Why each other backend was refused, and the remedy."""
    result = {}
    for candidate in BACKENDS:
        try:
            devices(candidate.name)
        except AuleError as error:
            result[candidate.name] = error.message
    return result


def choose(spec: str | None = None) -> Device | None:
    """The device for arrays in host memory; None stands for NumPy.

    ``spec`` (else ``AULE_BACKEND``) forces a backend (``"vulkan"``) or a device (``"vulkan:1"``); one that is missing
    raises. Without it the first real device in order of preference is taken; a software rasteriser never is. A wrong
    variable of the environment raises too, rather than cost a device.
    """
    wanted = settings.backend() if spec is None else asked(spec)
    if wanted is not None:
        return find(wanted)
    for candidate in BACKENDS:
        if candidate.name in _errors and os.getpid() == _pid:
            continue  # raising its refusal again would cost more than a small call of attention
        try:
            real = [d for d in devices(candidate.name) if not d.target.software]
        except InvalidArgumentError:
            raise
        except AuleError:
            continue
        if real:
            return real[0]
    return None


def asked(spec: str | None) -> str | None:
    """What a call's ``backend=`` forces, else ``AULE_BACKEND``; None where nothing does."""
    if spec is not None and not isinstance(spec, str):
        raise InvalidArgumentError(
            f"[backend] expected a name such as 'vulkan' or 'cuda:1', got {spec!r}; pass None for the best device"
        )
    return spec or settings.backend()


def find(spec: str) -> Device | None:
    """The device that ``"backend"`` or ``"backend:index"`` names; None for ``"numpy"``."""
    asked(spec)
    name, colon, number = spec.partition(":")
    if spec == NUMPY:
        return None
    if name == NUMPY:
        raise BackendUnavailableError(name, f"[{name}] expected no number, for it is no device, got {spec!r}; drop it")
    if name not in NAMES:
        raise _unknown(
            name, f"[backend] expected one of {', '.join(NAMES)}, got {spec!r}; aule.print_backend_info() lists devices"
        )
    found = devices(name)
    if not colon:
        return found[0]
    if not (number.isascii() and number.isdigit()) or int(number) >= len(found):
        have = ", ".join(f"{name}:{d.index} ({d.target.name})" for d in found)
        raise BackendUnavailableError(name, f"[{name}] expected one of {have}, got {spec!r}; choose one of these")
    return found[int(number)]


def forget() -> None:
    """Close every device and probe again at the next use."""
    with _lock:
        for group in _found.values():
            for device in group:
                device.close()
        _found.clear()
        _errors.clear()


def _after_fork() -> None:
    # Another thread of the parent may have held the lock; nobody would ever release it here.
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
