"""The CUDA runtime: the driver API (libcuda, nvcuda.dll) through ctypes. Needs no toolkit and no compiler.

Each device uses its primary context, the one PyTorch and JAX use, so their pointers and streams are valid here. It is
retained on first use, released by ``close`` and never reset. A call makes it current only if the thread's current
context is another one, and restores that one. Streams and memory are those of `_stream_device`.
"""

from __future__ import annotations

import ctypes

from aule.errors import BackendUnavailableError
from aule.runtime import _cuda_driver as cu
from aule.runtime._cuda_kernel import Loader
from aule.runtime._stream_context import Context
from aule.runtime._stream_device import StreamDevice
from aule.runtime._stream_driver import INT, OUT_OF_MEMORY, PTR
from aule.runtime.base import Device


def devices(library: str | None = None) -> list[Device]:
    """List the CUDA devices in the driver's order, which is that of ``CUDA_VISIBLE_DEVICES`` and PyTorch.

    Creates no context. Every call returns new devices, each with its own pool.

    Parameters
    ----------
    library : str or None
        Path of the driver library to use instead of the system's.

    Raises
    ------
    BackendUnavailableError
        No driver, or no device.
    """
    driver = cu.open_driver(library)
    count = driver.count()
    if not count:
        raise BackendUnavailableError(
            "cuda", "[cuda] expected an NVIDIA GPU, got none; check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        )
    return [CudaDevice(driver, ordinal) for ordinal in range(count)]


class _PrimaryContext(Context):
    """A device's primary context."""

    _driver: cu.Driver

    def __init__(self, driver: cu.Driver, device: int, name: str) -> None:
        super().__init__(driver, device, name)
        self._primary = 0
        self._get_current = driver.get_current
        self._current = PTR()
        self._current_ref = ctypes.byref(self._current)

    def _retain(self) -> None:
        context = PTR()
        code = self._api.context_retain(ctypes.byref(context), self._device)
        if code == OUT_OF_MEMORY:
            raise self.failure(code, "creating the context")
        if code or context.value is None:
            raise BackendUnavailableError(
                "cuda",
                f"[cuda] expected the primary context of {self._name}, got {self._driver.describe(code)}; "
                "check that no other process holds the GPU exclusively",
            )
        self._primary = context.value

    def _release(self) -> None:
        self._api.context_release(self._device)
        self._primary = 0

    def _is_current(self) -> bool:
        self.require(self._get_current(self._current_ref), "asking for the current context")
        return self._current.value == self._primary

    def _switch(self) -> None:
        self.require(self._api.context_push(self._primary), "making the context current")

    def _switch_back(self, before: None) -> None:
        self._api.context_pop(ctypes.byref(PTR()))


class CudaDevice(StreamDevice):
    """One NVIDIA GPU. Made by `devices`."""

    language = "ptx"

    def __init__(self, driver: cu.Driver, ordinal: int) -> None:
        handle = INT()
        code = driver.api.device_get(ctypes.byref(handle), ordinal)
        if code:
            raise driver.probe_error(code, f"device {ordinal}")
        target = cu.read_target(driver, handle.value)
        context = _PrimaryContext(driver, handle.value, target.name)
        super().__init__(driver, ordinal, target, context, Loader(self, context, driver, handle.value))
