"""Row operations on every device: the cases, long rows, and rows that must not affect each other."""

from __future__ import annotations

import devices
import fused_cases
import numpy as np
import pytest

from aule.engine.memory import host_view
from aule.engine.row_ops import on_host
from aule.ops.catalogue import CATALOGUE
from aule.ops.rows import layout as row_shapes
from aule.ops.rows.hints import SumTuning
from aule.ops.shared.elements import as_float, stored
from aule.runtime.base import Device

pytestmark = pytest.mark.device


@pytest.fixture(params=devices.BACKENDS, scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    return devices.need(request.param)


def check(case: fused_cases.Case, device: Device | None) -> None:
    """Both directions of a case."""
    spec = CATALOGUE[case.op]
    arrays = fused_cases.operands(case)
    before = {name: array.tobytes() for name, (array, _) in arrays.items()}
    call = fused_cases.bound(spec, arrays, fused_cases.options(spec, case))
    found = on_host(spec, call, device)
    fused_cases.judge(call, found, fused_cases.right(spec, call), gradient=False)
    backward = fused_cases.gradient_call(spec, arrays, call, found, case)
    assert spec.gradient is not None
    grads = on_host(spec.gradient, backward, device)
    fused_cases.judge(backward, grads, fused_cases.right(spec.gradient, backward), gradient=True)
    repeated = on_host(spec.gradient, backward, device)
    for name, array in grads.items():
        assert array.tobytes() == repeated[name].tobytes(), f"{name} came out differently the second time"
    for name, (array, _) in arrays.items():
        assert array.tobytes() == before[name], f"{name} was changed"


@pytest.mark.parametrize("case", fused_cases.CASES, ids=str)
def test_cases(device: Device, case: fused_cases.Case) -> None:
    devices.spare(device, fused_cases.CASES.index(case), parts=10)
    check(case, device)


@pytest.mark.parametrize("case", fused_cases.CASES, ids=str)
def test_numpy(case: fused_cases.Case) -> None:
    check(case, None)


@pytest.mark.parametrize("op", ["layer_norm", "geglu", "rms_norm_rope", "softmax_dropout"])
def test_float64_on_the_cpu(op: str) -> None:
    case = next(case for case in fused_cases.CASES if case.op == op)
    pairs = case.shape[-1] // 2 if case.pairs else 0
    check(fused_cases.Case(op, (2, 2, 3, 50), "f64", case.options, pairs=25 if pairs else 0), devices.need("cpu"))


@pytest.mark.parametrize(
    "tuning",
    [
        SumTuning(resident=64, prefetch_to="registers"),
        SumTuning(resident=64, prefetch_to="staged"),
        SumTuning(resident=64, prefetch_to="staged_alone", columns="every_pass"),
        SumTuning(resident=64, prefetch_to="staged", reload=True),
        SumTuning(resident=64, prefetch=0, reload=True),
    ],
    ids=lambda tuning: f"{tuning.prefetch_to if tuning.prefetch else 'nothing'}{' reloaded' * tuning.reload}",
)
def test_gradients_with_rows_in_registers_ahead(
    device: Device, tuning: SumTuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefetches that some devices use, with partial blocks and parts, and rows that the last pass reloads."""
    if device.target.backend == "cpu":
        pytest.skip("CPUs have rows of one thread")
    monkeypatch.setattr(row_shapes, "choose_sums", lambda *_: tuning)
    check(fused_cases.Case("residual_layer_norm", (37, 776), "bf16"), device)


@pytest.mark.parametrize("columns", [1024, 4096, 6144, 8192, 16384])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "residual_rms_norm", "residual_layer_norm"])
def test_gradients_of_long_rows(device: Device, op: str, dtype: str, columns: int) -> None:
    """Gradients from saved statistics, of rows that NVIDIA's GPUs lay over clusters: more rows than slots, some of them
    zero, and one with NaN, which must not reach its neighbours. The bits are the same every time."""
    if device.target.software and (op, columns) != ("residual_layer_norm", 4096):
        pytest.skip("software devices have one layout for all of them")
    case = fused_cases.Case(op, (7 if device.target.software else 151, columns), dtype)
    gradient, backward = fused_cases.kept_gradient(case, lambda spec, call: on_host(spec, call, device))
    found = on_host(gradient, backward, device)
    fused_cases.judge(backward, found, fused_cases.right(gradient, backward), gradient=True)
    repeated = on_host(gradient, backward, device)
    assert all(array.tobytes() == repeated[name].tobytes() for name, array in found.items())
    backward.views["dy"].storage[2, 5] = stored(np.float32(np.nan), dtype)
    nonfinite = on_host(gradient, backward, device)
    assert np.isnan(as_float(nonfinite["dx"][2], dtype)).any() and np.isnan(as_float(nonfinite["dweight"], dtype)).any()
    others = [i for i in range(len(nonfinite["dx"])) if i != 2]
    np.testing.assert_array_equal(nonfinite["dx"][others], found["dx"][others])


def normalised(device: Device, op: str, x: np.ndarray) -> np.ndarray:
    spec = CATALOGUE[op]
    call = spec.call({"x": host_view("f32", x)}, {option.name: option.default for option in spec.options})
    return on_host(spec, call, device)["y"]


@pytest.mark.parametrize("op", ["layer_norm", "softmax_dropout"])
def test_a_large_common_offset_costs_no_digits(device: Device, op: str) -> None:
    x = np.random.default_rng(0).integers(-8, 8, (4, 1536)).astype(np.float32)
    found = normalised(device, op, x + np.float32(2**20))
    np.testing.assert_allclose(found, normalised(device, op, x), atol=2e-6)


@pytest.mark.parametrize("lowest", [np.finfo(np.float32).min, -1e9, -1.3e9, -1e10, -1e12, -1e30])
def test_a_large_number_in_the_place_of_infinity(device: Device, lowest: float) -> None:
    """Masks add the lowest number: a row with nothing else has equal weights, other rows have none there. Also for the
    largest."""
    x = np.zeros((6, 1536), np.float32)
    x[1], x[2, 5:], x[3], x[3, 3], x[4, 700:705] = lowest, lowest, 2 * (lowest / 4), lowest, -lowest
    x[5, ::2], x[5, 1::2] = lowest, lowest * 0.9
    found = normalised(device, "softmax_dropout", x)
    np.testing.assert_allclose(found[:2], 1 / 1536, rtol=1e-5)
    np.testing.assert_allclose(found[2], np.repeat([0.2, 0.0], [5, 1531]), rtol=1e-5)
    np.testing.assert_allclose(found[3], np.where(np.arange(1536) == 3, 0.0, 1 / 1535), rtol=1e-5)
    np.testing.assert_allclose(found[4], np.repeat([0.0, 0.2, 0.0], [700, 5, 831]), rtol=1e-5)
    np.testing.assert_allclose(found[5], np.tile([0.0, 1 / 768], 768), rtol=1e-5)


def test_equal_and_nonfinite_rows_do_not_disturb_others(device: Device) -> None:
    x = np.random.default_rng(1).standard_normal((8, 1536)).astype(np.float32)
    clean = {op: normalised(device, op, x) for op in ("layer_norm", "rms_norm", "softmax_dropout")}
    x[1] = 3e4 + 1 / 3  # all equal
    x[3, 5], x[5, 7], x[6, 9] = np.nan, np.inf, -np.inf
    for op, before in clean.items():
        found = normalised(device, op, x)
        np.testing.assert_array_equal(found[[0, 2, 4, 7]], before[[0, 2, 4, 7]])
        assert np.isnan(found[3]).any() and np.isnan(found[5]).any(), op
        equal = {"layer_norm": 0.0, "rms_norm": 1.0, "softmax_dropout": 1 / 1536}[op]
        np.testing.assert_allclose(found[1], equal, atol=2e-6, err_msg=op)


def test_rows_as_long_as_there_are(device: Device) -> None:
    devices.spare(device, 0)
    if device.target.backend == "metal" and device.target.software:
        pytest.skip("the shim takes half a minute for it")
    check(fused_cases.Case("layer_norm", (3, 262144)), device)


@pytest.mark.parametrize("op", ["rms_norm", "softmax_dropout"])
@pytest.mark.parametrize("rest", [3393, 2])
def test_long_rows_of_which_threads_have_different_numbers(device: Device, op: str, rest: int) -> None:
    """Some threads have one part more than others, and some take four at a time where others take three."""
    if device.target.backend == "metal" and device.target.software:
        pytest.skip("the shim takes half a minute for it")
    check(fused_cases.Case(op, (2, 20 * 4096 + rest)), device)
