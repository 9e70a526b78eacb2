"""`aule.scaled_dot_product_attention` against PyTorch's function, for all of its semantics."""

from __future__ import annotations

import math
from typing import Any

import grid
import ml_dtypes
import pytest

import aule
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.ops.attention.validate import attention_problem
from aule.ops.softmax.dropout import seed_words

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="gradients need the CPU engine")

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-12}
"""Largest error allowed, as a part of the largest number expected; gradients may have twice that. In half precision it
may also be twice the error of the same attention computed naively in that precision."""

sdpa = aule.scaled_dot_product_attention


def reference(q: Any, k: Any, v: Any, attn_mask: Any = None, **options: Any) -> Any:
    """PyTorch's own formula, in float64."""
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.double()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), attn_mask=attn_mask, **options
        )


def naive_attention(q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: bool = False, **_: Any) -> Any:
    """Every step rounded to the precision of q."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = (scores + attn_mask).to(q.dtype)
    return torch.ops.aten._safe_softmax(scores, -1) @ v


def close(found: Any, expected: Any, dtype: Any, factor: float = 1.0, naive: Any = None) -> None:
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    if expected.numel():
        allowed = factor * TOLERANCE[dtype] * max(expected.abs().max().item(), 0.1)
        if naive is not None:
            allowed = max(allowed, 2.0 * (naive.double() - expected).abs().max().item())
        error = (found.double() - expected).abs().max().item()
        assert error <= allowed


def agree(q: Any, k: Any, v: Any, attn_mask: Any = None, **options: Any) -> None:
    """Output, and the gradients of q, k, v and of a mask that wants one."""
    inputs = [q, k, v] if attn_mask is None else [q, k, v, attn_mask]
    wanted = 4 if attn_mask is not None and attn_mask.requires_grad else 3
    dout = None

    def run(function: Any, dtype: Any = None) -> tuple[Any, Any]:
        nonlocal dout
        given = [x.detach().clone() for x in inputs]
        if dtype is not None:
            given = [x if x.dtype == torch.bool else x.to(dtype) for x in given]
        for x in given[:wanted]:
            x.requires_grad_()
        out = function(*given, **options)
        if dout is None:
            dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)
        return out.detach(), torch.autograd.grad(out, given[:wanted], dout.to(out.dtype))

    out, grads = run(sdpa)
    expected, right = run(reference, torch.float64)
    naive, naive_grads = (None, [None] * wanted)
    if q.dtype in (torch.float16, torch.bfloat16):
        naive, naive_grads = run(naive_attention)
    assert out.dtype == q.dtype
    close(out, expected, q.dtype, 1.0, naive)
    for x, mine, theirs, twin in zip(inputs, grads, right, naive_grads, strict=False):
        assert mine.dtype == x.dtype
        close(mine, theirs, q.dtype, 2.0, twin)
    with torch.no_grad():
        close(sdpa(q, k, v, attn_mask, **options), expected, q.dtype, 1.0, naive)


def agree_dropping(q: Any, k: Any, v: Any, dropout_p: float, is_causal: bool = False) -> None:
    """Output and gradients with dropout, where PyTorch would drop other weights: against aule's own float64 reference
    with the weights that the seed says."""
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    given = [x.detach().expand(*lead, *x.shape[-2:]).clone().requires_grad_() for x in (q, k, v)]
    torch.manual_seed(4)
    out = sdpa(*given, dropout_p=dropout_p, is_causal=is_causal)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)
    grads = torch.autograd.grad(out, given, dout)
    assert out.dtype == q.dtype and out.shape == (*lead, q.shape[-2], v.shape[-1])
    torch.manual_seed(4)
    words = seed_words(torch.randint(2**63 - 1, (1,), dtype=torch.int64).item())

    def array(x: Any) -> Any:
        x = x.detach()
        return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()

    arrays = dict(zip("qkv", map(array, given), strict=True)) | {"seed": words}
    views = {name: grid.view_of(x) for name, x in arrays.items()}
    problem, _ = attention_problem(**views, causal=is_causal, causal_align="top-left", dropout_p=dropout_p)
    verdict = compare(problem, array(out), None, expect(problem, **arrays))
    assert verdict, verdict.message
    found = dict(zip(("dq", "dk", "dv"), map(array, grads), strict=True))
    wrong = compare_gradients(problem, found, expect_gradients(problem, array(dout), **arrays))
    assert not wrong, wrong


def tensors(*shapes: tuple[int, ...], dtype: Any = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


# -- PyTorch's own samples ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opinfo_samples(dtype: Any) -> None:
    pytest.importorskip("expecttest", reason="torch.testing._internal imports it")
    from torch.testing._internal.common_methods_invocations import op_db

    (op,) = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]
    counts = {"served": 0, "with dropout": 0, "with a gradient of the mask": 0}
    for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
        q, (k, v), options = sample.input, sample.args, dict(sample.kwargs)
        (agree_dropping if options["dropout_p"] else agree)(q, k, v, **options)
        counts["served"] += 1
        counts["with dropout"] += options["dropout_p"] > 0.0
        counts["with a gradient of the mask"] += "attn_mask" in options
    assert counts == {"served": 25, "with dropout": 12, "with a gradient of the mask": 1}


# -- dropout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.2, 0.9])
def test_dropout(dtype: Any, p: float) -> None:
    agree_dropping(*tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8), dtype=dtype), dropout_p=p)


def test_everything_dropped_is_zero() -> None:
    q, k, v = (x.requires_grad_() for x in tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)))
    out = sdpa(q, k, v, dropout_p=1.0)
    assert not out.any() and not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_dropout_keeps_the_mean() -> None:
    q, k = torch.zeros(1, 8, 64, 8), torch.zeros(1, 8, 512, 8)
    torch.manual_seed(0)
    out = sdpa(q, k, torch.ones(1, 8, 512, 8), dropout_p=0.25)
    assert abs(out.mean().item() - 1.0) < 5 * (0.25 / 0.75 / (8 * 64 * 512)) ** 0.5
    assert (out[..., 0].std() / (0.25 / 0.75 / 512) ** 0.5 - 1).abs() < 0.1


# -- causal ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(5, 5), (3, 7), (7, 3)])
def test_causal_is_aligned_top_left(seq_q: int, seq_kv: int) -> None:
    agree(*tensors((2, 3, seq_q, 8), (2, 3, seq_kv, 8), (2, 3, seq_kv, 8)), is_causal=True)


def test_scale_and_value_dimension() -> None:
    agree(*tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 16)), scale=0.7)
    agree(*tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)), scale=-0.3)
    agree(*tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)), scale=0.0)


# -- masks -------------------------------------------------------------------------------------------------------------

MASKS = [(5, 6), (1, 6), (5, 1), (3, 5, 6), (1, 5, 6), (2, 1, 1, 6), (2, 3, 5, 6), (1, 3, 1, 1)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks_broadcast(shape: tuple[int, ...]) -> None:
    q, k, v = tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8))
    (mask,) = tensors(shape)
    agree(q, k, v, attn_mask=mask)
    agree(q, k, v, attn_mask=mask > -0.3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_float32_mask_with_other_inputs(dtype: Any) -> None:
    (mask,) = tensors((5, 6))
    agree(*tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8), dtype=dtype), attn_mask=mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "-inf"])
def test_fully_masked_rows_are_zero(dtype: Any, kind: str) -> None:
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[1] = False
    q, k, v = tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8), dtype=dtype)
    given = mask if kind == "bool" else torch.zeros(5, 6, dtype=dtype).masked_fill(~mask, -math.inf)
    agree(q, k, v, attn_mask=given)
    assert not sdpa(q, k, v, attn_mask=given)[:, :, 1].any()
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=given)
    assert not theirs[:, :, 1].any()


def test_lowest_number_is_not_minus_infinity() -> None:
    """A row of nothing but the lowest float is averaged, as PyTorch does. Of the output alone."""
    q, k, v = tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8))
    mask = torch.zeros(5, 6)
    mask[1] = torch.finfo(torch.float32).min
    close(sdpa(q, k, v, attn_mask=mask), reference(q, k, v, attn_mask=mask), torch.float32)


# -- ranks, broadcasting, strides --------------------------------------------------------------------------------------

SHAPES = [
    ((5, 8), (6, 8), (6, 8)),
    ((3, 5, 8), (3, 6, 8), (3, 6, 8)),
    ((2, 2, 3, 5, 8), (2, 2, 3, 6, 8), (2, 2, 3, 6, 8)),
    ((2, 1, 2, 3, 5, 8), (2, 1, 2, 3, 6, 8), (2, 1, 2, 3, 6, 8)),
    ((2, 3, 5, 8), (1, 3, 6, 8), (2, 1, 6, 8)),
    ((1, 3, 5, 8), (2, 3, 6, 8), (1, 3, 6, 8)),
    ((1, 3, 5, 8), (1, 3, 6, 8), (2, 3, 6, 8)),
    ((2, 1, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)),
    ((2, 3, 5, 8), (6, 8), (3, 6, 8)),
    ((5, 8), (2, 3, 6, 8), (6, 8)),
    ((2, 3, 5, 8), (2, 1, 6, 8), (2, 1, 6, 8)),
    ((2, 1, 3, 5, 8), (4, 3, 6, 8), (1, 4, 1, 6, 8)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_ranks_and_broadcasting(shapes: Any, is_causal: bool) -> None:
    agree(*tensors(*shapes), is_causal=is_causal)


@pytest.mark.parametrize("shape", [(5, 6), (3, 1, 6), (2, 3, 5, 6), (1, 2, 3, 5, 6), (4, 1, 1, 1, 6)], ids=str)
def test_masks_of_five_axes(shape: tuple[int, ...]) -> None:
    (mask,) = tensors(shape)
    agree(*tensors((4, 2, 3, 5, 8), (4, 2, 3, 6, 8), (4, 2, 3, 6, 8)), attn_mask=mask)


def test_strides_of_all_kinds() -> None:
    qkv = tensors((2, 5, 3, 3, 8))[0]
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    close(sdpa(q, k, v), reference(q, k, v), torch.float32)
    packed = qkv.clone().requires_grad_()
    sdpa(*(x.transpose(1, 2) for x in packed.unbind(2)), is_causal=True).square().sum().backward()
    double = qkv.double().requires_grad_()
    reference(*(x.transpose(1, 2) for x in double.unbind(2)), is_causal=True).square().sum().backward()
    close(packed.grad, double.grad, torch.float32, 2.0)
    backwards = torch.complex(qkv, qkv).conj().imag  # read with its sign turned
    assert backwards.is_neg()
    q, k, v = (x.transpose(1, 2) for x in backwards.unbind(2))
    close(sdpa(q, k, v), reference(q, k, v), torch.float32)


def test_views_are_not_copied() -> None:
    """Broadcast and transposed tensors reach the engine in their own memory."""
    from aule.frontends.torch.sdpa.translate import Arguments, translate

    q, k, v = tensors((2, 5, 4, 8), (1, 6, 2, 8), (6, 2, 8))
    transposed = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(0, 1))
    call = translate(Arguments(*transposed, enable_gqa=True))
    for made, given in zip((call.q, call.k, call.v), (q, k, v), strict=True):
        assert made.data_ptr() == given.data_ptr() and made.dim() == 4
    assert call.k.shape == (2, 2, 6, 8) and call.k.stride(0) == 0


def test_backend_of_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    from aule.frontends.torch import route

    (x,) = tensors((2, 3))
    monkeypatch.delenv("AULE_BACKEND", raising=False)
    assert route.host_backend(x) == "cpu"
    assert route.host_backend(x.to("meta")) is None
    monkeypatch.setenv("AULE_BACKEND", "numpy")
    assert route.host_backend(x) is None
    monkeypatch.delenv("AULE_BACKEND")

    def missing(name: str) -> Any:
        raise aule.BackendUnavailableError(name, "no llvmlite")

    monkeypatch.setattr(route.registry, "devices", missing)
    assert route.host_backend(x) is None


@pytest.mark.parametrize(
    ("heads", "heads_k", "heads_v"), [(6, 2, 2), (6, 1, 1), (12, 4, 6), (6, 1, 3), (6, 3, 1), (4, 4, 2)], ids=str
)
@pytest.mark.parametrize("lead", [(), (2,), (2, 2)], ids=str)
def test_grouped_heads(heads: int, heads_k: int, heads_v: int, lead: tuple[int, ...]) -> None:
    shapes = (*lead, heads, 5, 8), (*lead, heads_k, 6, 8), (*lead, heads_v, 6, 8)
    agree(*tensors(*shapes), enable_gqa=True, is_causal=True)


def test_grouped_heads_and_a_broadcast_batch() -> None:
    agree(*tensors((2, 6, 5, 8), (1, 2, 6, 8), (2, 2, 6, 8)), enable_gqa=True)


# -- nothing -----------------------------------------------------------------------------------------------------------

EMPTY = [
    ((2, 3, 4, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
    ((2, 3, 0, 8), (2, 3, 4, 8), (2, 3, 4, 8)),
    ((0, 3, 4, 8), (0, 3, 4, 8), (0, 3, 4, 8)),
    ((2, 0, 4, 8), (2, 0, 4, 8), (2, 0, 4, 8)),
    ((0, 2, 3, 4, 8), (0, 2, 3, 4, 8), (0, 2, 3, 4, 8)),
    ((2, 3, 4, 0), (2, 3, 5, 0), (2, 3, 5, 8)),
    ((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 0)),
    ((2, 3, 4, 0), (2, 3, 5, 0), (2, 3, 5, 0)),
    ((4, 8), (0, 8), (0, 8)),
]


@pytest.mark.parametrize("shapes", EMPTY, ids=str)
def test_empty_axes(shapes: Any) -> None:
    agree(*tensors(*shapes))


def test_causal_with_no_keys() -> None:
    agree(*tensors(*EMPTY[0]), is_causal=True)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_gradient_of_one_alone(which: str) -> None:
    ours = dict(zip("qkv", tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)), strict=True))
    theirs = {name: x.double() for name, x in ours.items()}
    ours[which].requires_grad_()
    theirs[which].requires_grad_()
    sdpa(*ours.values()).square().sum().backward()
    reference(*theirs.values()).square().sum().backward()
    close(ours[which].grad, theirs[which].grad, torch.float32, 2.0)
    assert [x.grad is None for x in ours.values()].count(False) == 1


def test_gradcheck() -> None:
    inputs = [x.requires_grad_() for x in tensors((1, 2, 3, 8), (1, 2, 4, 8), (1, 2, 4, 8), dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *x: sdpa(*x, is_causal=True), inputs)


@pytest.mark.parametrize("shape", [(5, 6), (1, 6), (2, 1, 1, 6), (2, 3, 5, 6)], ids=str)
@pytest.mark.parametrize("alone", [False, True])
def test_gradient_of_a_mask(shape: tuple[int, ...], alone: bool) -> None:
    *qkv, mask = tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8), shape)
    if alone:
        ours, theirs = mask.clone().requires_grad_(), mask.double().requires_grad_()
        sdpa(*qkv, ours).square().sum().backward()
        reference(*qkv, theirs).square().sum().backward()
        close(ours.grad, theirs.grad, torch.float32, 2.0)
    else:
        agree(*qkv, attn_mask=mask.requires_grad_())


def test_gradient_of_a_mask_of_five_axes() -> None:
    *qkv, mask = tensors((4, 2, 3, 5, 8), (4, 2, 3, 6, 8), (4, 2, 3, 6, 8), (4, 1, 1, 1, 6))
    agree(*qkv, attn_mask=mask.requires_grad_())


def test_gradient_of_a_mask_with_masked_rows() -> None:
    *qkv, mask = tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8), (5, 6))
    mask[1] = -math.inf
    mask[2, 3] = -math.inf
    agree(*qkv, attn_mask=mask.requires_grad_())


# -- autocast, subclasses, transforms ----------------------------------------------------------------------------------


def test_autocast_is_followed() -> None:
    q, k, v, mask = tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8), (5, 6))
    with torch.autocast("cpu", torch.bfloat16):
        out = sdpa(q, k, v, mask)
        mixed = sdpa(q, k.bfloat16(), v)
        double = sdpa(q.double(), k.double(), v.double())
    assert out.dtype == mixed.dtype == torch.bfloat16 and double.dtype == torch.float64
    close(out, reference(*(x.bfloat16() for x in (q, k, v, mask))), torch.bfloat16)


def test_gradients_under_autocast() -> None:
    """They come back in the type of the tensors, and are those of PyTorch's function."""
    inputs = tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8), (5, 6))
    found = []
    for function in (sdpa, torch.nn.functional.scaled_dot_product_attention):
        given = [x.clone().requires_grad_() for x in inputs]
        with torch.autocast("cpu", torch.bfloat16):
            out = function(*given)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        found.append([x.grad for x in given])
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype == torch.float32
        assert (mine - theirs).abs().max() <= 2 * TOLERANCE[torch.bfloat16] * theirs.abs().max()


