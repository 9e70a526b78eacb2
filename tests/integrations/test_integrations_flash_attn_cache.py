"""`flash_attn_with_kvcache` against attention on each sequence by itself."""

from __future__ import annotations

from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")

from aule.integrations import flash_attn  # noqa: E402

BATCH, ROOM, HEADS, HEADS_KV, DIM = 3, 12, 4, 2, 8
LENS = torch.tensor([5, 0, 9], dtype=torch.int32)


def tensors(*shapes: tuple[int, ...], dtype: Any = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def turned(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool) -> Any:
    """Rotary embedding of ``[seq, heads, dim]`` as flash-attn's own reference has it."""
    c, s = cos[positions][:, None], sin[positions][:, None]
    half = cos.shape[1]
    result = x.clone()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    a, b = x[..., first], x[..., second]
    result[..., first], result[..., second] = a * c - b * s, b * c + a * s
    return result


def alone(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """One sequence, ``[seq, heads, dim]`` each."""
    given = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = aule.flash_attention(*given, **options, return_lse=True, backend="numpy")
    return out[0].transpose(0, 1), lse[0]


@pytest.mark.parametrize("layout", ["contiguous", "chosen", "paged"])
@pytest.mark.parametrize(
    ("rotary", "interleaved", "options"),
    [
        (0, True, {"causal": True}),
        (8, True, {"causal": True, "softcap": 3.0}),
        (4, False, {"window_size": (4, 0), "softmax_scale": 0.5}),
        (8, False, {}),
    ],
)
def test_append_rotate_attend(layout: str, rotary: int, interleaved: bool, options: dict[str, Any]) -> None:
    rows = 2
    q, k, v = tensors((BATCH, rows, HEADS, DIM), (BATCH, rows, HEADS_KV, DIM), (BATCH, rows, HEADS_KV, DIM))
    old_k, old_v = tensors((BATCH, ROOM, HEADS_KV, DIM), (BATCH, ROOM, HEADS_KV, DIM))
    where: dict[str, Any] = {}
    if layout == "contiguous":
        caches = old_k.clone(), old_v.clone()
    elif layout == "chosen":
        where = {"cache_batch_idx": torch.tensor([4, 0, 3], dtype=torch.int32)}
        caches = tuple(torch.full((5, ROOM, HEADS_KV, DIM), torch.nan) for _ in range(2))
        for cache, old in zip(caches, (old_k, old_v), strict=True):
            cache[where["cache_batch_idx"].long()] = old
    else:
        where = {"block_table": torch.tensor([[7, 2, 5], [0, 1, 9], [8, 3, 6]], dtype=torch.int32)}
        caches = tuple(torch.full((10, 4, HEADS_KV, DIM), torch.nan) for _ in range(2))
        for cache, old in zip(caches, (old_k, old_v), strict=True):
            cache[where["block_table"].long().flatten()] = old.reshape(-1, 4, HEADS_KV, DIM)
    before = [cache.clone() for cache in caches]
    angles: dict[str, Any] = {}
    if rotary:
        (table,) = tensors((ROOM + 2, rotary // 2))
        angles = {"rotary_cos": table.cos(), "rotary_sin": table.sin(), "rotary_interleaved": interleaved}
    given = {"cache_seqlens": LENS, **where, **angles, **options, "return_softmax_lse": True}
    out, lse = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, **given)

    plain = {"causal": False, "softcap": 0.0} | {n: x for n, x in options.items() if n in ("causal", "softcap")}
    plain |= {"scale": options.get("softmax_scale"), "window": options.get("window_size")}
    local = bool(options.get("causal") or "window_size" in options)
    for b, length in enumerate(LENS.tolist()):
        new_k, new_q = k[b], q[b]
        if rotary:
            at = torch.arange(length, length + rows)
            new_k = turned(k[b], table.cos(), table.sin(), at, interleaved)
            new_q = turned(q[b], table.cos(), table.sin(), at if local else at * 0 + length, interleaved)
        keys, values = torch.cat([old_k[b, :length], new_k]), torch.cat([old_v[b, :length], v[b]])
        wanted, wanted_lse = alone(new_q, keys, values, **plain)
        torch.testing.assert_close(out[b], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[b], wanted_lse, rtol=1e-5, atol=1e-5)
        for cache, old, rows_now in zip(caches, before, (keys, values), strict=True):
            if layout == "paged":
                mine = where["block_table"][b].long()
                cache, old = cache[mine].flatten(0, 1), old[mine].flatten(0, 1)
            else:
                row = b if layout == "contiguous" else int(where["cache_batch_idx"][b])
                cache, old = cache[row], old[row]
            torch.testing.assert_close(cache[: length + rows], rows_now, rtol=1e-6, atol=1e-6)
            assert torch.equal(cache[length + rows :], old[length + rows :])


def test_without_new_keys() -> None:
    (q,) = tensors((BATCH, 1, HEADS, DIM))
    k, v = tensors((BATCH, ROOM, HEADS_KV, DIM), (BATCH, ROOM, HEADS_KV, DIM))
    everything = flash_attn.flash_attn_with_kvcache(q, k, v)
    torch.testing.assert_close(everything, flash_attn.flash_attn_func(q, k, v), rtol=1e-5, atol=1e-5)
    some = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=4, num_splits=3)
    torch.testing.assert_close(some, flash_attn.flash_attn_func(q, k[:, :4], v[:, :4]), rtol=1e-5, atol=1e-5)


def test_keys_that_begin_later() -> None:
    (q,) = tensors((BATCH, 2, HEADS, DIM))
    k, v = tensors((BATCH, ROOM, HEADS_KV, DIM), (BATCH, ROOM, HEADS_KV, DIM))
    left = torch.tensor([2, 0, 9], dtype=torch.int32)
    lens = torch.tensor([7, 12, 11], dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, cache_leftpad=left, causal=True)
    for b in range(BATCH):
        mine = slice(int(left[b]), int(lens[b]))
        wanted, _ = alone(q[b], k[b, mine], v[b, mine], causal=True)
        torch.testing.assert_close(out[b], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_pages_with_rows_of_the_table_and_keys_that_begin_later(chosen: bool, left: bool) -> None:
    """As FlashAttention-3's tests have it: ``cache_batch_idx`` chooses rows of the table."""
    q, k, v = tensors((BATCH, 2, HEADS, DIM), (BATCH, 2, HEADS_KV, DIM), (BATCH, 2, HEADS_KV, DIM))
    k_cache, v_cache = tensors((16, 4, HEADS_KV, DIM), (16, 4, HEADS_KV, DIM))
    table = torch.tensor([[7, 2, 5], [0, 1, 14], [8, 3, 6], [10, 11, 12], [9, 13, 4]], dtype=torch.int32)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32) if chosen else torch.arange(BATCH, dtype=torch.int32)
    mine = table[rows.long()]
    given = {"cache_seqlens": LENS, "causal": True, "return_softmax_lse": True}
    if left:
        given["cache_leftpad"] = torch.tensor([2, 0, 9], dtype=torch.int32)
    gathered = [x[mine.long()].flatten(1, 2) for x in (k_cache, v_cache)]
    wanted = flash_attn.flash_attn_with_kvcache(q, *gathered, k, v, **given)
    given |= {"block_table": table, "cache_batch_idx": rows} if chosen else {"block_table": mine}
    found = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **given)
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
    for cache, right in zip((k_cache, v_cache), gathered, strict=True):
        assert torch.equal(cache[mine.long()].flatten(1, 2), right)


@pytest.mark.parametrize("new", [0, 1])
def test_lengths_beyond_the_table_are_refused(new: int) -> None:
    (q,) = tensors((1, 1, HEADS, DIM))
    k_cache, v_cache = tensors((4, 256, HEADS_KV, DIM), (4, 256, HEADS_KV, DIM))
    before, table = k_cache.clone(), torch.zeros(1, 1, dtype=torch.int32)
    given = tensors((1, 1, HEADS_KV, DIM), (1, 1, HEADS_KV, DIM)) if new else [None, None]
    lens = torch.tensor([257 - new], dtype=torch.int32)
    with pytest.raises(aule.AuleError, match="block_table more columns"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, *given, cache_seqlens=lens, block_table=table)
    assert torch.equal(k_cache, before)
    at_q, at_k = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 257], dtype=torch.int32)
    with pytest.raises(aule.InvalidShapeError, match=r"context_lens from 0 to 256"):
        flash_attn.flash_attn_varlen_func(q[0], k_cache, v_cache, at_q, at_k, 1, 257, block_table=table)


