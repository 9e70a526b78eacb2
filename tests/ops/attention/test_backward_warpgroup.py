"""Attention's gradients over warpgroups: on the interpreter with the sanitizer on, and when they are chosen."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import grid
import numpy as np
import pytest
from test_backward_interpreted import run
from test_fragment_interpreted import BACKWARD, CASES
from test_fragment_interpreted import target as interpreted

from aule.ir.verify import verify
from aule.ops.attention.config import BackwardConfig
from aule.ops.attention.fragment.backward import build_backward_fragment
from aule.ops.attention.plan.backward import plan_backward
from aule.ops.attention.plan.tiles_backward import choose_backward_warpgroups
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.ops.attention.validate import attention_problem
from aule.ops.attention.warpgroup.backward import build_backward_warpgroup
from aule.ops.rope.tables import Rope
from aule.render import ptx
from aule.target import NVIDIA_LAYOUT, WARPGROUP_UNITS, Target
from aule.tile.fragment.shape import FragmentShape
from aule.view import TensorView, contiguous_strides

ONE = FragmentShape(64, 64, 4, 4, False, warpgroups=True)
"""A single warpgroup, which has all of dQ."""
ROWS = FragmentShape(128, 128, 8, 4, False, warpgroups=True)
"""Two, with half of a tile's rows each."""
COLUMNS = FragmentShape(128, 64, 8, 4, False, warpgroups=True)
"""Two, with half of dQ's columns each."""
WIDE = FragmentShape(64, 64, 8, 2, False, columns=2, warpgroups=True)
"""Two that have the same keys."""


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_small_grid(case: grid.Case) -> None:
    inputs = grid.make_inputs(case, seed=3)
    problem, operands = grid.case_problem(case, inputs)
    found, dout = run(replace(problem, deterministic=False), operands, inputs, ONE, case.seq_q % 2 == 0, interpreted())
    arrays = {"alibi" if name == "alibi_slopes" else name: array for name, array in inputs.items()}
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


LONG: list[tuple[FragmentShape, tuple[int, int], tuple[int, int], dict[str, Any]]] = [
    (ONE, (64, 32), (2, 1), {"causal": True}),
    (ROWS, (64, 64), (2, 1), {"causal": True}),
    (COLUMNS, (128, 128), (1, 1), {"window": (40, 60)}),
    (COLUMNS, (72, 128), (1, 1), {}),
    (WIDE, (256, 128), (2, 1), {"causal": True}),
    (WIDE, (136, 200), (1, 1), {}),
]


def arrays_of(dims: tuple[int, int], heads: int, heads_kv: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "q": rng.standard_normal((1, heads, 300, dims[0])).astype(np.float16),
        "k": rng.standard_normal((1, heads_kv, 150, dims[0])).astype(np.float16),
        "v": rng.standard_normal((1, heads_kv, 150, dims[1])).astype(np.float16),
    }


@pytest.mark.parametrize("case", LONG, ids=lambda case: f"{case[0].block_kv}-{case[0].stages}-{case[1]}")
def test_several_tiles(case: tuple[FragmentShape, tuple[int, int], tuple[int, int], dict[str, Any]]) -> None:
    """Of rows and of keys, none of them whole: what is in flight from one to the next."""
    shape, dims, (heads, heads_kv), options = case
    arrays = arrays_of(dims, heads, heads_kv)
    problem, operands = attention_problem(**{name: grid.view_of(array) for name, array in arrays.items()}, **options)
    # NVIDIA's layout, with which dQ is rounded four components at a time.
    found, dout = run(problem, operands, arrays, shape, target=replace(interpreted(), matrix_layout=NVIDIA_LAYOUT))
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


@pytest.mark.parametrize("case", [LONG[1], LONG[2], LONG[4]], ids=lambda case: f"{case[0].block_kv}-{case[1]}")
def test_without_sums(case: tuple[FragmentShape, tuple[int, int], tuple[int, int], dict[str, Any]]) -> None:
    """dQ, which has to be the same bits every time, has a kernel of its own."""
    shape, dims, (heads, heads_kv), options = case
    arrays = arrays_of(dims, heads, heads_kv)
    problem, operands = attention_problem(**{name: grid.view_of(array) for name, array in arrays.items()}, **options)
    target = replace(interpreted(), matrix_layout=NVIDIA_LAYOUT)
    shapes = BACKWARD["two-stages"], shape
    found, dout = run(replace(problem, deterministic=True), operands, arrays, shapes, target=target)
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


