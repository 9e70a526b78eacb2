"""The forward kernel for matrix units where every row keeps every key and all tiles are full."""

from __future__ import annotations

from typing import Any

import grid
import numpy as np
import pytest
from op_plans import run_step
from test_forward_interpreted import STORED, run
from test_fragment_vulkan import TARGET, VOTE

from aule.ir import Builder
from aule.ir.interpret import interpret
from aule.ir.types import f32, i32
from aule.ops.attention.build import build_forward
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.fragment.forward_full_tiles import MOST_BLOCKS, quotient
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.plan.tiles import choose_fragments, choose_full
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.validate import attention_problem
from aule.ops.rope.tables import Rope
from aule.view import TensorView, contiguous_strides


def views_of(problem: AttentionProblem) -> dict[str, TensorView]:
    dims = {
        name: (problem.batch, heads, rows, dim)
        for name, heads, rows, dim in (
            ("q", problem.heads_q, problem.seq_q, problem.head_dim),
            ("k", problem.heads_kv, problem.seq_kv, problem.head_dim),
            ("v", problem.heads_kv, problem.seq_kv, problem.value_dim),
            ("o", problem.heads_q, problem.seq_q, problem.value_dim),
        )
    }
    return {n: TensorView(problem.dtype, d, contiguous_strides(d), "device", None) for n, d in dims.items()}


def full(problem: AttentionProblem, **more: TensorView) -> bool:
    config = plan_forward(problem, views_of(problem) | more, TARGET).steps[-1].config
    return isinstance(config, FragmentConfig) and config.full_tiles


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_where_tiles_are_full(dim: int) -> None:
    def problem(seq_q: int = 256, seq_kv: int = 192, value_dim: int = dim, **options: Any) -> AttentionProblem:
        return AttentionProblem(1, 4, 2, seq_q, seq_kv, dim, value_dim, "f16", 0.1, **options)

    assert full(problem()) and full(problem(sinks=True, return_lse=True))
    assert not full(problem(seq_q=200)) and not full(problem(seq_kv=200)) and not full(problem(seq_kv=0))
    assert not full(problem(value_dim=dim - 8))  # the last fragment has columns that are not there
    assert not full(problem(causal=True)) and not full(problem(softcap=3.0)) and not full(problem(dropout_p=0.1))
    assert full(problem(seq_q=128, seq_kv=64, window=(200, 200)))  # the band reaches beyond all keys
    size = (1, 1, 256, dim // 2)
    tables = {name: TensorView("f32", size, contiguous_strides(size), "device", None) for name in ("cos", "sin")}
    assert not full(problem(seq_kv=256, rope=Rope("f32", dim, False)), **tables)
    assert full(AttentionProblem(MOST_BLOCKS - 1, 1, 1, 128, 64, dim, dim, "f16", 0.1))
    assert not full(AttentionProblem(MOST_BLOCKS, 1, 1, 128, 64, dim, dim, "f16", 0.1))


def test_tiles_of_their_own() -> None:
    """They are taken where tiles are full, unless somebody says otherwise, and cut rows and keys as the others do."""
    for dim in (64, 128, 256):
        plain = choose_fragments(TARGET, "bf16", dim, dim, False, False)
        assert plain is not None
        problem = AttentionProblem(1, 4, 2, 256, 192, dim, dim, "bf16", 0.1)
        taken = plan_forward(problem, views_of(problem), TARGET).steps[-1].config
        assert isinstance(taken, FragmentConfig) and taken.shape == choose_full(TARGET, plain)
        assert (taken.shape == plain) == (dim == 64)
        cut = [(s.block_q, s.block_kv, s.subgroups) for s in (taken.shape, plain)]
        assert cut[0] == cut[1]
        config = plan_forward(problem, views_of(problem), TARGET, shape=plain).steps[-1].config
        assert isinstance(config, FragmentConfig) and config.full_tiles and config.shape == plain


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (128, 64), (64, 208)], ids=str)
def test_results(dims: tuple[int, int], dtype: str) -> None:
    """Groups of heads; O in one part and in several, Q in memory, in registers and in both, and by another way."""
    rng = np.random.default_rng(2)
    sizes = {"q": (6, 128, dims[0]), "k": (2, 128, dims[0]), "v": (2, 128, dims[1])}
    arrays: dict[str, Any] = {
        name: rng.standard_normal((2, *size)).astype(np.float32).astype(grid.NUMPY_DTYPES[dtype])
        for name, size in sizes.items()
    }
    arrays["sinks"] = rng.standard_normal(6).astype(np.float32)
    arrays["k"][:, :, 100:] *= 3  # later keys outweigh earlier ones
    problem, operands = attention_problem(**{n: grid.view_of(a) for n, a in arrays.items()}, return_lse=True)
    plan = plan_forward(problem, views_of(problem) | {"sinks": operands.sinks}, TARGET)
    config = plan.steps[-1].config
    assert isinstance(config, FragmentConfig) and config.full_tiles
    assert build_forward(config, TARGET).shared_bytes + VOTE <= TARGET.max_shared_bytes
    out, lse = run(problem, operands, config.shape, TARGET)
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """Weights are positive, so that a value shows in all rows; and a NaN in Q in its row."""
    rng = np.random.default_rng(3)
    arrays = {n: rng.standard_normal((1, 1, 128, 64)).astype(grid.NUMPY_DTYPES["bf16"]) for n in "qkv"}
    arrays["v"][0, 0, 70, 5], arrays["q"][0, 0, 9, 3] = bad, np.nan
    problem, operands = attention_problem(**{n: grid.view_of(a) for n, a in arrays.items()})
    config = plan_forward(problem, views_of(problem), TARGET).steps[-1].config
    assert isinstance(config, FragmentConfig) and config.full_tiles
    out = run(problem, operands, config.shape, TARGET)[0].view(grid.NUMPY_DTYPES["bf16"]).astype(np.float32)[0, 0]
    others = np.delete(np.arange(128), 9)
    assert np.isnan(out[9]).all() and np.isfinite(np.delete(out, 5, axis=1)[others]).all()
    np.testing.assert_array_equal(out[others, 5], np.full(127, bad, np.float32))


