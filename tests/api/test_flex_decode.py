"""Functions of the user and tree masks in decoding and packed batches, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import devices
import numpy as np
import numpy.typing as npt
import pytest

import aule
from aule.errors import AuleError, InvalidArgumentError, InvalidShapeError

torch = pytest.importorskip("torch")
Array = npt.NDArray[Any]
BATCH, HEADS, HEADS_KV, TOKENS, LONGEST, DIM = 3, 6, 2, 4, 90, 32
LENS = np.array([90, 37, 4], np.int32)
SLOPES = np.linspace(0.05, 0.4, HEADS).astype(np.float32)
TABLE = np.random.default_rng(5).standard_normal((HEADS, 2 * LONGEST)).astype(np.float32)
TREE = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], np.bool_)


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - SLOPES[h] * abs(q_idx - kv_idx)


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return np.tanh(score) * 3.0 + TABLE[h, q_idx - kv_idx + LONGEST]


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx < 9


def odd(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx + b + h) % 3 != 1


def arrays(seed: int = 0, tokens: int = TOKENS, dtype: type = np.float32) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((BATCH, HEADS, tokens, DIM)).astype(dtype)
    k, v = (rng.standard_normal((BATCH, HEADS_KV, LONGEST, DIM)).astype(dtype) for _ in range(2))
    return q, k, v


def expected(
    q: Array, k: Array, v: Array, *, score_mod: Any = None, mask_mod: Any = None, tree: Array | None = None
) -> Array:
    """Decoding by its formula, sequence by sequence; causal unless there is a tree."""
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h in np.ndindex(q.shape[:2]):
        length, rows = int(LENS[b]), q.shape[2]
        own_k, own_v = (x[b, h // (HEADS // HEADS_KV), :length].astype(np.float64) for x in (k, v))
        at = np.arange(length - rows, length)[:, None]
        key = np.arange(length)[None]
        s = q[b, h].astype(np.float64) @ own_k.T / np.sqrt(DIM)
        s = s if score_mod is None else score_mod(s, b, h, at, key)
        keep = key <= at
        if tree is not None:
            keep = np.ones((rows, length), np.bool_)
            keep[:, length - rows :] = tree if tree.ndim == 2 else tree[b]
        if mask_mod is not None:
            keep = keep & mask_mod(b, h, at, key)
        s = np.where(keep, s, -np.inf)
        top = s.max(axis=1, keepdims=True)
        p = np.exp(s - np.where(np.isfinite(top), top, 0.0))
        total = p.sum(axis=1, keepdims=True)
        out[b, h] = p @ own_v / np.where(total == 0, 1, total)
    return out


CASES: dict[str, dict[str, Any]] = {
    "score": {"score_mod": relative},
    "mask": {"mask_mod": odd},
    "tree": {"tree": TREE},
    "all": {"score_mod": alibi, "mask_mod": odd, "tree": np.stack([TREE, TREE.T | TREE, np.eye(4, dtype=np.bool_)])},
}


def named(case: dict[str, Any]) -> dict[str, Any]:
    """A case as the keywords of a call."""
    return {{"tree": "tree_mask"}.get(name, name): x for name, x in case.items()}


def pages_of(k: Array, v: Array, page: int = 16) -> tuple[Array, Array, Array]:
    """A pool with the pages of all sequences in mixed order, and their table."""
    count = -(-LONGEST // page)
    padded = [np.zeros((BATCH, HEADS_KV, count * page, DIM), x.dtype) for x in (k, v)]
    for to, x in zip(padded, (k, v), strict=True):
        to[:, :, :LONGEST] = x
    order = np.random.default_rng(1).permutation(BATCH * count).astype(np.int32)
    pools = []
    for x in padded:
        pool = np.zeros((BATCH * count, page, HEADS_KV, DIM), x.dtype)
        pool[order] = x.reshape(BATCH, HEADS_KV, count, page, DIM).transpose(0, 2, 3, 1, 4).reshape(-1, *pool.shape[1:])
        pools.append(pool)
    return pools[0], pools[1], order.reshape(BATCH, count)


def close(found: Any, wanted: Array, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["cpu", "numpy"])
@pytest.mark.parametrize("case", CASES)
def test_contiguous_and_paged_caches_match_the_formula(backend: str, case: str) -> None:
    if backend == "cpu":
        devices.need("cpu")
    q, k, v = arrays()
    wanted = expected(q, k, v, **CASES[case])
    close(aule.decode_attention(q, k, v, context_lens=LENS, backend=backend, **named(CASES[case])), wanted)
    pool_k, pool_v, tables = pages_of(k, v)
    found = aule.flash_attention_paged(q, pool_k, pool_v, tables, LENS, backend=backend, **named(CASES[case]))
    close(found, wanted)


@pytest.mark.parametrize("name", ["cuda", "vulkan", "opencl"])
def test_gpus_match_the_formula(name: str) -> None:
    devices.need(name)
    q, k, v = arrays()
    for case in ("score", "all"):
        wanted = expected(q, k, v, **CASES[case])
        close(aule.decode_attention(q, k, v, context_lens=LENS, backend=name, **named(CASES[case])), wanted)
    pool_k, pool_v, tables = pages_of(*(x.astype(np.float16) for x in (k, v)))
    half = aule.flash_attention_paged(
        q.astype(np.float16), pool_k, pool_v, tables, LENS, backend=name, **named(CASES["all"])
    )
    close(half, expected(*(x.astype(np.float16) for x in (q, k, v)), **CASES["all"]), 2e-3)


@pytest.mark.parametrize("backend", ["cpu", "numpy"])
def test_single_tokens_keep_what_a_function_keeps(backend: str) -> None:
    if backend == "cpu":
        devices.need("cpu")
    q, k, v = arrays(1, 1)
    v[:, :, 1::3] = np.nan  # `odd` keeps such values of some sequences and heads, and drops them of others
    wanted = expected(q, k, v, mask_mod=odd)
    found = aule.decode_attention(q[:, :, 0], k, v, context_lens=LENS, mask_mod=odd, backend=backend)
    for b, h in np.ndindex(BATCH, HEADS):
        if (1 + b + h) % 3 == 1:
            own = np.where(np.isnan(v[b, h // 3]), 0, v[b, h // 3])[None, None]
            close(found[b, h], _row(q, k, own, b, h))
        else:
            assert np.isnan(found[b, h]).all() and np.isnan(wanted[b, h]).all()


def _row(q: Array, k: Array, v: Array, b: int, h: int) -> Array:
    length = int(LENS[b])
    s = k[b, h // 3, :length].astype(np.float64) @ q[b, h, 0] / np.sqrt(DIM)
    p = np.where((np.arange(length) + b + h) % 3 != 1, np.exp(s - s.max()), 0)
    return p @ v[0, 0, :length] / p.sum()


def test_functions_mean_the_same_as_options() -> None:
    devices.need("cpu")
    q, k, v = arrays(2)
    given: dict[str, Any] = {"context_lens": LENS, "backend": "cpu"}
    close(
        aule.decode_attention(q, k, v, mask_mod=window, **given),
        aule.decode_attention(q, k, v, window=9, **given),
    )
    close(
        aule.decode_attention(q, k, v, score_mod=alibi, **given),
        aule.decode_attention(q, k, v, alibi_slopes=SLOPES, **given),
    )
    chain = np.tril(np.ones((TOKENS, TOKENS), np.bool_))
    for sides in (None, 9, (8, None)):
        close(
            aule.decode_attention(q, k, v, tree_mask=chain, window=sides, **given),
            aule.decode_attention(q, k, v, window=sides, **given),
        )


def test_a_cache_of_int8_and_its_kvcache() -> None:
    devices.need("cpu")
    rng = np.random.default_rng(3)
    cache = aule.KVCache(16, HEADS_KV, DIM, quantize="int8", backend="cpu")
    lens = (29, 40)
    seqs = [cache.allocate() for _ in lens]
    for seq, length in zip(seqs, lens, strict=True):
        rows = rng.standard_normal((2, length, HEADS_KV, DIM)).astype(np.float32)
        cache.append(seq, rows[0], rows[1])
    q = rng.standard_normal((2, HEADS, TOKENS, DIM)).astype(np.float32)
    found = cache.attend(q, seqs, tree_mask=TREE, score_mod=alibi)
    same = cache.attend(q, seqs, tree_mask=TREE, alibi_slopes=SLOPES)
    close(found, same)
    plain = cache.attend(q, seqs, alibi_slopes=SLOPES)
    assert np.abs(found - plain).max() > 1e-2


def test_packed_queries_have_rows_of_one_tree() -> None:
    devices.need("cpu")
    q, k, v = arrays(4)
    counts = (3, 1, 4)
    packed = np.concatenate([q[b, :, TOKENS - n :].transpose(1, 0, 2) for b, n in enumerate(counts)])
    offsets = np.cumsum((0, *counts)).astype(np.int32)
    pool_k, pool_v, tables = pages_of(k, v)
    trees = np.stack([TREE, TREE, TREE])
    found = aule.flash_attention_paged(
        packed, pool_k, pool_v, tables, LENS, cu_seqlens_q=offsets, tree_mask=trees, score_mod=relative, backend="cpu"
    )
    for b, n in enumerate(counts):
        own = expected(q[:, :, TOKENS - n :], k, v, tree=TREE[:n, :n], score_mod=relative)[b]
        close(found[offsets[b] : offsets[b + 1]], own.transpose(1, 0, 2))


def test_torch_takes_new_values_without_a_new_kernel() -> None:
    devices.need("cpu")
    q, k, v = (torch.from_numpy(x) for x in arrays(6))
    slopes = torch.from_numpy(SLOPES.copy())
    lens = torch.from_numpy(LENS).to(torch.int64)

    def mod(factor: float) -> Callable[..., Any]:
        return lambda score, b, h, q_idx, kv_idx: score * factor - slopes[h] * (q_idx - kv_idx).abs()

    def wanted(factor: float) -> Array:
        def same(s: Any, b: Any, h: Any, at: Any, key: Any) -> Any:
            return s * factor - slopes.numpy()[h] * np.abs(at - key)

        return expected(*(x.numpy() for x in (q, k, v)), score_mod=same, tree=TREE)

    tree = torch.from_numpy(TREE)
    for factor in (0.5, 1.5):
        close(aule.decode_attention(q, k, v, context_lens=lens, score_mod=mod(factor), tree_mask=tree), wanted(factor))
        slopes *= 2


def _refused(kind: type[AuleError], text: str, **options: Any) -> None:
    q, k, v = arrays()
    with pytest.raises(kind, match=text):
        aule.decode_attention(q, k, v, context_lens=LENS, backend="numpy", **options)


def test_mistakes_are_named() -> None:
    _refused(InvalidShapeError, r"\[decode_attention\] expected tree_mask of shape", tree_mask=TREE[:3, :3])
    _refused(InvalidShapeError, r"with batch = 3 and tokens = 4", tree_mask=np.stack([TREE, TREE]))
    _refused(InvalidArgumentError, r"expected tree_mask as an array of bool", tree_mask=TREE.astype(np.float32))
    _refused(InvalidArgumentError, r"\[decode_attention\] expected mask_mod as a function of 4", mask_mod=alibi)
    _refused(InvalidArgumentError, r"expected mask_mod as a function of 4", mask_mod=alibi, tree_mask=TREE)
    _refused(
        InvalidArgumentError, r"\[decode_attention\] expected a function", mask_mod=lambda b, h, q, k: q if q else k
    )
    q, k, v = (torch.from_numpy(x) for x in arrays())
    slopes = torch.from_numpy(SLOPES).requires_grad_()
    with pytest.raises(AuleError, match="a captured tensor; detach it"):
        aule.decode_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - slopes[h])


# -- packed batches ----------------------------------------------------------------------------------------------------

OFFSETS = np.array([0, 33, 33, 45], np.int32)


def _packed(dtype: type = np.float32) -> list[Array]:
    rng = np.random.default_rng(8)
    heads = (HEADS, HEADS_KV, HEADS_KV)
    return [rng.standard_normal((int(OFFSETS[-1]), n, DIM)).astype(dtype) for n in heads]


def _own(b: int, function: Any) -> Any:
    """A function of a sequence's own call, whose only batch is ``b`` here."""
    return lambda *args: function(*args[:-4], b, *args[-3:])


