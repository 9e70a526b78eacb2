"""The forward kernel on the interpreter with the sanitizer on: the small grid, and tiles of every kind."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import grid
import numpy as np
import pytest
from op_plans import run_step, unwritten

from aule import tuning
from aule.engine.attention import attention_views
from aule.ir import Builder
from aule.ir.interpret import interpret
from aule.ir.types import Scalar, f32, f64, i32
from aule.ops.attention.config import ForwardConfig
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.plan.tiles import FRAGMENT, SIMT, WARPGROUP, choose_shape, simt_shape
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.validate import Operands, attention_problem
from aule.ops.softmax.online_softmax import LAG
from aule.target import Target
from aule.tile.common.math import LN2, LOG2E, tanh
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape
from aule.view import TensorView, contiguous_strides

SMALL_SHAPES = {
    "resident": SimtShape(16, 16, 4, 4, 8, 8, True),
    "streamed": SimtShape(16, 16, 4, 4, 8, 4, False),
    "parts": SimtShape(16, 32, 4, 4, 8, 4, False, block_p=16),
    "pieces": SimtShape(16, 32, 4, 4, 8, 4, True, block_p=8, edge_loop=True, sums_in_shared=False, by_columns=True),
    "two-rows": SimtShape(16, 16, 4, 8, 8, 8, False),
}
STORED = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def target(subgroup_size: int) -> Target:
    sizes = (subgroup_size,) if subgroup_size else ()
    return Target("vulkan", subgroup_size=subgroup_size, subgroup_sizes=sizes, max_shared_bytes=1 << 20, int64=True)


def run(
    problem: AttentionProblem, operands: Operands, shape: SimtShape | FragmentShape | None, device: Target, *,
    index64: bool = False, aligned: bool = True, tuned: bool = False,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Forward pass on the interpreter, on copies packed as the engine packs them."""
    out_shape = (problem.batch, problem.heads_q, problem.seq_q, problem.value_dim)
    out = np.zeros(out_shape, STORED[problem.dtype])
    lse = np.zeros(out_shape[:3], np.float32)
    result = TensorView(problem.dtype, out_shape, contiguous_strides(out_shape), "device", None)
    views: dict[str, TensorView] = {"o": result}
    memory: dict[str, Any] = {"o": out.reshape(-1), "lse": lse.reshape(-1)}
    for name, view in attention_views(operands, result).items():
        if name != "o":
            used = tuple(slice(None) if stride else slice(0, 1) for stride in view.strides)
            packed = np.ascontiguousarray(view.storage[used])
            steps = zip(contiguous_strides(packed.shape), view.strides, strict=True)
            views[name] = TensorView(view.dtype, view.shape, tuple(p if s else 0 for p, s in steps), "device", None)
            memory[name] = (packed.view(np.uint8) if packed.dtype == np.bool_ else packed).reshape(-1)
    aligned_base = dict.fromkeys([*"qkvo", "mask"], aligned)
    if tuned and shape is not None:  # as if `aule tune` had found the shape
        op = SIMT if isinstance(shape, SimtShape) else WARPGROUP if shape.warpgroups else FRAGMENT
        own = tuning.Record(op, {}, {"shape": asdict(shape), "accumulators": [1 << 20] * 3})
        any_mask = tuning.Record("attention.forward.mask_prepass_scores", {}, {"value": 0})
        with tuning.trying(own, any_mask):
            plan = plan_forward(problem, views, device, aligned_base)
    else:
        plan = plan_forward(problem, views, device, aligned_base, shape)
    memory |= {name: unwritten(size) for name, size in plan.workspace.items()}
    memory |= {name: np.zeros(size, np.int32) for name, size in plan.scratch.items()}
    for step in plan.steps:
        run_step(replace(step, config=replace(step.config, index64=index64)), memory, device)
    return out, lse


@pytest.mark.parametrize("subgroup_size", [8, 0])
@pytest.mark.parametrize("shape", SMALL_SHAPES)
@pytest.mark.parametrize("case", grid.forward_grid("small"), ids=str)
def test_small_grid(case: grid.Case, shape: str, subgroup_size: int) -> None:
    inputs = grid.make_inputs(case, seed=3)
    problem, operands = grid.case_problem(case, inputs)
    out, lse = run(problem, operands, SMALL_SHAPES[shape], target(subgroup_size))
    verdict = compare(problem, out, lse if case.return_lse else None, grid.expected(case, inputs))
    assert verdict, verdict.message


TABLE = dict.fromkeys(simt_shape(record.use) for record in tuning.every(SIMT))


@pytest.mark.parametrize("shape", TABLE, ids=lambda s: f"{s.block_q}x{s.block_kv}-{s.threads}")
def test_tiles_of_the_table(shape: SimtShape) -> None:
    case = next(c for c in grid.forward_grid("full") if c.causal and c.seq_q == 200 and c.head_dim <= 64)
    inputs = grid.make_inputs(case, seed=4)
    problem, operands = grid.case_problem(case, inputs)
    out, lse = run(problem, operands, shape, target(32))
    verdict = compare(problem, out, lse if case.return_lse else None, grid.expected(case, inputs))
    assert verdict, verdict.message