def test_causal_bias() -> None:
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k, v = tensors((2, 3, 3, 8), (2, 3, 6, 8), (2, 3, 6, 8))
    mask = torch.ones(3, 6, dtype=torch.bool)
    close(sdpa(q, k, v, causal_upper_left(3, 6)), reference(q, k, v, attn_mask=mask.tril()), torch.float32)
    close(sdpa(q, k, v, causal_lower_right(3, 6)), reference(q, k, v, attn_mask=mask.tril(3)), torch.float32)
    with pytest.raises(aule.InvalidShapeError, match="bias of lengths"):
        sdpa(q, k, v, causal_lower_right(4, 6))
    with pytest.raises(aule.InvalidArgumentError, match="either a CausalBias or is_causal"):
        sdpa(q, k, v, causal_lower_right(3, 6), is_causal=True)


def test_what_is_refused_around_a_call() -> None:
    q, k, v = tensors((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8))
    with pytest.raises(aule.AuleError, match="got forward-mode"), torch.autograd.forward_ad.dual_level():
        sdpa(q, k, v)
    with pytest.raises(aule.AuleError, match=r"got torch\.jit\.trace"):
        torch.jit.trace(sdpa, (q, k, v))
    with pytest.raises(aule.DeviceMismatchError, match="meta tensor"):
        sdpa(*(x.to("meta") for x in (q, k, v)))


