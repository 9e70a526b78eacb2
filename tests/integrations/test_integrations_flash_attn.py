"""flash-attn's functions against PyTorch's attention, with gradients."""

from __future__ import annotations

from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="gradients need the CPU engine")

import aule.integrations.flash_attn as flash_attn  # noqa: E402


def reference(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Attention on ``[batch, seq, heads, head_dim]`` in float64, written out as flash-attn documents it."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seq_q, seq_kv = q.shape[2], k.shape[2]
    scale = options.get("softmax_scale") or q.shape[-1] ** -0.5
    scores = q @ k.mT * scale
    softcap = options.get("softcap", 0.0)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    away = torch.arange(seq_kv)[None] - (torch.arange(seq_q)[:, None] + seq_kv - seq_q)
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        slopes = slopes.double().expand(q.shape[0], -1)[:, :, None, None]
        scores = scores - slopes * away.abs()
    left, right = options.get("window_size", (-1, -1))
    kept = torch.ones(seq_q, seq_kv, dtype=torch.bool)
    if options.get("causal"):
        kept &= away <= 0
    if left >= 0:
        kept &= away >= -left
    if right >= 0:
        kept &= away <= right
    weights = torch.ops.aten._safe_softmax(scores.masked_fill(~kept, -torch.inf), -1)
    return (weights @ v).transpose(1, 2)


def agree(function: Any, expect: Any, *inputs: Any) -> None:
    ours = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    out, expected = function(*ours), expect(*theirs)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = zip(torch.autograd.grad(out, ours, dout), torch.autograd.grad(expected, theirs, dout.double()), strict=True)
    for mine, right in grads:
        torch.testing.assert_close(mine.double(), right, rtol=2e-5, atol=2e-5)
    with torch.no_grad():
        again = function(*inputs)
    assert again.is_contiguous()
    torch.testing.assert_close(again.double(), expected.detach(), rtol=1e-5, atol=1e-5)


def tensors(*shapes: tuple[int, ...]) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "softmax_scale": 0.5},
    {"window_size": (2, 1)},
    {"causal": True, "window_size": (2, 3)},
    {"causal": True, "window_size": [3, -1]},
    {"window_size": torch.tensor([2, 1])},
    {"softcap": 5.0, "causal": True},
    {"alibi_slopes": SLOPES},
    {"alibi_slopes": torch.stack([SLOPES, SLOPES.flip(0)]), "causal": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(o) or "plain")
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(5, 5), (3, 7), (7, 3)])
def test_func(options: dict[str, Any], seq_q: int, seq_kv: int) -> None:
    inputs = tensors((2, seq_q, 4, 8), (2, seq_kv, 2, 8), (2, seq_kv, 2, 8))
    agree(lambda *x: flash_attn.flash_attn_func(*x, **options), lambda *x: reference(*x, **options), *inputs)


def test_packed_functions() -> None:
    q, kv, qkv = tensors((2, 3, 4, 8), (2, 5, 2, 2, 8), (2, 5, 3, 4, 8))
    agree(
        lambda q, kv: flash_attn.flash_attn_kvpacked_func(q, kv, causal=True),
        lambda q, kv: reference(q, *kv.unbind(2), causal=True),
        q,
        kv,
    )
    agree(
        lambda qkv: flash_attn.flash_attn_qkvpacked_func(qkv, window_size=(1, 1)),
        lambda qkv: reference(*qkv.unbind(2), window_size=(1, 1)),
        qkv,
    )


def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(flash_attn, "flash_attention", lambda q, k, v, **o: seen.update(q=q, k=k, v=v, **o))
    (qkv,) = tensors((2, 5, 3, 4, 8))
    out = flash_attn.flash_attn_qkvpacked_func(qkv)
    storage = qkv.untyped_storage().data_ptr()
    assert all(seen[name].untyped_storage().data_ptr() == storage for name in "qkv")
    assert seen["out"].data_ptr() == out.data_ptr()


@pytest.mark.parametrize("lengths", [([3, 5, 1], [3, 5, 1]), ([2, 0, 4], [5, 3, 0])], ids=str)
@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[7]], ids=lambda o: " ".join(o))
def test_varlen(lengths: tuple[list[int], list[int]], options: dict[str, Any]) -> None:
    at_q, at_k = (torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32) for n in lengths)
    total_q, total_k = sum(lengths[0]) + 2, sum(lengths[1])  # two rows more than the sequences need

    def expect(q: Any, k: Any, v: Any) -> Any:
        parts = zip(q[:-2].split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)
        return torch.cat(
            [*(reference(*(x[None] for x in part), **options)[0] for part in parts), 0.0 * q[-2:].double()]
        )

    def function(q: Any, k: Any, v: Any) -> Any:
        return flash_attn.flash_attn_varlen_func(q, k, v, at_q, at_k, 5, 5, **options)

    agree(function, expect, *tensors((total_q, 4, 8), (total_k, 2, 8), (total_k, 2, 8)))


