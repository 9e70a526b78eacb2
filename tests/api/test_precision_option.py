"""The option ``precision``: fp32 inputs on matrix units, and only when asked for."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import grid
import numpy as np
import pytest
import test_fragment_compiles as compiles
import test_fragment_interpreted as fragments
from test_forward_interpreted import run

import aule
from aule.ops.attention.build import build_forward
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.plan.backward import plan_backward
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.validate import attention_problem
from aule.render import spirv
from aule.target import Target
from aule.tile.fragment.shape import FragmentShape

CASES = [case for case in grid.forward_grid("small") if case.dtype == "f32"]
SHAPES = [FragmentShape(32, 32, 2, 2, True), FragmentShape(32, 16, 2, 1, False)]


@pytest.mark.parametrize("precision", ["f16", "bf16", "tf32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_good_as_rounded_inputs(case: grid.Case, precision: str) -> None:
    """The result is fp32, and as close to that of the rounded inputs as one in half precision must be."""
    inputs = grid.make_inputs(case, seed=3)
    problem, operands = grid.case_problem(case, inputs)
    number = CASES.index(case)
    asked = replace(problem, precision=precision)
    shape, way = SHAPES[number % 2], list(fragments.WAYS.values())[0 if precision == "tf32" else number % 3]
    out, lse = run(asked, operands, shape, way[0], aligned=number % 4 > 0)
    assert out.dtype == np.float32
    rounded = {name: grid.rounded_to(x, precision) if name in "qkv" else x for name, x in inputs.items()}
    arrays = {"alibi" if name == "alibi_slopes" else name: array for name, array in rounded.items()}
    half = replace(problem, dtype="f16" if precision == "tf32" else precision)  # tf32 has as many digits as fp16
    verdict = compare(half, out, lse if case.return_lse else None, expect(half, **arrays))
    assert verdict, verdict.message


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_dropped_infinities_do_not_leak(precision: str, bad: float) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 40, 16), np.float32) for _ in range(3))
    k[:, :, 20], v[:, :, 20, 3] = bad, bad  # rows from 20 on see it
    views = {name: grid.view_of(array) for name, array in {"q": q, "k": k, "v": v}.items()}
    problem, operands = attention_problem(**views, causal=True, precision=precision)
    out, _ = run(problem, operands, SHAPES[0], fragments.target())
    assert np.isfinite(out[:, :, :20]).all() and not np.isfinite(out[:, :, 20:, 3]).any()


# -- the plan ----------------------------------------------------------------------------------------------------------


def problem_of(head_dim: int, precision: str | None) -> AttentionProblem:
    return AttentionProblem(1, 8, 8, 2048, 2048, head_dim, head_dim, "f32", 0.125, causal=True, precision=precision)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize(
    ("arch", "precision"), [("sm_75", "f16"), ("sm_90", "f16"), ("sm_86", "tf32"), ("sm_90", "tf32")]
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_it_runs_on_matrix_units(arch: str, precision: str, head_dim: int, tmp_path: Path) -> None:
    device, problem = compiles.target(arch), problem_of(head_dim, precision)
    config = plan_forward(problem, compiles.views(problem), device).steps[-1].config
    assert isinstance(config, FragmentConfig)
    text, spilled = compiles.assemble(build_forward(config, device), device, tmp_path)
    assert text.count("mma.sync") > 100 and "cp.async" not in text
    assert ("m16n8k8.row.col.f32.tf32.tf32.f32" in text) == (precision == "tf32")
    assert spilled <= compiles.SPILLED


def test_it_renders_to_cooperative_matrices() -> None:
    """The structure only: the validator here is older than SPV_KHR_cooperative_matrix."""
    device = Target(
        "vulkan", subgroup_size=32, subgroup_sizes=(32,), max_threads=1024, max_shared_bytes=49152, f16=True,
        int64=True, storage16=True, storage8=True, language_version=13, matrix_units=("m16n16k16:f16:f32",),
        matrix_layout=compiles.NVIDIA_LAYOUT,
        extensions=("VK_KHR_cooperative_matrix", "VK_KHR_vulkan_memory_model", "VK_KHR_shader_float16_int8"),
    )  # fmt: skip
    problem = problem_of(64, "f16")
    kernel = build_forward(plan_forward(problem, compiles.views(problem), device).steps[-1].config, device)
    assert "cooperativeMatrix" in spirv.render(kernel, device).extensions


def test_never_silently() -> None:
    """Not without the option, and with it nothing else in its place."""
    device = compiles.target("sm_90")
    plain, asked = problem_of(64, None), problem_of(64, "bf16")
    assert not isinstance(plan_forward(plain, compiles.views(plain), device).steps[-1].config, FragmentConfig)
    for step in plan_backward(asked, compiles.views(asked), device).steps:  # gradients stay fp32
        assert "Fragment" not in type(step.config).__name__
    for precision, name in (("bf16", "bfloat16"), ("tf32", "tf32")):
        asked = problem_of(64, precision)
        with pytest.raises(aule.InvalidArgumentError, match=rf"matrix units for precision='{name}'.* only 'float16';"):
            plan_forward(asked, compiles.views(asked), compiles.target("sm_75"))


# -- accepted and refused ----------------------------------------------------------------------------------------------


def arrays(dtype: Any) -> list[tuple[str, Any]]:
    x = np.zeros((1, 2, 5, 8), dtype)
    try:
        import torch
    except ImportError:
        return [("numpy", x)]
    return [("numpy", x), ("torch", torch.from_numpy(x))]


@pytest.mark.parametrize("bad", ["fp32", "float8", 16, ["fp16"]])
def test_three_types_and_nothing_else(bad: Any) -> None:
    for _, x in arrays(np.float32):
        with pytest.raises(aule.InvalidArgumentError, match="precision 'float16', 'bfloat16' or 'tf32', got"):
            aule.flash_attention(x, x, x, precision=bad)


def test_float32_alone() -> None:
    for _, x in arrays(np.float16):
        with pytest.raises(
            aule.InvalidDtypeError, match=r"expected q, k and v of float32 with precision='bfloat16', got float16"
        ):
            aule.flash_attention(x, x, x, precision="bf16")


@pytest.mark.parametrize("spelling", ["bfloat16", "BF16", "torch.bfloat16"])
def test_any_spelling(spelling: str) -> None:
    for _, x in arrays(np.float32):
        with pytest.raises(aule.InvalidArgumentError, match=r"precision='bfloat16', got .*, which offers none"):
            aule.flash_attention(x, x, x, precision=spelling, backend="numpy")


def test_the_operator_has_it() -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(1, 2, 5, 8)
    with pytest.raises(aule.InvalidArgumentError, match="offers none"):
        torch.vmap(lambda q: aule.flash_attention(q, x, x, precision="fp16", backend="numpy"))(x[None])