def test_page_numbers_that_overflow_stay_wrong() -> None:
    (q,) = tensors((1, 1, HEADS, DIM))
    k, v = tensors((2, 512, HEADS_KV, DIM), (2, 512, HEADS_KV, DIM))
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    for given in ({}, {"cache_leftpad": torch.tensor([1])}):
        with pytest.raises(aule.InvalidArgumentError, match="block_tables of pages"):
            flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=9, block_table=table, **given)


def test_the_backward_pass_over_pages_is_refused() -> None:
    at_q, at_k = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([0, 7, 12], dtype=torch.int32)
    q, k, v = tensors((4, HEADS, DIM), (5, 4, HEADS_KV, DIM), (5, 4, HEADS_KV, DIM))
    call = at_q, at_k, 3, 7
    table = torch.tensor([[4, 1], [0, 2]], dtype=torch.int32)
    wanted = flash_attn.flash_attn_varlen_func(q, k, v, *call, block_table=table)
    for name in "qkv":
        given = {"q": q, "k": k, "v": v}
        given[name] = given[name].clone().requires_grad_()
        out = flash_attn.flash_attn_varlen_func(*given.values(), *call, block_table=table)
        assert torch.equal(out, wanted) and out.requires_grad
        with pytest.raises(aule.AuleError, match=r"\[flash_attn_varlen_func\] expected tensors that need no gradient"):
            out.sum().backward()
        with torch.no_grad():
            assert not flash_attn.flash_attn_varlen_func(*given.values(), *call, block_table=table).requires_grad