# -- errors ------------------------------------------------------------------------------------------------------------

Q, K, V = (2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)
ERRORS: list[Any] = [
    (Q, K, V, {"attn_mask": torch.ones(5, 6, dtype=torch.bool), "is_causal": True}, ValueError, "either attn_mask or"),
    (Q, K, V, {"attn_mask": torch.ones(6)}, ValueError, "two axes or more"),
    (Q, K, V, {"attn_mask": torch.ones(())}, ValueError, "two axes or more"),
    (Q, K, V, {"attn_mask": torch.ones(5, 7)}, ValueError, r"broadcasts to \[2, 3, 5, 6\], got \[5, 7\]"),
    (Q, K, V, {"attn_mask": torch.ones(1, 1, 1, 5, 6)}, ValueError, "broadcasts to"),
    ((1, *Q[1:]), (1, *K[1:]), V, {"attn_mask": torch.ones(2, 1, 5, 6)}, ValueError, "broadcasts to"),
    (Q, K, V, {"attn_mask": torch.ones(5, 6, dtype=torch.int32)}, TypeError, "attn_mask of torch.bool"),
    (Q, K, V, {"attn_mask": torch.ones(5, 6, dtype=torch.float64)}, TypeError, "attn_mask of torch.bool"),
    (Q, K, V, {"attn_mask": [[1.0]]}, TypeError, "attn_mask to be a torch tensor"),
    (Q, K, V, {"dropout_p": -0.1}, ValueError, "dropout_p in 0..1"),
    (Q, K, V, {"dropout_p": 1.5}, ValueError, "dropout_p in 0..1"),
    (Q, K, V, {"scale": math.nan}, ValueError, "finite scale"),
    ((8,), K, V, {}, ValueError, r"\[..., seq, head_dim\]"),
    (Q, (2, 3, 6, 4), V, {}, ValueError, "one head_dim"),
    (Q, K, (2, 3, 7, 8), {}, ValueError, "one length"),
    (Q, (2, 2, 6, 8), (2, 2, 6, 8), {}, ValueError, "leading axes that broadcast"),
    (Q, (2, 2, 6, 8), (2, 2, 6, 8), {"enable_gqa": True}, ValueError, "multiple of key's"),
    ((2, 1, 5, 8), K, V, {"enable_gqa": True}, ValueError, "multiple of key's"),
    ((5, 8), (6, 8), (6, 8), {"enable_gqa": True}, ValueError, "with enable_gqa, got two axes"),
    ((1, 1, 2, 577), (1, 1, 2, 577), (1, 1, 2, 8), {}, ValueError, "at most 576, got 577"),
    ((1, 1, 2, 8), (1, 1, 2, 8), (1, 1, 2, 600), {}, ValueError, "at most 576, got 600"),
]