@pytest.mark.parametrize("backend", ["cpu", "numpy"])
def test_varlen_counts_within_each_sequence(backend: str) -> None:
    if backend == "cpu":
        devices.need("cpu")
    q, k, v = _packed()
    found, lse = aule.flash_attention_varlen(
        q, k, v, OFFSETS, OFFSETS, score_mod=relative, mask_mod=odd, return_lse=True, backend=backend
    )
    for b, (first, end) in enumerate(itertools.pairwise(OFFSETS)):
        if first == end:
            continue
        own = [x[first:end].astype(np.float64).transpose(1, 0, 2)[None] for x in (q, k, v)]
        mask = aule.and_masks(_own(b, odd), lambda b, h, i, j: i >= j)
        block = aule.create_block_mask(mask, None, None, end - first, end - first)
        out, own_lse = aule.flex_attention(
            *own, _own(b, relative), block, enable_gqa=True, return_lse=True, backend="numpy"
        )
        close(found[first:end], out[0].transpose(1, 0, 2))
        close(lse[:, first:end], own_lse[0])


def test_varlen_gradients_match_flex_attention() -> None:
    devices.need("cpu")
    tensors = [torch.from_numpy(x).requires_grad_() for x in _packed(np.float64)]
    table = torch.from_numpy(TABLE)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.tanh(score) * 3.0 + table[h, q_idx - kv_idx + LONGEST]

    offsets = torch.from_numpy(OFFSETS)
    out = aule.flash_attention_varlen(*tensors, offsets, offsets, score_mod=mod, mask_mod=odd)
    dout = torch.from_numpy(np.random.default_rng(9).standard_normal(out.shape))
    found = torch.autograd.grad(out, tensors, dout)
    for b, (first, end) in enumerate(itertools.pairwise(OFFSETS)):
        if first == end:
            continue
        own = [x[first:end].detach().transpose(0, 1)[None].requires_grad_() for x in tensors]
        mask = aule.and_masks(_own(b, odd), lambda b, h, i, j: i >= j)
        block = aule.create_block_mask(mask, None, None, end - first, end - first)
        part = aule.flex_attention(*own, _own(b, mod), block, enable_gqa=True)
        wanted = torch.autograd.grad(part, own, dout[first:end].transpose(0, 1)[None])
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x[first:end], y[0].transpose(0, 1), rtol=1e-9, atol=1e-10)
    table.requires_grad_()
    with pytest.raises(AuleError, match="a captured tensor; detach it"):
        aule.flash_attention_varlen(*tensors, offsets, offsets, score_mod=mod)
