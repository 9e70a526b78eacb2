"""Torch tensors on Apple's GPUs: our MSL, which PyTorch compiles and launches among its own work.

``torch.mps.compile_shader`` takes the source and gives kernels that are called with tensors, in the order of the
kernel's buffer indices. The scalars follow in one block, as our MSL declares them, held by a small tensor.

This has not been run on Apple hardware. Tests run it whole, with a stand-in for ``compile_shader`` that compiles the
same source with g++ and calls it on CPU tensors.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aule.artifact import Artifact
from aule.errors import ShaderCompileError
from aule.frontends.torch_cuda import (
    PreparedLaunch,
    copied,
    device_gradients,
    lies_over,
    prepare_launch,
    signature,
)
from aule.frontends.torch_fused import Prepared, launch_on, no_key, prepare_on
from aule.frontends.torch_views import keyed, written
from aule.ops.spec import OpSpec
from aule.options import AttentionOptions
from aule.runtime._refused import save_refused
from aule.runtime.base import Program
from aule.target import Target

_MAX_LAUNCHES = 4096
_launches: dict[Any, PreparedLaunch] = {}
_fused_launches: dict[Any, Prepared] = {}
_devices: dict[Any, MpsDevice] = {}


def available() -> bool:
    """Whether this PyTorch can compile our kernels (2.7 and later)."""
    return hasattr(torch.mps, "compile_shader")


def on_mps(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """Attention where the tensors lie; planned and built once per signature."""
    options = keyed("flash_attention", options)
    arrays = options.arrays()
    key = (
        *(signature(x) for x in (q, k, v, options.out, *arrays.values())), *arrays, *options.plain().values(),
    )  # fmt: skip
    found = _launches.get(key)
    if found is None:
        if len(_launches) >= _MAX_LAUNCHES:
            _launches.clear()
        found = _launches[key] = prepare_launch(q, k, v, options, device_of(q))
    if options.out is not None and lies_over(options.out, q, k, v):
        return copied(options.out, on_mps(q, k, v, options._replace(out=None)))
    out = q.new_empty(found.out_shape) if options.out is None else written(options.out)
    lse = q.new_empty(found.lse_shape, dtype=torch.float32) if options.return_lse else None
    if found.launch is not None:
        extra = [getattr(options, name) for name in found.extra]
        found.launch([q, k, v, out, *extra, *([] if lse is None else [lse])])
    return out if lse is None else (out, lse)


def mps_gradients(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, options: AttentionOptions, want_scores: bool
) -> tuple[list[Any], Any]:
    """Gradients of q, k and v, and of what is added to the scores where it is wanted."""
    return device_gradients(
        q, k, v, out, lse, dout, options, want_scores, lambda: device_of(q), lambda launch, tensors: launch(tensors)
    )  # fmt: skip


def fused_on_mps(
    spec: OpSpec, tensors: Sequence[Any], options: Sequence[Any], backend: str | None, wanted: tuple[str, ...]
) -> tuple[Any, ...]:
    """An op of the catalogue where the tensors lie; planned and built once per signature."""
    key = (spec.name, wanted, options, backend, *(None if x is None else signature(x) for x in tensors))
    try:
        found = _fused_launches.get(key)
    except TypeError:
        raise no_key(spec, tensors, options, wanted) from None
    if found is None:
        if len(_fused_launches) >= _MAX_LAUNCHES:
            _fused_launches.clear()
        found = _fused_launches[key] = prepare_on(spec, tensors, options, wanted, device_of(tensors[0]))
    return launch_on(spec, tensors, found, lambda launch, memory: launch(memory))


def device_of(tensor: Any) -> MpsDevice:
    """The device of a tensor."""
    found = _devices.get(tensor.device)
    if found is None:
        found = _devices[tensor.device] = MpsDevice(tensor.device)
    return found


class MpsDevice:
    """As much of a device as the engine needs to build kernels: what it can do, and how one is loaded.

    Memory is PyTorch's, and so is the order of the work.
    """

    def __init__(self, where: Any) -> None:
        self.where = where
        self.target = _target()

    def load(self, artifact: Artifact) -> Program:
        """Have a kernel compiled."""
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

    def prepare(self, program: Program, grid: tuple[int, int, int], arguments: list[Any]) -> _Launch:
        """A launch with everything but the tensors. ``arguments`` follow the parameters; those of buffers are None."""
        artifact = program.artifact
        scalars = [x for x, p in zip(arguments, artifact.params, strict=True) if p.kind == "scalar"]
        block = []
        if scalars:
            packed = bytearray(artifact.scalar_struct.pack(*scalars))
            block = [torch.frombuffer(packed, dtype=torch.uint8).to(self.where, copy=True)]
        return _Launch(program.handle, block, grid, artifact.workgroup)

    # What follows serves `aule.engine.probe`, which knows devices and no tensors.

    def alloc(self, nbytes: int) -> Any:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.where)

    def free(self, allocation: Any) -> None:
        """Nothing: PyTorch frees a tensor when nobody holds it."""

    def upload(self, allocation: Any, data: npt.NDArray[Any]) -> None:
        allocation.copy_(torch.from_numpy(data.reshape(-1).view(np.uint8)))

    def download(self, allocation: Any, out: npt.NDArray[Any]) -> None:
        out.reshape(-1).view(np.uint8)[:] = allocation.cpu().numpy()

    def launch(self, program: Program, grid: tuple[int, int, int], tensors: list[Any]) -> None:
        self.prepare(program, grid, tensors).launch(tensors)


class _Launch:
    def __init__(self, kernel: Any, block: list[Any], grid: tuple[int, int, int], workgroup: int) -> None:
        self.kernel = kernel
        self.block = block
        self.threads = [grid[0] * workgroup, grid[1], grid[2]]
        self.group = [workgroup, 1, 1]

    def launch(self, tensors: list[Any]) -> None:
        """Start it, behind what PyTorch was asked for before."""
        self.kernel(*tensors, *self.block, threads=self.threads, group_size=self.group)


def _target() -> Target:
    """What every GPU has that this PyTorch runs on: Apple's own, from the M1 (family 7) on."""
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
