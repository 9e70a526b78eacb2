"""The forward kernel on every device: the full grid, and cases beyond the grid."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import devices
import grid
import numpy as np
import pytest
from repository import ROOT

from aule.engine.attention import forward_on_host
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.validate import attention_problem
from aule.runtime.base import Device

pytestmark = pytest.mark.device

CASES = grid.forward_grid("full")


@pytest.fixture(params=devices.BACKENDS, scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    return devices.need(request.param)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_grid(device: Device, case: grid.Case) -> None:
    devices.spare(device, CASES.index(case), parts=16, cpu_parts=3)
    inputs = grid.make_inputs(case, seed=1)
    before = {name: array.copy() for name, array in inputs.items()}
    problem, operands = grid.case_problem(case, inputs)
    out, lse = forward_on_host(problem, operands, device)
    verdict = compare(problem, out, lse, grid.expected(case, inputs))
    assert verdict, verdict.message
    for name, array in inputs.items():
        assert array.tobytes() == before[name].tobytes(), f"{name} was changed"


def run(device: Device, arrays: dict[str, np.ndarray], **options: object) -> tuple[np.ndarray, np.ndarray | None]:
    problem, operands = attention_problem(**{n: grid.view_of(a) for n, a in arrays.items()}, **options)
    return forward_on_host(problem, operands, device)


def judge(device: Device, arrays: dict[str, np.ndarray], **options: object) -> None:
    problem, operands = attention_problem(**{n: grid.view_of(a) for n, a in arrays.items()}, **options)
    out, lse = forward_on_host(problem, operands, device)
    renamed = {"alibi" if n == "alibi_slopes" else n: a for n, a in arrays.items()}
    verdict = compare(problem, out, lse, expect(problem, **renamed))
    assert verdict, verdict.message


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def test_more_heads_than_a_grid_axis_holds(device: Device) -> None:
    if device.target.software and device.target.backend != "opencl" and os.environ.get("AULE_FULL_GRID") != "1":
        pytest.skip("software devices take up to a minute for it; AULE_FULL_GRID=1 runs it")
    heads = 65536 + 3
    q, k, v = (random(1, heads, 1, 4, seed=i) for i in range(3))
    out, _ = run(device, {"q": q, "k": k, "v": v})
    np.testing.assert_allclose(out, v, atol=1e-6)  # one key: its weight is 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("how", ["mask", "padding", "causal"])
def test_dropped_keys_do_not_leak(device: Device, bad: float, how: str) -> None:
    q, k, v = (random(1, 2, 70, 16, seed=i) for i in range(3))
    options: dict[str, object] = {"return_lse": True}
    arrays = {"q": q, "k": k, "v": v}
    if how == "mask":
        mask = np.ones((70, 70), bool)
        mask[:, 5] = False
        arrays["mask"] = mask
        k[:, :, 5], v[:, :, 5] = bad, bad
    elif how == "padding":
        mask = np.zeros((1, 1, 1, 70), np.float32)
        mask[..., 60:] = -np.inf
        arrays["mask"] = mask
        k[:, :, 60:], v[:, :, 60:] = bad, bad
    else:
        options["causal"] = True
        k[:, :, 69], v[:, :, 69] = bad, bad  # only the last row may see it
    out, lse = run(device, arrays, **options)
    rows = slice(0, 69 if how == "causal" else 70)
    assert np.isfinite(out[:, :, rows]).all()
    assert lse is not None and np.isfinite(lse[:, :, rows]).all()


def test_kept_nan_does_come_out(device: Device) -> None:
    q, k, v = (random(1, 1, 8, 16, seed=i) for i in range(3))
    v[0, 0, 3, 2] = np.nan
    out, _ = run(device, {"q": q, "k": k, "v": v}, causal=True)
    assert np.isnan(out[0, 0, 3:, 2]).all()
    assert np.isfinite(out[0, 0, :3]).all()
    assert np.isfinite(np.delete(out[0, 0], 2, axis=1)).all()


@pytest.mark.parametrize("where", ["q", "k"])
def test_nan_score_makes_its_rows_nan(device: Device, where: str) -> None:
    arrays = {name: random(1, 1, 8, 16, seed=i) for i, name in enumerate("qkv")}
    arrays[where][0, 0, 3, 2] = np.nan
    out, lse = run(device, arrays, causal=True, return_lse=True)
    nonfinite = [3] if where == "q" else range(3, 8)
    finite = [row for row in range(8) if row not in nonfinite]
    assert lse is not None
    assert np.isnan(out[0, 0, nonfinite]).all() and np.isnan(lse[0, 0, nonfinite]).all()
    assert np.isfinite(out[0, 0, finite]).all() and np.isfinite(lse[0, 0, finite]).all()


@pytest.mark.parametrize("seq_q", [1, 17, 40])
def test_no_keys_at_all(device: Device, seq_q: int) -> None:
    q, k, v = (random(1, 2, n, 16, seed=i) for i, n in enumerate((seq_q, 0, 0)))
    out, lse = run(device, {"q": q, "k": k, "v": v}, return_lse=True)
    assert lse is not None
    assert (out == 0).all() and np.isneginf(lse).all()


def test_rows_without_keys_are_zero(device: Device) -> None:
    q, k, v = (random(1, 2, n, 16, seed=i) for i, n in enumerate((40, 10, 10)))
    out, lse = run(device, {"q": q, "k": k, "v": v}, causal=True, return_lse=True)
    assert lse is not None
    assert (out[:, :, :30] == 0).all() and np.isneginf(lse[:, :, :30]).all()
    assert np.isfinite(lse[:, :, 30:]).all()


def test_lowest_finite_mask_averages(device: Device) -> None:
    """Frameworks mask with the lowest finite number; a row of nothing but that is the mean, not zero."""
    q, k, v = (random(1, 1, 4, 8, seed=i) for i in range(3))
    mask = np.full((4, 4), np.finfo(np.float32).min, np.float32)
    out, _ = run(device, {"q": q, "k": k, "v": v, "mask": mask})
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(2, keepdims=True), out.shape), atol=1e-5)


def test_float64(device: Device) -> None:
    """Slopes and sinks are float32, a bias may be: they are numbers like others, and nothing is rounded to that."""
    if device.target.backend != "cpu":
        pytest.skip("float64 is computed by the CPU alone")
    arrays = {name: random(1, 2, 70, 40, seed=i).astype(np.float64) for i, name in enumerate("qkv")}
    arrays |= {"alibi_slopes": random(2, seed=3), "sinks": random(2, seed=4), "bias": random(70, 70, seed=5)}
    judge(device, arrays, softcap=3.0, return_lse=True)


def test_same_bits_again(device: Device) -> None:
    q, k, v = (random(2, 2, 100, 40, seed=i) for i in range(3))
    first, _ = run(device, {"q": q, "k": k, "v": v}, causal=True)
    for _ in range(3):
        again, _ = run(device, {"q": q, "k": k, "v": v}, causal=True)
        np.testing.assert_array_equal(first, again)


def test_negative_and_zero_scale(device: Device) -> None:
    arrays = {name: random(1, 2, 33, 24, seed=i) for i, name in enumerate("qkv")}
    for scale in (-0.5, 0.0, 3.0):
        judge(device, arrays, scale=scale, return_lse=True)


def test_large_scores(device: Device) -> None:
    arrays = {name: random(1, 1, 40, 64, seed=i) * (30 if name != "v" else 1) for i, name in enumerate("qkv")}
    out, lse = run(device, arrays, return_lse=True)
    assert np.isfinite(out).all() and lse is not None and np.isfinite(lse).all()


def test_any_shape_and_stride(device: Device) -> None:
    hypothesis = pytest.importorskip("hypothesis")  # which a machine that is lent may not have; the grid runs there
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=12, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(data=st.data())
    def holds(data: Any) -> None:
        draw = data.draw
        batch, heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
        seq_q, seq_kv = draw(st.integers(0, 90)), draw(st.integers(0, 90))
        # Few head dimensions, so that the number of kernels to compile stays small.
        head_dim, value_dim = draw(st.sampled_from([(7, 7), (16, 33), (64, 64)]))
        shapes = {
            "q": (batch, heads_kv * group, seq_q, head_dim),
            "k": (batch, heads_kv, seq_kv, head_dim),
            "v": (batch, heads_kv, seq_kv, value_dim),
        }
        arrays = {}
        for number, (name, shape) in enumerate(shapes.items()):
            order = draw(st.permutations(range(4)))
            full = random(*(shape[axis] for axis in order), seed=number)
            array = full.transpose(np.argsort(order))
            flips = draw(st.tuples(*(st.sampled_from([1, -1]) for _ in range(4))))
            arrays[name] = array[tuple(slice(None, None, step) for step in flips)]
        window = draw(st.sampled_from([None, 5, (3, 4), (None, 7)]))
        judge(device, arrays, causal=draw(st.booleans()), window=window, return_lse=True)

    holds()


def test_other_target_same_answer() -> None:
    """Legalised kernels (no 16-bit storage, no fp16 arithmetic, no subgroups) agree on the same device."""
    device = devices.need("vulkan")
    base = device.target
    cases = [c for c in CASES if c.dtype != "f32" and c.seq_q][:2]
    try:
        changes = ({"f16": False}, {"storage16": False, "storage8": False}, {"subgroup_size": 0, "subgroup_sizes": ()})
        for change in changes:
            device.target = replace(base, **change)
            for case in cases:
                inputs = grid.make_inputs(case, seed=2)
                problem, operands = grid.case_problem(case, inputs)
                out, lse = forward_on_host(problem, operands, device)
                verdict = compare(problem, out, lse, grid.expected(case, inputs))
                assert verdict, f"{change} {case}: {verdict.message}"
    finally:
        device.target = base


VALIDATED = """
import sys
sys.path.insert(0, {tests!r})
import run_grid
from aule.runtime import vulkan
wrong = run_grid.main("small:6", ["vulkan"])
older = ("VUID-VkDeviceCreateInfo-pNext-pNext", "is not supported by this layer")
print("messages", [m for m in vulkan.validation_messages() if not any(text in m for text in older)], "wrong", wrong)
"""


def test_vulkan_validation_layer_is_silent() -> None:
    devices.need("vulkan")
    tests = str(ROOT / "tests")
    script = VALIDATED.format(tests=tests)
    env = os.environ | {"AULE_VULKAN_VALIDATION": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300)
    assert "messages [] wrong 0" in done.stdout, done.stdout + done.stderr
