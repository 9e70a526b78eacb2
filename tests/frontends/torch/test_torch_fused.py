"""Row operations on torch tensors: gradients against PyTorch's own, operators, compiled and mapped calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="these run on the CPU engine")

from aule.backends import registry  # noqa: E402
from aule.engine.signatures import signatures  # noqa: E402
from aule.frontends.torch import passes  # noqa: E402
from aule.frontends.torch import repeated as torch_repeated  # noqa: E402
from aule.frontends.torch.autograd.row_ops import saved  # noqa: E402
from aule.frontends.torch.compile import row_operators as torch_fused_ops  # noqa: E402
from aule.frontends.torch.devices import host as torch_host  # noqa: E402
from aule.ops.catalogue import CATALOGUE  # noqa: E402
from aule.ops.rope import plan as rope_plan  # noqa: E402

F = torch.nn.functional
ANGLES = torch.linspace(0, 3, 20).reshape(5, 4)
SEED = torch.tensor([5, -7], dtype=torch.int32)


def made(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def rotated(x: Any) -> Any:
    cos, sin = ANGLES.cos().to(x.dtype), ANGLES.sin().to(x.dtype)
    a, b = x[..., :4], x[..., 4:8]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 8:]], -1)


ROWS, HEADS = (3, 4, 10), (2, 3, 5, 10)
CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "rms_norm": (
        lambda x, w: aule.rms_norm(x, w, eps=1e-3),
        lambda x, w: F.rms_norm(x, (10,), w, 1e-3),
        [ROWS, (10,)],
    ),
    "layer_norm": (aule.layer_norm, lambda x, w, b: F.layer_norm(x, (10,), w, b), [ROWS, (10,), (10,)]),
    "residual_rms_norm": (
        aule.residual_rms_norm,
        lambda x, r, w: (F.rms_norm(x + r, (10,), w, 1e-6), x + r),
        [ROWS, ROWS, (10,)],
    ),
    "residual_layer_norm": (
        aule.residual_layer_norm,
        lambda x, r, w, b: (F.layer_norm(x + r, (10,), w, b), x + r),
        [ROWS, ROWS, (10,), (10,)],
    ),
    "swiglu": (aule.swiglu, lambda g, u: F.silu(g) * u, [ROWS, ROWS]),
    "packed swiglu": (aule.swiglu, lambda x: F.silu(x[..., :5]) * x[..., 5:], [ROWS]),
    "geglu": (aule.geglu, lambda g, u: F.gelu(g) * u, [ROWS, ROWS]),
    "geglu tanh": (
        lambda g, u: aule.geglu(g, u, approximate="tanh"),
        lambda g, u: F.gelu(g, approximate="tanh") * u,
        [ROWS, ROWS],
    ),
    "rope": (lambda x: aule.rope(x, ANGLES.cos(), ANGLES.sin()), rotated, [HEADS]),
    "rms_norm_rope": (
        lambda x, w: aule.rms_norm_rope(x, w, ANGLES.cos(), ANGLES.sin()),
        lambda x, w: rotated(F.rms_norm(x, (10,), w, 1e-6)),
        [HEADS, (10,)],
    ),
    "softmax_dropout": (
        lambda x: aule.softmax_dropout(x, causal=True, scale=0.5),
        lambda x: torch.softmax((x * 0.5).masked_fill(~torch.ones(5, 10).tril(5).bool(), -torch.inf), -1),
        [HEADS],
    ),
}


def inputs(name: str, dtype: Any = torch.float32) -> list[Any]:
    return [made(*shape, dtype=dtype, seed=i).requires_grad_() for i, shape in enumerate(CALLS[name][2])]


def flat(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def differentiate(call: Callable[..., Any], tensors: list[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    outs = flat(call(*tensors))
    grads = [made(*out.shape, dtype=out.dtype, seed=9 + i) for i, out in enumerate(outs)]
    return outs, torch.autograd.grad(outs, tensors, grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_pytorch_s(name: str, dtype: Any) -> None:
    ours, theirs, _ = CALLS[name]
    tensors = inputs(name, dtype)
    found = differentiate(ours, tensors)
    want = differentiate(theirs, [x.detach().double().requires_grad_() for x in tensors])
    limit = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    for kind, right in zip(found, want, strict=True):
        for got, value in zip(kind, right, strict=True):
            assert got.dtype == dtype and got.shape == value.shape
            assert (got.double() - value).abs().max() <= limit * value.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in CALLS if name in CATALOGUE and CATALOGUE[name].saved_outputs])
def test_so_they_are_with_what_was_kept_for_them(name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_host, "_SAVE_FROM", 0)
    test_gradients_are_pytorch_s(name, dtype)


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_other_devices_compute_gradients_too(backend: str) -> None:
    x, w = inputs("rms_norm")
    found = torch.autograd.grad(aule.rms_norm(x, w, backend=backend).sum(), (x, w))
    want = torch.autograd.grad(F.rms_norm(x, (10,), w, 1e-6).sum(), (x, w))
    for got, right in zip(found, want, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-5)


def test_only_what_is_wanted() -> None:
    x, w = inputs("rms_norm")
    (found,) = torch.autograd.grad(aule.rms_norm(x.detach(), w).sum(), w)
    torch.testing.assert_close(found, torch.autograd.grad(F.rms_norm(x.detach(), (10,), w, 1e-6).sum(), w)[0])
    _, h = aule.residual_rms_norm(x, made(*ROWS), w)
    torch.testing.assert_close(torch.autograd.grad(h.sum(), x)[0], torch.ones(ROWS))  # y was not used
    empty = aule.rms_norm(torch.zeros(0, 10), w)
    assert (torch.autograd.grad(empty.sum(), w)[0] == 0).all()


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["swiglu", "geglu", "geglu tanh"])
def test_gradients_of_large_gates(name: str, dtype: Any, backend: str) -> None:
    """They are those of a step: 0 on the left and 1 on the right, as far as numbers reach."""
    options = {"approximate": "tanh"} if name.endswith("tanh") else {}
    sizes = torch.tensor([50.0, 1e4, 1e7, 1e13, 1e20, 3e38], dtype=dtype)
    gate = torch.cat([-sizes, sizes]).requires_grad_()
    if name == "swiglu":
        gate = (2.0 * gate).detach()[[*range(1, 5), *range(7, 11)]].requires_grad_()  # e**-100 is a number
    up = torch.full_like(gate, 0.5)
    y = getattr(aule, name.split()[0])(gate, up, backend=backend, **options)
    (found,) = torch.autograd.grad(y.sum(), gate)
    assert torch.equal(found, torch.where(gate > 0, 0.5, 0.0).to(dtype))
    assert torch.equal(y, torch.where(gate > 0, 0.5 * gate, 0.0).to(dtype))


def test_dropout_draws_from_pytorch_s_generator() -> None:
    x = made(128, 128).requires_grad_()
    torch.manual_seed(3)
    first, second = aule.softmax_dropout(x, dropout_p=0.5), aule.softmax_dropout(x, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(first, aule.softmax_dropout(x, dropout_p=0.5)) and not torch.equal(first, second)
    grad = torch.autograd.grad(first, x, torch.ones_like(x))[0]
    p = torch.softmax(x.double(), -1)
    dp = (first.double() > 0) * 2.0  # the gradient has the forward pass's mask
    torch.testing.assert_close(grad.double(), p * (dp - (p * dp).sum(-1, keepdim=True)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_what_was_dropped_is_seen_in_the_result_or_drawn_again(dtype: Any, causal: bool) -> None:
    spec, options = CATALOGUE["softmax_dropout"], (0.5, causal, 2.0)
    assert spec.gradient is not None
    x, dy = 4 * made(3, 40, 133, dtype=dtype), made(3, 40, 133, dtype=dtype, seed=1)
    x[0, 1, 7] = 1000.0  # some row's only weight, kept or dropped
    y, statistics, weights = passes.compute(spec, (x, None, SEED), options, None, spec.results)
    p = torch.softmax(2.0 * x.double(), -1)
    if causal:
        p = torch.softmax((2.0 * x.double()).masked_fill(~torch.ones(40, 133).tril(93).bool(), -torch.inf), -1)
    dp = dy.double() * 2 * (y > 0)
    right = p * (dp - (p * dp).sum(-1, keepdim=True)) * 2.0
    rounded, drops = p.to(dtype), dp.to(dtype)  # the same in the precision of the arrays
    naive = rounded * (drops - (rounded * drops).sum(-1, keepdim=True)) * 2.0
    allowed = 2e-5 * right.abs().max() if dtype == torch.float32 else 2 * (naive.double() - right).abs().max()
    ways = [(x, y, statistics, None), (x, y, None, None), (x, None, None, None)]
    if dtype == torch.bfloat16:
        ways.append((weights, None, None, weights))  # which are all that it needs
    for first, *given in ways:
        found = passes.compute(spec.gradient, (dy, first, None, SEED, *given), options, None, ("dx",))[0]
        assert (found.double() - right).abs().max() <= allowed


def test_weights_that_are_kept_are_negative_where_they_were_dropped() -> None:
    """Also a row's NaN; and the result is the same as without them."""
    spec, options = CATALOGUE["softmax_dropout"], (0.5, True, 1.0)
    x = made(3, 40, 133, dtype=torch.bfloat16)
    x[1, 2, 3] = torch.nan
    y, _, weights = passes.compute(spec, (x, None, SEED), options, None, ("y", "weights"))
    plain = passes.compute(spec, (x, None, SEED), options, None, ("y",))[0]
    assert torch.equal(y.view(torch.int16), plain.view(torch.int16))
    band = ~torch.ones(40, 133).tril(93).bool()
    p = torch.softmax(x.double().masked_fill(band, -torch.inf), -1)
    torch.testing.assert_close(weights.double().abs(), p, rtol=2**-8, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(weights)[p > 0], (y == 0)[p > 0])