CUT: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "exactly": {"deterministic": True, "window": (200, 100)},
    "mask": {"mask": True},
}


@pytest.mark.parametrize("options", CUT.values(), ids=CUT)
@pytest.mark.parametrize("dim", [64, 200])
def test_blocks_that_several_workgroups_share(dim: int, options: dict[str, Any]) -> None:
    """Few keys, many rows of three heads: each workgroup has a part of the rows, or of the heads."""
    target = replace(interpreted(), matrix_layout=NVIDIA_LAYOUT, compute_units=16, device_fence=True)
    shape = choose_backward_warpgroups(replace(device(), backend="cuda"), "f16", dim, dim)
    assert shape is not None
    rng = np.random.default_rng(1)
    shapes = {"q": (1, 3, 400, dim), "k": (1, 1, 70, dim), "v": (1, 1, 70, dim)}
    arrays = {name: rng.standard_normal(size).astype(np.float16) for name, size in shapes.items()}
    if "mask" in options:
        arrays["mask"] = rng.random((400, 70)) < 0.5
        arrays["mask"][130:260] = False
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, **{k: v for k, v in options.items() if k != "mask"})
    queries = BACKWARD["two-stages"] if problem.deterministic else None
    found, dout = run(problem, operands, arrays, (queries, shape), target=target)
    assert found["part"].any() and not found["tickets"].any()
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


