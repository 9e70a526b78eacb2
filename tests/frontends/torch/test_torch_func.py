"""torch.func: vmap folds the mapped axis into the batch; reverse-mode transforms work, others raise a clear error."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="gradients need the CPU engine")

SIZE = 3
QKV = {"q": (2, 4, 5, 8), "k": (2, 2, 6, 8), "v": (2, 2, 6, 12)}
SUBSETS = ["".join(names) for n in (1, 2, 3) for names in itertools.combinations("qkv", n)]


def made(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def agree(shapes: dict[str, tuple[int, ...]], mapped: set[str], **options: Any) -> None:
    """The result, the log-sum-exp and the gradients of everything, mapped and one by one."""
    tensors, dims = {}, []
    for number, (name, shape) in enumerate(shapes.items()):
        dim = number % 2 if name in mapped else None
        tensors[name] = made(*(shape if dim is None else (*shape[:dim], SIZE, *shape[dim:])))
        dims.append(dim)

    def attend(*given: Any) -> Any:
        return aule.flash_attention(**dict(zip(shapes, given, strict=True)), return_lse=True, **options)

    def loss(*given: Any) -> Any:
        return attend(*given)[0].square().sum()

    differentiated = tuple(i for i, name in enumerate(shapes) if name != "alibi_slopes")
    for function in (attend, torch.func.grad(loss, differentiated)):
        found = torch.vmap(function, in_dims=tuple(dims))(*tensors.values())
        for i in range(SIZE):
            one = [x if d is None else x.select(d, i) for x, d in zip(tensors.values(), dims, strict=True)]
            for mine, theirs in zip(found, function(*one), strict=True):
                assert torch.equal(mine[i], theirs)


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("mapped", SUBSETS)
def test_vmap(rank: int, mapped: str) -> None:
    agree({name: shape[4 - rank :] for name, shape in QKV.items()}, set(mapped))


@pytest.mark.parametrize("mapped", [("q",), ("added",), ("q", "added"), ("k", "v", "added")], ids=str)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("bias", (5, 6)),
        ("bias", (4, 1, 6)),
        ("bias", (1, 4, 5, 6)),
        ("bias", (2, 1, 5, 1)),
        ("mask", (2, 4, 5, 6)),
        ("alibi_slopes", (4,)),
        ("alibi_slopes", (2, 4)),
        ("sinks", (4,)),
    ],
    ids=str,
)
def test_vmap_of_further_arrays(name: str, shape: tuple[int, ...], mapped: tuple[str, ...]) -> None:
    agree(QKV | {name: shape}, {name if x == "added" else x for x in mapped}, causal=False, softcap=2.0)


def test_vmap_of_a_batch_of_one() -> None:
    shapes = {name: (1, *shape[1:]) for name, shape in QKV.items()}
    agree(shapes | {"bias": (1, 4, 5, 6), "alibi_slopes": (1, 4)}, {"q"})


def test_vmap_of_vmap_and_of_sdpa() -> None:
    x = made(2, 4, 5, 8)
    expected = aule.flash_attention(*(x.reshape(8, 1, 5, 8),) * 3).reshape(x.shape)
    assert torch.equal(torch.vmap(torch.vmap(aule.flash_attention))(x, x, x), expected)
    mask = made(4, 5, 5)
    found = torch.vmap(aule.scaled_dot_product_attention, in_dims=(0, 0, 0, None))(x, x, x, mask)
    assert torch.equal(found, aule.scaled_dot_product_attention(x, x, x, mask))


def test_vmap_keeps_errors() -> None:
    q, k, v = made(SIZE, *QKV["q"]), made(*QKV["k"]), made(2, 2, 7, 8)
    with pytest.raises(aule.InvalidShapeError, match=r"of equal seq.*shapes \[2, 2, 6, 8\]"):
        torch.vmap(aule.flash_attention, in_dims=(0, None, None))(q, k, v)


def test_reverse_mode() -> None:
    q, k, v = (made(*shape) for shape in QKV.values())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(aule.flash_attention(*leaves).square().sum(), leaves)
    found = torch.func.grad(lambda *x: aule.flash_attention(*x).square().sum(), (0, 1, 2))(q, k, v)
    assert all(map(torch.equal, found, expected))
    out, back = torch.func.vjp(aule.flash_attention, q, k, v)
    assert all(map(torch.equal, back(2 * out), expected))


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_of_a_jacobian(batch: int) -> None:
    """Only the gradient of the output is mapped; what the forward pass left is the same for all rows."""
    q, k, v = (made(batch, *shape[1:]) for shape in QKV.values())
    rows = torch.func.jacrev(lambda q: aule.flash_attention(q, k, v)[0, 0, 2])(q)
    assert rows.shape == (12, *q.shape)
    leaf = q.clone().requires_grad_()
    for i, out in enumerate(aule.flash_attention(leaf, k, v)[0, 0, 2]):
        (one,) = torch.autograd.grad(out, leaf, retain_graph=True)
        assert torch.equal(rows[i], one)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_gradients_of_many(dropout_p: float) -> None:
    """Autograd's ``is_grads_batched``, which maps them outside of any transform."""
    shapes = (*QKV.values(), (4, 5, 6), (4,))
    q, k, v, bias, sinks = leaves = [made(*shape).requires_grad_() for shape in shapes]
    out = aule.flash_attention(q, k, v, bias=bias, sinks=sinks, dropout_p=dropout_p, seed=3)
    douts = made(SIZE, *out.shape)
    found = torch.autograd.grad(out, leaves, douts, is_grads_batched=True, retain_graph=True)
    for i, dout in enumerate(douts):
        want = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(many[i], one) for many, one in zip(found, want, strict=True))


