"""Decoding of latents over warpgroups: on the interpreter with the sanitizer on, through ptxas, and who gets it."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import decode_cases
import numpy as np
import pytest
import test_decode_interpreted as interpreted
import test_fragment_interpreted as fragments
from repository import ROOT

from aule import tuning
from aule.codegen import generate
from aule.ops.attention.plan.layout import Layout
from aule.ops.attention.reference import compare
from aule.ops.decode.config import LatentWarpgroupShape
from aule.ops.decode.plan.decode import plan_decode
from aule.ops.decode.plan.latent import OP, choose_latent
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.sequences import expect_decode
from aule.ops.shared.plan import Step
from aule.target import NVIDIA_LAYOUT, Target
from aule.view import TensorView, contiguous_strides

RECORD = tuning.Record(OP, {}, {"kind": "warpgroup", "shape": {}})
SMALL, LATENT = (192, 128), (576, 512)
INTERPRETED = replace(fragments.target(), overlap=True)
TARGETS: dict[str, Target] = runpy.run_path(str(ROOT / "tools" / "kernel_targets.py"))["TARGETS"]
H200 = TARGETS["h200-cuda"]
Case = decode_cases.Case
Array = np.ndarray[Any, Any]


# -- interpreted -------------------------------------------------------------------------------------------------------


def given(case: Case) -> dict[str, Any]:
    """Arrays of a case, whose values are the first columns of the keys."""
    arrays = decode_cases.make(case)
    return arrays | {"v": arrays["k"][..., : case.dims[1]], "latent": True}


def run(arrays: dict[str, Any], case: Case, splits: int = 1, target: Target = INTERPRETED) -> tuple[Array, Array, Any]:
    """Result, log-sum-exp, and what is expected."""
    problem, operands = decode_cases.problem_of(case, arrays)
    # V is never read: it is K's memory. All bits set are a NaN.
    nan = np.full(operands.v.storage.shape, 0xFFFF, np.uint16).view(operands.v.storage.dtype)
    hidden = replace(operands, v=replace(operands.v, storage=nan))
    with tuning.trying(RECORD):
        assert isinstance(choose_latent(problem, Layout(views_of(problem), {}), target), LatentWarpgroupShape)
        out, lse = interpreted.run(problem, hidden, target, splits)
    return out, lse, (problem, operands)


CASES = {
    "two tiles": (Case("", (70,), 1, (64, 1), SMALL, "f16", page=16), 1),
    "lengths": (Case("", (300, 0, 1, 64), 1, (64, 1), SMALL, "bf16", page=3), 1),
    "splits, some empty": (Case("", (330, 65, 0), 1, (128, 1), SMALL, "f16", page=64), 3),
    "tokens": (Case("", (130, 2), 3, (64, 1), SMALL, "bf16", page=256), 1),
    "few heads, no mask": (Case("", (129,), 3, (5, 1), SMALL, "f16", page=1, options={"causal": False}), 2),
    "heads that fill no block": (Case("", (66,), 1, (70, 1), SMALL, "f16", page=32), 1),
    "contiguous": (Case("", (90, 64), 1, (64, 1), (128, 128), "f16"), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    """Garbage page numbers and NaN behind the lengths."""
    case, splits = CASES[name]
    out, lse, (problem, operands) = run(given(case), case, splits)
    judged, expected = expect_decode(problem, operands)
    verdict = compare(judged, out, lse, expected)
    assert verdict, verdict.message


def test_deepseeks_sizes_in_a_devices_layout() -> None:
    """Two to three tiles of 576 columns for each of two splits, as an H200's lanes hold them."""
    case = Case("", (290,), 1, (64, 1), LATENT, "bf16", page=64)
    out, lse, (problem, operands) = run(given(case), case, 2, replace(INTERPRETED, matrix_layout=NVIDIA_LAYOUT))
    judged, expected = expect_decode(problem, operands)
    verdict = compare(judged, out, lse, expected)
    assert verdict, verdict.message


def test_flat_grids_and_long_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aule.view.TensorView.last_index", property(lambda view: 1 << 32))
    case = Case("", (100, 0, 20), 1, (64, 1), (128, 128), "f16", page=16)
    out, lse, (problem, operands) = run(given(case), case, 2, replace(INTERPRETED, max_grid=(1 << 20, 2, 2)))
    judged, expected = expect_decode(problem, operands)
    verdict = compare(judged, out, lse, expected)
    assert verdict, verdict.message