ALONE: dict[str, tuple[tuple[int, int], int, dict[str, Any]]] = {
    "plain": ((130, 60), 64, {}),
    "shared": ((400, 60), 64, {}),
    "rows-without-keys": ((200, 50), 64, {"causal": True, "causal_align": "bottom-right"}),
    "window": ((200, 50), 72, {"window": (20, 10), "deterministic": True}),
    "softcap": ((70, 33), 128, {"softcap": 5.0}),
    "wide": ((130, 60), 200, {"causal": True}),
    "mask": ((130, 60), 96, {"mask": True}),
}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_one_block_of_keys(name: str, arch: str) -> None:
    """Which stores dQ, also if several workgroups share its rows: nothing is cleared, added to or rounded."""
    (rows, keys), dim, options = ALONE[name]
    fence = name == "shared"
    target = replace(interpreted(arch), matrix_layout=NVIDIA_LAYOUT, compute_units=16, device_fence=fence)
    rng = np.random.default_rng(1)
    shapes = {"q": (1, 3, rows, dim), "k": (1, 1, keys, dim), "v": (1, 1, keys, dim)}
    arrays = {name: rng.standard_normal(size).astype(np.float16) for name, size in shapes.items()}
    if "mask" in options:
        arrays["mask"] = rng.random((rows, keys)) < 0.5
        arrays["mask"][64:100] = False
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, **{k: v for k, v in options.items() if k != "mask"})
    found, dout = run(problem, operands, arrays, None, target=target)
    assert "dq_sum" not in found and ("part" in found) == fence
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_dropped_infinities_do_not_leak(bad: float, softcap: float | None) -> None:
    """Key 5 is dropped for all rows by a mask; key 39 by causality, which would keep it for rows past the end."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((1, 1, 39 + (name != "q"), 16)).astype(np.float16) for name in "qkv"}
    mask = np.ones((39, 40), bool)
    mask[:, 5] = False
    for dropped in (5, 39):
        arrays["k"][:, :, dropped] = arrays["v"][:, :, dropped] = bad
    arrays["mask"] = mask
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, softcap=softcap, causal=True, causal_align="top-left")
    clean = {name: np.where(np.isfinite(array), array, 0).astype(array.dtype) for name, array in arrays.items()}
    found, dout = run(problem, operands, clean, ONE, target=interpreted())
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **clean))
    assert not wrong, wrong


def device(arch: str = "sm_90") -> Target:
    return Target(
        "cuda", arch=arch, vendor="nvidia", subgroup_size=32, subgroup_sizes=(32,), max_threads=1024,
        max_shared_bytes=232448, int64=True, matrix_layout=NVIDIA_LAYOUT, max_buffer_bytes=1 << 34, atomic_f32_add=True,
        matrix_units=("m16n8k16:f16:f32", "m16n8k16:bf16:f32", *(WARPGROUP_UNITS if arch == "sm_90" else ())),
    )  # fmt: skip


def planned(problem: AttentionProblem, target: Target, odd: bool = False) -> Any:
    """The step of dK and dV; ``odd`` when rows of q do not start at multiples of eight elements."""
    views = {}
    for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv"):
        heads = problem.heads_kv if name in ("k", "v", "dk", "dv") else problem.heads_q
        dim = problem.value_dim if name in ("v", "o", "do", "dv") else problem.head_dim
        shape = (problem.batch, heads, problem.seq_q, dim)
        strides = contiguous_strides((*shape[:3], dim + (odd and name == "q")))
        views[name] = TensorView(problem.dtype, shape, strides, "device", None)
    if problem.mask is not None:
        shape = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
        views["mask"] = TensorView(problem.mask, shape, contiguous_strides(shape), "device", None)
        views["bias"] = views["mask"]
    if problem.rope is not None:
        shape = (1, 1, problem.seq_q, problem.rope.half)
        views |= {name: TensorView("f32", shape, contiguous_strides(shape), "device", None) for name in ("cos", "sin")}
    return next(
        step for step in plan_backward(problem, views, target).steps if getattr(step.config, "of", "") == "keys"
    )


def plain(head_dim: int, value_dim: int = 0, **options: Any) -> AttentionProblem:
    return AttentionProblem(1, 8, 8, 2048, 2048, head_dim, value_dim or head_dim, "bf16", 0.125, **options)


def test_when_they_are_chosen() -> None:
    """Everything else keeps the kernels for fragments."""
    rotated, masked = plain(64, rope=Rope("f32", 64, False)), plain(64, mask="bool", bias="f32")
    plainly = plain(64), plain(128), plain(40, 24), plain(128, 64), plain(64, causal=True), plain(256)
    plainly += plain(136), plain(192, 128), plain(248)
    exactly = plain(64, deterministic=True), plain(128, packed=(4096, 4096), causal=True)
    for problem in (*plainly, *exactly, rotated, masked):
        assert planned(problem, device()).build is build_backward_warpgroup, problem
    others = [
        planned(plain(64), device("sm_100")),
        planned(plain(64), replace(device(), max_shared_bytes=100 << 10)),
        planned(plain(64, 128), device()),  # dQ has one panel of columns
        planned(plain(64), device(), odd=True),
    ]
    for step in others:
        assert step.build is build_backward_fragment
    assert isinstance(planned(replace(plain(64), dtype="f32"), device()).config, BackwardConfig)


@pytest.mark.parametrize(("rows", "divided"), [(1 << 20, True), (3 << 20, False)])
def test_blocks_are_divided_while_the_numbers_of_tiles_fit_32_bits(rows: int, divided: bool) -> None:
    """A piece finds its tiles by products of two such numbers (`combine.pieces.Passes`)."""
    problem = AttentionProblem(1, 8, 1, rows, rows, 256, 256, "bf16", 0.0625)
    step = planned(problem, replace(device(), compute_units=132, device_fence=True))
    assert step.config.shared_blocks == divided


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize("options", [{"causal": True}, {"mask": "bool", "window": (64, 64)}], ids=["causal", "mask"])
@pytest.mark.parametrize("dim", [64, 128])
def test_nothing_is_spilled_or_waited_for(dim: int, options: dict[str, Any], tmp_path: Path) -> None:
    step = planned(plain(dim, **options), device())
    kernel = step.build(step.config, device())
    verify(kernel)
    text = ptx.render(kernel, device()).text
    assert "wgmma" in text and "atom.global.add.v4.f32" in text
    (tmp_path / "kernel.ptx").write_text(text)
    command = ["ptxas", "-arch=sm_90a", "-v", str(tmp_path / "kernel.ptx"), "-o", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = done.stdout + done.stderr
    assert "serialized" not in told, told
    assert re.search(r"\b0 bytes spill stores", told), told