WIDE = [r for r in tuning.family_records("generic", SIMT) if r.when.get("head_dim")]


@pytest.mark.parametrize("record", WIDE, ids=lambda r: f"{r.use['shape']['block_q']}-rows")
def test_heads_above_256(record: tuning.Record) -> None:
    """Columns of O are spread over the threads of a row; V passes a few rows at a time."""
    case = next(c for c in grid.forward_grid("wide") if (c.head_dim, c.value_dim, c.seq_q) == (576, 512, 40))
    inputs = grid.make_inputs(case, seed=4)
    problem, operands = grid.case_problem(case, inputs)
    out, lse = run(problem, operands, simt_shape(record.use), target(32 if record is not WIDE[-1] else 0))
    verdict = compare(problem, out, lse if case.return_lse else None, grid.expected(case, inputs))
    assert verdict, verdict.message


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("shape", SMALL_SHAPES)
def test_guarded_product_has_no_race(shape: str, bad: float) -> None:
    """Inf and NaN in dropped values take another way through the kernel."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 40, 16), np.float32) for _ in range(3))
    mask = np.ones((40, 40), bool)
    mask[:, 5] = False
    k[:, :, 5], v[:, :, 5] = bad, bad
    views = {name: grid.view_of(array) for name, array in {"q": q, "k": k, "v": v, "mask": mask}.items()}
    problem, operands = attention_problem(**views, causal=True, return_lse=True)
    out, lse = run(problem, operands, SMALL_SHAPES[shape], target(8))
    assert np.isfinite(out).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("device", [target(8), target(0), replace(target(8), backend="webgpu")],
                         ids=["subgroups", "none", "webgpu"])  # fmt: skip
def test_wild_values_in_a_loop_of_their_own(device: Target) -> None:
    """A value that causal rows drop is NaN: only tiles with dropped keys look for it, and the last row must have it."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 1, 80, 16), np.float32) for _ in range(3))
    v[:, :, 79] = np.nan
    views = {name: grid.view_of(array) for name, array in {"q": q, "k": k, "v": v}.items()}
    problem, operands = attention_problem(**views, causal=True)
    out, _ = run(problem, operands, SMALL_SHAPES["pieces"], device)
    assert np.isfinite(out[0, 0, :79]).all() and np.isnan(out[0, 0, 79]).all()


@pytest.mark.parametrize("device", [target(8), target(0), replace(target(8), backend="webgpu")],
                         ids=["subgroups", "none", "webgpu"])  # fmt: skip
