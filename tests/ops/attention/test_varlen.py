"""Packed batches on every device, forward and backward, and through the public functions."""

from __future__ import annotations

from typing import Any

import devices
import numpy as np
import pytest
import varlen_cases

import aule
from aule.engine.attention import backward_on_host, forward_on_host
from aule.engine.memory import STORED, host_view
from aule.ops.attention.reference import compare
from aule.ops.attention.reference_backward import compare_gradients
from aule.ops.attention.varlen import expect_varlen, expect_varlen_gradients
from aule.runtime.base import Device

pytestmark = pytest.mark.device

CASES = list(varlen_cases.cases())


@pytest.fixture(params=devices.BACKENDS, scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    return devices.need(request.param)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(device: Device, case: varlen_cases.Case) -> None:
    devices.spare(device, CASES.index(case), parts=10, cpu_parts=2)
    problem, operands = varlen_cases.problem_of(varlen_cases.make(case))
    out, lse = forward_on_host(problem, operands, device)
    assert lse is not None
    verdict = compare(problem, out, lse, expect_varlen(problem, operands))
    assert verdict, verdict.message
    dout = np.random.default_rng(1).standard_normal(problem.out_shape).astype(np.float32)
    stored = (dout.view(np.uint32) >> 16).astype(np.uint16) if case.dtype == "bf16" else dout.astype(STORED[case.dtype])
    found = backward_on_host(problem, operands, device, out, lse, host_view(problem.dtype, stored))
    expected = expect_varlen_gradients(problem, operands, stored)
    wrong = compare_gradients(problem, dict(zip(("dq", "dk", "dv"), found, strict=True)), expected)
    assert not wrong, wrong


def by_sequence(given: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """The same, one call of `aule.flash_attention` for each sequence."""
    given = dict(given)
    at_q, at_k = given.pop("cu_seqlens_q"), given.pop("cu_seqlens_k")
    q, k, v = (given.pop(name).swapaxes(0, 1) for name in "qkv")
    parts = []
    for i in range(len(at_q) - 1):
        rows, keys = slice(at_q[i], at_q[i + 1]), slice(at_k[i], at_k[i + 1])
        parts.append(aule.flash_attention(q[:, rows], k[:, keys], v[:, keys], **given, **options, return_lse=True))
    return np.concatenate([out for out, _ in parts], 1).swapaxes(0, 1), np.concatenate([lse for _, lse in parts], 1)


@pytest.mark.parametrize("name", ["numpy", "cpu", "vulkan", "opencl", "webgpu"])
def test_agrees_with_one_call_for_each_sequence(name: str) -> None:
    if name != "numpy":
        devices.need(name)
    given = varlen_cases.make(CASES[1]) | {"softcap": 2.0}
    out, lse = aule.flash_attention_varlen(**given, return_lse=True, backend=name)
    wanted, wanted_lse = by_sequence(given, backend=name)
    assert out.shape == wanted.shape == (247, 4, 32) and lse.shape == wanted_lse.shape == (4, 247)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    target = np.empty_like(out)
    assert aule.flash_attention_varlen(**given, out=target, backend=name) is target and (target == out).all()


def test_float64() -> None:
    devices.need("cpu")
    given = {n: x.astype(np.float64) if n in "qkv" else x for n, x in varlen_cases.make(CASES[0]).items()}
    exact = expect_varlen(*varlen_cases.problem_of(given)).out[0].swapaxes(0, 1)
    np.testing.assert_allclose(aule.flash_attention_varlen(**given, backend="cpu"), exact, rtol=1e-12, atol=1e-12)


def test_a_sequence_is_a_batch_to_dropout() -> None:
    """Sequences of one length, packed, drop the same weights as a batch of them."""
    devices.need("cpu")
    q, k, v = (np.random.default_rng(i).standard_normal((3, 20, 2, 16)).astype(np.float32) for i in range(3))
    at = np.arange(4, dtype=np.int32) * 20
    options = {"dropout_p": 0.4, "seed": 5, "backend": "cpu"}
    packed = aule.flash_attention_varlen(*(x.reshape(60, 2, 16) for x in (q, k, v)), at, at, **options)
    batch = aule.flash_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), **options).swapaxes(1, 2)
    np.testing.assert_allclose(packed.reshape(batch.shape), batch, rtol=1e-5, atol=1e-6)


# -- PyTorch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", "vulkan"])
def test_torch_gradients(name: str) -> None:
    torch = pytest.importorskip("torch")
    devices.need(name)
    given = varlen_cases.make(CASES[4])
    tensors = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    leaves = [tensors[n].requires_grad_() for n in ("q", "k", "v", "sinks")]
    out, lse = aule.flash_attention_varlen(**tensors, return_lse=True, backend=name)
    assert not lse.requires_grad and lse.shape == (4, 247)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    *found, of_sinks = torch.autograd.grad(out, leaves, dout)
    problem, operands = varlen_cases.problem_of(given)
    expected = expect_varlen_gradients(problem, operands, dout.numpy().swapaxes(0, 1)[None])
    swapped = {n: g.numpy().swapaxes(0, 1)[None] for n, g in zip(("dq", "dk", "dv"), found, strict=True)}
    wrong = compare_gradients(problem, swapped, expected)
    assert not wrong, wrong

    exact = expect_varlen(problem, operands)  # the sink's weight times -delta, summed over rows
    delta = (dout.double().numpy().swapaxes(0, 1) * exact.out[0]).sum(-1)
    weight = np.exp(given["sinks"].astype(np.float64)[:, None] - exact.lse[0])
    np.testing.assert_allclose(of_sinks.numpy(), -(weight * delta).sum(1), rtol=1e-4, atol=1e-4)