def test_weights_are_kept_of_bf16_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of x and of the result, and of nothing else."""
    asked: list[Any] = []
    compute = passes.compute
    monkeypatch.setattr(passes, "compute", lambda *given: (asked.append(given), compute(*given))[1])
    for dtype, kept in ((torch.bfloat16, "weights"), (torch.float32, "statistics")):
        asked.clear()
        x = made(8, 4096, dtype=dtype).requires_grad_()
        torch.autograd.grad(aule.softmax_dropout(x, dropout_p=0.25, seed=3).sum(), x)
        (_, _, _, _, wanted), (gradient, tensors, *_) = asked
        assert wanted == ("y", kept)
        given = dict(zip((operand.name for operand in gradient.operands), tensors, strict=True))
        named = {name for name, tensor in given.items() if tensor is not None}
        if kept == "weights":
            assert named == {"dy", "x", "seed", "weights"} and given["x"] is given["weights"]
        else:
            assert named == {"dy", "x", "seed", "y", "statistics"}


def test_a_result_is_kept_for_the_gradient_only_where_it_is_of_use() -> None:
    spec, x = CATALOGUE["softmax_dropout"], made(4, 8)
    numbers = made(2, 4)
    found = saved(spec, (x, None, SEED), (x, numbers), ("statistics",))
    assert found[-3] is x and found[-2] is numbers and found[-1] is None
    assert saved(spec, (x, None, SEED), x)[-3:] == [x, None, None]
    assert saved(spec, (x, None, None), x)[-3:] == [None, None, None]
    assert saved(spec, (x.to("meta"), None, SEED), x)[-3:] == [None, None, None]


def test_statistics_are_kept_for_the_gradient_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    compute = passes.compute
    monkeypatch.setattr(passes, "compute", lambda *given: (asked.append((given[0].name, given[4])), compute(*given))[1])
    x = made(4, 4096).requires_grad_()
    y = aule.layer_norm(x)
    assert isinstance(y, torch.Tensor)
    torch.autograd.grad(y.sum(), x)
    with torch.no_grad():
        aule.layer_norm(x)
    aule.layer_norm(x, backend="numpy")
    aule.layer_norm(x[:3])  # not worth it
    kept = ("y", "statistics")
    assert asked == [
        ("layer_norm", kept),
        ("layer_norm_backward", ("dx",)),
        *[("layer_norm", ("y",))] * 3,
    ]


def forget() -> None:
    """Let all calls be planned anew."""
    signatures.clear()
    torch_repeated.forget()


def test_results_past_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever results lie: those of NumPy seldom begin where a vector may."""
    x, w = made(37, 1100), made(1100, seed=1)
    want = aule.layer_norm(x, w)
    device = registry.find("cpu")
    assert device is not None
    monkeypatch.setattr(device, "target", replace(device.target, cache_bytes=1))
    forget()
    assert torch.equal(aule.layer_norm(x, w), want)
    forget()
    memory = np.zeros(37 * 1100 + 1, np.float32)
    for shift in (0, 1):
        given = memory[shift : 37 * 1100 + shift].reshape(37, 1100)
        given[...] = x.numpy()
        np.testing.assert_array_equal(aule.layer_norm(given, w.numpy()), want.numpy())
    signatures.clear()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_past_the_caches(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, also of gradients and of columns that are not rotated; in place they do not go there."""
    x, weight = made(2, 3, 9, 40).requires_grad_(), made(40, seed=1).requires_grad_()
    cos, sin = aule.precompute_rope_frequencies(9, 32, device="cpu")

    def results() -> list[Any]:
        plain = aule.rope(x, cos, sin, interleaved=interleaved)
        normal = aule.rms_norm_rope(x, weight, cos, sin, interleaved=interleaved)
        first, second = torch.autograd.grad(plain, x, x.detach()), torch.autograd.grad(normal, (x, weight), x.detach())
        return [plain, normal, *first, *second, aule.rope(x.detach().clone(), cos, sin, inplace=True)]

    want = results()
    device = registry.find("cpu")
    assert device is not None
    monkeypatch.setattr(device, "target", replace(device.target, cache_bytes=1))
    forget()
    streamed, config = [], rope_plan.RopeConfig
    monkeypatch.setattr(rope_plan, "RopeConfig", lambda **given: (streamed.append(given["stream"]), config(**given))[1])
    assert all(torch.equal(got, right) for got, right in zip(results(), want, strict=True))
    assert streamed == [True, True, True, True, False]
    forget()


@pytest.mark.parametrize("backend", [None, "numpy"])
def test_rotated_heads_lie_as_they_did(backend: str | None) -> None:
    """As results of PyTorch's own elementwise ops, also of operators; of broadcast heads they are contiguous."""
    cos, sin = ANGLES.cos(), ANGLES.sin()

    def call(x: Any) -> Any:
        return aule.rope(x, cos, sin, backend=backend)

    between = made(2, 5, 3, 10).transpose(1, 2)
    some = made(2, 5, 9, 10)[:, :, 2:5].transpose(1, 2)  # of a projection to q, k and v
    alike = made(1, 3, 5, 10).expand(2, 3, 5, 10)
    plain = made(*HEADS).stride()
    for x, strides in ((between, between.stride()), (some, between.stride()), (alike, plain), (made(*HEADS), plain)):
        assert torch.allclose(call(x), rotated(x), atol=1e-6)
        assert call(x).stride() == strides
    assert torch.compile(call, backend="aot_eager", fullgraph=True)(some).stride() == between.stride()
    torch.library.opcheck(
        torch_fused_ops.operator(CATALOGUE["rope"]), (some, cos, sin, None, False, None, False, backend)
    )


def test_rope_in_place() -> None:
    x = inputs("rope")[0]
    cos, sin = ANGLES.cos(), ANGLES.sin()
    copy = x * 1.0
    found = aule.rope(copy, cos, sin, inplace=True)
    assert found is copy
    want = aule.rope(x, cos, sin)
    assert torch.equal(found, want)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, want)]
    assert torch.equal(*grads)
    with pytest.raises(aule.AuleError, match="expected cos to need no gradient"):
        aule.rope(x, cos.clone().requires_grad_(), sin).sum().backward()


