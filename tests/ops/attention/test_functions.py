"""Users' mask functions: which tiles are classified as dropped, partly kept and kept, and kernels that skip the dropped
ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from op_plans import run_step, unwritten
from test_backward_interpreted import SHAPES as BACKWARD_SHAPES
from test_backward_interpreted import TARGET
from test_backward_interpreted import run as backward
from test_forward_interpreted import SMALL_SHAPES, run
from test_forward_interpreted import target as simt_target
from test_fragment_interpreted import target as fragment_target

from aule.ops.attention.plan.layout import view_scalars
from aule.ops.attention.plan.scalars import problem_scalars
from aule.ops.attention.prepass import mask_prepass
from aule.ops.attention.prepass.mask_kernels import ALL, NONE, SOME
from aule.ops.attention.prepass.tile_list import HEADER
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.ops.attention.validate import Operands, attention_problem
from aule.ops.scores.functions.evaluate import Evaluator
from aule.ops.scores.functions.trace import load, trace
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape
from aule.view import TensorView, contiguous_strides

B, H, HK, S, T = 2, 4, 2, 75, 90
"""Lengths that no tile divides."""


@dataclass(frozen=True)
class Captured:
    """An array that a function can index with symbols."""

    array: np.ndarray

    def __getitem__(self, index: Any) -> Any:
        first = index[0] if isinstance(index, tuple) else index
        return load(first.tracer, self.array, index)


def masks() -> dict[str, Callable[..., Any]]:
    rng = np.random.default_rng(4)
    documents = Captured(np.sort(rng.integers(0, 4, 90)).astype(np.int32))
    lengths = Captured(np.array([17, 60], np.int32))
    table = Captured(rng.random((H, 6, 6)) < 0.3)
    return {
        "documents": lambda b, h, q, k: documents[q] == documents[k],
        "window": lambda b, h, q, k: (q >= k) & (q - k <= 20),
        "prefix": lambda b, h, q, k: (q >= k) | (k < lengths[b]),
        "dilated": lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0),
        "blocks": lambda b, h, q, k: table[h, q // 16, k // 16],
        "empty-rows": lambda b, h, q, k: ((q // 16) % 2 == 1) & (q % 7 != 0) & (k < 70),
        "nothing": lambda b, h, q, k: k < 0,
    }


MASKS = tuple(masks())


@dataclass(frozen=True)
class Case:
    """A problem with a mask function, its arrays, and which keys the function keeps."""

    problem: AttentionProblem
    operands: Operands
    arrays: dict[str, Any]
    captured: dict[str, Any]
    kept: np.ndarray


def view(x: np.ndarray) -> TensorView:
    dtype = {"float32": "f32", "float16": "f16", "int32": "i32", "bool": "bool"}[x.dtype.name]
    return TensorView(dtype, x.shape, contiguous_strides(x.shape), "host", x)


def case(kind: str, dtype: Any = np.float32, dim: int = 24, sizes: tuple[int, int] = (S, T), **options: Any) -> Case:
    rng = np.random.default_rng(2)
    (rows, keys), shapes = sizes, {"q": (H, 0), "k": (HK, 1), "v": (HK, 1)}
    arrays = {n: rng.standard_normal((B, heads, sizes[i], dim)).astype(dtype) for n, (heads, i) in shapes.items()}
    problem, operands = attention_problem(**{n: view(x) for n, x in arrays.items()}, return_lse=True, **options)
    inputs = ("batch", "head", "query", "key")
    bound, found = trace(masks()[kind], inputs, "f32", lambda x: view(x).dtype, "mask_mod")
    captured = {f"keep{i}": x for i, x in enumerate(found)}
    operands = replace(operands, captured={n: view(x) for n, x in captured.items()})
    places = zip(inputs, np.ix_(range(B), range(H), range(rows), range(keys)), strict=True)
    kept = np.broadcast_to(Evaluator(bound, found)(**dict(places)), (B, H, rows, keys))
    return Case(replace(problem, mask_mod=bound), operands, arrays, captured, kept)


def classes(kept: np.ndarray, rows: int, keys: int) -> np.ndarray:
    """NONE, SOME or ALL for each tile; rows and keys past the end do not count."""
    down, right = (range(0, n, size) for n, size in zip(kept.shape, (rows, keys), strict=True))
    tiles = [[kept[i : i + rows, j : j + keys] for j in right] for i in down]
    return np.array([[ALL if x.all() else SOME if x.any() else NONE for x in line] for line in tiles])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_classes_and_lists(kind: str, transposed: bool) -> None:
    """All tiles have their class, and blocks list what neither the function nor the band drops, partly kept first."""
    found = case(kind, causal=kind == "documents", window=(40, 30) if kind == "empty-rows" else (-1, -1))
    problem, shape = found.problem, SimtShape(16, 32, 4, 4, 8, 8, True)
    left, right = problem.limits
    options, device = {"left": left != -1, "right": right != -1, "index64": False}, simt_target(0)
    scalars = problem_scalars(problem, device) | view_scalars(dict(found.operands.captured))
    prepass = mask_prepass.function_prepass(problem, shape, device, transposed, options, scalars)
    memory = {name: unwritten(size) for name, size in prepass.workspace.items()}
    memory |= {n: (x.view(np.uint8) if x.dtype == bool else x).reshape(-1) for n, x in found.captured.items()}
    for step in prepass.steps:
        run_step(step, memory, device)
    by_batch, by_head = kind == "prefix", kind == "blocks"
    maps = [(b, h) for b in range(B if by_batch else 1) for h in range(H if by_head else 1)]
    assert prepass.scalars["map_heads"] == (H if by_head else 1)
    t = np.arange(S)[:, None] + problem.shift - np.arange(T)[None, :]
    band = (t <= (left if left != -1 else T + S)) & (-t <= (right if right != -1 else T + S))
    for number, at in enumerate(maps):
        keeps, inside = (x.T if transposed else x for x in (found.kept[at], band))
        right_classes = classes(keeps, 16, 32)
        size = right_classes.size
        stored = memory["mask_tiles"][number * size :][:size].reshape(right_classes.shape)
        np.testing.assert_array_equal(stored, right_classes)
        keys = np.arange(T)[:, None] if transposed else np.arange(T)[None, :]
        within, tiles = classes(inside & (keys < T), 16, 32), right_classes.shape[1]
        # A tile that reaches past the last key is not full.
        if transposed:
            within[-1] = np.minimum(within[-1], SOME if T % 16 else ALL)
        else:
            within[:, -1] = np.minimum(within[:, -1], SOME if T % 32 else ALL)
        lists = memory["mask_order"].reshape(-1, tiles + HEADER)[number * len(within) :]
        for line, own, band_own in zip(lists, right_classes, within, strict=False):
            kinds = np.minimum(own, band_own)
            some, every = (np.flatnonzero(kinds == x).tolist() for x in (SOME, ALL))
            assert line[:HEADER].tolist() == [len(some), len(some) + len(every)]
            assert line[HEADER : HEADER + line[1]].tolist() == some + every


FORWARD = {
    "simt": SMALL_SHAPES["streamed"],
    "simt-edges": SMALL_SHAPES["pieces"],
    "two-stages": FragmentShape(32, 32, 2, 2, True),
    "one-stage": FragmentShape(32, 32, 2, 1, True),
    "scores-ahead": FragmentShape(32, 16, 2, 1, True, prefetch_scores=True),
    "warpgroups": FragmentShape(64, 16, 4, 2, False, warpgroups=True),
    "warpgroups-ahead": FragmentShape(64, 16, 4, 3, False, warpgroups=True),
}
OPTIONS: dict[str, dict[str, Any]] = {"documents": {"causal": True}, "dilated": {"window": (40, 8)}}


def forward(found: Case, shape: SimtShape | FragmentShape) -> tuple[np.ndarray, np.ndarray]:
    device = simt_target(8) if isinstance(shape, SimtShape) else fragment_target()
    return run(found.problem, found.operands, shape, device)


@pytest.mark.parametrize("shape", FORWARD)
@pytest.mark.parametrize("kind", MASKS)
def test_forward(kind: str, shape: str) -> None:
    """K and V of keys that no row keeps hold NaN, which no result shows."""
    tiles = FORWARD[shape]
    found = case(kind, np.float32 if isinstance(tiles, SimtShape) else np.float16, **OPTIONS.get(kind, {}))
    for name in "kv":
        unused = ~found.kept.any(2).reshape(B, HK, -1, T).any(2)
        found.arrays[name][unused] = np.nan
    out, lse = forward(found, tiles)
    verdict = compare(found.problem, out, lse, expect(found.problem, **found.arrays, captured=found.captured))
    assert verdict, verdict.message


BACKWARD = {
    "simt": BACKWARD_SHAPES["tall"],
    "fragments": FragmentShape(32, 32, 2, 2, False),
    "one-stage": FragmentShape(32, 32, 2, 1, False),
    "late": FragmentShape(32, 32, 2, 1, False, late_fetch=True),
    "warpgroups": FragmentShape(64, 64, 4, 4, False, warpgroups=True),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", BACKWARD)
@pytest.mark.parametrize("kind", MASKS)
def test_gradients(kind: str, shape: str, deterministic: bool) -> None:
    tiles = BACKWARD[shape]
    simt = isinstance(tiles, SimtShape)
    if not simt and tiles.warpgroups and deterministic:
        tiles = (BACKWARD["fragments"], tiles)
    found = case(kind, np.float32 if simt else np.float16, **OPTIONS.get(kind, {}))
    problem = replace(found.problem, deterministic=deterministic)
    inputs = found.arrays | {"captured": found.captured}
    gradients, dout = backward(problem, found.operands, inputs, tiles, target=TARGET if simt else fragment_target())
    right = expect_gradients(problem, dout, **found.arrays, captured=found.captured)
    wrong = compare_gradients(problem, gradients, right)
    assert not wrong, wrong
