"""The HIP runtime: AMD's GPUs through libamdhip64 and libhiprtc, which PyTorch for ROCm contains.

A device's context is the one that PyTorch uses, so its pointers and streams are valid here. A call selects the device
only if another is selected for the thread, and restores that one. Streams and memory are those of `_stream_device`.
No AMD device has run this: tests run it on libraries that stand in for AMD's (``tests/hip_standin``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from aule.artifact import Artifact
from aule.errors import BackendUnavailableError
from aule.runtime import _hip_driver, _stream_kernel
from aule.runtime._hip_compile import Refused, code_object
from aule.runtime._hip_driver import Driver
from aule.runtime._stream_context import Context
from aule.runtime._stream_device import StreamDevice
from aule.runtime._stream_driver import INT
from aule.runtime.base import Device


def devices(folder: str | None = None) -> list[Device]:
    """List AMD's GPUs in the order of ``HIP_VISIBLE_DEVICES`` and PyTorch.

    Every call returns new devices, each with its own pool.

    Parameters
    ----------
    folder : str or None
        The only folder to look for the libraries in.

    Raises
    ------
    BackendUnavailableError
        No library, or no device.
    """
    driver = _hip_driver.open_driver(folder)
    count = driver.count()
    if not count:
        raise BackendUnavailableError("hip", f"[hip] expected an AMD GPU, got none; {driver.remedy}")
    return [HipDevice(driver, ordinal, count > 1) for ordinal in range(count)]


class _Selected(Context):
    """The context that HIP makes for a device when it is first used."""

    def __init__(self, driver: Driver, device: int, name: str, several: bool) -> None:
        super().__init__(driver, device, name)
        self._several = several

    def _retain(self) -> None:
        """Nothing to do: a device's context lives until the process ends."""

    def _release(self) -> None:
        """Nothing to do."""

    def _current(self) -> int:
        device = INT()
        self.require(self._api.device_current(ctypes.byref(device)), "asking for the selected device")
        return device.value

    def _is_current(self) -> bool:
        return self._current() == self._device

    def _switch(self) -> int:
        before = self._current()
        self.require(self._api.device_select(self._device), "selecting the device")
        return before

    def _switch_back(self, before: Any) -> None:
        self._api.device_select(before)

    def bound(self, launch: Callable[..., int]) -> Callable[..., int]:
        """Select the device first, if there are several: the default stream is that of the selected device."""
        if not self._several:
            return launch

        def selected(*call: Any) -> int:
            with self.pushed():
                return launch(*call)

        return selected


class _Loader(_stream_kernel.Loader):
    """Loads HIP C, which hiprtc compiles."""

    _driver: Driver

    def __init__(self, device: Device, context: Context, driver: Driver, ordinal: int, arch: str) -> None:
        super().__init__(device, context, driver, ordinal)
        self._arch = arch

    def _load_module(self, module: ctypes.c_void_p, artifact: Artifact) -> str:
        try:
            code, log = code_object(self._driver, artifact, self._arch)
        except Refused as error:
            reason, log = error.args
            raise self._device.refused_error(artifact, reason, log) from None
        self._check(artifact, self._api.module_load(ctypes.byref(module), code), log)
        return log


class HipDevice(StreamDevice):
    """One AMD GPU. Made by `devices`."""

    language = "hip"

    def __init__(self, driver: Driver, ordinal: int, several: bool) -> None:
        arch = driver.arch(ordinal)
        target = _hip_driver.read_target(driver, ordinal, arch)
        context = _Selected(driver, ordinal, target.name, several)
        super().__init__(driver, ordinal, target, context, _Loader(self, context, driver, ordinal, arch))