@pytest.mark.parametrize("backend", ["cpu", "numpy"])
@pytest.mark.parametrize("wrong", [2**40, -(2**40), 2**31, -(2**31) - 1, 2**32 + 1, 7, -1])
def test_positions_outside_of_the_table_are_refused(backend: str, wrong: int) -> None:
    """In host memory, on every call; the first of these is repeated with other numbers in the same tensor."""
    x, angles, ids = made(*HEADS), torch.linspace(0, 3, 28).reshape(7, 4), torch.tensor([6, 0, 1, 2, 3])
    for _ in range(3):
        aule.rope(x, angles.cos(), angles.sin(), position_ids=ids, backend=backend)
    ids[3] = wrong
    for array in (lambda t: t, lambda t: t.numpy()):
        arrays = [array(t) for t in (x, angles.cos(), angles.sin())]
        with pytest.raises(aule.AuleError, match=rf"\[rope\] expected position_ids of 0 to 6, .* got {wrong} at \["):
            aule.rope(*arrays, position_ids=array(ids), backend=backend)


@pytest.mark.parametrize("op", ["softmax_dropout", "rms_norm", "layer_norm"])
def test_rows_without_columns(op: str) -> None:
    """As PyTorch: an empty result, and empty gradients."""
    x, weight = torch.zeros(3, 0, requires_grad=True), torch.zeros(0, requires_grad=True)
    leaves = (x,) if op == "softmax_dropout" else (x, weight)
    out = getattr(aule, op)(*leaves)
    assert out.shape == (3, 0)
    assert [g.shape for g in torch.autograd.grad(out.sum(), leaves)] == [leaf.shape for leaf in leaves]


