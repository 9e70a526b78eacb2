"""Tensors on Apple's GPUs: PyTorch compiles our MSL and launches it in order with its own work.

``torch.mps.compile_shader`` takes the source and gives kernels that are called with tensors, in the order of the
kernel's buffer indices. The scalars follow in one block, as our MSL declares them, held by a small tensor.

This path is untested on Apple hardware. Tests run all of it, with a stand-in for ``compile_shader`` that compiles the
same source with g++ and calls it on CPU tensors.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aule.artifact import Artifact
from aule.engine.memory import MemorySource
from aule.engine.run import BoundCall
from aule.errors import ShaderCompileError
from aule.frontends.torch.calls import Call, Results
from aule.frontends.torch.decode import Decode
from aule.frontends.torch.devices.base import Planned
from aule.frontends.torch.devices.staged import Staged
from aule.frontends.torch.varlen import Backward as PackedBackward
from aule.frontends.torch.varlen import Forward as PackedForward
from aule.runtime._refused import save_refused
from aule.runtime.base import Device, Program
from aule.target import Target

_STAGED = (Decode, PackedForward, PackedBackward)
"""Calls that go through the host."""

_devices: dict[torch.device, MpsDevice] = {}


def available() -> bool:
    """Whether this PyTorch can compile our kernels (2.7 and later)."""
    return hasattr(torch.mps, "compile_shader")


class Mps(Planned):
    """Tensors on Apple's GPUs."""

    def __init__(self, staged: Staged) -> None:
        self._staged = staged

    def compute(self, call: Call) -> Results:
        return self._staged.compute(call) if isinstance(call, _STAGED) else super().compute(call)

    def device(self, call: Call) -> Device:
        return device_of(call.first)  # type: ignore[return-value]

    def memory(self, call: Call, device: Device) -> MemorySource:
        return TensorMemory(call.first.device)

    def launch(self, launch: BoundCall, tensors: Sequence[Tensor]) -> None:
        launch(tensors)


class TensorMemory:
    """Workspace and scratch as tensors of their own."""

    raw = True
    has_scratch = True

    def __init__(self, where: torch.device) -> None:
        self._where = where

    def acquire(
        self, workspace: Sequence[int], scratch: Sequence[int], stream: int | None
    ) -> tuple[list[Tensor], None]:
        """Memory for one call; see `aule.engine.memory.MemorySource`."""
        made = [torch.empty(nbytes, dtype=torch.uint8, device=self._where) for nbytes in workspace]
        return made + [torch.zeros(words, dtype=torch.int32, device=self._where) for words in scratch], None

    def release(self, block: None) -> None:
        """Nothing to do: PyTorch frees a tensor after the work that uses it."""


def device_of(tensor: Tensor) -> MpsDevice:
    """The device of a tensor."""
    found = _devices.get(tensor.device)
    if found is None:
        found = _devices[tensor.device] = MpsDevice(tensor.device)
    return found


class MpsDevice:
    """The part of a `Device` that the engine needs to build kernels. PyTorch manages memory and the order of work."""

    closed = False

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.target = _target()

    def load(self, artifact: Artifact) -> Program:
        try:
            kernel = getattr(torch.mps.compile_shader(artifact.text), artifact.entry)
        except (RuntimeError, SyntaxError) as error:
            path = save_refused("msl", artifact.code)
            raise ShaderCompileError(
                f"[mps] {artifact.entry}: expected a kernel that torch.mps.compile_shader accepts, got: {error}; the "
                f"source is in {path or 'no file (the cache directory cannot be written)'}",
                str(error),
                path,
            ) from None
        allowed = int(kernel.max_threads_per_threadgroup)
        if artifact.workgroup > allowed:
            raise ShaderCompileError(
                f"[mps] {artifact.entry} expected workgroups of {artifact.workgroup} threads, got room for {allowed} "
                "with the registers it uses; use fewer threads"
            )
        return Program(self, artifact, kernel)  # type: ignore[arg-type]

    def prepare(self, program: Program, grid: tuple[int, int, int], arguments: Sequence[Any]) -> _Launch:
        """A launch with everything but the tensors. ``arguments`` follow the parameters; those of buffers are None."""
        artifact = program.artifact
        scalars = [x for x, p in zip(arguments, artifact.params, strict=True) if p.kind == "scalar"]
        block = []
        if scalars:
            packed = bytearray(artifact.scalar_struct.pack(*scalars))
            block = [torch.frombuffer(packed, dtype=torch.uint8).to(self.where, copy=True)]
        return _Launch(program.handle, block, grid, artifact.workgroup)

    # The rest serves `aule.engine.probe`, which allocates and copies by itself.

    def alloc(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.where)

    def free(self, allocation: Tensor) -> None:
        """Nothing to do: PyTorch frees a tensor when nobody holds it."""

    def upload(self, allocation: Tensor, data: npt.NDArray[Any]) -> None:
        allocation.copy_(torch.from_numpy(data.reshape(-1).view(np.uint8)))

    def download(self, allocation: Tensor, out: npt.NDArray[Any]) -> None:
        out.reshape(-1).view(np.uint8)[:] = allocation.cpu().numpy()

    def launch(self, program: Program, grid: tuple[int, int, int], tensors: Sequence[Tensor]) -> None:
        self.prepare(program, grid, tensors).launch(tensors)


class _Launch:
    def __init__(self, kernel: Any, block: list[Tensor], grid: tuple[int, int, int], workgroup: int) -> None:
        self.kernel = kernel
        self.block = block
        self.threads = [grid[0] * workgroup, grid[1], grid[2]]
        self.group = [workgroup, 1, 1]

    def launch(self, tensors: Sequence[Tensor], stream: None = None) -> None:
        self.kernel(*tensors, *self.block, threads=self.threads, group_size=self.group)


def _target() -> Target:
    """Capabilities of all GPUs that this PyTorch runs on: Apple's own, from the M1 (family 7) on."""
    version = platform.mac_ver()[0]
    bf16 = int(version.split(".")[0] or 0) >= 14  # MSL 3.1, which has bfloat
    return Target(
        backend="metal",
        name="Apple GPU (mps)",
        vendor="apple",
        driver=f"torch {torch.__version__}, macOS {version}",
        subgroup_size=32,
        max_threads=1024,
        max_shared_bytes=32768,
        max_grid=((1 << 31) - 1, 65535, 65535),
        max_buffers=30,  # of 31 indices, one is for the scalars
        max_buffer_bytes=(1 << 32) - 1,
        unified_memory=True,
        f16=True,
        int64=True,
        storage16=True,
        storage8=True,
        bf16=bf16,
        matrix_units=("m8n8k8:f16:f32", *(("m8n8k8:bf16:f32",) if bf16 else ()), "m8n8k8:f32:f32"),
    )
