"""The GPU's backward kernels on the interpreter with the sanitizer on: the small grid, with tiles of several kinds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grid
import numpy as np
import pytest
import rope_cases
from op_plans import run_step, unwritten

from aule import tuning
from aule.engine.attention import attention_views
from aule.engine.memory import STORED
from aule.ops.attention.plan.backward import plan_backward
from aule.ops.attention.plan.tiles import simt_shape
from aule.ops.attention.plan.tiles_backward import SIMT
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import attention_reference, rounded_to
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.ops.attention.validate import Operands, attention_problem
from aule.target import Target
from aule.tile.simt.shape import SimtShape
from aule.view import TensorView, contiguous_strides

SHAPES = {
    "square": SimtShape(16, 16, 4, 4, 8, 8, False),
    "tall": SimtShape(32, 16, 4, 8, 8, 4, True),
    "wide": SimtShape(16, 32, 4, 4, 8, 8, False),
}
TARGET = Target(
    "vulkan", subgroup_size=8, subgroup_sizes=(8,), max_shared_bytes=1 << 20, int64=True, atomic_f32_add=True,
    extensions=("VK_EXT_shader_atomic_float",),
)  # fmt: skip


def run(
    problem: AttentionProblem,
    operands: Operands,
    inputs: dict[str, Any],
    shape: Any,
    index64: bool = False,
    target: Target = TARGET,
    scores: tuple[int, ...] | None = None,
) -> tuple[dict[str, Any], Any]:
    """Gradients by the interpreter, on copies packed as the engine packs them, and the gradient they start from.

    With ``scores`` only the gradient of the scores, in an array of that shape.
    """
    out_shape = (problem.batch, problem.heads_q, problem.seq_q, problem.value_dim)
    result = TensorView(problem.dtype, out_shape, contiguous_strides(out_shape), "device", None)
    views: dict[str, TensorView] = {"o": result, "do": result}
    memory: dict[str, Any] = {}
    for name, view in attention_views(operands, result).items():
        if name != "o":
            used = tuple(slice(None) if stride else slice(0, 1) for stride in view.strides)
            packed = np.ascontiguousarray(view.storage[used])
            steps = zip(contiguous_strides(packed.shape), view.strides, strict=True)
            views[name] = TensorView(view.dtype, view.shape, tuple(p if s else 0 for p, s in steps), "device", None)
            memory[name] = (packed.view(np.uint8) if packed.dtype == np.bool_ else packed).reshape(-1)
    arrays = {"alibi" if name == "alibi_slopes" else name: array for name, array in inputs.items()}
    out, lse = attention_reference(problem, **arrays)
    dtype = grid.NUMPY_DTYPES[problem.dtype]
    dout = np.random.default_rng(1).standard_normal(out_shape).astype(dtype)
    stored = STORED[problem.dtype]
    memory |= {
        "o": rounded_to(out.astype(np.float32), problem.dtype).astype(dtype).view(stored).reshape(-1),
        "do": dout.view(stored).reshape(-1),
        "lse": lse.astype(np.float32).reshape(-1),
    }
    if scores is not None:
        views["ds"] = TensorView("f32", scores, contiguous_strides(scores), "device", None)
        memory["ds"] = np.zeros(scores, np.float32).reshape(-1)
    for name in "qkv" if scores is None else "":
        shape_of = views[name].shape
        views["d" + name] = TensorView(problem.dtype, shape_of, contiguous_strides(shape_of), "device", None)
        memory["d" + name] = np.full(shape_of, np.nan, dtype).view(stored).reshape(-1)
    plan = plan_backward(problem, views, target, shapes=shape if isinstance(shape, tuple) else (shape, shape))
    memory |= {
        name: np.full(size, np.nan, np.float32) if name in ("delta", "dq_sum") else unwritten(size)
        for name, size in plan.workspace.items()
    }
    memory |= {name: np.zeros(size, np.int32) for name, size in plan.scratch.items()}
    for step in plan.steps:
        run_step(replace(step, config=replace(step.config, index64=index64)), memory, target)
    return memory, dout


WAYS = [(name, True) for name in SHAPES] + [("tall", False), ("wide", False)]


@pytest.mark.parametrize("way", WAYS, ids=[f"{name}{'' if exactly else '-sums'}" for name, exactly in WAYS])
@pytest.mark.parametrize("case", grid.forward_grid("small"), ids=str)
def test_small_grid(case: grid.Case, way: tuple[str, bool]) -> None:
    shape = SHAPES[way[0]]
    inputs = grid.make_inputs(case, seed=3)
    problem, operands = grid.case_problem(case, inputs)
    problem = replace(problem, deterministic=way[1])
    found, dout = run(problem, operands, inputs, shape, index64=case.seq_q % 2 == 0)
    arrays = {"alibi" if name == "alibi_slopes" else name: array for name, array in inputs.items()}
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


@pytest.mark.parametrize("exactly", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("shape", SHAPES)
def test_keys_that_only_rows_past_the_end_would_keep(shape: str, bad: float, exactly: bool) -> None:
    """Whatever they hold, their gradients are zero."""
    rng = np.random.default_rng(5)
    clean = {
        name: rng.standard_normal((1, 1, rows, 24)).astype(np.float32)
        for name, rows in (("q", 20), ("k", 40), ("v", 40))
    }
    given = {name: x.copy() for name, x in clean.items()}
    given["k"][:, :, 21], given["v"][:, :, 21] = bad, bad
    views = {name: grid.view_of(x) for name, x in given.items()}
    problem, operands = attention_problem(**views, causal=True, causal_align="top-left", deterministic=exactly)
    found, dout = run(problem, operands, clean, SHAPES[shape])
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **clean))
    assert not wrong, wrong


RECORDS = (*tuning.family_records("generic", SIMT), *tuning.family_records("nvidia", SIMT)[3::3])
TABLE = [simt_shape(record.use) for record in RECORDS]


@pytest.mark.parametrize("shape", TABLE, ids=lambda s: f"{s.block_q}x{s.block_kv}-{s.threads}-{s.resident_q}")
def test_tiles_of_the_table(shape: SimtShape) -> None:
    case = next(c for c in grid.forward_grid("full") if c.causal and c.seq_q == 200 and c.head_dim <= 64)
    inputs = grid.make_inputs(case, seed=4)
    problem, operands = grid.case_problem(case, inputs)
    found, dout = run(problem, operands, inputs, shape)
    arrays = {"alibi" if name == "alibi_slopes" else name: array for name, array in inputs.items()}
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


WIDE = [r for r in RECORDS if r.when.get("head_dim")]


@pytest.mark.parametrize("exactly", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("record", WIDE, ids=lambda r: f"{r.use['shape']['block_q']}-rows")
def test_heads_above_256(record: tuning.Record, exactly: bool) -> None:
    """Rotated rows are too wide to exchange their partners all at once."""
    case = rope_cases.Case("f16", (576, 512), 64, (19, 33))
    inputs = rope_cases.make_inputs(case)
    problem, operands = rope_cases.case_problem(case, inputs, deterministic=exactly)
    arrays = rope_cases.reference_arrays(inputs, operands)
    found, dout = run(problem, operands, arrays, simt_shape(record.use))
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong
