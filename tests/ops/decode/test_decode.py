"""Decoding on every device, and through the public functions."""

from __future__ import annotations

from typing import Any

import decode_cases
import devices
import numpy as np
import pytest

import aule
from aule.engine.decode import decode_on_host
from aule.ops.attention.reference import compare
from aule.ops.decode.plan.decode import decode_views, plan_decode
from aule.ops.decode.sequences import expect_decode
from aule.runtime.base import Device

pytestmark = pytest.mark.device

CASES = list(decode_cases.cases())


@pytest.fixture(params=devices.BACKENDS, scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    return devices.need(request.param)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(device: Device, case: decode_cases.Case) -> None:
    devices.spare(device, CASES.index(case), parts=10, cpu_parts=2)
    problem, operands = decode_cases.problem_of(case, decode_cases.make(case))
    out, lse = decode_on_host("decode_attention", problem, operands, device)
    judged, expected = expect_decode(problem, operands)
    verdict = compare(judged, out, lse, expected)
    assert verdict, verdict.message


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numpy(case: decode_cases.Case) -> None:
    given = decode_cases.make(case)
    problem, operands = decode_cases.problem_of(case, given)
    out, lse = call(given, backend="numpy")
    assert out.shape == operands.out_shape and lse.shape == operands.lse_shape
    judged, expected = expect_decode(problem, operands)
    lifted = operands.lifted(out)
    verdict = compare(judged, np.ascontiguousarray(lifted), lse, expected)
    assert verdict, verdict.message


def call(given: dict[str, Any], **options: Any) -> Any:
    given = dict(given)
    q, k, v = (given.pop(name) for name in "qkv")
    if "block_tables" in given:
        return aule.flash_attention_paged(q, k, v, **given, return_lse=True, **options)
    return aule.decode_attention(q, k, v, **given, return_lse=True, **options)


@pytest.mark.parametrize("name", ["cuda", "vulkan"])
def test_parts_are_added_up(name: str) -> None:
    """Several calls in turn, by the last workgroup: each finds what counts its parts as the one before found it; or by
    a second launch that begins before the first has ended."""
    device = devices.need(name)
    case = next(case for case in CASES if case.id == "parts")
    given = decode_cases.make(case)
    for lens in ((2100, 700), (1, 0), (900, 650)):
        given["context_lens"] = np.array(lens, np.int32)
        problem, operands = decode_cases.problem_of(case, given)
        views = decode_views(operands, operands.q)
        assert len(plan_decode(problem, views, device.target).steps) == (2 if device.target.overlap else 1)
        out, lse = decode_on_host("flash_attention_paged", problem, operands, device)
        judged, expected = expect_decode(problem, operands)
        verdict = compare(judged, out, lse, expected)
        assert verdict, verdict.message


@pytest.mark.parametrize("name", ["vulkan", "opencl"])
def test_public_functions(name: str) -> None:
    """The forms of q, an ``out``, and torch tensors, each through a device; the kernels are those of the cases."""
    torch = pytest.importorskip("torch")
    devices.need(name)
    for case in (CASES[0], CASES[5]):
        given = decode_cases.make(case)
        out, lse = call(given, backend=name)
        wanted, wanted_lse = call(given, backend="numpy")
        np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=2e-6)
        np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5, atol=1e-5)
        target = np.empty_like(out)
        assert call(given, backend=name, out=target)[0] is target and (target == out).all()
        tensors = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
        again, again_lse = call(tensors, backend=name)
        assert (again.numpy() == out).all() and (again_lse.numpy() == lse).all()
