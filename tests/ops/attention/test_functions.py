"""Users' mask functions: which tiles are classified as dropped, partly kept and kept, and kernels that skip the dropped
ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import BACKENDS, need
from op_plans import run_step, unwritten
from test_backward_interpreted import SHAPES as BACKWARD_SHAPES
from test_backward_interpreted import TARGET
from test_backward_interpreted import run as backward
from test_backward_warpgroup import device as warpgroup_device
from test_cpu_interpreted import brought
from test_forward_interpreted import SMALL_SHAPES, run
from test_forward_interpreted import target as simt_target
from test_fragment_compiles import assemble
from test_fragment_interpreted import target as fragment_target

from aule.engine.attention import backward_on_host, forward_on_host
from aule.ops.attention.cpu.config import CpuShape
from aule.ops.attention.cpu.function_tiles import plan_classes
from aule.ops.attention.cpu.plan import plan_forward
from aule.ops.attention.plan.forward import plan_forward as gpu_forward
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
from aule.ops.scores.functions.trace import Framework, load, trace
from aule.target import Target
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape
from aule.tile.vector.engine import VectorUnit
from aule.view import TensorView, contiguous_strides

B, H, HK, S, T = 2, 4, 2, 75, 90
"""Lengths that no tile divides."""
KEPT = 32
CPU = Target("cpu", arch="x86_64", extensions=("avx2", "fma"), compute_units=2)


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
        "head": lambda b, h, q, k: k < KEPT,
    }


MASKS = tuple(masks())[:-1]


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


def dtype_of(x: np.ndarray) -> str:
    return view(x).dtype


FRAMEWORK = Framework(dtype_of, lambda dtype: {})


def case(
    kind: str, dtype: Any = np.float32, dim: int = 24, heads: tuple[int, int, int] = (B, H, HK), **options: Any
) -> Case:
    rng = np.random.default_rng(2)
    batch, heads_q, heads_kv = heads
    shapes = {"q": (batch, heads_q, S, dim), "k": (batch, heads_kv, T, dim), "v": (batch, heads_kv, T, dim)}
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    problem, operands = attention_problem(**{n: view(x) for n, x in arrays.items()}, return_lse=True, **options)
    inputs = ("batch", "head", "query", "key")
    bound, found = trace(masks()[kind], inputs, "f32", FRAMEWORK, "mask_mod")
    captured = {f"keep{i}": x for i, x in enumerate(found)}
    if kind == "prefix":  # scores that may drop keys in tiles that the mask keeps, as far as a kernel can know
        slopes = Captured(rng.random(heads_q).astype(np.float32))
        alibi = trace(
            lambda s, b, h, q, k: s - slopes[h] * abs(q - k), ("score", *inputs), "f32", FRAMEWORK, "score_mod"
        )
        problem, captured["score0"] = replace(problem, score_mod=alibi[0]), slopes.array
    operands = replace(operands, captured={n: view(x) for n, x in captured.items()})
    places = zip(inputs, np.ix_(*map(range, (batch, heads_q, S, T))), strict=True)
    kept = np.broadcast_to(Evaluator(bound, found)(**dict(places)), (batch, heads_q, S, T))
    return Case(replace(problem, mask_mod=bound), operands, arrays, captured, kept)


def classes(kept: np.ndarray, rows: int, keys: int) -> np.ndarray:
    """NONE, SOME or ALL for each tile; rows and keys past the end do not count."""
    down, right = (range(0, n, size) for n, size in zip(kept.shape, (rows, keys), strict=True))
    tiles = [[kept[i : i + rows, j : j + keys] for j in right] for i in down]
    return np.array([[ALL if x.all() else SOME if x.any() else NONE for x in line] for line in tiles])


def maps_of(kind: str) -> list[tuple[int, int]]:
    """Batches and heads that have maps of their own."""
    return [(b, h) for b in range(B if kind == "prefix" else 1) for h in range(H if kind == "blocks" else 1)]


def host_scalars(found: Case) -> dict[str, int | float]:
    return problem_scalars(found.problem, CPU) | view_scalars(dict(found.operands.captured))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_classes_and_lists(kind: str, transposed: bool) -> None:
    """All tiles have their class, and blocks list what neither the function nor the band drops, partly kept first."""
    found = case(kind, causal=kind == "documents", window=(40, 30) if kind == "empty-rows" else (-1, -1))
    problem, shape = found.problem, SimtShape(16, 32, 4, 4, 8, 8, True)
    left, right = problem.limits
    options, device = {"left": left != -1, "right": right != -1, "index64": False}, simt_target(0)
    prepass = mask_prepass.function_prepass(problem, shape, device, transposed, options, host_scalars(found))
    memory = {name: unwritten(size) for name, size in prepass.workspace.items()}
    memory |= {n: (x.view(np.uint8) if x.dtype == bool else x).reshape(-1) for n, x in found.captured.items()}
    for step in prepass.steps:
        run_step(step, memory, device)
    assert prepass.scalars["listed"] == len(maps_of(kind)) * prepass.scalars["own_blocks"]
    t = np.arange(S)[:, None] + problem.shift - np.arange(T)[None, :]
    band = (t <= (left if left != -1 else T + S)) & (-t <= (right if right != -1 else T + S))
    for number, at in enumerate(maps_of(kind)):
        keeps, inside = (x.T if transposed else x for x in (found.kept[at], band))
        right_classes = classes(keeps, 16, 32)
        size = right_classes.size
        stored = memory["mask_tiles"][number * size :][:size].reshape(right_classes.shape)
        np.testing.assert_array_equal(stored, right_classes)
        within, tiles = classes(inside, 16, 32), right_classes.shape[1]
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


BACKWARD: dict[str, Any] = {
    "simt": BACKWARD_SHAPES["tall"],
    "fragments": FragmentShape(32, 32, 2, 2, False),
    "one-stage": FragmentShape(32, 32, 2, 1, False),
    "late": FragmentShape(32, 32, 2, 1, False, late_fetch=True),
    "warpgroups": FragmentShape(64, 64, 4, 4, False, warpgroups=True),
}


def forward(found: Case, shape: SimtShape | FragmentShape) -> tuple[np.ndarray, np.ndarray]:
    device = simt_target(8) if isinstance(shape, SimtShape) else fragment_target()
    return run(found.problem, found.operands, shape, device)


def sampled(shapes: dict[str, Any], parts: int) -> list[tuple[str, str]]:
    """Some masks for each shape, all masks for all of them together."""
    pairs = ((i + j, shape, kind) for i, shape in enumerate(shapes) for j, kind in enumerate(MASKS))
    return [(shape, kind) for number, shape, kind in pairs if number % parts == 0]


@pytest.mark.parametrize(("shape", "kind"), sampled(FORWARD, 3))
def test_forward(shape: str, kind: str) -> None:
    """K and V of keys that no row keeps hold NaN, which no result shows."""
    tiles = FORWARD[shape]
    found = case(kind, np.float32 if isinstance(tiles, SimtShape) else np.float16, **OPTIONS.get(kind, {}))
    for name in "kv":
        unused = ~found.kept.any(2).reshape(B, HK, -1, T).any(2)
        found.arrays[name][unused] = np.nan
    out, lse = forward(found, tiles)
    verdict = compare(found.problem, out, lse, expect(found.problem, **found.arrays, captured=found.captured))
    assert verdict, verdict.message


@pytest.mark.parametrize("shape", FORWARD)
def test_dropped_tiles_are_never_read(shape: str) -> None:
    """K and V end after the kept keys: the sanitizer refuses to read further."""
    tiles = FORWARD[shape]
    found = case("head", np.float32 if isinstance(tiles, SimtShape) else np.float16, heads=(1, 1, 1))
    cut = {n: replace(getattr(found.operands, n), storage=found.arrays[n][:, :, :KEPT].copy()) for n in "kv"}
    out, lse = forward(replace(found, operands=replace(found.operands, **cut)), tiles)
    verdict = compare(found.problem, out, lse, expect(found.problem, **found.arrays, captured=found.captured))
    assert verdict, verdict.message


@pytest.mark.parametrize(("shape", "kind"), sampled(BACKWARD, 3))
def test_gradients(shape: str, kind: str) -> None:
    tiles = BACKWARD[shape]
    simt, deterministic = isinstance(tiles, SimtShape), MASKS.index(kind) % 2 == 0
    if not simt and tiles.warpgroups and deterministic:
        tiles = (BACKWARD["fragments"], tiles)
    found = case(kind, np.float32 if simt else np.float16, **OPTIONS.get(kind, {}))
    problem = replace(found.problem, deterministic=deterministic)
    inputs = found.arrays | {"captured": found.captured}
    gradients, dout = backward(problem, found.operands, inputs, tiles, target=TARGET if simt else fragment_target())
    right = expect_gradients(problem, dout, **found.arrays, captured=found.captured)
    wrong = compare_gradients(problem, gradients, right)
    assert not wrong, wrong


@pytest.mark.parametrize("kind", MASKS)
def test_classes_on_the_cpu(kind: str) -> None:
    found, shape = case(kind), CpuShape(VectorUnit(8, 16), 6, 16, 24, 32)
    step, space, _ = plan_classes(found.problem, shape, host_scalars(found))
    memory = {n: x.view(np.uint8) if x.dtype == bool else x for n, x in found.captured.items()}
    memory |= {"mask_tiles": unwritten(space["mask_tiles"])}
    run_step(step, memory, CPU)
    for number, at in enumerate(maps_of(kind)):
        blocks, tiles = classes(found.kept[at], 24, 32), classes(found.kept[at], 6, 16)
        stored = memory["mask_tiles"].view(np.uint8)[number * blocks.size * 9 :][: blocks.size * 9]
        stored = stored.reshape(*blocks.shape, 9)
        np.testing.assert_array_equal(stored[..., 0], blocks)
        inner = stored[..., 1:].reshape(*blocks.shape, 4, 2).transpose(0, 2, 1, 3).reshape(-1, 2 * blocks.shape[1])
        np.testing.assert_array_equal(inner[: len(tiles), : tiles.shape[1]], tiles)


def test_a_cpu_takes_no_block_that_is_classified_as_dropped() -> None:
    """With all classes cleared before the main kernel runs, no row has a key."""
    found = case("documents")
    views, memory = brought(found.problem, found.operands)
    plan = plan_forward(found.problem, views, CPU)
    memory |= {name: unwritten(size) for name, size in plan.workspace.items()}
    for step in plan.steps:
        run_step(step, memory, CPU)
        if step is plan.steps[0]:
            memory["mask_tiles"][:] = 0
    assert not memory["o"].any() and np.isneginf(memory["lse"]).all()


DEVICE_MASKS = {"cpu": MASKS[:5], "cpu-avx2": ("blocks",), "cpu-baseline": ("empty-rows",)}


@pytest.mark.parametrize(
    ("backend", "kind"), [(x, kind) for x in BACKENDS for kind in DEVICE_MASKS.get(x, ("documents",))]
)
def test_devices(backend: str, kind: str) -> None:
    """Results and gradients; beside the mask function, some have a band. Two of the software devices, where compiling
    takes long, compute no gradients."""
    device = need(backend)
    found = case(kind, np.float16 if kind == "dilated" else np.float32, 32, **OPTIONS.get(kind, {}))
    problem, arrays, captured = found.problem, found.arrays, found.captured
    out, lse = forward_on_host(problem, found.operands, device, exact_lse=True)
    assert lse is not None
    verdict = compare(problem, out, lse, expect(problem, **arrays, captured=captured))
    assert verdict, verdict.message
    if device.target.software and backend in ("opencl", "webgpu"):
        return
    dout = np.random.default_rng(3).standard_normal(out.shape).astype(out.dtype)
    gradients = backward_on_host(problem, found.operands, device, out, lse, view(dout))
    right = expect_gradients(problem, dout, **arrays, captured=captured)
    wrong = compare_gradients(problem, dict(zip(("dq", "dk", "dv"), gradients, strict=True)), right)
    assert not wrong, wrong


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize("dim", [64, 128])
def test_nothing_is_spilled(dim: int, tmp_path: Path) -> None:
    """Over warpgroups, with the function in partly dropped tiles."""
    documents = case("documents")
    shape = (4, 16, 4096, dim)
    views = {n: TensorView("bf16", shape, contiguous_strides(shape), "device", None) for n in "qkvo"}
    views |= {n: replace(x, device="device", storage=None) for n, x in documents.operands.captured.items()}
    problem = AttentionProblem(4, 16, 16, 4096, 4096, dim, dim, "bf16", 0.125)
    plan = gpu_forward(replace(problem, mask_mod=documents.problem.mask_mod), views, warpgroup_device())
    assert plan.steps[-1].config.shape.warpgroups and len(plan.steps) == 3
    for step in plan.steps:
        _, spilled = assemble(step.build(step.config, warpgroup_device()), warpgroup_device(), tmp_path)
        assert spilled == 0
