"""`aule.flex_attention`: functions of many kinds against the plain formula in float64, and what is refused."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import devices
import numpy as np
import pytest

import aule
from aule.errors import AuleError

torch = pytest.importorskip("torch")

import flex_cases  # noqa: E402
from flex_cases import BATCH, CASES, HEADS, KEYS, QUERIES, Case, causal  # noqa: E402
from torch.nn.attention import flex_attention as peer  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from aule.frontends import numpy_flex  # noqa: E402
from aule.frontends.torch import attention  # noqa: E402
from aule.frontends.torch.flex import calls, captured, max_scores  # noqa: E402
from aule.ops.scores.functions.program import BoundFunction, Graph  # noqa: E402

DIM = 16
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error by type, of the largest element."""


def inputs(dtype: Any = torch.float32, heads_kv: int = HEADS) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(BATCH, HEADS, QUERIES), (BATCH, heads_kv, KEYS), (BATCH, heads_kv, KEYS)]
    made = [torch.randn(*shape, DIM, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in made]


def plain(q: Any, k: Any, v: Any, case: Case, scale: float = 1 / math.sqrt(DIM)) -> tuple[Any, Any]:
    """The formula in float64: output and log-sum-exp."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = q.double() @ k.transpose(-1, -2) * scale
    b, h, row, column = (torch.arange(n).view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(s.shape))
    score_mod = case.plain or case.score_mod
    if score_mod is not None:
        s = score_mod(s, b, h, row, column)
    mask_mod = case.plain_mask or case.mask_mod
    if mask_mod is not None:
        s = torch.where(mask_mod(b, h, row, column), s, -torch.inf)
    lse = s.logsumexp(-1)
    weights = torch.where(lse[..., None] == -torch.inf, 0.0, torch.exp(s - lse[..., None]))
    return weights @ v, lse


def close(found: Any, expected: Any, dtype: Any) -> None:
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape
    infinite = expected == -torch.inf
    assert torch.equal(found == -torch.inf, infinite)
    error = (found - expected)[~infinite].abs()
    assert error.numel() == 0 or error.max() <= TOLERANCES[dtype] * max(1.0, expected[~infinite].abs().max())


def check(case: Case, dtype: Any = torch.float32, block_mask: Any = None, **options: Any) -> None:
    """Output, log-sum-exp and all gradients."""
    q, k, v = inputs(dtype)
    if case.mask_mod is not None and block_mask is None:
        block_mask = aule.create_block_mask(case.mask_mod, None, None, QUERIES, KEYS)
    out, aux = aule.flex_attention(q, k, v, case.score_mod, block_mask, return_aux=aule.AuxRequest(lse=True), **options)
    expected, lse = plain(q, k, v, case)
    assert out.dtype == dtype
    close(out, expected, dtype)
    close(aux.lse, lse, dtype)
    asked = [q, k, v, *case.captured]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (expected, lse)]
    found, right = (
        torch.autograd.grad((o * weights[0]).sum() + (torch.where(x > -torch.inf, x, 0.0) * weights[1]).sum(), asked)
        for o, x in ((out, aux.lse), (expected, lse))
    )
    for x, grad, wanted in zip(asked, found, right, strict=True):
        assert grad.dtype == x.dtype
        close(grad, wanted, max(x.dtype, dtype, key=TOLERANCES.__getitem__))


@pytest.mark.device
@pytest.mark.parametrize("name", ["cpu", "cuda", "vulkan", "opencl", "webgpu", "msl-shim"])
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_functions_and_gradients(make: Callable[[], Case], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = devices.need(name)
    devices.spare(device, CASES.index(make))
    if name != "cpu":
        monkeypatch.setattr(attention, "gradient_device", lambda *args: device)
    check(make())


@pytest.mark.parametrize(
    ("dtype", "make"),
    [
        (torch.float64, functools.partial(flex_cases.functions, torch.float64)),
        (torch.bfloat16, flex_cases.document_relative),
        (torch.float16, flex_cases.sliding_alibi),
    ],
)
def test_other_types(dtype: Any, make: Callable[[], Case]) -> None:
    devices.need("cpu")
    check(make(), dtype)


@pytest.mark.parametrize(
    ("order", "name"), [((0, 2, 1, 3), "cpu"), ((2, 0, 1, 3), "cpu"), ((1, 0, 2, 3), "cpu"), ((0, 2, 1, 3), "opencl")]
)
def test_the_output_lies_in_memory_as_query_does(
    order: tuple[int, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = devices.need(name)
    if name != "cpu":
        monkeypatch.setattr(attention, "gradient_device", lambda *args: device)
    case = flex_cases.sliding_alibi()
    back = [order.index(i) for i in range(4)]
    x, *rest = inputs()
    given = [x.detach().permute(order).contiguous().permute(back).requires_grad_(), *rest]
    out = aule.flex_attention(*given, case.score_mod)
    assert out.stride() == given[0].stride() != x.stride()
    expected = aule.flex_attention(x, *rest, case.score_mod)
    assert torch.equal(out, expected)
    for found, right in zip(*(torch.autograd.grad(y.sin().sum(), z) for y, z in ((out, given), (expected, [x, *rest]))),
                            strict=True):  # fmt: skip
        close(found, right, torch.float32)


@pytest.mark.parametrize("masked", [False, True])
def test_max_scores(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.need("cpu")
    for module in (max_scores, numpy_flex):
        monkeypatch.setattr(module, "MOST_SCORES" if module is max_scores else "_MOST_SCORES", 5 * KEYS)
    table = np.linspace(-1, 1, HEADS * KEYS, dtype=np.float32).reshape(HEADS, KEYS)
    learnt = torch.from_numpy(table).requires_grad_()
    mask_mod = (lambda b, h, q, k: (q > k + 2) & (h == k % 2)) if masked else None
    mask = mask_mod and aule.create_block_mask(mask_mod, None, None, QUERIES, KEYS)
    q, k, v = inputs(heads_kv=1)
    request = aule.AuxRequest(max_scores=True)
    options: dict[str, Any] = {"scale": 0.5, "enable_gqa": True, "return_aux": request}
    _, aux = aule.flex_attention(q, k, v, lambda s, b, h, q, k: 2 * torch.tanh(s) + learnt[h, k] - b, mask, **options)
    arrays = [x.detach().numpy() for x in (q, k, v)]
    mask = mask_mod and aule.create_block_mask(mask_mod, None, None, QUERIES, KEYS)
    _, of_numpy = aule.flex_attention(
        *arrays, lambda s, b, h, q, k: 2 * np.tanh(s) + table[h, k] - b, mask, backend="numpy", **options
    )
    s = 2 * torch.tanh(q.double() @ k.double().transpose(2, 3) * 0.5) + learnt[:, None].double()
    s = s - torch.arange(BATCH)[:, None, None, None]
    if mask_mod is not None:
        places = [torch.arange(n).view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(s.shape)]
        s = torch.where(mask_mod(*places), s, -torch.inf)
    assert aux.lse is None and not aux.max_scores.requires_grad
    close(aux.max_scores, s.amax(-1), torch.float32)
    close(torch.from_numpy(of_numpy.max_scores), s.amax(-1), torch.float32)


# -- NumPy -------------------------------------------------------------------------------------------------------------

SLOPES = np.array([0.5, 0.25])  # float64, which NumPy makes by default


def numpy_functions() -> dict[str, tuple[Any, Any]]:
    rng = np.random.default_rng(3)
    table, document = (
        rng.standard_normal((HEADS, QUERIES + KEYS)).astype(np.float32),
        np.arange(KEYS, dtype=np.int16) // 9,
    )
    bias, flags = rng.standard_normal((BATCH, HEADS, QUERIES)), np.arange(KEYS) % 5 > 0

    def clipped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (
            np.clip(s, -1, 1)
            + np.where(q > k, np.log1p(0.0) + np.sqrt(abs(q - k) + 1), np.minimum(s, 0.5))
            - np.exp(-s)
        )

    return {
        "alibi of a module's array": (lambda s, b, h, q, k: s - SLOPES[h] * abs(q - k), None),
        "relative, documents": (
            lambda s, b, h, q, k: s + table[h, q - k + KEYS],
            lambda b, h, q, k: np.equal(document[q], document[k]),
        ),
        "softcap, combined masks": (
            lambda s, b, h, q, k: 2 * np.tanh(s / 2),
            aule.or_masks(aule.and_masks(causal, lambda b, h, q, k: flags[k]), lambda b, h, q, k: q == k),
        ),
        "default argument": (
            lambda s, b, h, q, k, table=table: s + table[h, k.astype(np.int64)] * (q > k).astype(float),
            functools.partial(lambda flags, b, h, q, k: flags[k], flags),
        ),
        "chained": (lambda s, b, h, q, k: s * (1 / (1 + np.exp(-bias[b][h][q]))), aule.noop_mask),
        "clipped": (clipped, lambda b, h, q, k: np.logical_or(np.logical_not(q), (q ^ k) % 3 != 0)),
    }


@pytest.mark.parametrize("name", numpy_functions())
def test_numpy_functions(name: str) -> None:
    score_mod, mask_mod = numpy_functions()[name]
    q, k, v = (x.detach().numpy() for x in inputs())
    b, h, row, column = (np.arange(n).reshape([-1 if i == j else 1 for j in range(4)])
                         for i, n in enumerate((BATCH, HEADS, QUERIES, KEYS)))  # fmt: skip
    if name == "chained":
        bias = numpy_functions()["chained"][0].__closure__[0].cell_contents
        s = q.astype(np.float64) @ k.swapaxes(-1, -2) / math.sqrt(DIM) * (1 / (1 + np.exp(-bias[b, h, row])))
    else:
        s = score_mod(q.astype(np.float64) @ k.swapaxes(-1, -2) / math.sqrt(DIM), b, h, row, column)
    block_mask = mask_mod and aule.create_block_mask(mask_mod, None, None, QUERIES, KEYS)
    if mask_mod is not None:
        s = np.where(mask_mod(b, h, row, column), s, -np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.nan_to_num(np.exp(s - s.max(-1, keepdims=True)))
    expected = weights @ v / np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    found, lse = aule.flex_attention(q, k, v, score_mod, block_mask, return_lse=True, backend="numpy")
    assert found.dtype == np.float32 and np.abs(found - expected).max() < 1e-5
    with np.errstate(divide="ignore"):
        assert np.allclose(lse, np.log(np.exp(s).sum(-1)), atol=1e-5)


def test_numpy_checks_the_block_mask() -> None:
    q, k, v = (x.detach().numpy() for x in inputs())
    with pytest.raises(
        AuleError, match=r"expected a block mask for batch 2, 2 heads, 36 queries and 41 keys, got \[1, 1, 8, 8\]"
    ):
        aule.flex_attention(q, k, v, None, aule.create_block_mask(causal, None, None, 8, 8), backend="numpy")
    with pytest.raises(AuleError, match=r"expected block_mask of aule\.create_block_mask, got int; make one"):
        aule.flex_attention(q, k, v, None, 3, backend="numpy")


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_new_values_and_lengths_need_no_new_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    device = devices.need("cpu")
    loaded: list[Any] = []
    load = device.load
    monkeypatch.setattr(device, "load", lambda artifact: loaded.append(artifact) or load(artifact))

    def attend(queries: int, keys: int, factor: float, offset: int, kind: Any) -> Any:
        table = torch.ones(HEADS, keys + 3, dtype=kind, requires_grad=kind != torch.int64)
        shape = (BATCH, HEADS, queries, DIM), (BATCH, HEADS, keys, DIM)
        q, k, v = (torch.ones(shape[min(i, 1)], requires_grad=True) for i in range(3))
        mask = aule.create_block_mask(lambda b, h, q, k: q + offset >= k, None, None, queries, keys)
        aule.flex_attention(q, k, v, lambda s, b, h, q, k: s * factor + table[h, k + offset], mask).sum().backward()
        return len(loaded)

    first = attend(36, 41, 0.5, 3, torch.float32)
    assert first == 0 or first >= 2  # the first call of a process loads a forward and a backward pass
    assert attend(36, 41, 0.25, 2, torch.float32) == first
    assert attend(29, 47, -3.5, 7, torch.float32) == first
    assert attend(36, 41, 0.5, 3, torch.bfloat16) > first  # another type is another kernel


# -- block masks -------------------------------------------------------------------------------------------------------


def document(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q // 9 == k // 9) & (q >= k)


@pytest.mark.parametrize("batch", [None, BATCH])
@pytest.mark.parametrize("size", [128, (16, 8)])
def test_masks_of_pytorch(batch: int | None, size: Any) -> None:
    devices.need("cpu")
    lengths = torch.tensor([30, 41])

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return document(b, h, q, k) & (k < lengths[b if batch else 0])

    made = peer.create_block_mask(mask_mod, batch, None, QUERIES, KEYS, device="cpu", BLOCK_SIZE=size)
    check(Case(None, mask_mod), block_mask=made)


def test_blocks_of_pytorch_decide() -> None:
    """Full blocks are kept whatever the function says, and blocks that are not listed are dropped."""
    devices.need("cpu")
    counts, indices = torch.tensor([[[1, 1, 0]]]), torch.tensor([[[[1, 0, 2], [0, 1, 2], [0, 1, 2]]]])
    full_counts, full_indices = torch.tensor([[[1, 0, 1]]]), torch.tensor([[[[0, 1, 2], [0, 1, 2], [2, 0, 1]]]])
    given = {"BLOCK_SIZE": (12, 16), "mask_mod": causal, "seq_lengths": (QUERIES, KEYS)}
    full = {"full_kv_num_blocks": full_counts.int(), "full_kv_indices": full_indices.int()}
    made = peer.BlockMask.from_kv_blocks(counts.int(), indices.int(), **full, **given)
    kinds = torch.tensor([[2, 1, 0], [1, 0, 0], [0, 0, 2]])

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        kind = kinds[q // 12, k // 16]
        return (kind == 2) | ((kind == 1) & (q >= k))

    check(Case(None, mask_mod), block_mask=made)
    q, k, v = inputs()
    before = aule.flex_attention(q, k, v, None, made)
    made.mask_mod = aule.noop_mask
    assert not torch.equal(aule.flex_attention(q, k, v, None, made), before)
    made.mask_mod = causal
    made.full_kv_num_blocks[:] = 0
    expected = plain(q, k, v, Case(None, lambda b, h, q, k: (kinds[q // 12, k // 16] == 1) & (q >= k)))[0]
    close(aule.flex_attention(q, k, v, None, made), expected, torch.float32)
    made.full_kv_num_blocks = made.full_kv_num_blocks.clone()
    aule.flex_attention(q, k, v, None, made)
    seen = weakref.ref(made.full_kv_num_blocks)
    made.full_kv_num_blocks = full_counts.int()
    assert seen() is not None, "a new tensor could have its id"
    with pytest.raises(RuntimeError, match="Cannot use mask_mod from a sliced BlockMask"):
        aule.flex_attention(q[:, :, :12], k, v, None, made[:, :, 0])


def test_pytorch_and_aule_mix() -> None:
    devices.need("cpu")
    mixed = peer.and_masks(aule.or_masks(document, lambda b, h, q, k: k == 0), peer.or_masks(causal, aule.noop_mask))
    own = aule.create_block_mask(aule.and_masks(mixed, peer.noop_mask), None, HEADS, QUERIES, KEYS)
    check(Case(None, lambda b, h, q, k: document(b, h, q, k) | (k == 0)), block_mask=own)


def test_looking_at_a_mask() -> None:
    mask = aule.create_block_mask(
        lambda b, h, q, k: (q >= k) & ((q - k < 8) | (h == 1)), 1, 2, 20, 21, BLOCK_SIZE=(4, 8)
    )
    theirs = peer.create_block_mask(mask.mask_mod, 1, 2, 20, 21, device="cpu", BLOCK_SIZE=(4, 8))
    dense = mask.to_dense()
    assert np.array_equal(dense > 0, theirs.to_dense().numpy() > 0)
    assert dense[0, 1].tolist() == [[1, 0, 0], [1, 0, 0], [2, 1, 0], [2, 1, 0], [2, 2, 1]]
    assert mask.sparsity() == pytest.approx(100 * (dense == 0).mean())
    assert str(mask).splitlines() == [
        "BlockMask(shape=(1, 2, 20, 21), sparsity=43.3%)",
        "░░",
        "░░",
        "░░░░",
        "░░░░",
        "  ░░░░",
    ]
    assert repr(mask).startswith("BlockMask(shape=(1, 2, 20, 21), block_size=(4, 8), mask_mod=<function ")
    assert mask.to("cpu") is mask


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_keys_of_one_batch_and_shared_heads() -> None:
    devices.need("cpu")
    q, k, v = inputs(heads_kv=1)
    k, v = (x[:1].detach().requires_grad_() for x in (k, v))
    mask = aule.create_block_mask(causal, BATCH, None, QUERIES, KEYS)
    found = aule.flex_attention(q, k, v, None, mask, enable_gqa=True)
    expected = plain(q, k, v, Case(None, causal))[0]
    close(found, expected, torch.float32)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (found, expected)), strict=True):
        close(a, b, torch.float32)


@pytest.mark.parametrize("make", [flex_cases.document_relative, flex_cases.block_sparse_gate, flex_cases.several_loads])
def test_gradients_of_captured_tensors_in_parts(make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of some rows, of some keys and of one head each; sums of diagonals of several blocks."""
    devices.need("cpu")
    case = make()
    made: list[Any] = []
    call = captured._Part.call
    monkeypatch.setattr(captured._Part, "call", lambda part, *args: made.append(part) or call(part, *args))
    monkeypatch.setattr(captured, "KEYS", 24)
    monkeypatch.setattr(captured, "most_scores", lambda q, each: 24 * 16)
    for module in (captured, calls):
        monkeypatch.setattr(module, "PADDING", 8)
    check(case)
    assert len({(p.rows.start, p.keys.start, p.heads.start, p.batch.start) for p in made}) == len(made) == 24


def window(size: int) -> BoundFunction:
    """Keeps ``size`` keys up to the row's own, and of these such as a captured tensor says."""
    g = Graph()
    distance = g.binary("sub", g.input("query"), g.input("key"))
    near = g.binary("and", g.compare("ge", distance, g.literal(0)), g.compare("lt", distance, g.literal(size)))
    flag = g.load(g.array("bool", 1), [g.input("key")])
    return BoundFunction(g.finish([g.binary("and", flag, near)]))


def test_parts_of_long_sequences_take_little_memory() -> None:
    q, k = (torch.empty(1, heads, 131072, 128, device="meta") for heads in (8, 2))
    saved = attention.Saved(q, k, k, q, q[..., 0], q)
    for mask, least, most in ((None, 1.0, 1.0), (window(1000), 1000 / 131072, 0.08)):
        sizes = [
            (p.heads.stop - p.heads.start) * 4 * (p.rows.stop - p.rows.start) * (p.keys.stop - p.keys.start)
            for p in captured._parts(saved, 1 << 26, mask)
        ]
        assert max(sizes) <= 1 << 26 and least <= sum(sizes) / (8 * 131072**2) <= most


@pytest.mark.parametrize(("rows", "keys"), [(70, 90), (90, 70)])
@pytest.mark.parametrize("size", [1, 20, 1000])
def test_parts_hold_all_that_a_mask_keeps(rows: int, keys: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEYS", "ROWS", "PADDING"):
        monkeypatch.setattr(captured, name, 8)
    q, k = (torch.empty(1, 1, n, 16) for n in (rows, keys))
    held = torch.zeros(rows, keys, dtype=torch.bool)
    for part in captured._parts(attention.Saved(q, k, k, q, q[..., 0], q), 64, window(size)):
        assert part.starts.tolist() == [0, 0, part.rows.start, part.keys.start]
        assert not held[part.rows, part.keys].any()
        held[part.rows, part.keys] = True
    apart = torch.arange(rows)[:, None] - torch.arange(keys)
    kept = (apart >= 0) & (apart < size)
    assert not (kept & ~held).any() and held.sum() <= kept.sum() + 8 * 2 * (rows + keys) * 2


def test_captured_tensors_alone_have_gradients() -> None:
    devices.need("cpu")
    case = flex_cases.sliding_alibi()
    (slopes,) = case.captured
    q, k, v = (x.detach() for x in inputs())
    mask = aule.create_block_mask(case.mask_mod, None, None, QUERIES, KEYS)

    def loss() -> Any:
        return aule.flex_attention(q, k, v, case.score_mod, mask).square().sum()

    plain(q, k, v, case)[0].square().sum().backward()
    expected, slopes.grad = slopes.grad, None
    loss().backward()
    close(slopes.grad, expected, torch.float32)
    slopes.grad = None
    checkpoint(loss, use_reentrant=False).backward()
    close(slopes.grad, expected, torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        found = [torch.autograd.grad(loss(), slopes)[0] for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    with torch.no_grad():
        assert not loss().requires_grad
    changed = loss()
    with torch.no_grad():
        slopes.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed.backward()


def test_second_derivatives_are_refused() -> None:
    devices.need("cpu")
    case = flex_cases.sliding_alibi()
    q, k, v = inputs()
    (slopes,) = case.captured
    for wanted in (q, slopes):
        out = aule.flex_attention(q, k, v, case.score_mod)
        (first,) = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
        with pytest.raises(AuleError, match="expected one derivative, got a second"):
            first.sum().backward()


def test_autocast() -> None:
    devices.need("cpu")
    case = flex_cases.sliding_alibi()
    q, k, v = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = aule.flex_attention(q, k, v, case.score_mod)
    assert out.dtype == torch.bfloat16
    close(out, plain(q, k, v, case._replace(mask_mod=None))[0], torch.bfloat16)
    out.sum().backward()
    assert q.grad.dtype == torch.float32