def test_rising_scores() -> None:
    """Each tile has larger scores than the one before, so that both halves of O are rescaled."""
    case = Case("", (250,), 1, (64, 1), SMALL, "f16", page=16)
    arrays = given(case)
    arrays["q"][:] = 0.5
    lines = arrays["k"].reshape(-1, SMALL[0])  # a view, as V is
    order = arrays["block_tables"][0]
    for i in range(250):
        lines[order[i // 16] * 16 + i % 16] = np.float16(i / 64 + 0.01 * np.sin(np.arange(SMALL[0]) + i))
    out, lse, (problem, operands) = run(arrays, case)
    judged, expected = expect_decode(problem, operands)
    assert np.ptp(expected.lse) < 1 < expected.lse.min() / 20
    verdict = compare(judged, out, lse, expected)
    assert verdict, verdict.message


def test_only_who_keeps_a_key_sees_its_infinities() -> None:
    """The last key of a sequence is kept by its last token alone."""
    case = Case("", (65, 70, 30), 2, (64, 1), SMALL, "f16", page=16)
    arrays = given(case)
    clean, clean_lse, _ = run(arrays, case)
    for n, bad in enumerate((np.inf, np.nan)):
        page, key = divmod(case.lens[n] - 1, case.page)
        arrays["k"][arrays["block_tables"][n, page], key, 0, 5] = bad
    out, lse, _ = run(arrays, case)
    assert np.isnan(np.float32(out[:2, :, 1])).any(axis=-1).all() and np.isnan(lse[1, :, 1]).all()
    for found, wanted in ((out, clean), (lse, clean_lse)):
        np.testing.assert_array_equal(found[:, :, 0], wanted[:, :, 0])
        np.testing.assert_array_equal(found[2], wanted[2])


# -- planned -----------------------------------------------------------------------------------------------------------


def problem_of(batch: int, keys: int, heads: int = 128, tokens: int = 1, page: int = 64, **more: Any) -> DecodeProblem:
    head_dim, value_dim = more.pop("dims", LATENT)
    dtype, cache = more.pop("dtype", "bf16"), more.pop("cache", "")
    return DecodeProblem(
        batch, heads, 1, tokens, keys, head_dim, value_dim, dtype, cache or dtype, more.pop("scale", 192**-0.5),
        page=page, pages=batch * keys // page if page else 0, latent=True, **more,
    )  # fmt: skip


def views_of(problem: DecodeProblem, gap: int = 0) -> dict[str, TensorView]:
    """Contiguous views of a problem; rows of q lie ``gap`` elements apart."""

    def view(dtype: str, *shape: int, gap: int = 0) -> TensorView:
        strides = contiguous_strides((*shape[:-1], shape[-1] + gap))
        return TensorView(dtype, shape, strides, "device", None)

    batch, heads, tokens, dim = problem.batch, problem.heads_q, problem.seq_q, problem.head_dim
    lead = (problem.pages, 1, problem.page) if problem.page else (batch, 1, problem.seq_kv)
    keys = view(problem.cache, *lead, dim)
    views = {"q": view(problem.dtype, batch, heads, tokens, dim, gap=gap), "k": keys, "lens": view("i32", batch)}
    views |= {"v": replace(keys, shape=(*lead, problem.value_dim))}
    views |= {"o": view(problem.dtype, batch, heads, tokens, problem.value_dim)}
    if problem.page:
        views["tables"] = view("i32", batch, problem.seq_kv // problem.page)
    return views


def chosen(problem: DecodeProblem, target: Target = H200, gap: int = 0) -> bool:
    with tuning.trying(RECORD):
        shape = choose_latent(problem, Layout(views_of(problem, gap), {}), target)
    return isinstance(shape, LatentWarpgroupShape)


def test_who_gets_it() -> None:
    """What the kernel does not serve stays with the others."""
    usual = problem_of(4, 1024)
    assert chosen(usual)
    for same in (
        problem_of(4, 1024, heads=64, tokens=3), problem_of(4, 1024, heads=16, tokens=3, causal=False),
        problem_of(4, 1024, page=0), problem_of(4, 999, page=3), problem_of(4, 1024, dtype="f16", return_lse=True),
        problem_of(4, 1024, dims=(320, 256)),
    ):  # fmt: skip
        assert chosen(same), same
    for other in (
        problem_of(4, 1024, heads=16, tokens=3), problem_of(4, 1024, window=(99, 0)), problem_of(4, 1024, sinks=True),
        problem_of(4, 1024, softcap=3.0), problem_of(4, 1024, alibi=True), problem_of(4, 1024, scale=-1.0),
        problem_of(4, 1024, cache="e4m3"), problem_of(4, 1024, dtype="f32"), problem_of(4, 1024, dims=(576, 448)),
        problem_of(4, 1024, dims=(560, 512)), replace(usual, latent=False), replace(usual, total_q=4),
    ):  # fmt: skip
        assert not chosen(other), other
    assert not chosen(usual, gap=4)
    assert chosen(usual, gap=8)
    assert not chosen(usual, TARGETS["sm80-cuda"])
    assert not chosen(usual, replace(H200, max_shared_bytes=200 << 10))


# -- assembled ---------------------------------------------------------------------------------------------------------


def step_of(problem: DecodeProblem, splits: int | None = None) -> Step:
    return plan_decode(problem, views_of(problem), H200, shape=LatentWarpgroupShape(), splits=splits).steps[0]


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas (CUDA toolkit) is not installed")
@pytest.mark.parametrize(
    "problem",
    [
        problem_of(64, 8192),
        problem_of(32, 4096, tokens=2, return_lse=True),
        problem_of(2, 3000, page=3, dtype="f16"),
    ],
    ids=["one part", "two tokens, lse", "odd pages, parts"],
)
def test_assembles(problem: DecodeProblem, tmp_path: Path) -> None:
    """Without spills, and without the products being serialised (notes C75xx of ptxas)."""
    step = step_of(problem)
    kernel = step.build(step.config, H200)
    assert kernel.shared_bytes == LatentWarpgroupShape().shared_bytes(*LATENT) <= H200.max_shared_bytes
    text = generate(kernel, H200).text
    assert text.count("setmaxnreg") == 3
    path = tmp_path / "kernel.ptx"
    path.write_text(text)
    command = ["ptxas", "-arch=sm_90a", "-v", str(path), "-o", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "(C75" not in done.stderr and "0 bytes spill stores, 0 bytes spill loads" in done.stderr, done.stderr
    assert "Used 168 registers" in done.stderr


def test_splits_fill_the_device() -> None:
    """Of an H200's 132 units: a workgroup for 64 rows where there are enough, else splits."""
    for batch, keys, splits in ((64, 8192, 1), (32, 4096, 2), (1, 8192, 64)):
        assert step_of(problem_of(batch, keys)).grid == (2, splits, batch)
