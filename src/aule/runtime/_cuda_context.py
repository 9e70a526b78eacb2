"""The primary context of a CUDA device and our own stream in it."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator

from aule.errors import AuleError, BackendUnavailableError, DeviceLostError, LaunchError, OutOfMemoryError
from aule.runtime import _cuda_driver as cu


class Context:
    """A device's primary context, retained when first entered and released by `close`.

    Attributes
    ----------
    lock : RLock
        Held during any call that does not wait. Calls that wait use `entered` instead: they block no other call, and
        `close` waits for them.
    refusal : callable or None
        Makes the error for all further calls, once the device is closed, lost, or was opened before a fork.
    stream, fence : c_void_p
        Our own stream, and an event for ordering other streams.
    """

    def __init__(self, driver: cu.Driver, device: int, name: str) -> None:
        self._driver, self._api, self._device, self._name = driver, driver.api, device, name
        self.lock = threading.RLock()
        self._idle = threading.Condition(self.lock)
        self._active = 0
        self.refusal: Callable[[], AuleError] | None = None
        self.closed = False
        self._forked = False
        self._handle = 0
        self.stream = cu.PTR()
        self.fence = cu.PTR()
        self._get_current = driver.get_current
        self._current = cu.PTR()
        self._current_ref = ctypes.byref(self._current)

    @property
    def opened(self) -> bool:
        """Whether the context has been entered and not been closed since."""
        return self._handle != 0

    # -- errors --------------------------------------------------------------------------------------------------------

    def after_fork(self, refusal: Callable[[], AuleError]) -> None:
        """Refuse all further calls in a forked child."""
        # Threads of the parent, which do not exist here, may have held the lock or been inside a call.
        self.lock = threading.RLock()
        self._idle = threading.Condition(self.lock)
        self._active = 0
        self._forked = True
        self.refuse(refusal)

    def refuse(self, refusal: Callable[[], AuleError]) -> None:
        """Make all further calls raise this error, unless they already raise another."""
        if self.refusal is None:
            self.refusal = refusal

    def check(self) -> None:
        """Raise the error of a closed or lost context."""
        if self.refusal is not None:
            raise self.refusal()

    def failure(self, code: int, action: str) -> AuleError:
        """Make the error for a driver call's result code."""
        text = self._driver.describe(code)
        if code in cu.LOST:
            message = (
                f"[cuda] {action}: expected a working context, got {text}, perhaps from an earlier launch; the context "
                "is lost for the whole process, restart it"
            )
            self.refuse(lambda: DeviceLostError(message))
            return DeviceLostError(message)
        if code == cu.OUT_OF_MEMORY:
            return OutOfMemoryError(f"[cuda] {action}: expected enough device memory, got {text}; free some")
        return LaunchError(f"[cuda] {action}: expected success, got {text}; see the CUDA driver API for the cause")

    def require(self, code: int, action: str) -> None:
        """Raise if a driver call's result code is an error."""
        if code:
            raise self.failure(code, action)

    # -- making it current ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Retain the primary context and create our stream. The lock is held."""
        if self._handle:
            return
        context = cu.PTR()
        code = self._api.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._device)
        if code == cu.OUT_OF_MEMORY:
            raise self.failure(code, "creating the context")
        if code or context.value is None:
            raise BackendUnavailableError(
                "cuda",
                f"[cuda] expected the primary context of {self._name}, got {self._driver.describe(code)}; "
                "check that no other process holds the GPU exclusively",
            )
        self._handle = context.value
        try:
            with self.pushed():
                self._make_stream()
        except AuleError:
            self._handle = 0
            self._api.cuDevicePrimaryCtxRelease_v2(self._device)
            raise

    def _make_stream(self) -> None:
        stream, fence = cu.PTR(), cu.PTR()
        code = self._api.cuStreamCreate(ctypes.byref(stream), cu.STREAM_NON_BLOCKING)
        self.require(code, "creating a stream")
        code = self._api.cuEventCreate(ctypes.byref(fence), cu.EVENT_DISABLE_TIMING)
        if code:
            self._api.cuStreamDestroy_v2(stream)
            raise self.failure(code, "creating an event")
        self.stream, self.fence = stream, fence

    def _push(self) -> bool:
        """Make our context current; return False if it already was. The lock is held."""
        self.require(self._get_current(self._current_ref), "asking for the current context")
        if self._current.value == self._handle:
            return False
        self.require(self._api.cuCtxPushCurrent_v2(self._handle), "making the context current")
        return True

    def _pop(self) -> None:
        self._api.cuCtxPopCurrent_v2(ctypes.byref(cu.PTR()))

    @contextlib.contextmanager
    def pushed(self) -> Iterator[None]:
        """Make our context current in a ``with`` block. The lock is held."""
        pushed = self._push()
        try:
            yield
        finally:
            if pushed:
                self._pop()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Open the device and make our context current in a ``with`` block.

        The lock is not held inside the block, and `close` waits for its end.
        """
        with self.lock:
            self.check()
            self._open()
            pushed = self._push()
            self._active += 1
        try:
            yield
        finally:
            if pushed:
                self._pop()
            with self.lock:
                self._active -= 1
                self._idle.notify_all()

    # -- closing -------------------------------------------------------------------------------------------------------

    def close(self, refusal: Callable[[], AuleError], tear_down: Callable[[], None]) -> None:
        """Wait until no call is inside `entered`, run ``tear_down`` to free the contents, and release the context.

        The lock is held.
        """
        self.closed = True
        self.refusal = refusal
        while self._active:
            self._idle.wait()
        if self._handle and not self._forked:
            # Errors are ignored: a lost context has already lost its contents.
            api = self._api
            if not api.cuCtxPushCurrent_v2(self._handle):
                api.cuCtxSynchronize()
                tear_down()
                api.cuEventDestroy_v2(self.fence)
                api.cuStreamDestroy_v2(self.stream)
                self._pop()
            api.cuDevicePrimaryCtxRelease_v2(self._device)
        self._handle = 0
