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
from aule.errors import InvalidArgumentError
from aule.ir import Builder, Value
from aule.ir.interpret import SanitizerError
from aule.ops.attention.build import build_forward
from aule.ops.attention.plan import tiles
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.validate import attention_problem
from aule.ops.attention.warpgroup.forward_slots import Place
from aule.target import Target
from aule.tile.fragment.shape import FragmentShape
from aule.view import TensorView

SMALL = FragmentShape(128, 16, 8, 2, False, warpgroups=True, copiers=4, q_stages=2)
DEEP = replace(SMALL, block_kv=32, stages=4, q_stages=1)
TENSORS = replace(SMALL, copies="tma")
DEEP_TENSORS = replace(DEEP, copies="tma")


def hopper(units: int) -> Target:
    return replace(target(), compute_units=units, tensor_maps=True)


def check(arrays: dict[str, np.ndarray], options: dict[str, Any], shape: FragmentShape, units: int) -> None:
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, **options, return_lse=True)
    out, lse = run(problem, operands, shape, hopper(units))
    known = {name: x for name, x in arrays.items() if name != "alibi_slopes"}
    alibi = {"alibi": arrays["alibi_slopes"]} if "alibi_slopes" in arrays else {}
    verdict = compare(problem, out, lse, expect(problem, **known, **alibi))
    assert verdict, verdict.message


def choose(shape: FragmentShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a shape before all records of the tables."""
    record = tuning.Record(tiles.WARPGROUP, {}, {"shape": asdict(shape)}, "rule", "")
    known = tuning.matching

    def matching(device: Target, op: str, facts: dict[str, Any]) -> list[tuning.Record]:
        return [record] * (op == tiles.WARPGROUP) + list(known(device, op, facts))

    monkeypatch.setattr(tuning, "matching", matching)


@pytest.mark.parametrize(
    ("shape", "band", "units"),
    [
        *((shape, *given) for shape in (SMALL, TENSORS) for given in (("full", 1), ("causal", 2), ("window", 100))),
        *((shape, *given) for shape in (DEEP, DEEP_TENSORS) for given in (("both-sides", 1), ("causal", 2))),
    ],
)
def test_blocks_follow_each_other(shape: FragmentShape, band: str, units: int) -> None:
    """Two heads of two blocks, with slots going round several times, and rows and keys past the end."""
    rng = np.random.default_rng(2)
    arrays = {name: rng.standard_normal((1, 2, 200, 72)).astype(np.float16) for name in "qkv"}
    check(arrays, BANDS[band], shape, units)


@pytest.mark.parametrize("shape", [SMALL, TENSORS], ids=["async", "tma"])
def test_windows_with_full_tiles(shape: FragmentShape) -> None:
    """Copies and products take tiles in one order: first those in which rows drop keys, on both sides of the others."""
    rng = np.random.default_rng(2)
    arrays = {name: rng.standard_normal((1, 1, 400, 16)).astype(np.float16) for name in "qkv"}
    check(arrays, {"causal": True, "window": (200, 0)}, shape, 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("no expect", "no thread can go on: .*0 of 1 threads have arrived, and 2048 bytes are too many"),
        ("more bytes", "no thread can go on: .*1 of 1 threads have arrived, and 16 bytes are missing"),
        ("fewer bytes", "no thread can go on: .*1 of 1 threads have arrived, and 16 bytes are too many"),
        ("wrong phase", "no thread can go on: .*waits for phase 1 of an mbarrier, at which 0 of 1 threads"),
        ("no wait", "read of shared memory that was never written|race in shared memory on tiles"),
        ("overwritten", "race in shared memory on tiles.*writes it in `tensor_copy"),
    ],
)
def test_sanitizer_finds_mistakes_with_copies(wrong: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults in the kernel's own pipeline, each with V of a tile."""
    expect, full = Builder.mbarrier_expect, Place.await_full
    bytes_ = {"more bytes": 16, "fewer bytes": -16}.get(wrong, 0)
    if wrong == "no expect" or bytes_:
        seen = iter(range(1000))

        def change(b: Builder, pointer: Value, index: Any, announced: int) -> None:
            if next(seen) != 2:  # after K and Q
                expect(b, pointer, index, announced)
            elif bytes_:
                expect(b, pointer, index, announced + bytes_)

        monkeypatch.setattr(Builder, "mbarrier_expect", change)
    elif wrong == "overwritten":
        monkeypatch.setattr(Place, "await_empty", lambda place: None)
    else:

        def wait(place: Place) -> None:
            if place.kind != "v":
                full(place)
            elif wrong == "wrong phase":
                place.slots.b.mbarrier_wait(place.slots.mbarriers, place.full, place._parity ^ 1)

        monkeypatch.setattr(Place, "await_full", wait)
    rng = np.random.default_rng(2)
    arrays = {name: rng.standard_normal((1, 1, 60, 64)).astype(np.float16) for name in "qkv"}
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views)
    with pytest.raises(SanitizerError, match=message):
        run(problem, operands, TENSORS, hopper(1))


