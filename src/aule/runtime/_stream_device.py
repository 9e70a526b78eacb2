"""Base class of devices with streams and plain pointers (CUDA, HIP): memory, copies, launches and their order.

Streams
    ``launch(..., stream=s)`` goes to the caller's stream (0 is the legacy default stream). Everything else goes to one
    stream of our own, which does not synchronise with the legacy stream. Memory from ``alloc`` is ordered by our
    stream: a launch on another stream that uses such memory first waits for our stream, and our stream then waits for
    it (on the device, by events). So work on one device is ordered, and a freed block can be reused at once. Memory
    from ``wrap`` belongs to a framework and is ordered by the launch's stream alone: pass the framework's stream. While
    a stream is captured into a graph, only the launch itself is recorded.

Memory
    ``alloc`` is served from a pool, because the driver's own allocation synchronises the device. It is called only to
    grow the pool, and its counterpart to empty it before an allocation fails, and in ``close``.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy.typing as npt

from aule.artifact import Artifact
from aule.errors import OutOfMemoryError, ShaderCompileError
from aule.runtime._stream_context import Context
from aule.runtime._stream_driver import DEV, INT, OUT_OF_MEMORY, PTR, SIZE, StreamDriver
from aule.runtime._stream_kernel import Kernel, Loader, PreparedLaunch
from aule.runtime._stream_pool import Block, Pool
from aule.runtime.base import Allocation, Arguments, Device, Grid, Program
from aule.target import Target

_TIMING_SCRATCH = 64 << 20


class _Wrapped(Allocation):
    """Memory owned by someone else. Its handle keeps the owner alive."""

    __slots__ = ()


class StreamDevice(Device):
    """A GPU with streams; the module docstring explains streams and memory."""

    language: str
    """Language of its kernels."""

    def __init__(self, driver: StreamDriver, ordinal: int, target: Target, context: Context, loader: Loader) -> None:
        self.index = ordinal
        self.target = target
        self._api = driver.api
        self._driver = driver
        self._context = context
        self._require = context.require
        self._loader = loader
        self._pool = Pool()
        # `free` only appends here, which is atomic: a finalizer may call it in the middle of any other method.
        self._returned: deque[Block] = deque()
        driver.devices.add(self)

    @property
    def closed(self) -> bool:
        return self._context.closed

    def after_fork(self) -> None:
        self._context.after_fork(self.forked_error)

    @property
    def stream(self) -> int:
        """Handle of our own stream."""
        with self._context.entered():
            return self._context.stream.value or 0

    # -- memory --------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> Allocation:
        if nbytes < 0:
            raise self.size_error(nbytes)
        with self._context.lock:
            self._context.check()
            self._reclaim()
            block = self._pool.take(nbytes)
            if block is None:
                with self._context.entered():
                    self._grow(nbytes)
                block = self._pool.take(nbytes)
            assert block is not None
            # list.pop is atomic: of two threads that free the same allocation, one gets the block.
            return Allocation(self, nbytes, [block], block.address)

    def _reclaim(self) -> None:
        while self._returned:
            self._pool.give(self._returned.popleft())

    def _grow(self, nbytes: int) -> None:
        size = self._pool.segment_size(nbytes)
        address = DEV()
        code = self._api.memory_allocate(ctypes.byref(address), size)
        if code == OUT_OF_MEMORY:
            self._driver.forget_error()
            self._release_cached()
            code = self._api.memory_allocate(ctypes.byref(address), size)
        if code == OUT_OF_MEMORY:
            self._driver.forget_error()
            free, total = self.memory_info()
            raise OutOfMemoryError(
                f"[{self.target.backend}] expected {nbytes} bytes of device memory, got none: {free} of {total} bytes "
                "are free; free tensors (torch.cuda.empty_cache() where PyTorch holds them) or make the problem "
                "smaller",
                requested_bytes=nbytes,
            )
        self._require(code, f"allocation of {nbytes} bytes")
        self._pool.add(address.value, size, nbytes)

    def _release_cached(self) -> None:
        """Return fully free segments to the driver. The lock is held and the context is current."""
        self._reclaim()
        # Queued work may still use freed blocks; all such work is on our stream or our stream waits for it.
        self._require(self._api.stream_synchronize(self._context.stream), "waiting for work on cached memory")
        for address in self._pool.drop_free_segments():
            self._require(self._api.memory_free(address), "freeing cached memory")

    def empty_cache(self) -> None:
        """Return the pool's unused memory to the driver. Waits for work in progress."""
        with self._context.lock:
            self._context.check()
            if self._context.opened:
                with self._context.entered():
                    self._release_cached()

    def free(self, allocation: Allocation) -> None:
        if allocation.device is not self:
            raise self.foreign_error("an allocation", "free it there")
        allocation.freed = True
        try:
            held = allocation.handle.pop()
        except IndexError:
            return
        if isinstance(held, Block):
            self._returned.append(held)

    def wrap(self, pointer: int, nbytes: int, owner: object = None) -> Allocation:
        """Wrap device memory that someone else owns in an allocation, which holds a reference to ``owner`` until freed.

        Launches that use it are ordered by their stream alone.
        """
        return _Wrapped(self, nbytes, [owner], pointer)

    def memory_info(self) -> tuple[int, int]:
        """Return free and total bytes as the driver counts them: all of our pool counts as used."""
        free, total = SIZE(), SIZE()
        with self._context.entered():
            self._require(self._api.memory_info(ctypes.byref(free), ctypes.byref(total)), "asking for free memory")
        return free.value, total.value

    @contextlib.contextmanager
    def _transfer(self, allocation: Allocation, array: npt.NDArray[Any], offset: int, into: bool) -> Iterator[int]:
        """Check a copy between an array and an allocation, enter the context and yield the device address."""
        self.check_allocation(allocation)
        self.check_copy(allocation, array, offset, into=into)
        with self._context.entered():
            if isinstance(allocation, _Wrapped):
                # The memory's owner may use it on any stream.
                self._require(self._api.synchronize(), "waiting for the memory's owner")
            yield allocation.address + offset

    def upload(self, allocation: Allocation, data: npt.NDArray[Any], offset: int = 0) -> None:
        with self._transfer(allocation, data, offset, into=False) as address:
            if data.nbytes:
                code = self._api.copy_to_device(address, data.ctypes.data, data.nbytes, self._context.stream)
                # The driver copies pageable memory at once, but may read pinned memory, or with HMM or ATS any
                # memory, after the call has returned.
                self._require(code or self._api.stream_synchronize(self._context.stream), "upload")

    def download(self, allocation: Allocation, out: npt.NDArray[Any], offset: int = 0) -> None:
        with self._transfer(allocation, out, offset, into=True) as address:
            if out.nbytes:
                code = self._api.copy_to_host(out.ctypes.data, address, out.nbytes, self._context.stream)
                self._require(code, "download")
            self._require(self._api.stream_synchronize(self._context.stream), "download")

    # -- kernels -------------------------------------------------------------------------------------------------------

    def load(self, artifact: Artifact) -> Program:
        self.check_language(artifact, self.language)
        if artifact.shared_bytes > self.target.max_shared_bytes:
            raise ShaderCompileError(
                f"[{self.target.backend}] {artifact.entry} expected {artifact.shared_bytes} bytes of shared memory, "
                f"got a device with {self.target.max_shared_bytes}; use smaller tiles"
            )
        with self._context.entered():
            return Program(self, artifact, self._loader.load(artifact))

    def statistics(self, program: Program) -> dict[str, int]:
        """Return the resources that a loaded kernel uses.

        Returns
        -------
        dict
            ``registers`` and ``local_bytes`` (spills and stack) per thread; ``static_shared_bytes``,
            ``dynamic_shared_bytes`` and ``max_threads`` per workgroup.
        """
        self.check_program(program)
        with self._context.entered():
            return self._loader.statistics(program.handle)

    def _sort_arguments(self, args: Arguments) -> tuple[list[int], list[int | float], bool]:
        """Return the pointers, the scalars, and whether any pointer is from our pool."""
        pointers: list[int] = []
        scalars: list[int | float] = []
        pooled = False
        for arg in args:
            if isinstance(arg, Allocation):
                self.check_allocation(arg)
                pointers.append(arg.address)
                pooled = pooled or not isinstance(arg, _Wrapped)
            else:
                scalars.append(arg)
        return pointers, scalars, pooled

    def launch(self, program: Program, grid: Grid, args: Arguments, stream: int | None = None) -> None:
        self.check_launch(program, grid, args, least=1)
        pointers, scalars, pooled = self._sort_arguments(args)
        with self._context.lock:
            self._context.check()
            with self._context.pushed():
                self._pack(program, pointers, scalars)
                if stream is None or stream == self._context.stream.value:
                    self._start(program, grid, self._context.stream)
                    return
                caller = PTR(stream)
                fenced = pooled and not self._capturing(caller)
                if fenced:
                    self._wait(caller, self._context.stream)
                self._start(program, grid, caller)
                if fenced:
                    self._wait(self._context.stream, caller)

    def _pack(self, program: Program, pointers: list[int], scalars: list[int | float]) -> None:
        parameters = program.handle.parameters
        try:
            parameters.pack_pointers(parameters.storage, 0, *pointers)
            parameters.pack_scalars(parameters.storage, parameters.scalars_at, *scalars)
        except (struct.error, OverflowError, TypeError) as error:
            raise self.argument_error(program.artifact, error) from None

    def _start(self, program: Program, grid: Grid, stream: ctypes.c_void_p) -> None:
        kernel: Kernel = program.handle
        code = kernel.start(grid, stream)
        self._require(code, f"launch of {program.artifact.entry}")

    def _capturing(self, stream: ctypes.c_void_p) -> bool:
        status = INT()
        self._require(self._api.stream_is_capturing(stream, ctypes.byref(status)), "asking for the state of a capture")
        return status.value != 0

    def capture(self, stream: int) -> int:
        """Return the unique number of the graph capture that a stream takes part in; 0 if none."""
        status, number = INT(), DEV()
        with self._context.lock:
            self._context.check()
            with self._context.pushed():
                code = self._api.stream_capture(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
                self._require(code, "asking for the state of a capture")
        return number.value if status.value else 0

    def _wait(self, stream: ctypes.c_void_p, other: ctypes.c_void_p) -> None:
        """Make future work on ``stream`` wait for the work now on ``other``. The host does not wait.

        One event serves all waits: a wait refers to the latest record before it, not to later ones.
        """
        self._require(self._api.event_record(self._context.fence, other), "ordering streams")
        self._require(self._api.stream_wait(stream, self._context.fence, 0), "ordering streams")

    def prepare(self, program: Program, grid: Grid, args: Sequence[Allocation | int | float | None]) -> PreparedLaunch:
        """Prepare a launch with everything fixed except its pointers and its stream.

        ``args`` are as for ``launch``; values for buffers are ignored and may be None.
        """
        self.check_program(program)
        self.check_grid(program, grid, least=1)
        params = program.artifact.params
        if len(args) != len(params):
            raise self.argument_error(program.artifact, f"{len(args)} values for {len(params)} parameters")
        with self._context.lock:
            self._context.check()
        scalars = [a for p, a in zip(params, args, strict=True) if p.kind == "scalar"]
        return PreparedLaunch(self._context, self._driver, program, grid, scalars)

    def time_launch(self, program: Program, grid: Grid, args: Arguments) -> float:
        """Measure one launch in seconds with device timestamps and a cold cache.

        The device fills scratch memory while the host queues the launch. Otherwise the host's time for that would count
        as the kernel's.
        """
        self.check_launch(program, grid, args, least=1)
        pointers, scalars, _ = self._sort_arguments(args)
        start, end, elapsed = PTR(), PTR(), ctypes.c_float()
        with self._context.entered():
            # Wrapped arguments may be in use on other streams.
            self._require(self._api.synchronize(), "waiting before a measurement")
            try:
                scratch = self.alloc(_TIMING_SCRATCH)
            except OutOfMemoryError:
                scratch = None
            try:
                for event in (start, end):
                    self._require(self._api.event_create(ctypes.byref(event), 0), "creating an event")
                with self._context.lock:
                    self._pack(program, pointers, scalars)
                    for address in [scratch.address] * 4 if scratch is not None else []:
                        code = self._api.fill(address, 0, _TIMING_SCRATCH // 4, self._context.stream)
                        self._require(code, "filling scratch memory")
                    self._require(self._api.event_record(start, self._context.stream), "recording an event")
                    self._start(program, grid, self._context.stream)
                    self._require(self._api.event_record(end, self._context.stream), "recording an event")
                self._require(self._api.event_synchronize(end), f"timing {program.artifact.entry}")
                code = self._api.event_elapsed(ctypes.byref(elapsed), start, end)
                self._require(code, f"timing {program.artifact.entry}")
            finally:
                for event in (start, end):
                    if event:
                        self._api.event_destroy(event)
                if scratch is not None:
                    self.free(scratch)
        return elapsed.value * 1e-3

    def synchronize(self) -> None:
        """Wait for all work in the context, including that of other libraries in this process.

        Fails while a stream is being captured: the driver then refuses to wait.
        """
        with self._context.lock:
            self._context.check()
            if not self._context.opened:
                return
        with self._context.entered():
            self._require(self._api.synchronize(), "synchronize")

    def close(self) -> None:
        """Free the pool, unload all kernels and release the context. Idempotent. Do not call it from a finalizer."""
        with self._context.lock:
            if self.closed:
                return
            self._context.close(self.closed_error, self._tear_down)
            self._returned.clear()
            self._pool = Pool()

    def _tear_down(self) -> None:
        self._loader.unload_all()
        for address in self._pool.segments:
            self._api.memory_free(address)