def test_pages_larger_than_ours() -> None:
    (q,) = tensors((2, 1, HEADS, DIM))
    k, v = tensors((3, 512, HEADS_KV, DIM), (3, 512, HEADS_KV, DIM))
    table = torch.tensor([[2], [0]], dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=500, block_table=table)
    wanted = flash_attn.flash_attn_func(q, k[[2, 0], :500], v[[2, 0], :500])
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_new_keys_need_room() -> None:
    q, k = tensors((2, 2, HEADS, DIM), (2, 2, HEADS_KV, DIM))
    k_cache, v_cache = torch.zeros(2, 4, HEADS_KV, DIM), torch.zeros(2, 4, HEADS_KV, DIM)
    with pytest.raises(aule.InvalidShapeError, match="room for 3 keys and 2 new ones, got 4"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=3)
    assert not k_cache.any() and not v_cache.any()


def test_packed_queries_over_pages() -> None:
    at_q = torch.tensor([0, 3, 4], dtype=torch.int32)
    at_k = torch.tensor([0, 7, 12], dtype=torch.int32)
    (q,) = tensors((4, HEADS, DIM))
    k, v = tensors((5, 4, HEADS_KV, DIM), (5, 4, HEADS_KV, DIM))
    table = torch.tensor([[4, 1], [0, 2]], dtype=torch.int32)
    found = flash_attn.flash_attn_varlen_func(q, k, v, at_q, at_k, 3, 7, causal=True, block_table=table)
    rows = [x[table.long()].flatten(1, 2) for x in (k, v)]
    packed = (torch.cat([x[0, :7], x[1, :5]]) for x in rows)
    wanted = flash_attn.flash_attn_varlen_func(q, *packed, at_q, at_k, 3, 7, causal=True)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"v": None}, aule.InvalidArgumentError, "in pairs"),
        ({"cache_seqlens": None}, aule.InvalidArgumentError, "expected cache_seqlens with k and v"),
        ({"k": None, "v": None, "rotary_cos": torch.ones(4, 2), "rotary_sin": torch.ones(4, 2)},
         aule.InvalidArgumentError, "rotate q before"),
        ({"cache_seqlens": torch.zeros(2)}, aule.InvalidDtypeError, "cache_seqlens as an int32 tensor"),
        ({"cache_leftpad": LENS, "block_table": torch.zeros(3, 0, dtype=torch.int32)},
         aule.InvalidShapeError, "room for keys with cache_leftpad"),
        ({"k": torch.zeros(3, 1, 2, 9)}, aule.InvalidShapeError, "dim 8"),
        ({"q": torch.zeros(3, 4, 8)}, aule.InvalidShapeError, "reshape"),
        ({"q": torch.zeros(3, 1, 4, 8, requires_grad=True)}, aule.AuleError, "no gradient"),
    ],
)  # fmt: skip
def test_refusals(changed: dict[str, Any], error: type[Exception], words: str) -> None:
    q, k, v = tensors((BATCH, 1, HEADS, DIM), (BATCH, 1, HEADS_KV, DIM), (BATCH, 1, HEADS_KV, DIM))
    k_cache, v_cache = tensors((BATCH, ROOM, HEADS_KV, DIM), (BATCH, ROOM, HEADS_KV, DIM))
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": LENS}
    with pytest.raises(error, match=words):
        flash_attn.flash_attn_with_kvcache(**given | changed)