def test_torch_gradcheck() -> None:
    torch = pytest.importorskip("torch")
    devices.need("cpu")
    at_q, at_k = torch.tensor([0, 4, 4, 9]), torch.tensor([0, 6, 8, 11])  # int64 is converted
    q = torch.randn(9, 4, 5, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(11, 2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def attend(q: Any, k: Any, v: Any) -> Any:
        options = {"causal": True, "dropout_p": 0.2, "seed": 3, "backend": "cpu"}
        return aule.flash_attention_varlen(q, k, v, at_q, at_k, 5, 6, **options)

    assert torch.autograd.gradcheck(attend, (q, k, v))


def test_torch_keeps_its_promises() -> None:
    torch = pytest.importorskip("torch")
    devices.need("cpu")
    at = torch.tensor([0, 3, 8], dtype=torch.int32)
    q = torch.randn(8, 2, 16, requires_grad=True)
    out = aule.flash_attention_varlen(q, q, q, at, at, backend="cpu")
    dout = torch.randn(8, 2, 16)
    grads = [torch.autograd.grad(out, q, x, retain_graph=True)[0] for x in (-dout, torch._neg_view(dout))]
    assert torch.equal(*grads), "what is negated when it is read is a gradient as well"
    with torch.no_grad():
        again = aule.flash_attention_varlen(q, q, q, at, at, backend="cpu", out=torch.empty(8, 2, 16))
        assert torch.equal(again, out)
        q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    with pytest.raises(aule.AuleError, match="out="):
        aule.flash_attention_varlen(q, q, q, at, at, out=torch.empty(8, 2, 16))
    with pytest.raises(aule.InvalidDtypeError, match=r"cu_seqlens_q as an int32 tensor \[batch \+ 1\], got list"):
        aule.flash_attention_varlen(q, q, q, [0, 8], at)
    with pytest.raises(aule.InvalidDtypeError, match="k to be a torch tensor"):
        aule.flash_attention_varlen(q, q.detach().numpy(), q, at, at)


# -- bad input ---------------------------------------------------------------------------------------------------------

Q = np.zeros((8, 2, 16), np.float32)
AT = np.array([0, 3, 8], np.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": Q[0]}, aule.InvalidShapeError, r"q of shape \[rows of all sequences, heads, head_dim\], got \[2, 16\]"),
        ({"cu_seqlens_q": AT.astype(np.float32)}, aule.InvalidDtypeError, "cu_seqlens_q as int32"),
        ({"cu_seqlens_k": AT[None]}, aule.InvalidDtypeError, r"cu_seqlens_k as .* got int32 \[1, 3\]"),
        ({"cu_seqlens_q": AT[:0]}, aule.InvalidDtypeError, "cu_seqlens_q as int32"),
        ({"cu_seqlens_q": AT[[0, 2]]}, aule.InvalidShapeError, "as many sequences of keys as of queries, got 1"),
        ({"cu_seqlens_q": [0, 3, 7]}, aule.InvalidShapeError, "cu_seqlens_q to rise from 0 to 8"),
        ({"cu_seqlens_k": [1, 3, 8]}, aule.InvalidShapeError, "cu_seqlens_k to rise from 0 to 8"),
        ({"cu_seqlens_k": [0, 9, 8]}, aule.InvalidShapeError, "cu_seqlens_k to rise from 0 to 8"),
        ({"max_seqlen_q": 4}, aule.InvalidArgumentError, "max_seqlen_q of at least 5, the longest sequence, got 4"),
        ({"max_seqlen_k": -1}, aule.InvalidArgumentError, "max_seqlen_k as an int >= 0 or None, got -1"),
        ({"max_seqlen_k": 2.0}, aule.InvalidArgumentError, "max_seqlen_k as an int"),
        ({"mask": np.ones((8, 8), bool)}, aule.InvalidArgumentError, "expected no mask, got one"),
        ({"bias": np.ones((8, 8), np.float32)}, aule.InvalidArgumentError, "expected no bias, got one"),
        ({"v": Q[:7]}, aule.InvalidShapeError, "k and v of equal seq"),
        ({"alibi_slopes": np.ones(3, np.float32)}, aule.InvalidShapeError, r"alibi_slopes as float32 \[heads_q\]"),
        ({"dropout_p": 2.0}, aule.InvalidArgumentError, "dropout_p in"),
        ({"out": np.zeros((8, 2, 15), np.float32)}, aule.InvalidShapeError, "out of shape"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: Any, message: str) -> None:
    given = {"q": Q, "k": Q, "v": Q, "cu_seqlens_q": AT, "cu_seqlens_k": AT} | changes
    with pytest.raises(error, match=message):
        aule.flash_attention_varlen(**given, backend="numpy")


def test_longest_lengths_may_be_more_than_there_are() -> None:
    given = varlen_cases.make(CASES[1])
    plain = aule.flash_attention_varlen(**given, backend="numpy")
    assert (aule.flash_attention_varlen(**given, max_seqlen_q=999, max_seqlen_k=999, backend="numpy") == plain).all()
