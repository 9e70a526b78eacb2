"""Loaded CUDA kernels, the storage for their launch parameters, and prepared launches."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

from aule.artifact import SCALAR_FORMATS, Artifact, Param
from aule.runtime._cuda_context import Context
from aule.runtime._cuda_driver import (
    PROGRAMMATIC_STREAM_SERIALIZATION,
    WRONG_CONTEXT,
    Driver,
    LaunchAttribute,
    LaunchConfig,
)
from aule.runtime.base import Program


class Arguments:
    """Storage for the parameters of one kernel, and the table of pointers into it that cuLaunchKernel reads.

    Every parameter has 8 bytes: first the pointers, then the scalars, so that one `struct` call writes all of a kind.
    The driver copies the values during the launch call.
    """

    __slots__ = ("pack_pointers", "pack_scalars", "scalars_at", "storage", "table")

    def __init__(self, params: Sequence[Param]) -> None:
        codes = [SCALAR_FORMATS[p.dtype] for p in params if p.kind == "scalar"]
        self.scalars_at = 8 * (len(params) - len(codes))
        self.storage = (ctypes.c_uint64 * max(1, len(params)))()
        pointer = ctypes.addressof(self.storage)
        scalar = pointer + self.scalars_at
        self.table = (ctypes.c_void_p * max(1, len(params)))()
        for i, p in enumerate(params):
            if p.kind == "buffer":
                self.table[i], pointer = pointer, pointer + 8
            else:
                self.table[i], scalar = scalar, scalar + 8
        self.pack_pointers = struct.Struct(f"<{self.scalars_at // 8}Q").pack_into
        self.pack_scalars = struct.Struct("<" + "".join(c + "4x" * (struct.calcsize(c) == 4) for c in codes)).pack_into


class Kernel:
    """A loaded function; the `Program.handle` of this runtime."""

    __slots__ = ("arguments", "block", "dependent_launch", "function", "log", "shared")

    def __init__(self, artifact: Artifact, function: ctypes.c_void_p, log: str) -> None:
        self.function = function
        self.log = log
        self.block = ctypes.c_uint(artifact.workgroup)
        self.shared = ctypes.c_uint(artifact.shared_bytes if artifact.dynamic_shared else 0)
        self.arguments = Arguments(artifact.params)
        self.dependent_launch = artifact.dependent_launch

    def call(self, grid: tuple[int, int, int], stream: ctypes.c_void_p, arguments: Arguments) -> tuple[Any, ...]:
        """Return the arguments for cuLaunchKernel, all of them ctypes objects."""
        one = ctypes.c_uint(1)
        x, y, z = (ctypes.c_uint(n) for n in grid)
        return (self.function, x, y, z, self.block, one, one, self.shared, stream, arguments.table, None)

    def extended_call(
        self, grid: tuple[int, int, int], arguments: Arguments
    ) -> tuple[ctypes.c_void_p, tuple[Any, ...]]:
        """Return the stream, whose value the caller sets before each call, and the arguments for cuLaunchKernelEx.

        It takes four arguments instead of eleven, and lets a kernel that waits for the previous launch itself start
        while that launch ends.
        """
        config = LaunchConfig(
            (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(self.block.value, 1, 1), self.shared.value
        )
        if self.dependent_launch:
            attribute = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_uint * 16)(1))
            config.attributes, config.count = ctypes.pointer(attribute), 1
        stream = ctypes.c_void_p.from_buffer(config, LaunchConfig.stream.offset)
        return stream, (ctypes.byref(config), self.function, arguments.table, None)


class PreparedLaunch:
    """A launch whose kernel, grid and scalars are fixed; made by `CudaDevice.prepare`.

    ``launch`` allocates nothing, records no event and waits for nothing, so a CUDA graph can capture it. It is ordered
    by its stream alone: pass pointers of the framework that owns the stream. Threads may share it.
    """

    __slots__ = ("_arguments", "_call", "_context", "_launch", "_pack_pointers", "_program", "_storage", "_stream")

    def __init__(
        self, context: Context, driver: Driver, program: Program, grid: tuple[int, int, int], scalars: Sequence[object]
    ) -> None:
        kernel = program.handle
        assert isinstance(kernel, Kernel)
        self._context = context
        self._program = program
        self._stream = ctypes.c_void_p()
        self._arguments = Arguments(program.artifact.params)
        self._storage = self._arguments.storage
        self._pack_pointers = self._arguments.pack_pointers
        self._call = kernel.call(grid, self._stream, self._arguments)
        self._launch = driver.launch_kernel
        if driver.launch_kernel_ex is not None:
            self._stream, self._call = kernel.extended_call(grid, self._arguments)
            self._launch = driver.launch_kernel_ex
        try:
            self._arguments.pack_scalars(self._storage, self._arguments.scalars_at, *scalars)
        except (struct.error, OverflowError, TypeError) as error:
            raise program.device.argument_error(program.artifact, error) from None

    def launch(self, pointers: Sequence[int], stream: int) -> None:
        """Launch with new pointers.

        Parameters
        ----------
        pointers : sequence of int
            One device address for each buffer, in the order of the kernel's buffers.
        stream : int
            Native stream handle; 0 is the legacy default stream.
        """
        context = self._context
        with context.lock:
            if context.refusal is not None:
                raise context.refusal()
            try:
                self._pack_pointers(self._storage, 0, *pointers)
            except (struct.error, TypeError) as error:
                raise self._program.device.argument_error(self._program.artifact, error) from None
            self._stream.value = stream
            # Frameworks usually have the context current already, and asking the driver on every call is slow. If it is
            # not current, the driver refuses the launch and it is repeated.
            code = self._launch(*self._call)
            if code in WRONG_CONTEXT:
                with context.pushed():
                    code = self._launch(*self._call)
        if code:
            raise context.failure(code, f"launch of {self._program.artifact.entry}")