def test_planned_where_tensor_maps_can_describe_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other devices and layouts take the next record; tiles that a caller insists on are refused."""
    shape = replace(CHOSEN[128], copies="tma")
    choose(shape, monkeypatch)
    device = replace(nvidia("sm_90"), compute_units=132, tensor_maps=True)
    problem = AttentionProblem(4, 16, 16, 2048, 2048, 128, 128, "bf16", 0.125)
    views = views_of(problem)
    repeated = replace(views["k"], strides=(0, *views["k"].strides[1:]))
    alone = replace(views["k"], shape=(1, *views["k"].shape[1:]), strides=(3, *views["k"].strides[1:]))
    for known, given, fits in (
        (device, {}, True),
        (replace(device, tensor_maps=False), {}, False),
        (device, {"k": repeated}, False),
        (device, {"v": repeated}, False),
        (device, {"k": alone}, True),
        (device, {"k": replace(views["k"], strides=(1 << 39, *views["k"].strides[1:]))}, False),
    ):
        config = plan_forward(problem, {**views, **given}, known).steps[-1].config
        assert (config.shape == shape) is fits, given
        if fits:
            plan_forward(problem, {**views, **given}, known, shape=shape)
        else:
            with pytest.raises(InvalidArgumentError, match="expected a device with tensor maps, and q, k and v whose"):
                plan_forward(problem, {**views, **given}, known, shape=shape)
    misplaced = plan_forward(problem, views, device, {"v": False}).steps[-1].config
    assert misplaced.shape != shape


def test_tables_may_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is added to scores; other problems take the next record."""
    shape = CHOSEN[128]
    choose(shape, monkeypatch)
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


@pytest.mark.parametrize("shape", [SMALL, TENSORS], ids=["async", "tma"])
def test_options(shape: FragmentShape) -> None:
    """Grouped heads, a sink, softcap, ALiBi, narrower values, and queries that keep no key at all."""
    rng = np.random.default_rng(3)
    shapes = {"q": (1, 4, 130, 64), "k": (1, 2, 60, 64), "v": (1, 2, 60, 40)}
    arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    arrays |= {"alibi_slopes": np.array([2.0, 0.5, 0.1, 0.01], np.float32)}
    arrays |= {"sinks": rng.standard_normal(4).astype(np.float32)}
    check(arrays, {"causal": True, "softcap": 5.0}, shape, 2)
    check(arrays, {"causal": True}, shape, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("shape", [SMALL, TENSORS], ids=["async", "tma"])
def test_dropped_infinities_do_not_leak(shape: FragmentShape, bad: float) -> None:
    """In one of the blocks of a workgroup, which is then computed again."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 3, 140, 16)).astype(np.float16) for _ in range(3))
    v[:, 1, 70, 3] = bad
    views = {name: grid.view_of(array) for name, array in {"q": q, "k": k, "v": v}.items()}
    problem, operands = attention_problem(**views, causal=True, return_lse=True)
    out, lse = run(problem, operands, shape, hopper(1))
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


WITH_TENSORS = [
    (64, replace(CHOSEN[64], copies="tma"), 0),
    (96, replace(CHOSEN[128], copies="tma"), 0),
    (128, replace(CHOSEN[128], copies="tma"), 0),
    (128, replace(CHOSEN[128], copies="tma", block_kv=176, q_stages=1), 0),
    (192, replace(CHOSEN[128], copies="tma", block_kv=112, q_stages=1), 96),
    (256, replace(CHOSEN[128], copies="tma", block_kv=80, q_stages=1), 96),
]
"""Head dimensions, tiles to be timed, and bytes that they spill in blocks that are computed again."""


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize(("dim", "shape", "spills"), WITH_TENSORS, ids=lambda x: getattr(x, "block_kv", x))
def test_tensor_copies_assemble(dim: int, shape: FragmentShape, spills: int, tmp_path: Path) -> None:
    device = replace(nvidia("sm_90"), compute_units=132, tensor_maps=True)
    problem = AttentionProblem(1, 64, 64, 2048, 2048, dim, dim, "bf16", 0.125, causal=dim == 128)
    assert shape.shared_bytes(dim, dim) <= device.max_shared_bytes
    step = plan_forward(problem, views_of(problem), device, shape=shape).steps[-1]
    text, spilled = assemble(build_forward(step.config, device), device, tmp_path)
    assert spilled <= spills and text.count("setmaxnreg") == 2 and text.count("wgmma.mma_async") > 20
    assert text.count("cp.async.bulk.tensor.4d") == 4 * -(-dim // 64)  # Q, first K, V and K of a tile


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
