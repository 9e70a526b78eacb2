"""The kernels for matrix units in MSL, through the shim, which executes the source that Apple's compiler would get on
simdgroup matrices in Apple's layout. Apple's compiler and hardware are not tested."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import devices
import fake_metal
import grid
import ml_dtypes
import msl_shim
import numpy as np
import pytest
import rope_cases

from aule.engine import probe
from aule.engine.attention import backward_on_host, forward_on_host
from aule.engine.memory import host_view
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.ops.attention.validate import Operands, attention_problem
from aule.runtime import metal
from aule.runtime.base import Device
from aule.target import APPLE_LAYOUT, NVIDIA_LAYOUT, FragmentLayout

pytestmark = pytest.mark.device

DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def device() -> Device:
    devices.need("msl-shim")
    return msl_shim.ShimDevice(matrices=True)


def on_matrices(device: Device) -> set[str]:
    """Kernels of a device that multiply matrices."""
    programs = vars(device)["_engine_programs"].values()
    return {p.artifact.entry for p in programs if "simdgroup_multiply_accumulate" in p.artifact.text}


def test_the_layout_is_found_out(device: Device) -> None:
    probe.find_layout(device)
    assert device.target.matrix_layout == APPLE_LAYOUT


@pytest.mark.parametrize(
    "layout",
    [
        NVIDIA_LAYOUT,
        replace(APPLE_LAYOUT, lane_rows=(0, 2, 1, 0, 4)),
        replace(APPLE_LAYOUT, part_rows=(0, 8, 0), part_cols=(1, 0, 8)),
    ],
)
def test_a_layout_that_gives_wrong_products_is_not_used(
    device: Device, layout: FragmentLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = msl_shim.ShimDevice(matrices=True)
    monkeypatch.setattr(probe, "decode", lambda *about: layout)
    probe.find_layout(other)
    assert other.target.matrix_layout is None
    monkeypatch.setattr(probe, "decode", lambda *about: APPLE_LAYOUT)
    probe.find_layout(other)
    assert other.target.matrix_layout is None, "a device is asked once"


def made(dtype: str, *shapes: tuple[int, ...], **options: Any) -> tuple[dict[str, Any], AttentionProblem, Operands]:
    rng = np.random.default_rng(sum(shapes[0]))
    arrays: dict[str, Any] = {
        name: rng.standard_normal(shape).astype(DTYPES[dtype]) for name, shape in zip("qkv", shapes, strict=True)
    }
    if options.pop("mask", False):
        arrays["mask"] = rng.random((shapes[0][2], shapes[1][2])) > 0.3
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    return arrays, *attention_problem(**views, return_lse=True, **options)


def judge(device: Device, arrays: dict[str, Any], problem: AttentionProblem, operands: Operands) -> None:
    """Output and gradients within the package's promise."""
    out, lse = forward_on_host(problem, operands, device, exact_lse=True)
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message
    assert lse is not None
    dtype = DTYPES[problem.dtype]
    dout = np.random.default_rng(7).standard_normal(problem.out_shape).astype(dtype)
    stored = dout.view(np.uint16) if problem.dtype == "bf16" else dout
    found = backward_on_host(problem, operands, device, out, lse, host_view(problem.dtype, stored))
    gradients = dict(zip(("dq", "dk", "dv"), found, strict=True))
    wrong = compare_gradients(problem, gradients, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong
    assert on_matrices(device) >= {
        "flash_attention", "flash_attention_backward_queries", "flash_attention_backward_keys",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "dim", "options"),
    [
        ("f16", 64, {"causal": True}),
        ("f16", 128, {"causal": False}),
        ("bf16", 64, {"causal": False, "mask": True}),
        ("bf16", 128, {"causal": True}),
    ],
)
def test_forward_and_gradients(device: Device, dtype: str, dim: int, options: dict[str, Any]) -> None:
    """Odd lengths, two query heads to a key head."""
    judge(device, *made(dtype, (1, 4, 75, dim), (1, 2, 83, dim), (1, 2, 83, dim), **options))


def test_rope(device: Device) -> None:
    """Rows are rotated where they lie in memory of 16 bits, and gradients back through it."""
    case = rope_cases.Case("bf16", (64, 64), 48, (40, 51), tables="batch")
    inputs = rope_cases.make_inputs(case)
    problem, operands = rope_cases.case_problem(case, inputs)
    judge(device, rope_cases.reference_arrays(inputs, operands), problem, operands)


CASES = [case for case in grid.forward_grid("small") if case.dtype in ("f16", "bf16")]


@pytest.mark.parametrize("case", [CASES[i] for i in (0, 1, 9, 15)], ids=str)
def test_options(device: Device, case: grid.Case) -> None:
    """Masks, bias, ALiBi, softcap, sinks, windows, dropout, strides, in a few combinations."""
    inputs = grid.make_inputs(case, seed=2)
    problem, operands = grid.case_problem(case, inputs)
    out, lse = forward_on_host(problem, operands, device)
    verdict = compare(problem, out, lse, grid.expected(case, inputs))
    assert verdict, verdict.message


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropped_infinities_do_not_leak(device: Device, dtype: str) -> None:
    arrays, problem, _ = made(dtype, *[(1, 1, 70, 64)] * 3, causal=True)
    arrays["v"][:, :, 40, 3], arrays["v"][:, :, 50, 5] = np.inf, np.nan
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, causal=True)
    raw, _ = forward_on_host(problem, operands, device)
    out = np.asarray(raw).view(DTYPES[dtype]).astype(np.float32)[0, 0]
    finite = np.isfinite(out)
    assert finite[:40].all() and (out[40:, 3] == np.inf).all() and np.isnan(out[50:, 5]).all()
    finite[40:, 3] = finite[50:, 5] = True
    assert finite.all()


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The Metal runtime on a stand-in for PyObjC whose GPU is the shim."""
    devices.need("msl-shim")
    gpu = fake_metal.install(monkeypatch)[1]
    gpu.execute = msl_shim.execute
    found = metal.devices()[0]
    yield found
    found.close()


def test_the_metal_runtime_finds_the_layout_and_uses_it(native: Device) -> None:
    assert native.target.matrix_layout is None
    judge(native, *made("f16", (1, 2, 40, 64), (1, 1, 66, 64), (1, 1, 66, 64), causal=True))
    assert native.target.matrix_layout == APPLE_LAYOUT


def test_before_apple7_there_are_none(native: Device) -> None:
    native.target = replace(native.target, matrix_units=())
    arrays, problem, operands = made("f16", *[(1, 1, 20, 64)] * 3, causal=True)
    out, lse = forward_on_host(problem, operands, native)
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message
    assert not on_matrices(native)
