"""Fragments in MSL: the text, refused kernels, and that kernels fit Apple's 32 KiB of threadgroup memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_fragment_compiles import views

from aule.codegen import target_for
from aule.errors import InvalidArgumentError, KernelError
from aule.ir import Builder, KernelIR
from aule.ir.types import Fragment, Scalar, bf16, f16, f32, i32
from aule.kernels import AttentionKernel
from aule.ops.attention.build import build_forward
from aule.ops.attention.config import FragmentBackwardConfig, FragmentConfig
from aule.ops.attention.plan.backward import plan_backward
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.problem import AttentionProblem
from aule.render import msl

APPLE = target_for("msl")


def product(elem: Scalar, side: int) -> KernelIR:
    b = Builder("product", 32, 32)
    x, out, start = b.buffer("x", elem), b.buffer("out", f32, "write"), b.scalar("start", i32)
    left = b.fragment_load(Fragment(elem, side, side, "a"), x, start, 24)
    right = b.fragment_load(Fragment(elem, side, side, "b"), x, 0, side, "column")
    sums = b.fragment_mma(left, right, b.fragment_fill(Fragment(f32, side, side, "accumulator"), 0.0))
    b.store(out, b.lane_id(), b.fragment_get(sums, 1))
    return b.finish()


def test_blocks_of_8x8() -> None:
    text = msl.render(product(f16, 16), APPLE).text
    head, body = text.split("kernel void")
    assert "struct half16x16 {\n    simdgroup_half8x8 block[4];\n};" in head
    # Rows go by the stride, and of a transposed matrix the columns.
    assert "simdgroup_load(m.block[1], p + 8, stride);" in head
    assert "simdgroup_load(m.block[2], p + 8 * stride, stride);" in head
    assert "simdgroup_load(m.block[1], p + 8 * stride, stride, ulong2(0, 0), true);" in head
    assert head.count("simdgroup_multiply_accumulate(") == 8
    assert "load_half16x16_device(x + params.start, ulong(24));" in body
    assert ".block[0].thread_elements()[1]" in body
    small = msl.render(product(f16, 8), APPLE).text
    assert "struct half8x8" not in small and "simdgroup_half8x8 m;" in small


def test_bf16_is_in_matrices_alone() -> None:
    text = msl.render(product(bf16, 16), APPLE).text
    assert "device const ushort* x" in text
    assert "load_bfloat16x16_device((device const bfloat*)(x + params.start), ulong(24));" in text


def test_refusals() -> None:
    with pytest.raises(KernelError, match=r"bfloat \(Metal 3.1\)"):
        msl.render(product(bf16, 16), replace(APPLE, bf16=False))
    with pytest.raises(KernelError, match="blocks of 8x8, got fragment<f16,12x12"):
        msl.render(product(f16, 12), APPLE)
    old = replace(APPLE, bf16=False, matrix_units=("m8n8k8:f16:f32",))
    with pytest.raises(InvalidArgumentError, match="matrix units take bfloat16"):
        AttentionKernel.tensor_core(256, 64, dtype="bf16").emit("msl", old)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_the_kernel_library_emits_them(dtype: str) -> None:
    artifact = AttentionKernel.tensor_core(2048, 128, dtype=dtype).with_causal().artifact("msl")
    assert f"simdgroup_{'half' if dtype == 'f16' else 'bfloat'}8x8 block[4];" in artifact.text
    assert artifact.subgroup_size == 32 and artifact.uses_subgroups


@pytest.mark.parametrize("dim", [16, 64, 72, 96, 128])
def test_kernels_fit(dim: int) -> None:
    problem = AttentionProblem(1, 4, 4, 256, 256, dim, dim, "f16", 0.125, causal=True)
    config = plan_forward(problem, views(problem), APPLE).steps[-1].config
    assert isinstance(config, FragmentConfig)
    kernels = [build_forward(config, APPLE)]
    steps = plan_backward(problem, views(problem), APPLE).steps
    kernels += [s.build(s.config, APPLE) for s in steps if isinstance(s.config, FragmentBackwardConfig)]
    assert len(kernels) == 3
    assert all(msl.render(kernel, APPLE).shared_bytes <= 32768 for kernel in kernels)


def test_wider_heads_and_fp32_take_the_plain_kernel() -> None:
    for dim, dtype in ((256, "f16"), (64, "f32")):
        problem = AttentionProblem(1, 4, 4, 256, 256, dim, dim, dtype, 0.125)
        assert not isinstance(plan_forward(problem, views(problem), APPLE).steps[-1].config, FragmentConfig)