def test_gradients_of_many_packed_are_refused() -> None:
    x, lengths = made(5, 2, 8).requires_grad_(), torch.tensor([0, 2, 5], dtype=torch.int32)
    out = aule.flash_attention_varlen(x, x, x, lengths, lengths)
    with pytest.raises(aule.AuleError, match=r"\[flash_attention_varlen\] expected plain tensors .* got a mapped one"):
        torch.autograd.grad(out, x, made(3, *out.shape), is_grads_batched=True)


def test_compiled_transforms() -> None:
    x = made(2, 4, 5, 8)

    def mapped(x: Any) -> Any:
        return torch.vmap(aule.flash_attention)(x, x, x)

    def gradient(x: Any) -> Any:
        return torch.func.grad(lambda x: aule.flash_attention(x, x, x).square().sum())(x)

    for function in (mapped, gradient):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x))


def test_second_derivatives_and_forward_mode_are_refused() -> None:
    q, k, v = (made(*shape) for shape in QKV.values())

    def loss(q: Any) -> Any:
        return aule.flash_attention(q, k, v).square().sum()

    with pytest.raises(aule.AuleError, match="expected one derivative"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q)
    with pytest.raises(aule.AuleError, match=r"forward mode \(jvp\)"):
        torch.func.jvp(loss, (q,), (q,))
    dual = torch.autograd.forward_ad
    with dual.dual_level():
        with pytest.raises(aule.AuleError, match=r"forward mode \(jvp\)"):
            aule.flash_attention(dual.make_dual(q, q), k, v)
        assert torch.equal(aule.flash_attention(q, k, v), aule.flash_attention(q, k, v))


def test_dropout_is_mapped_call_by_call() -> None:
    q, k, v = made(3, 2, 5, 8), made(3, 2, 6, 8), made(3, 2, 6, 8)

    def drop(q: Any, k: Any, v: Any, seed: int | None = 7) -> Any:
        return aule.flash_attention(q, k, v, causal=False, dropout_p=0.5, seed=seed)

    expected = torch.stack([drop(*one) for one in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.vmap(drop)(q, k, v), expected, rtol=0, atol=0)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return drop(q, k, v).square().sum()

    given = q.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(sum(loss(*one) for one in zip(given, k, v, strict=True)), given)
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(q, k, v), wanted)

    alike = [x[:1].expand(x.shape) for x in (q, k, v)]
    for randomness, same in (("different", False), ("same", True)):
        found = torch.vmap(lambda q, k, v: drop(q, k, v, None), randomness=randomness)(*alike)
        assert torch.equal(found[0], found[1]) == same
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda q, k, v: drop(q, k, v, None))(*alike)


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (2, 2, 0, 8)])
def test_gradient_of_sinks_for_any_number_of_axes_and_no_rows(shape: tuple[int, ...]) -> None:
    q, sinks = made(*shape).requires_grad_(), torch.zeros(shape[-3] if len(shape) > 2 else 1, requires_grad=True)
    found = torch.autograd.grad(aule.flash_attention(q, q, q, sinks=sinks).square().sum(), sinks)[0]
    four = q.detach()[(None,) * (4 - len(shape))]
    scores = (four @ four.mT) * shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.ones_like(scores).tril().bool(), -torch.inf)
    leaf = torch.zeros_like(sinks).requires_grad_()
    weights = torch.cat([scores, leaf[:, None, None].expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]
    want = torch.autograd.grad((weights @ four).square().sum(), leaf)[0]
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