def test_rows_far_apart() -> None:
    """Heads beside each other in memory, and rows of O with something between them, which stays what it was."""
    rng = np.random.default_rng(4)
    batch, heads, length, dim = 2, 3, 128, 128
    memory = {n: rng.standard_normal((batch, length, heads, dim)).astype(np.float16) for n in "qkv"}
    memory["o"] = np.full((batch, length, heads, dim + 8), 7, np.float16)
    arrays = {n: memory[n].transpose(0, 2, 1, 3) for n in "qkv"}
    problem, _ = attention_problem(**{n: grid.view_of(a) for n, a in arrays.items()})
    views = {}
    for name, array in memory.items():
        strides = tuple(array.strides[axis] // 2 for axis in (0, 2, 1, 3))
        views[name] = TensorView("f16", (batch, heads, length, dim), strides, "device", None)
    plan = plan_forward(problem, views, TARGET)
    (step,) = plan.steps
    assert isinstance(step.config, FragmentConfig) and step.config.full_tiles
    run_step(step, {n: a.reshape(-1).view(STORED["f16"]) for n, a in memory.items()}, TARGET)
    out = memory["o"].transpose(0, 2, 1, 3)
    verdict = compare(problem, np.ascontiguousarray(out[..., :dim]), None, expect(problem, **arrays))
    assert verdict, verdict.message
    assert (out[..., dim:] == 7).all()


def test_quotients() -> None:
    """Of the largest numbers, and around multiples, where a rounding would show."""
    divisors = np.array([1, 2, 3, 5, 7, 16, 49, 97, 255, 1000, 4097, 65535, MOST_BLOCKS - 1])
    near = [np.arange(max(MOST_BLOCKS // n - 40, 0), MOST_BLOCKS // n + 1) * n for n in divisors]
    numbers = [np.concatenate([x - 1, x, x + 1, np.arange(50)]) for x in near]
    numbers = [x[(x >= 0) & (x < MOST_BLOCKS)].astype(np.int32) for x in numbers]
    b = Builder("quotients", 32)
    source, target, inverse = b.buffer("x", i32), b.buffer("y", i32, "write"), b.scalar("inverse", f32)
    at = b.group_id() * 32 + b.thread_id()
    b.store(target, at, quotient(b, b.load(source, at), inverse))
    kernel = b.finish()
    for divisor, x in zip(divisors, numbers, strict=True):
        x = np.resize(x, -(-len(x) // 32) * 32)
        y = np.zeros_like(x)
        interpret(kernel, (len(x) // 32, 1, 1), [x, y, 1.0 / float(divisor)])
        np.testing.assert_array_equal(y, x // divisor)