@pytest.mark.parametrize("array", [lambda t: t, lambda t: t.numpy()], ids=["torch", "numpy"])
def test_position_ids_of_16_bits_are_refused_by_name(array: Callable[[Any], Any]) -> None:
    arrays = [array(t) for t in (made(1, 2, 5, 8), ANGLES.cos(), ANGLES.sin())]
    with pytest.raises(aule.InvalidDtypeError, match=r"position_ids of int32 or int64 for indices.* got .*int16"):
        aule.rope(*arrays, position_ids=array(torch.arange(5, dtype=torch.int16)))


def test_refused_tensors_and_tables() -> None:
    x = made(*HEADS)
    with pytest.raises(aule.InvalidShapeError, match=r"expected cos of shape \[positions, 4\] .* got \[0, 4\]"):
        aule.rope(x, ANGLES[:0], ANGLES[:0], position_ids=torch.zeros(5, dtype=torch.int64))
    assert aule.rope(x[:0], ANGLES[:0], ANGLES[:0], position_ids=torch.zeros(5, dtype=torch.int64)).shape == (
        0,
        3,
        5,
        10,
    )
    nested = torch.nested.nested_tensor([made(2, 4), made(3, 4)], layout=torch.strided)
    with pytest.raises(aule.InvalidDtypeError, match=r"\[rms_norm\] expected x as a plain tensor, got a nested one"):
        aule.rms_norm(nested)


