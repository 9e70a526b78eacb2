"""Decoding on the CPU engine: cases of its schedules beyond those of every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import decode_cases
import devices
import numpy as np
import pytest
from decode_cases import Case

import aule
from aule.engine.decode import decode_on_host
from aule.errors import InvalidArgumentError, InvalidShapeError
from aule.ops.attention.reference import compare
from aule.ops.decode.sequences import expect_decode
from aule.runtime.base import Device

pytestmark = pytest.mark.device

MIXED = (300, 45, 0, 1, 2100, 16), (100, 45, 0, 1, 1, 2)
CASES = [
    Case("page-1-d64", (16, 1, 0, 77), heads=(4, 1), dims=(64, 64), page=1),
    Case("page-1-odd-int8", (33, 2), 5, (2, 2), (37, 21), "bf16", "i8", page=1, layout="HND"),
    Case("page-16-whole-rows", (256, 255, 257, 16), heads=(8, 2), dims=(128, 128), dtype="bf16", page=16),
    Case("page-16-d128", (256, 255, 257, 16), heads=(8, 1), dims=(128, 128), dtype="bf16", page=16, shared=2),
    Case("page-16-d80-parts", (3000, 1, 0, 1025), heads=(4, 4), dims=(80, 80), page=16, layout="HND"),
    Case("page-16-fp8", (130, 16, 0), heads=(8, 2), dims=(64, 64), dtype="bf16", cache="e4m3", page=16, layout="HND"),
    Case("page-16-fp8-tokens", (130, 16, 4), 5, (8, 2), (64, 64), "bf16", "e4m3", 16),
    Case("page-256-int8-parts", (2600, 256, 3), heads=(4, 1), dims=(128, 128), cache="i8", page=256),
    Case("page-256-tokens", (512, 300, 6), 5, (8, 2), (128, 128), "f16", page=256, layout="HND"),
    Case("page-48", (100, 47, 48), 2, (4, 1), (40, 40), page=48, options={"window": 60}),
    Case("prompts", (300, 310, 200), 200, (4, 2), (64, 64), "bf16", page=16),
    Case("prompts-f32", (260, 90), 90, (4, 2), (24, 40), page=16, layout="HND", options=decode_cases.EVERYTHING),
    Case("mixed", *MIXED, (4, 2), (64, 64), page=16, options={"sinks": True}),
    Case("mixed-bf16", *MIXED, (4, 1), (64, 64), "bf16", page=16, options={"window": 500, "softcap": 4.0}),
    Case("window-parts", (9000, 4000), 1, (2, 1), (16, 16), page=8, options={"window": 3000, "sinks": True}),
    Case("many-heads", (70, 20), 1, (40, 2), (32, 32), "f16"),
]  # fmt: skip


@pytest.fixture(params=devices.CPUS, scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    return devices.need(request.param)


def check(device: Device, case: Case, given: dict[str, Any]) -> None:
    problem, operands = decode_cases.problem_of(case, given)
    out, lse = decode_on_host("decode_attention", problem, operands, device)
    judged, expected = expect_decode(problem, operands)
    verdict = compare(judged, out, lse, expected)
    assert verdict, verdict.message


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(device: Device, case: Case) -> None:
    devices.spare(device, CASES.index(case))
    check(device, case, decode_cases.make(case))


def test_float64() -> None:
    case = replace(CASES[0], id="f64", dtype="f64", lens=(16, 1, 0, 77, 1500))
    check(devices.need("cpu"), case, decode_cases.make(case))


def test_every_number_of_fp8(device: Device) -> None:
    """One key with each of the 254 numbers in V, subnormal ones too: the result is V, times its scale."""
    codes = np.array([n for n in range(256) if n & 0x7F != 0x7F], np.uint8)
    case = Case("fp8", (1,), heads=(1, 1), dims=(16, len(codes)), cache="e4m3", page=1)
    given = decode_cases.make(case)
    page = int(given["block_tables"][0, 0])
    given["v"].view(np.uint8)[page, 0, 0] = codes
    problem, operands = decode_cases.problem_of(case, given)
    out, _ = decode_on_host("flash_attention_paged", problem, operands, device)
    scale = given["v_scale"][page, 0, 0]
    np.testing.assert_array_equal(out[0, 0, 0], given["v"][page, 0, 0].astype(np.float32) * scale)
    given["v"].view(np.uint8)[page, 0, 0, 3] = 0xFF
    out, _ = decode_on_host("flash_attention_paged", problem, operands, device)
    assert np.isnan(out[0, 0, 0, 3]) and np.isnan(out).sum() == 1


def test_any_strides(device: Device) -> None:
    """A pool whose axes lie in another order, a head dimension that is not consecutive, and a broadcast cache."""
    case = CASES[0]
    given = decode_cases.make(case)
    for name in "kv":
        given[name] = np.asfortranarray(given[name])
    check(device, case, given)
    plain = Case("broadcast", (40, 9), heads=(4, 1), dims=(64, 64))
    given = decode_cases.make(plain)
    given["context_lens"] = np.array([9, 9], np.int32)
    given |= {name: np.broadcast_to(given[name][1:], given[name].shape) for name in "kv"}
    check(device, plain, given)


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def tensors(given: dict[str, Any]) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    kinds = {"bfloat16": (np.uint16, torch.bfloat16), "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn)}

    def tensor(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or x.dtype.name not in kinds:
            return torch.from_numpy(x) if isinstance(x, np.ndarray) else x
        bits, kind = kinds[x.dtype.name]
        return torch.from_numpy(x.view(bits)).view(kind)

    return {name: tensor(x) for name, x in given.items()}


def call(given: dict[str, Any], **options: Any) -> Any:
    arrays = [given[name] for name in ("q", "k", "v", "block_tables", "context_lens")]
    rest = {name: x for name, x in given.items() if name not in ("q", "k", "v", "block_tables", "context_lens")}
    return aule.flash_attention_paged(*arrays, **rest, **options, return_lse=True, backend="cpu")


def test_repeated_calls_on_tensors() -> None:
    """The second call of a signature has other lengths, tables and addresses, and is checked like the first."""
    torch = pytest.importorskip("torch")
    devices.need("cpu")
    case = next(case for case in CASES if case.id == "page-16-fp8")
    made = [decode_cases.make(case, seed) for seed in range(2)]
    made[1]["context_lens"] = np.array([5, 16, 0], np.int32)
    for given in made:
        out, lse = call(tensors(given))
        wanted, wanted_lse = call(given)
        assert (out.view(torch.uint16).numpy() == wanted.view(np.uint16)).all() and (lse.numpy() == wanted_lse).all()
    long = tensors(made[0])
    long |= {name: long[name].long() for name in ("context_lens", "block_tables")}
    assert torch.equal(call(long)[0], call(tensors(made[0]))[0])
    target = torch.empty_like(long["q"])
    assert call(long, out=target)[0] is target and torch.equal(target, call(long)[0])
    over = long["q"].clone()
    assert call(long | {"q": over}, out=over)[0] is over and torch.equal(over, target)
    for name, value, error in (
        ("block_tables", 10**6, InvalidArgumentError),
        ("context_lens", 10**6, InvalidShapeError),
    ):
        wrong = tensors(made[0])
        wrong[name] = wrong[name].clone()
        wrong[name].view(-1)[0] = value
        with pytest.raises(error, match="flash_attention_paged"):
            call(wrong)


def test_flushed_subnormals_do_not_matter() -> None:
    """Small numbers of fp8 are none in fp32, whatever the processor was told about those."""
    torch = pytest.importorskip("torch")
    devices.need("cpu")
    case = next(case for case in CASES if case.id == "page-16-fp8")
    given = decode_cases.make(case)
    for name in "kv":
        given[name].view(np.uint8)[...] &= 0x83  # subnormal numbers alone
    wanted, _ = call(given)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        found, _ = call(given)
    finally:
        torch.set_flush_denormal(False)
    assert wanted.view(np.uint16).any() and (found.view(np.uint16) == wanted.view(np.uint16)).all()