def ints(*numbers: Any) -> Any:
    return torch.tensor(numbers)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"cache_seqlens": ints(5, -1, 9)}, aule.InvalidArgumentError, r"cache_seqlens from 0 to 12, got \[5, -1, 9\]"),
        ({"cache_seqlens": ints(5, 2**32, 9)}, aule.InvalidArgumentError, "cache_seqlens from 0 to 12, got"),
        ({"cache_seqlens": -3}, aule.InvalidArgumentError, r"got \[-3, -3, -3\]"),
        ({"cache_seqlens": 2**70}, aule.InvalidArgumentError, "cache_seqlens from 0 to 12"),
        ({"cache_seqlens": 12}, aule.InvalidShapeError, "room for 12 keys and 1 new ones, got 12"),
        (
            {"cache_batch_idx": ints(0, 1, 3)},
            aule.InvalidArgumentError,
            r"cache_batch_idx from 0 to 2, got \[0, 1, 3\]",
        ),
        ({"cache_batch_idx": ints(0, -1, 1)}, aule.InvalidArgumentError, "cache_batch_idx from 0 to 2"),
        ({"cache_batch_idx": ints(0, 1, 1)}, aule.InvalidArgumentError, "every row of the cache once"),
        ({"cache_leftpad": ints(0, -2, 1)}, aule.InvalidArgumentError, "cache_leftpad from 0 to 12"),
        (
            {"rotary_cos": torch.ones(9, 4), "rotary_sin": torch.ones(9, 4)},
            aule.InvalidShapeError,
            "least 10 positions",
        ),
        ({"rotary_cos": "x", "rotary_sin": "x"}, aule.InvalidDtypeError, "rotary_cos to be a torch tensor"),
        ({"rotary_interleaved": "no"}, aule.InvalidArgumentError, "rotary_interleaved"),
        ({"softcap": -1.0}, aule.InvalidArgumentError, r"\[flash_attn_with_kvcache\] expected a finite softcap"),
        ({"alibi_slopes": torch.ones(3)}, aule.InvalidShapeError, "alibi_slopes"),
        ({"window_size": 3}, aule.InvalidArgumentError, r"window_size as \(left, right\), got 3"),
        ({"window_size": ("a", 0)}, aule.InvalidArgumentError, "window_size to be an int"),
        ({"q": torch.zeros(3, 1, 3, 8)}, aule.InvalidShapeError, "multiple of heads_kv"),
        ({"q": torch.zeros(3, 1, 4, 8).half()}, aule.InvalidDtypeError, "q's dtype"),
        ({"q": torch.zeros(3, 1, 4, 8, device="meta")}, aule.DeviceMismatchError, "k_cache on meta like q"),
        ({"k": torch.zeros(2, 1, 2, 8), "v": torch.zeros(2, 1, 2, 8)}, aule.InvalidShapeError, r"k of \[3, 1,"),
        ({"block_table": "x"}, aule.InvalidDtypeError, "block_table as an int32 tensor"),
        ({"block_table": ints([0], [1])}, aule.InvalidShapeError, r"block_table of \[3, max_pages\], got \[2, 1\]"),
        ({"block_table": ints([0], [1], [3])}, aule.InvalidArgumentError, "got 3 as page 0 of sequence 2"),
        ({"block_table": ints([0], [1], [2**32])}, aule.InvalidArgumentError, "int32's range"),
    ],
)
def test_a_call_that_fails_writes_nothing(changed: dict[str, Any], error: type[Exception], words: str) -> None:
    q, k, v = tensors((BATCH, 1, HEADS, DIM), (BATCH, 1, HEADS_KV, DIM), (BATCH, 1, HEADS_KV, DIM))
    caches = tensors((BATCH, ROOM, HEADS_KV, DIM), (BATCH, ROOM, HEADS_KV, DIM))
    before = [cache.clone() for cache in caches]
    given = {"q": q, "k": k, "v": v, "cache_seqlens": LENS, "causal": True}
    with pytest.raises(error, match=words):
        flash_attn.flash_attn_with_kvcache(k_cache=caches[0], v_cache=caches[1], **given | changed)
    assert all(torch.equal(cache, old) for cache, old in zip(caches, before, strict=True))


