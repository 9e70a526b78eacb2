"""`aule tune`: what is measured, kept and used. Software Vulkan stands in for a GPU; which tiles are faster there is no
matter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import devices
import numpy as np
import pytest

import aule
from aule import cli, store
from aule.engine import tuning
from aule.engine.attention import contiguous_strides, prepare_forward
from aule.errors import InvalidArgumentError
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.tiles import choose_shape
from aule.runtime.base import Device
from aule.target import NVIDIA_LAYOUT, Target
from aule.tile.fragment_shape import FragmentShape
from aule.tile.simt_shape import SimtShape
from aule.view import TensorView

OTHER = SimtShape(32, 32, 8, 8, 8, 4, False)
PROBLEM = AttentionProblem(1, 2, 2, 64, 64, 16, 16, "f32", 0.25)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("AULE_DISK_CACHE", "1")
    found = devices.need("vulkan")
    vars(found).pop("_tuned", None)
    yield found
    vars(found).pop("_tuned", None)


def planned(device: Device, problem: AttentionProblem = PROBLEM) -> object:
    shape = (1, 2, 64, 16)
    views = {n: TensorView("f32", shape, contiguous_strides(shape), "device", None) for n in "qkvo"}
    if problem.mask:
        views["mask"] = TensorView("bool", (1, 2, 64, 64), (0, 0, 64, 1), "device", None)
    return prepare_forward(problem, views, device).plan.config.shape


def test_tiles_are_measured_and_right(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "candidates", lambda target, dtype, dim: [choose_shape(target, dim, dim), OTHER])
    measured, kept = tuning.tune(device, "f32", 16, 64, causal=True, seconds=0.0)
    assert [m.shape for m in measured] == [choose_shape(device.target, 16, 16), OTHER]
    assert all(m.tflops > 0 and not m.refused for m in measured)
    assert kept in (None, OTHER) and tuning.tuned_shape(device, PROBLEM) == kept


def test_what_was_kept_is_used_and_only_where_it_was_measured(device: Device) -> None:
    table = planned(device)
    assert table != OTHER
    tuning._keep(device, tuning._key("f32", 16, 16), OTHER)
    vars(device).pop("_tuned")  # another process reads it from the disk
    assert planned(device) == OTHER
    masked = AttentionProblem(1, 2, 2, 64, 64, 16, 16, "f32", 0.25, mask="bool")
    assert planned(device, masked) != OTHER
    q, k, v = (np.random.default_rng(i).standard_normal((1, 2, 64, 16)).astype(np.float32) for i in range(3))
    found = aule.flash_attention(q, k, v, backend="vulkan")
    np.testing.assert_allclose(found, aule.flash_attention(q, k, v, backend="numpy"), rtol=1e-4, atol=1e-5)
    tuning._keep(device, tuning._key("f32", 16, 16), None)
    assert planned(device) == table


def test_a_damaged_or_foreign_file_is_no_choice(device: Device) -> None:
    for body in (b"{", b'{"f32 16 16": ["simt", {"rows": 3}]}', b'{"f32 16 16": ["other", {}]}', b"[]"):
        store.write(tuning._name(device.target), body)
        vars(device).pop("_tuned", None)
        assert tuning.tuned_shape(device, PROBLEM) is None


def test_a_wrong_result_is_never_kept(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "candidates", lambda target, dtype, dim: [choose_shape(target, dim, dim), OTHER])
    answers = iter([False, True])
    monkeypatch.setattr(tuning._Bench, "_differs", lambda self: next(answers))
    measured, kept = tuning.tune(device, "f32", 16, 64, seconds=0.0)
    assert kept is None and measured[1].tflops == 0 and "another result" in measured[1].refused


def test_the_command(device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tuning, "candidates", lambda target, dtype, dim: [choose_shape(target, dim, dim), OTHER])
    options = ["--dtype", "f32", "--head-dim", "16", "--seq-len", "64", "--seconds", "0"]
    assert cli.main(["tune", "--backend", "vulkan", *options]) == 0
    text = capsys.readouterr().out
    assert "f32, head dimension 16, 64 keys" in text and "(the table)" in text and text.count("TFLOPS") == 2
    assert cli.main(["tune", "--backend", "vulkan", "--head-dim", "300"]) == 2
    monkeypatch.setenv("AULE_DISK_CACHE", "0")
    assert cli.main(["tune", "--backend", "vulkan", *options]) == 2
    assert "AULE_DISK_CACHE=0" in capsys.readouterr().err


def test_a_processor_has_no_tiles(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="registers and caches"):
        tuning.tune(devices.need("cpu"), "f32", 64)


def test_candidates_on_matrix_units_fit_the_device() -> None:
    target = Target(
        "cuda", arch="sm_86", vendor="nvidia", subgroup_size=32, subgroup_sizes=(32,), max_threads=1024,
        max_shared_bytes=101376, matrix_units=("m16n8k16:f16:f32",), matrix_layout=NVIDIA_LAYOUT,
    )  # fmt: skip
    for dim in (64, 128, 256):
        found = tuning.candidates(target, "f16", dim)
        assert len(found) > 3 and all(isinstance(shape, FragmentShape) for shape in found)
        assert all(shape.shared_bytes(dim, dim) <= 101376 for shape in found)  # type: ignore[call-arg]
