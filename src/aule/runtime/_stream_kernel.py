"""Loaded kernels of devices with streams, the storage for their launch parameters, and prepared launches."""

from __future__ import annotations

import ctypes
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from aule.artifact import SCALAR_FORMATS, Artifact, Param
from aule.errors import AuleError, ShaderCompileError
from aule.runtime import _stream_driver as sd
from aule.runtime._exit import in_flight
from aule.runtime._stream_context import Context
from aule.runtime._stream_driver import StreamDriver
from aule.runtime.base import Device, Grid, Program


class Parameters:
    """Storage for the parameters of one kernel, and the table of pointers into it that a launch reads.

    Every parameter has 8 bytes: first the pointers, then the scalars, so that one `struct` call writes all of a kind.
    The driver copies the values during the launch call.
    """

    __slots__ = ("pack_pointers", "pack_scalars", "scalars_at", "storage", "table")

    def __init__(self, params: Sequence[Param], more: int = 0) -> None:
        """``more`` entries of the table, after those of the parameters, are left to the caller."""
        codes = [SCALAR_FORMATS[p.dtype] for p in params if p.kind == "scalar"]
        self.scalars_at = 8 * (len(params) - len(codes))
        self.storage = (ctypes.c_uint64 * max(1, len(params)))()
        pointer = ctypes.addressof(self.storage)
        scalar = pointer + self.scalars_at
        self.table = (ctypes.c_void_p * max(1, len(params) + more))()
        for i, p in enumerate(params):
            if p.kind == "buffer":
                self.table[i], pointer = pointer, pointer + 8
            else:
                self.table[i], scalar = scalar, scalar + 8
        self.pack_pointers = struct.Struct(f"<{self.scalars_at // 8}Q").pack_into
        self.pack_scalars = struct.Struct("<" + "".join(c + "4x" * (struct.calcsize(c) == 4) for c in codes)).pack_into


class Kernel:
    """A loaded function; the `Program.handle` of a runtime with streams."""

    __slots__ = ("block", "function", "launch_kernel", "log", "parameters", "shared")

    def __init__(self, driver: StreamDriver, artifact: Artifact, function: ctypes.c_void_p, log: str) -> None:
        self.launch_kernel = driver.launch_kernel
        self.function = function
        self.log = log
        self.block = ctypes.c_uint(artifact.workgroup)
        self.shared = ctypes.c_uint(artifact.shared_bytes if artifact.dynamic_shared else 0)
        self.parameters = Parameters(artifact.params, len(artifact.maps))

    def call(self, grid: Grid, stream: ctypes.c_void_p, parameters: Parameters) -> tuple[Any, ...]:
        """Return the arguments of a launch, all of them ctypes objects."""
        one = ctypes.c_uint(1)
        x, y, z = (ctypes.c_uint(n) for n in grid)
        return (self.function, x, y, z, self.block, one, one, self.shared, stream, parameters.table, None)

    def start(self, grid: Grid, stream: ctypes.c_void_p) -> int:
        """Launch with the kernel's own parameters; return the driver's result."""
        return self.launch_kernel(*self.call(grid, stream, self.parameters))

    def prepared(
        self, grid: Grid, parameters: Parameters
    ) -> tuple[Callable[..., int], ctypes.c_void_p, tuple[Any, ...]]:
        """Return a function that launches, the stream, whose value the caller sets before, and the arguments."""
        stream = ctypes.c_void_p()
        return self.launch_kernel, stream, self.call(grid, stream, parameters)


class Loader(ABC):
    """Loads the kernels of one device. The device's context is current during each call."""

    def __init__(self, device: Device, context: Context, driver: StreamDriver, handle: int) -> None:
        self._device, self._context, self._driver, self._api = device, context, driver, driver.api
        self._handle = handle
        self._modules: list[ctypes.c_void_p] = []

    def load(self, artifact: Artifact) -> Kernel:
        """Compile a kernel and set its attributes."""
        module, function = sd.PTR(), sd.PTR()
        try:
            log = self._load_module(module, artifact)
            code = self._api.module_function(ctypes.byref(function), module, artifact.entry.encode())
            self._check(artifact, code)
            self._configure(artifact, function)
        except AuleError:
            if module:
                self._api.module_unload(module)
            raise
        with self._context.lock:
            self._modules.append(module)
        return self._kernel(artifact, function, log)

    @abstractmethod
    def _load_module(self, module: ctypes.c_void_p, artifact: Artifact) -> str:
        """Compile and load a kernel's module; return the compiler's log."""

    def _kernel(self, artifact: Artifact, function: ctypes.c_void_p, log: str) -> Kernel:
        return Kernel(self._driver, artifact, function, log)

    def _check(self, artifact: Artifact, code: int, log: str = "") -> None:
        if not code:
            return
        if code in self._driver.lost or code == sd.OUT_OF_MEMORY:
            raise self._context.failure(code, f"loading {artifact.entry}")
        raise self._device.refused_error(artifact, self._driver.describe(code), log)

    def _configure(self, artifact: Artifact, function: ctypes.c_void_p) -> None:
        """Check a function's limits and set its attributes."""
        allowed = self._attribute(function, sd.FUNC_MAX_THREADS)
        if artifact.workgroup > allowed:
            raise ShaderCompileError(
                f"[{self._driver.backend}] {artifact.entry} expected workgroups of {artifact.workgroup} threads, got "
                f"room for {allowed} with the registers it uses; declare its workgroup or use fewer threads"
            )

    def _attribute(self, function: ctypes.c_void_p, attribute: int) -> int:
        value = sd.INT()
        code = self._api.function_attribute(ctypes.byref(value), attribute, function)
        self._context.require(code, "asking about a kernel")
        return value.value

    def statistics(self, kernel: Kernel) -> dict[str, int]:
        """Return the resources of a kernel; see `StreamDevice.statistics`."""
        return {
            "registers": self._attribute(kernel.function, sd.FUNC_REGISTERS),
            "local_bytes": self._attribute(kernel.function, sd.FUNC_LOCAL),
            "static_shared_bytes": self._attribute(kernel.function, sd.FUNC_STATIC_SHARED),
            "dynamic_shared_bytes": kernel.shared.value,
            "max_threads": self._attribute(kernel.function, sd.FUNC_MAX_THREADS),
        }

    def unload_all(self) -> None:
        """Unload every kernel."""
        for module in self._modules:
            self._api.module_unload(module)
        self._modules.clear()


class PreparedLaunch:
    """A launch whose kernel, grid and scalars are fixed; made by `StreamDevice.prepare`.

    ``launch`` allocates nothing, records no event and waits for nothing, so a graph can capture it. It is ordered by
    its stream alone: pass pointers of the framework that owns the stream. Threads may share it.
    """

    __slots__ = (
        "_call", "_context", "_elsewhere", "_launch", "_pack_pointers", "_parameters", "_program", "_storage", "_stream"
    )  # fmt: skip

    def __init__(
        self, context: Context, driver: StreamDriver, program: Program, grid: Grid, scalars: Sequence[object]
    ) -> None:
        kernel: Kernel = program.handle
        self._context = context
        self._elsewhere = driver.wrong_context
        self._program = program
        self._parameters = Parameters(program.artifact.params, len(program.artifact.maps))
        self._storage = self._parameters.storage
        self._pack_pointers = self._parameters.pack_pointers
        launch, self._stream, self._call = kernel.prepared(grid, self._parameters)
        self._launch = context.bound(launch)
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
            if code in self._elsewhere:
                with context.pushed():
                    code = self._launch(*self._call)
        if code:
            raise context.failure(code, f"launch of {self._program.artifact.entry}")
