"""The warpgroup forward kernel whose workgroups stay, on the interpreter with the sanitizer on, and through ptxas."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grid
import numpy as np
import pytest
from test_forward_interpreted import run
from test_fragment_compiles import assemble
from test_fragment_compiles import target as nvidia
from test_fragment_compiles import views as views_of
from test_fragment_interpreted import BANDS, target

from aule import tuning
from aule.ops.attention.build import build_forward
from aule.ops.attention.plan import tiles
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.validate import attention_problem
from aule.target import Target
from aule.tile.fragment.shape import FragmentShape
from aule.view import TensorView

SMALL = FragmentShape(128, 16, 8, 2, False, warpgroups=True, copiers=4, q_stages=2)
DEEP = replace(SMALL, block_kv=32, stages=4, q_stages=1)


def check(arrays: dict[str, np.ndarray], options: dict[str, Any], shape: FragmentShape, units: int) -> None:
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, **options, return_lse=True)
    out, lse = run(problem, operands, shape, replace(target(), compute_units=units))
    known = {name: x for name, x in arrays.items() if name != "alibi_slopes"}
    alibi = {"alibi": arrays["alibi_slopes"]} if "alibi_slopes" in arrays else {}
    verdict = compare(problem, out, lse, expect(problem, **known, **alibi))
    assert verdict, verdict.message


@pytest.mark.parametrize(
    ("shape", "band", "units"),
    [(SMALL, "full", 1), (SMALL, "causal", 2), (SMALL, "window", 100), (DEEP, "both-sides", 1), (DEEP, "causal", 2)],
)
def test_blocks_follow_each_other(shape: FragmentShape, band: str, units: int) -> None:
    """Two heads of two blocks, with slots going round several times, and rows and keys past the end."""
    rng = np.random.default_rng(2)
    arrays = {name: rng.standard_normal((1, 2, 200, 72)).astype(np.float16) for name in "qkv"}
    check(arrays, BANDS[band], shape, units)


def test_windows_with_full_tiles() -> None:
    """Copies and products take tiles in one order: first those in which rows drop keys, on both sides of the others."""
    rng = np.random.default_rng(2)
    arrays = {name: rng.standard_normal((1, 1, 400, 16)).astype(np.float16) for name in "qkv"}
    check(arrays, {"causal": True, "window": (200, 0)}, SMALL, 2)


def test_tables_may_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is added to scores; other problems take the next record."""
    shape = CHOSEN[128]
    record = tuning.Record(tiles.WARPGROUP, {}, {"shape": asdict(shape)}, "rule", "")
    known = tuning.matching

    def matching(device: Target, op: str, facts: dict[str, Any]) -> list[tuning.Record]:
        return [record] * (op == tiles.WARPGROUP) + list(known(device, op, facts))

    monkeypatch.setattr(tuning, "matching", matching)
    device = replace(nvidia("sm_90"), compute_units=132)
    plain = AttentionProblem(1, 64, 64, 2048, 2048, 128, 128, "bf16", 0.125, causal=True)
    for problem, chosen in (
        (plain, True),
        (replace(plain, heads_q=2, heads_kv=2), False),
        (replace(plain, softcap=5.0), False),
        (replace(plain, dropout_p=0.5), False),
        (replace(plain, value_dim=192), False),
    ):
        views = views_of(problem)
        if problem.dropout_p:
            views["seed"] = TensorView("i32", (1, 1, 1, 2), (2, 2, 2, 1), "device", None)
        config = plan_forward(problem, views, device).steps[-1].config
        assert (config.shape == shape) is chosen, problem


def test_options() -> None:
    """Grouped heads, a sink, softcap, ALiBi, narrower values, and queries that keep no key at all."""
    rng = np.random.default_rng(3)
    shapes = {"q": (1, 4, 130, 64), "k": (1, 2, 60, 64), "v": (1, 2, 60, 40)}
    arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    arrays |= {"alibi_slopes": np.array([2.0, 0.5, 0.1, 0.01], np.float32)}
    arrays |= {"sinks": rng.standard_normal(4).astype(np.float32)}
    check(arrays, {"causal": True, "softcap": 5.0}, SMALL, 2)
    check(arrays, {"causal": True}, SMALL, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_dropped_infinities_do_not_leak(bad: float) -> None:
    """In one of the blocks of a workgroup, which is then computed again."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 3, 140, 16)).astype(np.float16) for _ in range(3))
    v[:, 1, 70, 3] = bad
    views = {name: grid.view_of(array) for name, array in {"q": q, "k": k, "v": v}.items()}
    problem, operands = attention_problem(**views, causal=True, return_lse=True)
    out, lse = run(problem, operands, SMALL, replace(target(), compute_units=1))
    assert np.isfinite(lse).all()
    late = out[:, 1, 70:, 3]
    assert not np.isfinite(late).any()
    out[:, 1, 70:, 3] = 0
    finite = v.copy()
    finite[:, 1, 70, 3] = 0
    expected = expect(problem, q=q, k=k, v=finite)
    expected.out[:, 1, 70:, 3] = 0
    verdict = compare(problem, out, lse, expected)
    assert verdict, verdict.message


CHOSEN = {
    64: FragmentShape(192, 128, 12, 2, False, warpgroups=True, copiers=4, q_stages=2),
    128: FragmentShape(128, 128, 8, 2, False, warpgroups=True, copiers=4, q_stages=2),
}


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", CHOSEN)
def test_assembles_without_spills(dim: int, causal: bool, tmp_path: Path) -> None:
    device = replace(nvidia("sm_90"), compute_units=132)
    problem = AttentionProblem(1, 64, 64, 2048, 2048, dim, dim, "bf16", 0.125, causal=causal)
    step = plan_forward(problem, views_of(problem), device, shape=CHOSEN[dim]).steps[-1]
    assert step.grid == (132, 1, 1)
    text, spilled = assemble(build_forward(step.config, device), device, tmp_path)
    assert spilled == 0 and text.count("setmaxnreg") == 2 and text.count("wgmma.mma_async") > 20
