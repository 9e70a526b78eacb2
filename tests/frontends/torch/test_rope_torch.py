"""RoPE inside attention through PyTorch: gradients, operators, compiled calls, transforms, packed batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aule
from aule.errors import AuleError, InvalidShapeError

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="gradients need the CPU engine")

DTYPE = torch.float64
"""The CPU engine computes in it, so that results can be compared closely."""


def turn(x: Any, cos: Any, sin: Any) -> Any:
    """Rotated by halves, by PyTorch's own operators."""
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def tables(positions: int, dim: int) -> tuple[Any, Any]:
    cos, sin = aule.precompute_rope_frequencies(positions, dim, dtype=DTYPE)
    return cos, sin


def tensors(seq_q: int = 12, seq_kv: int = 20, batch: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, 4, seq_q, 24), (batch, 2, seq_kv, 24), (batch, 2, seq_kv, 24))
    return [torch.randn(shape, dtype=DTYPE, generator=generator, requires_grad=True) for shape in shapes]


def by_hand(q: Any, k: Any, v: Any, cos: Any, sin: Any) -> Any:
    """Causal attention of rotated rows, the last query at the last key."""
    shift = k.shape[-2] - q.shape[-2]
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(shift)
    q, k = turn(q, cos[shift:], sin[shift:]), turn(k, cos, sin)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def gradients(function: Any, inputs: list[Any]) -> list[Any]:
    out = function(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


def assert_same(got: list[Any], expected: list[Any]) -> None:
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_gradients() -> None:
    cos, sin = tables(20, 16)
    expected = gradients(lambda *x: by_hand(*x, cos, sin), tensors())
    assert_same(gradients(lambda *x: aule.flash_attention(*x, rope=(cos, sin)), tensors()), expected)
    assert_same(gradients(lambda *x: aule.flash_attention_rope(*x, cos, sin), tensors()), expected)


def test_tables_of_transformers_by_batch_and_strided() -> None:
    cos, sin = tables(20, 24)
    expected = gradients(lambda *x: by_hand(*x, cos, sin), tensors())
    both = torch.stack([cos, sin], -1)  # columns two apart
    full = [torch.cat([x, x], -1).expand(2, -1, -1) for x in (cos, sin)]
    for rope in (both.unbind(-1), full):
        assert_same(gradients(lambda *x, rope=rope: aule.flash_attention(*x, rope=rope), tensors()), expected)


def test_tables_have_no_gradient() -> None:
    cos, sin = tables(20, 16)
    with pytest.raises(AuleError, match="rope_sin"):
        aule.flash_attention(*tensors(), rope=(cos, sin.requires_grad_()))


def test_tables_changed_in_place_are_noticed() -> None:
    cos, sin = tables(20, 16)
    out = aule.flash_attention(*tensors(), rope=(cos, sin))
    sin.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_opcheck() -> None:
    from aule.frontends.torch.compile import operators as torch_ops

    cos, sin = tables(20, 16)
    options = torch_ops.AttentionOptions(rope_cos=cos, rope_sin=sin)
    arguments = (*tensors(), *torch_ops._arguments(options))
    results = torch.library.opcheck(torch.ops.aule.attention.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


def test_compiled() -> None:
    cos, sin = tables(20, 16)
    compiled = torch.compile(lambda *x: aule.flash_attention(*x, rope=(cos, sin)), backend="aot_eager", fullgraph=True)
    assert_same(gradients(compiled, tensors()), gradients(lambda *x: by_hand(*x, cos, sin), tensors()))


def test_mapped() -> None:
    """Over examples that share the tables, and over examples that have each their own."""
    cos, sin = tables(20, 16)
    inputs = [x.detach() for x in tensors(batch=3)]
    later = [torch.stack([x, x.roll(1, 0), x.flip(0)]) for x in (cos, sin)]
    got = torch.vmap(lambda q, k, v: aule.flash_attention(q, k, v, rope=(cos, sin)))(*inputs)
    torch.testing.assert_close(got, by_hand(*inputs, cos, sin))
    got = torch.vmap(lambda q, k, v, c, s: aule.flash_attention(q, k, v, rope=(c, s)))(*inputs, *later)
    for i in range(3):
        one = by_hand(*(x[i : i + 1] for x in inputs), later[0][i], later[1][i])
        torch.testing.assert_close(got[i : i + 1], one)


def test_packed_batches() -> None:
    """Positions begin anew in each sequence."""
    cos, sin = tables(20, 16)
    lengths_q, lengths_k = (5, 0, 7), (9, 3, 20)
    at_q, at_k = ([0, *np.cumsum(n).tolist()] for n in (lengths_q, lengths_k))
    generator = torch.Generator().manual_seed(1)
    shapes = ((12, 4, 24), (32, 2, 24), (32, 2, 24))
    packed = [torch.randn(shape, dtype=DTYPE, generator=generator, requires_grad=True) for shape in shapes]

    def together(*x: Any) -> Any:
        offsets = [torch.tensor(at, dtype=torch.int32) for at in (at_q, at_k)]
        return aule.flash_attention_varlen(*x, *offsets, rope=(cos, sin))

    def one_by_one(q: Any, k: Any, v: Any) -> Any:
        parts = []
        for i in range(3):
            rows, keys = slice(*at_q[i : i + 2]), slice(*at_k[i : i + 2])
            one = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
            n = lengths_k[i]
            parts.append(by_hand(*one, cos[:n], sin[:n])[0].transpose(0, 1))
        return torch.cat(parts)

    assert_same(gradients(together, packed), gradients(one_by_one, packed))
    with pytest.raises(InvalidShapeError, match=r"flash_attention_varlen.*at least 20 positions"):
        cos, sin = cos[:19], sin[:19]
        together(*packed)


def test_context() -> None:
    cos, sin = tables(20, 16)
    q, k, v = (x.detach().float() for x in tensors())
    with aule.Aule(backend="cpu") as gpu:
        arrays = [x.float().numpy() for x in (q, k, v, cos, sin)]
        made = [gpu.tensor(x.shape) for x in arrays]
        for tensor, array in zip(made, arrays, strict=True):
            tensor.upload(array)
        out = gpu.tensor(q.shape)
        gpu.attention_gpu(*made[:3], out, causal=True, rope=(made[3], made[4]))
        expected = by_hand(q, k, v, cos.float(), sin.float())
        np.testing.assert_allclose(out.download(), expected.numpy(), atol=1e-5)