def test_an_expanded_cache_is_not_written_to() -> None:
    q, k = tensors((2, 1, HEADS, DIM), (2, 1, HEADS_KV, DIM))
    cache = torch.zeros(1, 4, HEADS_KV, DIM).expand(2, -1, -1, -1)
    with pytest.raises(aule.InvalidShapeError, match="k_cache with memory for every element"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache.clone(), k, k, cache_seqlens=1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"q": None}, "q to be a torch tensor"),
        ({"k": [1]}, "k to be a torch tensor"),
        ({"block_table": [[0]]}, "block_table as an int32 tensor"),
        ({"cu_seqlens_k": [0, 7]}, "cu_seqlens_k as an int32 tensor"),
        ({"cu_seqlens_k": ints([0, 7])}, "cu_seqlens_k of"),
        ({"dropout_p": "x"}, "dropout_p to be a number"),
        ({"return_attn_probs": torch.ones(2)}, "return_attn_probs to be True or False"),
    ],
)
def test_packed_refusals(changed: dict[str, Any], words: str) -> None:
    q, k = tensors((4, HEADS, DIM), (5, 4, HEADS_KV, DIM))
    given = {"q": q, "k": k, "v": k, "cu_seqlens_q": ints(0, 3, 4), "cu_seqlens_k": ints(0, 7, 12), "max_seqlen_q": 3}
    given |= {"max_seqlen_k": 7, "block_table": ints([4, 1], [0, 2])}
    flash_attn.flash_attn_varlen_func(**given)
    with pytest.raises(aule.AuleError, match=words):
        flash_attn.flash_attn_varlen_func(**given | changed)
