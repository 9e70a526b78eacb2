"""Loading CUDA kernels, the storage for their launch parameters, and prepared launches."""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Sequence
from typing import Any

from aule.artifact import SCALAR_FORMATS, Artifact, Param
from aule.errors import AuleError, ShaderCompileError
from aule.runtime import _cuda_driver as cu
from aule.runtime._cuda_context import Context
from aule.runtime._exit import in_flight
from aule.runtime.base import Device, Grid, Program

_log = logging.getLogger("aule")


class Parameters:
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

    __slots__ = ("block", "dependent_launch", "function", "log", "parameters", "shared")

    def __init__(self, artifact: Artifact, function: ctypes.c_void_p, log: str) -> None:
        self.function = function
        self.log = log
        self.block = ctypes.c_uint(artifact.workgroup)
        self.shared = ctypes.c_uint(artifact.shared_bytes if artifact.dynamic_shared else 0)
        self.parameters = Parameters(artifact.params)
        self.dependent_launch = artifact.dependent_launch

    def call(self, grid: Grid, stream: ctypes.c_void_p, parameters: Parameters) -> tuple[Any, ...]:
        """Return the arguments for cuLaunchKernel, all of them ctypes objects."""
        one = ctypes.c_uint(1)
        x, y, z = (ctypes.c_uint(n) for n in grid)
        return (self.function, x, y, z, self.block, one, one, self.shared, stream, parameters.table, None)

    def extended_call(self, grid: Grid, parameters: Parameters) -> tuple[ctypes.c_void_p, tuple[Any, ...]]:
        """Return the stream, whose value the caller sets before each call, and the arguments for cuLaunchKernelEx.

        It takes four arguments instead of eleven, and lets a kernel that waits for the previous launch itself start
        while that launch ends.
        """
        config = cu.LaunchConfig(
            (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(self.block.value, 1, 1), self.shared.value
        )
        if self.dependent_launch:
            attribute = cu.LaunchAttribute(cu.PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_uint * 16)(1))
            config.attributes, config.count = ctypes.pointer(attribute), 1
        stream = ctypes.c_void_p.from_buffer(config, cu.LaunchConfig.stream.offset)
        return stream, (ctypes.byref(config), self.function, parameters.table, None)


