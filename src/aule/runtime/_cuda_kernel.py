"""Loading CUDA kernels, and launches with attributes."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

from aule.artifact import Artifact
from aule.errors import ShaderCompileError
from aule.runtime import _cuda_driver as cu
from aule.runtime import _stream_kernel
from aule.runtime._cuda_tensor_map import TensorMaps
from aule.runtime._stream_driver import FUNC_REGISTERS, INT, PTR
from aule.runtime._stream_kernel import Parameters
from aule.runtime.base import Grid

_log = logging.getLogger("aule")


class Kernel(_stream_kernel.Kernel):
    """A kernel, maybe with tensor maps, that may start while the previous launch ends, where the driver can do that."""

    __slots__ = ("artifact", "dependent_launch", "encode_tensor_map", "launch_kernel_ex", "maps")

    def __init__(self, driver: cu.Driver, artifact: Artifact, function: ctypes.c_void_p, log: str) -> None:
        super().__init__(driver, artifact, function, log)
        self.dependent_launch = artifact.dependent_launch
        self.launch_kernel_ex = driver.launch_kernel_ex
        self.artifact, self.encode_tensor_map = artifact, driver.encode_tensor_map
        self.maps = self._tensor_maps(self.parameters)

    def _tensor_maps(self, parameters: Parameters) -> TensorMaps | None:
        if not self.artifact.maps:
            return None
        if self.encode_tensor_map is None:
            raise ShaderCompileError(
                f"[cuda] {self.artifact.entry} expected a driver of CUDA 12.0 or later, which encodes tensor maps, got "
                "an older one; update the NVIDIA driver"
            )
        return TensorMaps(self.encode_tensor_map, self.artifact, parameters)

    def start(self, grid: Grid, stream: ctypes.c_void_p) -> int:
        if self.maps is not None:
            self.maps.forget()
            code = self.maps.refresh()
            if code:
                return code
        if not self.dependent_launch or self.launch_kernel_ex is None:
            return super().start(grid, stream)
        call_stream, call = self._extended_call(grid, self.parameters)
        call_stream.value = stream.value
        return self.launch_kernel_ex(*call)

    def prepared(
        self, grid: Grid, parameters: Parameters
    ) -> tuple[Callable[..., int], ctypes.c_void_p, tuple[Any, ...]]:
        if self.launch_kernel_ex is None:
            launch, stream, call = super().prepared(grid, parameters)
        else:
            launch, (stream, call) = self.launch_kernel_ex, self._extended_call(grid, parameters)
        maps = self._tensor_maps(parameters)
        return launch if maps is None else lambda *call: maps.refresh() or launch(*call), stream, call

    def _extended_call(self, grid: Grid, parameters: Parameters) -> tuple[ctypes.c_void_p, tuple[Any, ...]]:
        """Return the stream and the arguments for cuLaunchKernelEx.

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


class Loader(_stream_kernel.Loader):
    """Loads PTX, which the driver compiles."""

    _driver: cu.Driver

    def _load_module(self, module: ctypes.c_void_p, artifact: Artifact) -> str:
        info, errors = ctypes.create_string_buffer(16384), ctypes.create_string_buffer(16384)
        options = (INT * 4)(*cu.JIT_LOG_OPTIONS)
        values = (PTR * 4)(ctypes.addressof(info), len(info), ctypes.addressof(errors), len(errors))
        code = self._api.module_load(ctypes.byref(module), artifact.code + b"\0", 4, options, values)
        self._check(artifact, code, _text(errors))
        log = _text(info)
        if log:
            _log.debug("cuda: %s: %s", artifact.entry, log)
        return log

    def _kernel(self, artifact: Artifact, function: ctypes.c_void_p, log: str) -> Kernel:
        return Kernel(self._driver, artifact, function, log)

    def _configure(self, artifact: Artifact, function: ctypes.c_void_p) -> None:
        """Request the shared memory a kernel needs, and a split of L1 that lets its resident workgroups fit."""
        if self._driver.func_load is not None:
            self._check(artifact, self._driver.func_load(function))
        super()._configure(artifact, function)
        if artifact.dynamic_shared:
            code = self._api.function_set_attribute(function, cu.FUNC_MAX_DYNAMIC_SHARED, artifact.shared_bytes)
            self._check(artifact, code)
        unit_threads, unit_registers, unit_shared, reserved = (
            self._driver.attribute(self._handle, number)
            for number in (
                cu.MAX_THREADS_PER_SM, cu.MAX_REGISTERS_PER_SM, cu.MAX_SHARED_PER_SM, cu.RESERVED_SHARED_PER_BLOCK
            )
        )  # fmt: skip
        if artifact.shared_bytes and unit_shared:
            # Registers are allocated per warp, in steps of 8 per thread.
            registers = -(-max(1, self._attribute(function, FUNC_REGISTERS)) // 8) * 8
            threads = -(-artifact.workgroup // 32) * 32
            resident = max(1, min(unit_threads // threads, unit_registers // (registers * threads)))
            need = resident * (artifact.shared_bytes + reserved)
            # Only a hint: the kernel runs even if the driver refuses it.
            self._api.function_set_attribute(function, cu.FUNC_CARVEOUT, min(100, -(-100 * need // unit_shared)))


def _text(buffer: ctypes.Array[ctypes.c_char]) -> str:
    return buffer.value.decode(errors="replace").strip()