def test_maximum_that_runs_ahead(device: Target) -> None:
    """Rows whose scores grow from tile to tile, by less and by more than m may lag behind, beside one that is NaN."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((1, 1, n, 8), np.float32) for n in (16, 64, 64))
    q = np.abs(q) * np.linspace(0, 4, 16, dtype=np.float32)[:, None]
    k = np.abs(k) * np.linspace(-3, 3, 64, dtype=np.float32)[:, None]
    q[:, :, 3] = np.nan
    views = {name: grid.view_of(array) for name, array in {"q": q, "k": k, "v": v}.items()}
    problem, operands = attention_problem(**views, return_lse=True)
    out, lse = run(problem, operands, SMALL_SHAPES["resident"], device)
    rows = np.arange(16) != 3
    s = (q[0, 0, rows].astype(np.float64) @ k[0, 0].astype(np.float64).T) * (problem.scale * LOG2E)
    highest = s.max(axis=1, keepdims=True)
    assert (highest - s[:, :16].max(axis=1, keepdims=True)).max() > 2 * LAG
    weights = np.exp2(s - highest)
    total = weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out[0, 0, rows], weights @ v[0, 0] / total, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse[0, 0, rows], ((highest + np.log2(total)) * LN2)[:, 0], rtol=1e-5, atol=1e-5)
    assert np.isnan(out[0, 0, 3]).all()


STEADY = SimtShape(
    16, 32, 4, 8, 8, 4, False, block_p=16, edge_loop=True, by_columns=True, prefetch_k=1, prefetch_v=2, full_tiles=True
)


def planned(lengths: tuple[int, int], row_strides: tuple[int, ...] = (64, 64, 64, 64), **options: Any) -> bool:
    """Whether a problem of two heads of 64 columns gets the kernel that relies on whole tiles of dense rows."""
    problem = AttentionProblem(1, 2, 2, *lengths, 64, 64, "f32", 0.125, **options)
    views = {}
    for name, stride in zip("qkvo", row_strides, strict=True):
        rows = lengths[name in "kv"]
        views[name] = TensorView("f32", (1, 2, rows, 64), (2 * rows * stride, rows * stride, stride, 1), "device", None)
    config = plan_forward(problem, views, target(8), shape=STEADY).steps[-1].config
    assert isinstance(config, ForwardConfig)
    return config.full_tiles


def test_steady_only_over_whole_tiles_of_dense_rows() -> None:
    assert planned((48, 64)) and planned((48, 64), causal=True)
    assert not planned((40, 64)) and not planned((48, 80))
    for strided in ((128, 64, 64, 64), (64, 128, 64, 64), (64, 64, 128, 64), (64, 64, 64, 128)):
        assert not planned((48, 64), strided)
    nvidia = replace(target(32), vendor="nvidia", max_threads=1024, max_shared_bytes=48 << 10)
    assert choose_shape(nvidia, 128, 128).full_tiles


@pytest.mark.parametrize("resident", [False, True], ids=["streamed", "resident"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_steady_reads_nothing_past_the_end(causal: bool, resident: bool) -> None:
    """The last tile of the last head has no next one to fetch; the sanitizer sees every access."""
    assert planned((48, 96), causal=causal)
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 2, n, 64), np.float32) for n in (48, 96, 96))
    views = {name: grid.view_of(array) for name, array in {"q": q, "k": k, "v": v}.items()}
    problem, operands = attention_problem(**views, causal=causal, return_lse=True)
    out, lse = run(problem, operands, replace(STEADY, resident_q=resident), target(8), index64=resident)
    verdict = compare(problem, out, lse, expect(problem, q, k, v))
    assert verdict, verdict.message


def test_late_only_where_workgroups_hide_it() -> None:
    """Three of 73 KiB fit into Hopper's shared memory, and one into what Ada has."""
    hopper = Target("cuda", vendor="nvidia", subgroup_size=32, subgroup_sizes=(32,), max_threads=1024,
                    max_shared_bytes=227 * 1024)  # fmt: skip
    ada = replace(hopper, max_shared_bytes=99 * 1024)
    assert choose_shape(hopper, 128, 128).late_values
    assert not choose_shape(hopper, 128, 128, modifiers=1).late_values
    assert not choose_shape(ada, 128, 128).late_values
    assert not choose_shape(replace(hopper, backend="vulkan"), 128, 128).late_values


def test_three_workgroups_of_nvidia_through_vulkan() -> None:
    """A multiprocessor has 100 KiB of shared memory there, of which each workgroup takes 1 KiB for itself."""
    device = Target("vulkan", vendor="nvidia", subgroup_size=32, subgroup_sizes=(32,), max_threads=1024,
                    max_shared_bytes=48 * 1024)  # fmt: skip
    for modifiers in range(3):
        shape = choose_shape(device, 64, 64, modifiers=modifiers)
        assert 3 * (shape.shared_bytes(64, 64, subgroups=True) + 1024) <= 100 * 1024


@pytest.mark.parametrize("elem", [f32, f64], ids=str)
def test_tanh_to_a_few_ulp(elem: Scalar) -> None:
    """On both sides of where the formula changes, and far below, where nothing may be lost."""
    dtype = np.float32 if elem == f32 else np.float64
    size = np.concatenate([np.linspace(0.0, 1.2, 4001), np.geomspace(1e-30, 1e-2, 90), [20.0, 1e4, np.inf]])
    x = np.concatenate([size, -size, [np.nan]]).astype(dtype)
    b = Builder("tanh", 64)
    source, result, count = b.buffer("x", elem), b.buffer("y", elem, "write"), b.scalar("count", i32)
    i = b.group_id(0) * 64 + b.thread_id()
    with b.if_(i < count):
        b.store(result, i, tanh(b, b.load(source, i)))
    y = np.empty_like(x)
    interpret(b.finish(), (-(-len(x) // 64), 1, 1), [x, y, len(x)])
    want = np.tanh(x.astype(np.longdouble))
    ulp = np.finfo(dtype).eps * np.abs(want[:-1])
    assert (np.abs(y - want)[:-1] <= 4 * ulp).all() and np.isnan(y[-1])


def test_indices_of_64_bits() -> None:
    case = grid.forward_grid("small")[2]
    inputs = grid.make_inputs(case, seed=5)
    problem, operands = grid.case_problem(case, inputs)
    out, _ = run(problem, operands, SMALL_SHAPES["streamed"], target(8), index64=True)
    verdict = compare(problem, out, None, grid.expected(case, inputs))
    assert verdict, verdict.message


def test_far_views_get_indices_of_64_bits() -> None:
    case = grid.forward_grid("small")[2]
    problem, operands = grid.case_problem(case, grid.make_inputs(case, seed=5))
    near = attention_views(operands, operands.q)
    far = {name: replace(view, offset=2**31) for name, view in near.items()}
    assert not plan_forward(problem, near, target(8)).steps[-1].config.index64
    assert plan_forward(problem, far, target(8)).steps[-1].config.index64