# -- operators ---------------------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "layer_norm": lambda: (inputs("layer_norm")[0], None, inputs("layer_norm")[2], 1e-5, None),
    "layer_norm_linear": lambda: (
        *inputs("layer_norm"), made(4, inputs("layer_norm")[0].shape[-1]).requires_grad_(), None, 1e-5, None,
    ),
    "cross_entropy": lambda: (made(2, 3, 19).requires_grad_(), torch.tensor([[1, 2, -100], [4, 5, 18]]), -100, 0.1,
                              "mean", False, None),
    "swiglu": lambda: (inputs("swiglu")[0], None, None),
    "geglu": lambda: (*inputs("geglu"), "tanh", None),
    "rope": lambda: (inputs("rope")[0], ANGLES.cos(), ANGLES.sin(), None, True, None, False, None),
    "rms_norm_rope": lambda: (
        *inputs("rms_norm_rope"), ANGLES.cos(), ANGLES.sin(), torch.zeros(2, 5, dtype=torch.int64), False, None, 1e-6,
        None,
    ),
    "softmax_dropout": lambda: (
        inputs("softmax_dropout")[0], made(5, 10) > 0, SEED, 0.4, False, 1.0, None,
    ),
}  # fmt: skip
"""Of operators that are not checked on the tensors of `CALLS` with default options."""


@pytest.mark.parametrize("name", CATALOGUE)
def test_opcheck(name: str) -> None:
    spec = CATALOGUE[name]
    usual = (option.default for option in spec.options)
    given = ARGUMENTS[name]() if name in ARGUMENTS else (*inputs(name), *usual, None)
    torch.library.opcheck(torch_fused_ops.operator(spec), given)