@pytest.mark.parametrize(("q", "k", "v", "options", "kind", "message"), ERRORS)
def test_errors(q: Any, k: Any, v: Any, options: dict[str, Any], kind: Any, message: str) -> None:
    with pytest.raises(kind, match=rf"^\[scaled_dot_product_attention\] expected .*{message}.*; ") as caught:
        sdpa(*tensors(q, k, v), **options)
    assert isinstance(caught.value, aule.AuleError)


def test_errors_of_kinds() -> None:
    q, k, v = tensors(Q, K, V)
    with pytest.raises(aule.InvalidDtypeError, match="of one dtype"):
        sdpa(q, k.half(), v)
    with pytest.raises(aule.InvalidDtypeError, match="of one dtype"):
        sdpa(q.int(), k.int(), v.int())
    with pytest.raises(aule.InvalidDtypeError, match="query to be a torch tensor"):
        sdpa(q.numpy(), k, v)
    with pytest.raises(aule.AuleError, match="dense, strided tensor"):
        sdpa(q.to_sparse(), k, v)
    with pytest.raises(aule.AuleError, match="a nested tensor"):
        sdpa(*(torch.nested.nested_tensor([x[0], x[1]], layout=torch.strided) for x in (q, k, v)))
    with pytest.raises(aule.DeviceMismatchError):
        sdpa(q, k.to("meta"), v)
