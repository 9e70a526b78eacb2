"""The context of a device with streams, and our own stream in it."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from aule.errors import AuleError, DeviceLostError, LaunchError, OutOfMemoryError
from aule.runtime._stream_driver import EVENT_DISABLE_TIMING, OUT_OF_MEMORY, PTR, STREAM_NON_BLOCKING, StreamDriver


class Context(ABC):
    """A device's context, retained when first entered and released by `close`.

    A child says what a context is: how to retain and release it, and how to make it current for a thread.

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

    def __init__(self, driver: StreamDriver, device: int, name: str) -> None:
        self._driver, self._api, self._device, self._name = driver, driver.api, device, name
        self.lock = threading.RLock()
        self._idle = threading.Condition(self.lock)
        self._active = 0
        self.refusal: Callable[[], AuleError] | None = None
        self.closed = False
        self._forked = False
        self.opened = False
        """Whether the context has been entered and not been closed since."""
        self.stream = PTR()
        self.fence = PTR()

    @abstractmethod
    def _retain(self) -> None:
        """Create the context or share it with other users in this process."""

    @abstractmethod
    def _release(self) -> None:
        """Undo `_retain`. Errors are ignored."""

    @abstractmethod
    def _is_current(self) -> bool:
        """Whether the context is current for this thread. The lock is held."""

    @abstractmethod
    def _switch(self) -> Any:
        """Make the context current; return what `_switch_back` needs. The lock is held."""

    @abstractmethod
    def _switch_back(self, before: Any) -> None:
        """Make the context current that was so before `_switch`. Errors are ignored."""

    def bound(self, launch: Callable[..., int]) -> Callable[..., int]:
        """Return what a prepared launch calls: the driver's function, unless that would use the wrong context."""
        return launch

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
        backend, text = self._driver.backend, self._driver.describe(code)
        if code in self._driver.lost:
            message = (
                f"[{backend}] {action}: expected a working context, got {text}, perhaps from an earlier launch; the "
                "context is lost for the whole process, restart it"
            )
            self.refuse(lambda: DeviceLostError(message))
            return DeviceLostError(message)
        if code == OUT_OF_MEMORY:
            return OutOfMemoryError(f"[{backend}] {action}: expected enough device memory, got {text}; free some")
        return LaunchError(
            f"[{backend}] {action}: expected success, got {text}; see {self._driver.manual} for the cause"
        )

    def require(self, code: int, action: str) -> None:
        """Raise if a driver call's result code is an error."""
        if code:
            raise self.failure(code, action)

    # -- making it current ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Retain the context and create our stream. The lock is held."""
        if self.opened:
            return
        self._retain()
        try:
            with self.pushed():
                self._make_stream()
        except AuleError:
            self._release()
            raise
        self.opened = True

    def _make_stream(self) -> None:
        stream, fence = PTR(), PTR()
        self.require(self._api.stream_create(ctypes.byref(stream), STREAM_NON_BLOCKING), "creating a stream")
        code = self._api.event_create(ctypes.byref(fence), EVENT_DISABLE_TIMING)
        if code:
            self._api.stream_destroy(stream)
            raise self.failure(code, "creating an event")
        self.stream, self.fence = stream, fence

    @contextlib.contextmanager
    def pushed(self, always: bool = False) -> Iterator[None]:
        """Make our context current in a ``with`` block, without asking if it is (``always``). The lock is held."""
        switched = always or not self._is_current()
        before = self._switch() if switched else None
        try:
            yield
        finally:
            if switched:
                self._switch_back(before)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Open the device and make our context current in a ``with`` block.

        The lock is not held inside the block, and `close` waits for its end.
        """
        with self.lock:
            self.check()
            self._open()
            switched = not self._is_current()
            before = self._switch() if switched else None
            self._active += 1
        try:
            yield
        finally:
            if switched:
                self._switch_back(before)
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
        if self.opened and not self._forked:
            # Errors are ignored: a lost context has already lost its contents.
            with contextlib.suppress(AuleError), self.pushed(always=True):
                self._api.synchronize()
                tear_down()
                self._api.event_destroy(self.fence)
                self._api.stream_destroy(self.stream)
            self._release()
        self.opened = False