def test_opcheck_of_a_gradient() -> None:
    x, w = (t.detach() for t in inputs("rms_norm"))
    for wanted in ([True, True], [False, True]):
        torch.library.opcheck(torch.ops.aule.rms_norm_backward.default, (made(*ROWS), x, w, 1e-6, None, wanted))


@pytest.mark.parametrize("name", ["residual_layer_norm", "packed swiglu", "rope", "softmax_dropout"])
def test_compiled_without_a_break(name: str) -> None:
    ours = CALLS[name][0]
    tensors = inputs(name)
    compiled = torch.compile(lambda *given: flat(ours(*given)), backend="aot_eager", fullgraph=True)
    found, want = differentiate(compiled, tensors), differentiate(ours, tensors)
    for kind, right in zip(found, want, strict=True):
        assert all(torch.equal(got, value) for got, value in zip(kind, right, strict=True))


def test_compiled_in_place_and_random() -> None:
    def call(x: Any) -> Any:
        y = x * 2
        aule.rope(y, ANGLES.cos(), ANGLES.sin(), inplace=True)
        return y, aule.softmax_dropout(x, dropout_p=0.5)

    x = inputs("rope")[0].detach()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    (turned_x, first), (_, second) = compiled(x), compiled(x)
    assert torch.equal(turned_x, aule.rope(x * 2, ANGLES.cos(), ANGLES.sin()))
    assert not torch.equal(first, second)


def test_transforms() -> None:
    x, w = (t.detach() for t in inputs("rms_norm"))

    def loss(x: Any, w: Any) -> Any:
        return aule.rms_norm(x, w).square().sum()

    grads = torch.func.grad(loss, argnums=(0, 1))(x, w)
    x.requires_grad_()
    want = torch.autograd.grad(loss(x, w), x)[0]
    torch.testing.assert_close(grads[0], want)
    each = torch.vmap(torch.func.grad(loss), in_dims=(0, None))(x.detach(), w)
    torch.testing.assert_close(each, want)
    assert torch.equal(torch.vmap(aule.rms_norm, in_dims=(1, None), out_dims=1)(x.detach(), w), aule.rms_norm(x, w))


@pytest.mark.parametrize("save_from", [0, 1 << 14])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_outside_of_the_transform_and_of_many(
    name: str, save_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``vjp`` returns is called when the transform is over; ``is_grads_batched`` maps gradients without one."""
    monkeypatch.setattr(torch_host, "_SAVE_FROM", save_from)
    call = CALLS[name][0]
    tensors = inputs(name)
    outs = flat(call(*tensors))
    douts = [torch.stack([made(*out.shape, seed=i), made(*out.shape, seed=i + 1)]) for i, out in enumerate(outs)]
    want = [torch.autograd.grad(outs, tensors, [d[i] for d in douts], retain_graph=True) for i in range(2)]
    found, back = torch.func.vjp(lambda *given: flat(call(*given)), *(x.detach() for x in tensors))
    assert all(map(torch.equal, found, outs))
    many = torch.autograd.grad(outs, tensors, douts, is_grads_batched=True)
    for i in range(2):
        for got in (back(tuple(d[i] for d in douts)), [grad[i] for grad in many]):
            for grad, right in zip(got, want[i], strict=True):
                torch.testing.assert_close(grad, right, rtol=1e-6, atol=1e-6)


def test_the_second_derivative_is_refused() -> None:
    x, w = inputs("rms_norm")
    (grad,) = torch.autograd.grad(aule.rms_norm(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(aule.AuleError, match=r"\[rms_norm\] expected one derivative"):
        torch.autograd.grad(grad.sum(), x)


def test_meta_tensors_and_refusals() -> None:
    assert aule.rms_norm(torch.empty(3, 4, device="meta")).shape == (3, 4)
    with pytest.raises(aule.InvalidDtypeError, match=r"\[swiglu\] expected up to be a torch tensor like gate"):
        aule.swiglu(made(2, 4), [1.0])
    with pytest.raises(aule.InvalidShapeError, match=r"\[rms_norm\] expected weight of shape"):
        aule.rms_norm(made(2, 4), made(5))
