"""The kernels for matrix units go through ptxas for every architecture, forward and backward, and really use them."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from aule.errors import InvalidArgumentError, InvalidDtypeError
from aule.ir import KernelIR
from aule.ir.verify import verify
from aule.kernels import AttentionKernel
from aule.ops.attention.build import build_forward
from aule.ops.attention.config import FragmentBackwardConfig, FragmentConfig
from aule.ops.attention.plan.backward import plan_backward
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.problem import AttentionProblem
from aule.render import ptx
from aule.target import NVIDIA_LAYOUT, WARPGROUP_UNITS, Target
from aule.view import TensorView, contiguous_strides

SHARED = {"sm_75": 65536, "sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_120": 101376}
SPILLED = 160
"""Bytes that ptxas may spill in the widest kernels, which hold 192 sums a thread: loop invariants, a few registers."""


def target(arch: str) -> Target:
    turing = arch == "sm_75"
    units = ("m16n8k8:f16:f32",) if turing else ("m16n8k16:f16:f32", "m16n8k16:bf16:f32", "m16n8k8:tf32:f32")
    if arch == "sm_90":
        units += WARPGROUP_UNITS
    return Target(
        "cuda", arch=arch, vendor="nvidia", subgroup_size=32, subgroup_sizes=(32,), max_threads=1024, int64=True,
        max_shared_bytes=SHARED[arch], matrix_units=units, matrix_layout=NVIDIA_LAYOUT, atomic_f32_add=True,
    )  # fmt: skip


def views(problem: AttentionProblem) -> dict[str, TensorView]:
    shape = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim)
    return {
        name: TensorView(problem.dtype, shape, contiguous_strides(shape), "device", None)
        for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv")
    }


def assemble(kernel: KernelIR, device: Target, tmp_path: Path) -> tuple[str, int]:
    """The PTX, and the bytes that ptxas spills."""
    verify(kernel)
    text = ptx.render(kernel, device).text
    (tmp_path / "kernel.ptx").write_text(text)
    arch = re.search(r"\.target (\w+)", text)
    assert arch is not None
    command = ["ptxas", "-arch", arch[1], "-v", str(tmp_path / "kernel.ptx"), "-o", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:500]
    said = done.stderr + done.stdout
    assert "serialized" not in said and "injected" not in said  # products that wait for each other, or are waited for
    found = re.search(r"(\d+) bytes spill stores", said)
    assert found is not None
    return text, int(found[1])


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_forward(arch: str, head_dim: int, tmp_path: Path) -> None:
    device = target(arch)
    problem = AttentionProblem(1, 8, 8, 2048, 2048, head_dim, head_dim, "f16", 0.125, causal=True)
    plan = plan_forward(problem, views(problem), device)
    config = plan.steps[-1].config
    assert isinstance(config, FragmentConfig)
    text, spilled = assemble(build_forward(config, device), device, tmp_path)
    if arch == "sm_90":
        assert text.count("wgmma.mma_async") > 20
    else:
        assert text.count("mma.sync") > 100 and "ldmatrix" in text
    assert ("cp.async" in text) == (arch != "sm_75")
    assert spilled <= SPILLED


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize("head_dim", [96, 144, 208])
def test_no_product_of_other_dimensions_waits(head_dim: int, tmp_path: Path) -> None:
    device = target("sm_90")
    problem = AttentionProblem(1, 8, 8, 2048, 2048, head_dim, head_dim, "bf16", 0.125, causal=head_dim == 208)
    step = plan_forward(problem, views(problem), device).steps[-1]
    _, spilled = assemble(step.build(step.config, device), device, tmp_path)
    assert spilled <= SPILLED


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize("head_dim", [200, 512])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_wide_gradients_are_on_matrix_units(arch: str, head_dim: int, tmp_path: Path) -> None:
    device = target(arch)
    problem = AttentionProblem(1, 8, 8, 2048, 2048, head_dim, head_dim, "bf16", 0.125, causal=True)
    (step,) = (
        step
        for step in plan_backward(problem, views(problem), device).steps
        if getattr(step.config, "of", "") == "keys"
    )
    assert isinstance(step.config, FragmentBackwardConfig)
    text, spilled = assemble(step.build(step.config, device), device, tmp_path)
    assert ("wgmma" if arch == "sm_90" and head_dim <= 256 else "mma.sync") in text and spilled <= SPILLED


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize(("head_dim", "deterministic"), [(64, False), (64, True), (128, False), (128, True)])
def test_backward(arch: str, head_dim: int, deterministic: bool, tmp_path: Path) -> None:
    device = target(arch)
    problem = AttentionProblem(
        1, 8, 8, 2048, 2048, head_dim, head_dim, "f16", 0.125, causal=True, deterministic=deterministic
    )
    plan = plan_backward(problem, views(problem), device)
    kernels = [step for step in plan.steps if isinstance(step.config, FragmentBackwardConfig)]
    assert [step.config.of for step in kernels] == (["queries", "keys"] if deterministic else ["keys"])
    for step in kernels:
        text, spilled = assemble(step.build(step.config, device), device, tmp_path)
        assert ("atom.global.add" in text) == (not deterministic)
        assert spilled <= SPILLED


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_scores(arch: str, head_dim: int, tmp_path: Path) -> None:
    device = target(arch)
    problem = AttentionProblem(1, 8, 8, 2048, 1024, head_dim, head_dim, "f16", 0.125, causal=True)
    given = {name: view for name, view in views(problem).items() if name not in ("dq", "dk", "dv")}
    shape = (1, 8, 2048, 1152)
    given["ds"] = TensorView("f32", shape, contiguous_strides(shape), "device", None)
    _, step = plan_backward(problem, given, device).steps
    assert isinstance(step.config, FragmentBackwardConfig) and step.config.of == "scores"
    text, spilled = assemble(step.build(step.config, device), device, tmp_path)
    assert "mma.sync" in text and spilled == 0


def test_fp32_stays_off_matrix_units() -> None:
    problem = AttentionProblem(1, 8, 8, 2048, 2048, 64, 64, "f32", 0.125)
    assert not isinstance(plan_forward(problem, views(problem), target("sm_90")).steps[-1].config, FragmentConfig)
    half = replace(problem, dtype="bf16")
    assert isinstance(plan_forward(half, views(half), target("sm_90")).steps[-1].config, FragmentConfig)
    # Turing has no bf16.
    assert not isinstance(plan_forward(half, views(half), target("sm_75")).steps[-1].config, FragmentConfig)


def test_the_kernel_library_has_them() -> None:
    kernel = AttentionKernel.tensor_core(2048, 128).with_causal()
    assert kernel.name == "flash_attention_tensor_core_causal" and kernel.use_tensor_cores and kernel.dtype == "f16"
    assert "mma.sync.aligned.m16n8k16" in kernel.emit_ptx() and kernel.shared_memory_bytes > 0
    small = AttentionKernel.tensor_core(2048, 64, dtype="bf16").with_tiles(64, 32)
    assert (small.tile_q, small.tile_kv) == (64, 32) and "bf16" in small.emit_ptx()
    assert not AttentionKernel(2048, 128).use_tensor_cores
    with pytest.raises(InvalidDtypeError, match="float16 or bfloat16"):
        AttentionKernel.tensor_core(2048, 128, dtype="f32")
    with pytest.raises(InvalidArgumentError, match="matrix units"):
        kernel.emit("wgsl")
    with pytest.raises(InvalidArgumentError, match="multiple of 16"):
        kernel.with_tiles(24, 32).build()
    with pytest.raises(InvalidArgumentError, match="shared memory"):
        kernel.with_tiles(256, 256).build()


def test_buffers_are_in_the_order_that_callers_rely_on() -> None:
    """torch's way to CUDA passes q, k, v, o, then what is added, then the log-sum-exp, without looking at names."""
    device = target("sm_90")
    problem = AttentionProblem(
        1, 8, 8, 256, 256, 64, 64, "bf16", 0.125, causal=True, mask="bool", bias="f32", alibi=True, sinks=True,
        dropout_p=0.1, return_lse=True,
    )  # fmt: skip
    square, more = (1, 8, 256, 256), views(problem)
    for name, dtype in (("mask", "bool"), ("bias", "f32")):
        more[name] = TensorView(dtype, square, contiguous_strides(square), "device", None)
    more["alibi"] = TensorView("f32", (1, 8), (8, 1), "device", None)
    more["sinks"] = TensorView("f32", (8,), (1,), "device", None)
    more["seed"] = TensorView("u32", (2,), (1,), "device", None)
    kernel = build_forward(plan_forward(problem, more, device).steps[-1].config, device)
    buffers = [p.name.removesuffix("_ptr") for p in kernel.params if p.kind == "buffer"]
    assert buffers[:4] == ["q", "k", "v", "o"] and buffers[-1] == "lse"
    assert sorted(buffers[4:-1]) == ["alibi", "bias", "mask", "seed", "sinks"]