def test_varlen_without_a_sequence() -> None:
    (rows,) = tensors((2, 4, 8))
    at = torch.tensor([0], dtype=torch.int32)
    assert not flash_attn.flash_attn_varlen_func(rows, rows, rows, at, at, 0, 0).any()


def test_varlen_slopes_of_each_sequence() -> None:
    at = torch.tensor([0, 3, 7], dtype=torch.int32)
    q, k, v = tensors((7, 4, 8), (7, 4, 8), (7, 4, 8))
    slopes = torch.stack([SLOPES, SLOPES.flip(0)])
    out = flash_attn.flash_attn_varlen_func(q, k, v, at, at, 4, 4, alibi_slopes=slopes)
    for i, rows in enumerate((slice(0, 3), slice(3, 7))):
        expected = reference(q[None, rows], k[None, rows], v[None, rows], alibi_slopes=slopes[i])
        torch.testing.assert_close(out[rows].double(), expected[0], rtol=1e-5, atol=1e-5)


def test_varlen_packed_functions() -> None:
    at_q, at_k = torch.tensor([0, 2, 3]), torch.tensor([0, 3, 7])
    q, kv, qkv = tensors((3, 4, 8), (7, 2, 2, 8), (7, 3, 4, 8))
    plain = flash_attn.flash_attn_varlen_func(q, *kv.unbind(1), at_q, at_k, 2, 4, causal=True)
    assert torch.equal(flash_attn.flash_attn_varlen_kvpacked_func(q, kv, at_q, at_k, 2, 4, causal=True), plain)
    plain = flash_attn.flash_attn_varlen_func(*qkv.unbind(1), at_k, at_k, 4, 4, softcap=3.0)
    assert torch.equal(flash_attn.flash_attn_varlen_qkvpacked_func(qkv, at_k, 4, softcap=3.0), plain)


def test_dropout() -> None:
    q, k, v = tensors((2, 33, 4, 8), (2, 45, 2, 8), (2, 45, 2, 8))
    torch.manual_seed(1)
    found = flash_attn.flash_attn_func(q, k, v, 0.3, causal=True)
    torch.manual_seed(1)
    turned = (x.transpose(1, 2) for x in (q, k, v))
    wanted = aule.flash_attention(*turned, dropout_p=0.3, causal=True, backend="cpu")
    assert torch.equal(found, wanted.transpose(1, 2))
    assert not torch.equal(found, flash_attn.flash_attn_func(q, k, v, causal=True))


def test_refusals() -> None:
    q, k, v = tensors((2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8))
    rows, at = q.flatten(0, 1), torch.tensor([0, 6], dtype=torch.int32)
    function, varlen = flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func
    with pytest.raises(aule.InvalidArgumentError, match="expected dropout_p in"):
        function(q, k, v, 1.1)
    with pytest.raises(aule.AuleError, match="never stored"):
        function(q, k, v, return_attn_probs=True)
    with pytest.raises(aule.AuleError, match="no dropout with block_table"):
        varlen(rows, rows[:, None], rows[:, None], at, at, 6, 6, 0.5, block_table=at[None])
    with pytest.raises(aule.InvalidArgumentError, match=r"window_size as \(left, right\)"):
        function(q, k, v, window_size=(1,))
    with pytest.raises(aule.InvalidShapeError, match=r"q of \[batch, seq, heads, head_dim\]"):
        function(q[0], k[0], v[0])
    with pytest.raises(aule.InvalidDtypeError, match="k to be a torch tensor"):
        function(q, k.numpy(), v)
    with pytest.raises(aule.InvalidShapeError, match="third from the end of length 3"):
        flash_attn.flash_attn_qkvpacked_func(q)
    with pytest.raises(aule.InvalidDtypeError, match="cu_seqlens_q as an int32 tensor"):
        varlen(rows, rows, rows, [0, 6], at, 6, 6)
    with pytest.raises(aule.InvalidShapeError, match="rise from 0 to at most 6"):
        varlen(rows, rows, rows, torch.tensor([0, 4, 7]), at, 6, 6)
    with pytest.raises(aule.InvalidShapeError, match="cu_seqlens_q to rise from 0 to 6"):
        varlen(rows, rows, rows, torch.tensor([0, 4, 2, 6]), torch.tensor([0, 1, 2, 6]), 6, 6)
    with pytest.raises(aule.InvalidShapeError, match="as many sequences"):
        varlen(rows, rows, rows, torch.tensor([0, 2, 6]), at, 6, 6)
    with pytest.raises(aule.InvalidShapeError, match="k and v of one length"):
        varlen(rows, rows, rows[:4], at, at, 6, 6)