class Loader:
    """Loads the kernels of one device. The device's context is current during each call."""

    def __init__(self, device: Device, context: Context, driver: cu.Driver, handle: int) -> None:
        self._device, self._context, self._driver, self._api = device, context, driver, driver.api
        self._handle = handle
        self._modules: list[ctypes.c_void_p] = []

    def load(self, artifact: Artifact) -> Kernel:
        """Compile a kernel and set its attributes."""
        module, function = cu.PTR(), cu.PTR()
        info, errors = ctypes.create_string_buffer(16384), ctypes.create_string_buffer(16384)
        options = (cu.INT * 4)(*cu.JIT_LOG_OPTIONS)
        values = (cu.PTR * 4)(ctypes.addressof(info), len(info), ctypes.addressof(errors), len(errors))
        code = self._api.cuModuleLoadDataEx(ctypes.byref(module), artifact.code + b"\0", 4, options, values)
        try:
            self._check(artifact, code, errors)
            code = self._api.cuModuleGetFunction(ctypes.byref(function), module, artifact.entry.encode())
            if not code and self._driver.func_load is not None:
                code = self._driver.func_load(function)
            self._check(artifact, code, errors)
            self._configure(artifact, function, errors)
        except AuleError:
            if module:
                self._api.cuModuleUnload(module)
            raise
        with self._context.lock:
            self._modules.append(module)
        log = _text(info)
        if log:
            _log.debug("cuda: %s: %s", artifact.entry, log)
        return Kernel(artifact, function, log)

    def _check(self, artifact: Artifact, code: int, errors: ctypes.Array[ctypes.c_char]) -> None:
        if not code:
            return
        if code in cu.LOST or code == cu.OUT_OF_MEMORY:
            raise self._context.failure(code, f"loading {artifact.entry}")
        raise self._device.refused_error(artifact, self._driver.describe(code), _text(errors))

    def _configure(self, artifact: Artifact, function: ctypes.c_void_p, errors: ctypes.Array[ctypes.c_char]) -> None:
        """Request the shared memory a kernel needs, and a split of L1 that lets its resident workgroups fit."""
        allowed = self._attribute(function, cu.FUNC_MAX_THREADS)
        if artifact.workgroup > allowed:
            raise ShaderCompileError(
                f"[cuda] {artifact.entry} expected workgroups of {artifact.workgroup} threads, got room for {allowed} "
                "with the registers it uses; declare .maxntid or use fewer threads"
            )
        if artifact.dynamic_shared:
            code = self._api.cuFuncSetAttribute(function, cu.FUNC_MAX_DYNAMIC_SHARED, artifact.shared_bytes)
            self._check(artifact, code, errors)
        unit_threads, unit_registers, unit_shared, reserved = (
            self._driver.attribute(self._handle, number)
            for number in (
                cu.MAX_THREADS_PER_SM, cu.MAX_REGISTERS_PER_SM, cu.MAX_SHARED_PER_SM, cu.RESERVED_SHARED_PER_BLOCK
            )
        )  # fmt: skip
        if artifact.shared_bytes and unit_shared:
            # Registers are allocated per warp, in steps of 8 per thread.
            registers = -(-max(1, self._attribute(function, cu.FUNC_REGISTERS)) // 8) * 8
            threads = -(-artifact.workgroup // 32) * 32
            resident = max(1, min(unit_threads // threads, unit_registers // (registers * threads)))
            need = resident * (artifact.shared_bytes + reserved)
            # Only a hint: the kernel runs even if the driver refuses it.
            self._api.cuFuncSetAttribute(function, cu.FUNC_CARVEOUT, min(100, -(-100 * need // unit_shared)))

    def _attribute(self, function: ctypes.c_void_p, attribute: int) -> int:
        value = cu.INT()
        code = self._api.cuFuncGetAttribute(ctypes.byref(value), attribute, function)
        self._context.require(code, "asking about a kernel")
        return value.value

    def statistics(self, kernel: Kernel) -> dict[str, int]:
        """Return the resources of a kernel; see `CudaDevice.statistics`."""
        return {
            "registers": self._attribute(kernel.function, cu.FUNC_REGISTERS),
            "local_bytes": self._attribute(kernel.function, cu.FUNC_LOCAL),
            "static_shared_bytes": self._attribute(kernel.function, cu.FUNC_STATIC_SHARED),
            "dynamic_shared_bytes": kernel.shared.value,
            "max_threads": self._attribute(kernel.function, cu.FUNC_MAX_THREADS),
        }

    def unload_all(self) -> None:
        """Unload every kernel."""
        for module in self._modules:
            self._api.cuModuleUnload(module)
        self._modules.clear()


def _text(buffer: ctypes.Array[ctypes.c_char]) -> str:
    return buffer.value.decode(errors="replace").strip()


class PreparedLaunch:
    """A launch whose kernel, grid and scalars are fixed; made by `CudaDevice.prepare`.

    ``launch`` allocates nothing, records no event and waits for nothing, so a CUDA graph can capture it. It is ordered
    by its stream alone: pass pointers of the framework that owns the stream. Threads may share it.
    """

    __slots__ = ("_call", "_context", "_launch", "_pack_pointers", "_parameters", "_program", "_storage", "_stream")

    def __init__(
        self, context: Context, driver: cu.Driver, program: Program, grid: Grid, scalars: Sequence[object]
    ) -> None:
        kernel: Kernel = program.handle
        self._context = context
        self._program = program
        self._stream = ctypes.c_void_p()
        self._parameters = Parameters(program.artifact.params)
        self._storage = self._parameters.storage
        self._pack_pointers = self._parameters.pack_pointers
        self._call = kernel.call(grid, self._stream, self._parameters)
        self._launch = driver.launch_kernel
        if driver.launch_kernel_ex is not None:
            self._stream, self._call = kernel.extended_call(grid, self._parameters)
            self._launch = driver.launch_kernel_ex
        try:
            self._parameters.pack_scalars(self._storage, self._parameters.scalars_at, *scalars)
        except (struct.error, OverflowError, TypeError) as error:
            raise program.device.argument_error(program.artifact, error) from None

    def launch(self, pointers: Sequence[int], stream: int) -> None:
        """Launch with new pointers, one per buffer in the kernel's order, on a native stream (0: legacy default)."""
        context = self._context
        with in_flight, context.lock:
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
            if code in cu.WRONG_CONTEXT:
                with context.pushed():
                    code = self._launch(*self._call)
        if code:
            raise context.failure(code, f"launch of {self._program.artifact.entry}")
