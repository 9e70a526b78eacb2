"""`aule tune`: measuring, saving and using records. Software Vulkan stands in for a GPU; its times do not matter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest

import aule
from aule import cli, store, tuning
from aule.engine import tune
from aule.engine.attention import prepare_forward
from aule.engine.tune_cases import Settings, cases
from aule.errors import InvalidArgumentError
from aule.ops.attention.plan.tiles import FRAGMENT, SIMT
from aule.ops.attention.problem import AttentionProblem
from aule.runtime.base import Device
from aule.target import NVIDIA_LAYOUT, Target
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape
from aule.tuning import own
from aule.view import TensorView, contiguous_strides

pytestmark = pytest.mark.device

OTHER = SimtShape(32, 32, 8, 8, 8, 4, False)
USE: dict[str, Any] = {
    "shape": {
        "block_q": 32, "block_kv": 32, "threads_x": 8, "threads_y": 8, "chunk_k": 8, "chunk_v": 4, "resident_q": False,
    },
    "accumulators": [240, 240, 160],
}  # fmt: skip
WHEN = {"dtype": "f32", "head_dim": 16, "narrow_dim": 16, "modifiers": 0}
RECORD = tuning.Record(SIMT, WHEN, USE, {"device": "this one", "driver": "1", "date": "2026-11-17"})
SMALL = Settings("f32", 16, 64)
PROBLEM = AttentionProblem(1, 2, 2, 64, 64, 16, 16, "f32", 0.25)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("AULE_DISK_CACHE", "1")
    found = devices.need("vulkan")
    own.forget(found.target)
    yield found
    own.forget(found.target)


def planned(device: Device, problem: AttentionProblem = PROBLEM) -> object:
    shape = (1, 2, 64, 16)
    views = {n: TensorView("f32", shape, contiguous_strides(shape), "device", None) for n in "qkvo"}
    if problem.mask:
        views["mask"] = TensorView("bool", (1, 2, 64, 64), (0, 0, 64, 1), "device", None)
    return prepare_forward(problem, views, device).plan.steps[-1].config.shape


def test_shapes_are_measured_and_right(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "candidates", lambda case, target: [USE])
    (outcome,) = tune.tune(device, "forward", replace(SMALL, causal=True), seconds=0.0)
    assert [m.use for m in outcome.measured] == [None, USE]
    assert all(m.speed > 0 and not m.refused for m in outcome.measured)
    kept = own.own_records(device.target, SIMT)
    assert [record.use for record in kept] == ([] if outcome.saved is None else [USE])


@pytest.mark.parametrize("op", ["forward", "backward", "decode", "rows"])
def test_every_op_has_candidates(device: Device, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One other candidate each, with a mask where there may be one."""
    every = tune.candidates
    monkeypatch.setattr(tune, "candidates", lambda case, target: list(every(case, target))[-2:])
    for outcome in tune.tune(device, op, replace(SMALL, masked=True, columns=512), seconds=0.0):
        assert outcome.measured[0].speed > 0, outcome
        assert all("another result" not in m.refused for m in outcome.measured), outcome


def test_what_was_kept_is_used_and_only_where_it_was_measured(device: Device) -> None:
    table = planned(device)
    assert table != OTHER
    own.save(device.target, SIMT, WHEN, RECORD)
    own.forget(device.target)  # another process reads it from the disk
    assert planned(device) == OTHER
    masked = replace(PROBLEM, mask="bool")
    assert planned(device, masked) != OTHER
    q, k, v = (np.random.default_rng(i).standard_normal((1, 2, 64, 16)).astype(np.float32) for i in range(3))
    found = aule.flash_attention(q, k, v, backend="vulkan")
    np.testing.assert_allclose(found, aule.flash_attention(q, k, v, backend="numpy"), rtol=1e-4, atol=1e-5)
    with tuning.trying():
        assert planned(device) == table
    own.save(device.target, SIMT, WHEN, None)
    assert planned(device) == table


def test_a_damaged_or_foreign_line_is_no_choice(device: Device) -> None:
    foreign = [
        "{",
        "[]",
        replace(RECORD, op="attention.sideways").line(),
        replace(RECORD, use={"shape": {"rows": 3}}).line(),
        replace(RECORD, use={**USE, "accumulators": "many"}).line(),
        replace(RECORD, use={}).line(),
    ]
    store.write(own.file_name(device.target), "\n".join([*foreign, RECORD.line()]).encode())
    assert own.own_records(device.target, SIMT) == (RECORD,)
    store.path(own.file_name(device.target)).write_bytes(b"damaged")
    own.forget(device.target)
    assert own.own_records(device.target, SIMT) == ()


def test_a_wrong_result_is_never_kept(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "candidates", lambda case, target: [USE])
    answers = iter([False, True])
    monkeypatch.setattr(tune._Bench, "_differs", lambda self: next(answers))
    (outcome,) = tune.tune(device, "forward", SMALL, seconds=0.0)
    assert outcome.saved is None and outcome.measured[1].speed == 0
    assert "another result" in outcome.measured[1].refused


def test_results_of_the_candidate_before_do_not_count(device: Device) -> None:
    (case,) = cases("forward", SMALL, device.target)
    with tune._Bench(device, case) as bench:
        assert bench.measure(None, 0.0) is not None
        idle = replace(case.plan(device.target), steps=())
        bench._time(idle, 0.0)
        assert bench._differs()


def test_the_command(device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tune, "candidates", lambda case, target: [USE])
    options = ["--dtype", "f32", "--head-dim", "16", "--seq-len", "64", "--seconds", "0"]
    assert cli.main(["tune", "--backend", "vulkan", *options]) == 0
    text = capsys.readouterr().out
    assert "f32, head dimension 16, 64 keys" in text and "(the table)" in text
    assert text.count("FLOPS") == 2 and " 0.00 " not in text
    assert cli.main(["tune", "--backend", "vulkan", "--head-dim", "600"]) == 2
    monkeypatch.setenv("AULE_DISK_CACHE", "0")
    assert cli.main(["tune", "--backend", "vulkan", *options]) == 2
    assert "AULE_DISK_CACHE=0" in capsys.readouterr().err


def test_a_processor_has_no_tiles(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="registers and caches"):
        next(tune.tune(devices.need("cpu"), "forward", SMALL))


def test_candidates_on_matrix_units_are_shapes_of_records() -> None:
    target = Target(
        "cuda", arch="sm_86", vendor="nvidia", subgroup_size=32, subgroup_sizes=(32,), max_threads=1024,
        max_shared_bytes=101376, matrix_units=("m16n8k16:f16:f32",), matrix_layout=NVIDIA_LAYOUT,
    )  # fmt: skip
    for dim in (64, 128, 256):
        (case,) = cases("forward", Settings("f16", dim, 128), target)
        assert case.op == FRAGMENT
        found = list(tune.candidates(case, target))
        assert len(found) > 20
        for use in found:
            assert own._understood(tuning.Record(case.op, case.when, use))
            FragmentShape(**use["shape"])
