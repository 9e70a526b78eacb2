"""Mistakes that users make, and the whole message that each gets: what was expected, what came, and the remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aule
from aule.dtypes import dtype_name

try:
    import torch
except ImportError:
    torch = None

Array = np.ndarray[Any, Any]
KINDS: dict[str, Callable[[Array], Any]] = {"numpy": lambda x: x}
if torch is not None:
    KINDS["torch"] = torch.from_numpy


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


Q = ones(2, 4, 9, 16)
QKV = (Q, Q, Q)
ROWS = ones(9, 4, 16)
OFFSETS = np.array([0, 4, 9], np.int32)
PACKED = (ROWS, ROWS, ROWS, OFFSETS, OFFSETS)
PAGES = (ones(2, 8, 64), ones(4, 16, 2, 64), ones(4, 16, 2, 64), np.zeros((2, 2), np.int32), np.array([3, 5], np.int32))
CACHED = (ones(2, 8, 64), ones(2, 2, 9, 64), ones(2, 2, 9, 64))
LATENT = (ones(2, 8, 24), ones(4, 16, 24), np.zeros((2, 2), np.int32), np.array([3, 5], np.int32))
X = ones(4, 8)
BACKENDS = "[backend] expected one of cuda, hip, metal, vulkan, opencl, webgpu, cpu, numpy, got"
FLOATS = "float32, float16, bfloat16 or float64"
MAKE_A_MASK = (
    "pass block_mask=aule.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN); causal is lambda b, h, q, k: q >= k"
)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


OPTIONS: list[tuple[str, tuple[Any, ...], str, str]] = [
    ("flash_attention", QKV, "is_causal", "did you mean `causal`?"),
    ("flash_attention", QKV, "casual", "did you mean `causal`?"),
    ("flash_attention", QKV, "attn_mask", "did you mean `mask`?"),
    ("flash_attention", QKV, "softmax_scale", "did you mean `scale`?"),
    ("flash_attention", QKV, "sm_scale", "did you mean `scale`?"),
    ("flash_attention", QKV, "dropout", "did you mean `dropout_p`?"),
    ("flash_attention", QKV, "p", "did you mean `dropout_p`?"),
    ("flash_attention", QKV, "window_size", "did you mean `window`?"),
    ("flash_attention", QKV, "logits_soft_cap", "did you mean `softcap`?"),
    ("flash_attention", QKV, "attn_bias", "did you mean `bias`?"),
    ("flash_attention", QKV, "return_softmax_lse", "did you mean `return_lse`?"),
    ("flash_attention", QKV, "device", "did you mean `backend`?"),
    ("flash_attention", QKV, "enable_gqa", "leave it out: k and v may always have fewer heads than q"),
    ("flash_attention", QKV, "num_heads", "leave it out: the number of heads is the length of an axis"),
    (
        "flash_attention", QKV, "key_padding_mask",
        "did you mean `mask`? True attends there: pass mask=~key_padding_mask[:, None, None, :]",
    ),
    (
        "flash_attention", QKV, "colour",
        "it has q, k, v, causal, scale, window, softcap, mask, bias, alibi_slopes, sinks, rope, rope_interleaved, "
        "dropout_p, seed, causal_align, return_lse, deterministic, precision, out, backend",
    ),
    ("flash_attention_varlen", PACKED, "max_seqlen_kv", "did you mean `max_seqlen_k`?"),
    ("flash_attention_paged", PAGES, "softmax_scale", "did you mean `scale`?"),
    ("decode_attention", CACHED, "cache_seqlens", "did you mean `context_lens`?"),
    ("rms_norm", (X,), "epsilon", "did you mean `eps`?"),
    ("rms_norm", (X,), "variance_epsilon", "did you mean `eps`?"),
    ("layer_norm", (X,), "normalized_shape", "leave it out: rows are normalised along the last axis"),
    ("softmax_dropout", (X,), "p", "did you mean `dropout_p`?"),
    ("softmax_dropout", (X,), "dim", "leave it out: the function works along the last axis"),
    ("cross_entropy", (X, np.zeros(4, np.int64)), "smoothing", "did you mean `label_smoothing`?"),
    ("attention", QKV, "scale", "did you mean `softmax_scale`?"),
    ("KVCache", (4, 2, 16), "block_size", "did you mean `page_size`?"),
    ("KVCache", (4, 2, 16), "num_layers", "did you mean `layers`?"),
    ("KVCache", (4, 1, 16), "kv_lora_rank", "did you mean `value_dim`?"),
    ("flash_attention", QKV, "score_mod", "call aule.flex_attention, which takes functions of scores"),
    ("flash_attention", QKV, "block_mask", "call aule.flex_attention, which takes masks as functions"),
    ("flex_attention", QKV, "causal", MAKE_A_MASK),
    ("flex_attention", QKV, "attn_mask", MAKE_A_MASK),
    ("flex_attention", QKV, "mask_mod", MAKE_A_MASK),
    ("flex_attention", QKV, "softcap", "compute it in score_mod(score, b, h, q_idx, kv_idx)"),
    ("flex_attention", QKV, "softmax_scale", "did you mean `scale`?"),
    ("create_block_mask", (causal, None, None, 9, 9), "block_size", "did you mean `BLOCK_SIZE`?"),
    ("create_block_mask", (causal, None, None, 9, 9), "seq_kv", "did you mean `KV_LEN`?"),
]  # fmt: skip
"""A function, its arguments, an option that it does not have, and the remedy."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("function", "arguments", "option", "remedy"), OPTIONS)
def test_an_option_of_another_library(
    function: str, arguments: tuple[Any, ...], option: str, remedy: str, kind: str
) -> None:
    given = [KINDS[kind](x) if isinstance(x, np.ndarray) else x for x in arguments]
    with pytest.raises(TypeError) as caught:
        getattr(aule, function)(*given, **{option: None})
    assert type(caught.value) is aule.UnknownOptionError
    assert caught.value.message == f"[{function}] expected one of its options, got `{option}`; {remedy}"


CALLS: list[tuple[type[aule.AuleError], str, Callable[..., Any]]] = [
    # shapes
    (
        aule.InvalidShapeError,
        "[flash_attention] expected mask broadcastable to [batch, heads_q, seq_q, seq_kv] = [2, 4, 9, 9], got [2, 9]; "
        "pass mask[:, None, None, :]",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), mask=a(ones(2, 9, dtype=np.bool_))),
    ),
    (
        aule.InvalidDtypeError,
        "[flash_attention] expected mask of bool or floats, got int64; pass (mask != 0)[:, None, None, :], in which "
        "True means attend",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), mask=a(ones(2, 9, dtype=np.int64))),
    ),
    (
        aule.InvalidShapeError,
        "[flash_attention] expected mask broadcastable to [batch, heads_q, seq_q, seq_kv] = [2, 4, 9, 9], got "
        "[2, 9, 9]; pass mask[:, None]",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), mask=a(ones(2, 9, 9, dtype=np.bool_))),
    ),
    (
        aule.InvalidShapeError,
        "[flash_attention] expected heads_q to be a multiple of heads_kv, got heads_q 1 and heads_kv 100 (shapes "
        "[2, 1, 8, 16] and [2, 100, 8, 16]); if q, k and v are [batch, seq, heads, head_dim], swap their axes 1 and "
        "2: .swapaxes(1, 2)",
        lambda a: aule.flash_attention(a(ones(2, 1, 8, 16)), a(ones(2, 100, 8, 16)), a(ones(2, 100, 8, 16))),
    ),
    (
        aule.InvalidShapeError,
        "[decode_attention] expected heads_q to be a multiple of heads_kv, got heads_q 8 and heads_kv 9 (shapes "
        "[2, 8, 1, 64] and [2, 9, 2, 64]); if k and v are [batch, seq, heads, head_dim], swap their axes 1 and 2: "
        ".swapaxes(1, 2)",
        lambda a: aule.decode_attention(a(ones(2, 8, 64)), a(ones(2, 9, 2, 64)), a(ones(2, 9, 2, 64))),
    ),
    (
        aule.InvalidShapeError,
        "[flash_attention] expected heads_q to be a multiple of heads_kv, got heads_q 6 and heads_kv 4 (shapes "
        "[2, 6, 9, 16] and [2, 4, 9, 16]); repeat or drop heads of k and v",
        lambda a: aule.flash_attention(a(ones(2, 6, 9, 16)), a(Q), a(Q)),
    ),
    (
        aule.InvalidShapeError,
        "[flash_attention] expected the head_dim of q and k in 1..576, got 768; three axes are [heads, seq, "
        "head_dim]: for [batch, seq, embed], reshape to [batch, seq, heads, head_dim] and swap axes 1 and 2",
        lambda a: aule.flash_attention(*[a(ones(2, 9, 768))] * 3),
    ),
    (
        aule.InvalidShapeError,
        "[flash_attention] expected k and v of equal seq, got k 9 and v 8 (shapes [2, 4, 9, 16] and [2, 4, 8, 16]); "
        "every key needs its value",
        lambda a: aule.flash_attention(a(Q), a(Q), a(ones(2, 4, 8, 16))),
    ),
    (
        aule.InvalidShapeError,
        "[flash_attention] expected q of shape [seq, head_dim], [heads, seq, head_dim] or [batch, heads, seq, "
        "head_dim], got [16]; reshape q",
        lambda a: aule.flash_attention(*[a(ones(16))] * 3),
    ),
    (
        aule.InvalidShapeError,
        "[flash_attention] expected out of shape (2, 4, 9, 16), got (2, 4, 9, 8); allocate it like q",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), out=a(ones(2, 4, 9, 8))),
    ),
    (
        aule.InvalidShapeError,
        "[flash_attention_varlen] expected q of shape [rows of all sequences, heads, head_dim], got [2, 4, 9, 16]; "
        "concatenate the sequences along the first axis",
        lambda a: aule.flash_attention_varlen(a(Q), a(Q), a(Q), a(OFFSETS), a(OFFSETS)),
    ),
    (
        aule.InvalidShapeError,
        "[flash_attention_varlen] expected cu_seqlens_q to rise from 0 to 9, the number of rows, got [4, 5]; pass "
        "cumulative lengths",
        lambda a: aule.flash_attention_varlen(a(ROWS), a(ROWS), a(ROWS), *[a(np.array([4, 5], np.int32))] * 2, 5, 5),
    ),
    (
        aule.InvalidShapeError,
        "[rms_norm] expected weight of shape [8], got [4]; give it one number for each column of x",
        lambda a: aule.rms_norm(a(X), a(ones(4))),
    ),
    (
        aule.InvalidShapeError,
        "[swiglu] expected gate with an even last axis when up is not given, got [4, 7]; it holds gate and up one "
        "after the other",
        lambda a: aule.swiglu(a(ones(4, 7))),
    ),
    (
        aule.InvalidShapeError,
        "[decode_attention] expected context_lens from 0 to 9, the size of the cache, got 10 for sequence 1; enlarge "
        "the cache or correct the lengths",
        lambda a: aule.decode_attention(*map(a, CACHED), context_lens=a(np.array([3, 10], np.int32))),
    ),
    (
        aule.InvalidShapeError,
        "[flex_attention] expected as many heads of key and value as of query, got 4 and 2; pass enable_gqa=True to "
        "share heads of key and value",
        lambda a: aule.flex_attention(a(Q), a(ones(2, 2, 9, 16)), a(ones(2, 2, 9, 16))),
    ),
    (
        aule.InvalidShapeError,
        "[flex_attention] expected query, key and value of shape [batch, heads, seq, head_dim], got [4, 9, 16], "
        "[4, 9, 16], [4, 9, 16]; add axes of length 1",
        lambda a: aule.flex_attention(a(Q)[0], a(Q)[0], a(Q)[0]),
    ),
    (
        aule.InvalidShapeError,
        "[mla_decode] expected q and kv_cache of equal dim, got q [2, 8, 16] and kv_cache [4, 16, 24]; both have the "
        "latent columns and the rotated ones",
        lambda a: aule.mla_decode(a(ones(2, 8, 16)), *map(a, LATENT[1:]), scale=None, value_dim=16),
    ),
    (
        aule.InvalidShapeError,
        "[mla_decode] expected kv_cache of [pages, page, dim], got [4, 16, 1, 24]; reshape it",
        lambda a: aule.mla_decode(a(LATENT[0]), a(LATENT[1][:, :, None]), *map(a, LATENT[2:]), scale=None),
    ),
    (
        aule.InvalidShapeError,
        "[mla_decode] expected value_dim from 1 to the 24 columns of kv_cache, got 512; the values are its first "
        "columns",
        lambda a: aule.mla_decode(*map(a, LATENT), scale=None),
    ),
    (
        aule.InvalidShapeError,
        "[mla_decode] expected kv_scale of [pages, page] = [4, 16], got [4]; give each token one factor",
        lambda a: aule.mla_decode(
            a(LATENT[0]),
            a(ones(4, 16, 24, dtype=np.int8)),
            *map(a, LATENT[2:]),
            scale=None,
            value_dim=16,
            kv_scale=a(ones(4)),
        ),
    ),
    (
        aule.InvalidShapeError,
        "[mla_decode] expected indices of [2, topk], got [3, 4]; give every token its keys",
        lambda a: aule.mla_decode(*map(a, LATENT[:2]), scale=None, value_dim=16, indices=a(np.zeros((3, 4), np.int32))),
    ),
    (
        aule.InvalidShapeError,
        "[decode_attention] expected tree_mask of shape [tokens, tokens] or [batch, tokens, tokens] with batch = 2 and "
        "tokens = 1, got [3, 3]; give a row for each of the newest queries and a column for each of the newest keys",
        lambda a: aule.decode_attention(*map(a, CACHED), tree_mask=a(ones(3, 3, dtype=np.bool_))),
    ),
    # dtypes and kinds
    (
        aule.InvalidDtypeError,
        "[flex_attention] expected NumPy arrays, torch tensors or arrays with __dlpack__, got list; convert with "
        "numpy.asarray",
        lambda a: aule.flex_attention([[1.0, 2.0]], [[1.0, 2.0]], [[1.0, 2.0]]),
    ),
    (
        aule.InvalidDtypeError,
        "[mla_decode] expected kv_cache of q's dtype, or int8 or float8_e4m3fn with kv_scale, got int8 without "
        "kv_scale for q of float32; convert it, or pass its scales",
        lambda a: aule.mla_decode(
            a(LATENT[0]), a(ones(4, 16, 24, dtype=np.int8)), *map(a, LATENT[2:]), scale=None, value_dim=16
        ),
    ),
    (
        aule.InvalidDtypeError,
        f"[flash_attention] expected q of {FLOATS}, got int32; convert q first",
        lambda a: aule.flash_attention(*[a(Q.astype(np.int32))] * 3),
    ),
    (
        aule.InvalidDtypeError,
        "[flash_attention] expected q, k and v of one dtype, got q float16, k float32, v float32; convert them to "
        "float16",
        lambda a: aule.flash_attention(a(Q.astype(np.float16)), a(Q), a(Q)),
    ),
    (
        aule.InvalidDtypeError,
        "[flash_attention] expected NumPy arrays, torch tensors or arrays with __dlpack__, got list; convert with "
        "numpy.asarray",
        lambda a: aule.flash_attention([[1.0, 2.0]], [[1.0, 2.0]], [[1.0, 2.0]]),
    ),
    (
        aule.InvalidDtypeError,
        "[cross_entropy] expected target of int32 or int64, the correct column of each row, got float32; convert it",
        lambda a: aule.cross_entropy(a(X), a(ones(4))),
    ),
    (
        aule.InvalidDtypeError,
        "[flash_attention] expected sinks of float32, got float64; convert sinks",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), sinks=a(np.ones(4))),
    ),
    (
        aule.InvalidDtypeError,
        "[KVCache] expected dtype float32, float16 or bfloat16, got 'float'; choose one",
        lambda a: aule.KVCache(4, 2, 16, dtype="float"),
    ),
    # functions of the user
    (
        aule.InvalidArgumentError,
        "[flex_attention] expected score_mod as a function of 5 arguments (score, batch, head, query, key), got "
        "(s, b) (too many positional arguments); give it these arguments",
        lambda a: aule.flex_attention(a(Q), a(Q), a(Q), lambda s, b: s),
    ),
    (
        aule.InvalidArgumentError,
        "[flex_attention] expected score_mod as a function of 5 arguments (score, batch, head, query, key), got "
        "BlockMask; pass it as block_mask=",
        lambda a: aule.flex_attention(a(Q), a(Q), a(Q), aule.create_block_mask(causal, None, None, 9, 9)),
    ),
    (
        aule.InvalidArgumentError,
        "[flex_attention] expected return_aux as an AuxRequest, got bool; pass aule.AuxRequest(lse=True)",
        lambda a: aule.flex_attention(a(Q), a(Q), a(Q), return_aux=True),
    ),
    (
        aule.InvalidArgumentError,
        "[flex_attention] expected return_lse to be True or False, got str; pass a bool",
        lambda a: aule.flex_attention(a(Q), a(Q), a(Q), return_lse="no"),
    ),
    (
        aule.InvalidArgumentError,
        "[flex_attention] expected a block mask for batch 2, 4 heads, 9 queries and 9 keys, got [1, 1, 8, 8]; make one "
        "with create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)",
        lambda a: aule.flex_attention(a(Q), a(Q), a(Q), None, aule.create_block_mask(causal, None, None, 8, 8)),
    ),
    (
        aule.InvalidArgumentError,
        "[create_block_mask] expected functions of masks, got ndarray; pass mask_mod(b, h, q_idx, kv_idx)",
        lambda a: aule.create_block_mask(Q, None, None, 9, 9),  # type: ignore[arg-type]
    ),
    (
        aule.InvalidArgumentError,
        "[create_block_mask] expected BLOCK_SIZE as an int of at least 1 or two of them, got 0; leave it out for 128",
        lambda a: aule.create_block_mask(causal, None, None, 9, 9, BLOCK_SIZE=0),
    ),
    (
        aule.InvalidArgumentError,
        "[create_block_mask] expected lengths of at least 0, got [1, 1, -9, 9]; pass the lengths of query and key",
        lambda a: aule.create_block_mask(causal, None, None, -9, 9),
    ),
    (
        aule.InvalidArgumentError,
        "[and_masks] expected functions of masks, got BlockMask; pass its mask_mod",
        lambda a: aule.and_masks(causal, aule.create_block_mask(causal, None, None, 9, 9)),  # type: ignore[arg-type]
    ),
    # caches of latents
    (
        aule.InvalidArgumentError,
        "[mla_decode] expected block_tables and context_lens, or indices, got block_tables; pass the pages and length "
        "of each sequence, or the keys of each token",
        lambda a: aule.mla_decode(*map(a, LATENT[:3]), scale=None, value_dim=16),
    ),
    (
        aule.InvalidArgumentError,
        "[mla_decode] expected kv_scale only with a cache of int8 or float8_e4m3fn, got one with float32; leave it out",
        lambda a: aule.mla_decode(*map(a, LATENT), scale=None, value_dim=16, kv_scale=a(ones(4, 16))),
    ),
    (
        aule.InvalidArgumentError,
        "[mla_decode] expected indices below 64, the keys of the pool, got 99; an index is page number times page "
        "size, plus the place in the page",
        lambda a: aule.mla_decode(
            *map(a, LATENT[:2]), scale=None, value_dim=16, indices=a(np.full((2, 4), 99, np.int32))
        ),
    ),
    (
        aule.UnknownOptionError,
        "[mla_decode] expected one of its options, got `kv_lora_rank`; did you mean `value_dim`?",
        lambda a: aule.mla_decode(*map(a, LATENT), scale=None, kv_lora_rank=16),  # type: ignore[call-arg]
    ),
    (
        aule.InvalidArgumentError,
        "[KVCache] expected one key head and value_dim of at most head_dim with latent=True, got 2 heads and 576 of "
        "576; the values are the first columns of the keys",
        lambda a: aule.KVCache(4, 2, 576, latent=True),
    ),
    (
        aule.InvalidArgumentError,
        "[KVCache.append] expected no v for a latent cache, got one; its values are the first columns of k",
        lambda a: aule.KVCache(4, 1, 24, value_dim=16, latent=True).append(0, ones(5, 1, 24), ones(5, 1, 16)),
    ),
    (
        aule.InvalidShapeError,
        "[KVCache.append] expected k of [tokens, heads_kv, dim] or [sequences, heads_kv, tokens, dim], got [5, 24]; "
        "add the missing axes of length 1",
        lambda a: aule.KVCache(4, 1, 24, value_dim=16, latent=True).append(0, ones(5, 24)),
    ),
    (
        aule.InvalidArgumentError,
        "[KVCache.append] expected a layer from 0 to 1, got 2; layers= of the cache is their number",
        lambda a: aule.KVCache(4, 1, 16, layers=2).append(0, ones(5, 1, 16), ones(5, 1, 16), layer=2),
    ),
    # values
    (
        aule.InvalidArgumentError,
        "[flash_attention] expected causal to be True or False, got str; pass a bool, and a mask as mask=",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), causal="no"),
    ),
    (
        aule.InvalidArgumentError,
        "[flash_attention] expected dropout_p in 0..1, got 10.0; pass 0.0 for no dropout",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), dropout_p=10.0),
    ),
    (
        aule.InvalidArgumentError,
        "[flash_attention] expected an int window >= 1, got 0; pass None for no window",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), window=0),
    ),
    (
        aule.InvalidArgumentError,
        "[flash_attention] expected causal_align 'bottom-right' or 'top-left', got 'left'; pass 'top-left' for "
        "PyTorch's is_causal",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), causal_align="left"),
    ),
    (
        aule.InvalidArgumentError,
        "[flash_attention] expected precision 'float16', 'bfloat16' or 'tf32', got 'fp8'; pass None to compute in "
        "float32",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), precision="fp8"),
    ),
    (
        aule.InvalidArgumentError,
        "[cross_entropy] expected targets of 0 to 7 or ignore_index=-100, got 8 at [3]; check the labels against the "
        "logits' last axis",
        lambda a: aule.cross_entropy(a(X), a(np.array([1, 2, 3, 8]))),
    ),
    (
        aule.InvalidArgumentError,
        "[KVCache.append] expected a sequence that allocate() or fork() gave, got 7; allocate one first",
        lambda a: aule.KVCache(2, 2, 16).append(7, ones(1, 2, 16), ones(1, 2, 16)),
    ),
    # backends
    (
        aule.BackendUnavailableError,
        f"{BACKENDS} 'gpu'; name its backend: 'cuda' (NVIDIA), 'hip' (AMD), 'metal' (Apple), 'vulkan', 'opencl' or "
        "'webgpu'",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), backend="gpu"),
    ),
    (
        aule.BackendUnavailableError,
        f"{BACKENDS} 'rocm'; AMD GPUs are served by 'hip' (ROCm), 'vulkan' or 'opencl'",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), backend="ROCm"),
    ),
    (
        aule.BackendUnavailableError,
        f"{BACKENDS} 'mps'; Apple GPUs are served by 'metal'",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), backend="mps"),
    ),
    (
        aule.BackendUnavailableError,
        f"{BACKENDS} 'xpu:0'; Intel GPUs are served by 'vulkan' or 'opencl'",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), backend="xpu:0"),
    ),
    (
        aule.BackendUnavailableError,
        f"{BACKENDS} 'directml'; on Windows, GPUs are served by 'cuda' (NVIDIA), 'vulkan' or 'webgpu'",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), backend="directml"),
    ),
    (
        aule.BackendUnavailableError,
        f"{BACKENDS} 'vulcan'; did you mean 'vulkan'?",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), backend="vulcan"),
    ),
    (
        aule.InvalidArgumentError,
        "[backend] expected a name such as 'vulkan' or 'cuda:1', got 3; pass None for the best device",
        lambda a: aule.flash_attention(a(Q), a(Q), a(Q), backend=3),
    ),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("error", "message", "call"), CALLS, ids=range(len(CALLS)))
def test_a_wrong_call(error: type[aule.AuleError], message: str, call: Callable[..., Any], kind: str) -> None:
    with pytest.raises(error) as caught:
        call(KINDS[kind])
    assert type(caught.value) is error
    assert caught.value.message == message
    assert str(caught.value) == f"{message} [{caught.value.code}]"


def test_of_numpy_alone() -> None:
    with pytest.raises(aule.InvalidDtypeError) as caught:
        aule.flash_attention(Q, Q.tolist(), Q)
    assert caught.value.message == (
        "[flash_attention] expected k to be a NumPy array like q, got list; convert it with numpy.asarray"
    )
    with pytest.raises(aule.InvalidDtypeError) as caught:
        aule.flash_attention(Q, Q, Q, mask=aule.create_block_mask(causal, None, None, 9, 9))
    assert caught.value.message == (
        "[flash_attention] expected mask to be a NumPy array like q, got BlockMask; call aule.flex_attention, which "
        "takes masks as functions"
    )
    for key in (Q.tolist(), ones(1, 4, 9, 16).tolist()):
        with pytest.raises(aule.InvalidDtypeError) as caught:
            aule.flex_attention(Q, key, Q)
        assert caught.value.message == (
            "[flex_attention] expected key to be a NumPy array like query, got list; convert it with numpy.asarray"
        )
    with pytest.raises(aule.InvalidDtypeError) as caught:
        aule.layer_norm(X, (8,))  # type: ignore[arg-type]
    assert caught.value.message == (
        "[layer_norm] expected weight to be a NumPy array like x, got tuple; rows are normalised along the last axis, "
        "so there is no normalized_shape"
    )
    with pytest.raises(aule.InvalidDtypeError) as caught:
        aule.aule_attention(Q, Q, Q)
    assert caught.value.message == (
        "[aule_attention] expected torch tensors, got ndarray; use aule.flash_attention for others"
    )


@pytest.mark.skipif(torch is None, reason="needs PyTorch")
def test_of_pytorch_alone() -> None:
    q = torch.from_numpy(Q)
    cases: list[tuple[str, Callable[[], Any]]] = [
        (
            "[flash_attention] expected k to be a torch tensor like q, got ndarray; convert it with torch.as_tensor",
            lambda: aule.flash_attention(q, Q, q),
        ),
        (
            "[flash_attention] expected k on the CPU like q, got meta; move it with .to",
            lambda: aule.flash_attention(q, q.to("meta"), q),
        ),
        (
            "[flash_attention] expected tensors that need no gradient, got requires_grad=True with NumPy; NumPy has no "
            'gradients: pip install "aule-attention[cpu]", or choose a device with backend=',
            lambda: aule.flash_attention(q.clone().requires_grad_(), q, q, backend="numpy"),
        ),
        (
            "[scaled_dot_product_attention] expected one of its options, got `causal`; did you mean `is_causal`?",
            lambda: aule.scaled_dot_product_attention(q, q, q, causal=True),  # type: ignore[call-arg]
        ),
        (
            "[decode_attention] expected tensors that need no gradient, got requires_grad=True; call it under "
            "torch.no_grad(), or use aule.flash_attention, which has gradients",
            lambda: aule.decode_attention(q.clone().requires_grad_(), q, q),
        ),
    ]
    for message, call in cases:
        with pytest.raises(aule.AuleError) as caught:
            call()
        assert caught.value.message == message


@pytest.mark.skipif(torch is None or not torch.distributed.is_available(), reason="needs torch.distributed")
def test_of_several_processes() -> None:
    """Of `aule.distributed`, in a group of one rank."""
    spread, dist = aule.distributed, torch.distributed
    q, token = torch.from_numpy(Q), torch.ones(1, 8, 64)
    cache = torch.ones(1, 8, 9, 64)
    with pytest.raises(aule.InvalidArgumentError) as caught:
        spread.ring_attention(q, q, q)
    assert caught.value.message == (
        "[ring_attention] expected a process group, got none; call torch.distributed.init_process_group first"
    )
    cases: list[tuple[str, Callable[[], Any]]] = [
        (
            "[ring_attention] expected q to be a torch tensor, got ndarray; convert it with torch.as_tensor",
            lambda: spread.ring_attention(Q, Q, Q),
        ),
        (
            "[ring_attention] expected one of its options, got `is_causal`; did you mean `causal`?",
            lambda: spread.ring_attention(q, q, q, is_causal=True),
        ),
        (
            "[ulysses_attention] expected one of its options, got `process_group`; did you mean `group`?",
            lambda: spread.ulysses_attention(q, q, q, process_group=None),
        ),
        (
            "[attention] expected one of its options, got `group`; did you mean `mesh`?",
            lambda: spread.attention(q, q, q, group=None),
        ),
        (
            "[ring_attention] expected balance 'zigzag', 'contiguous', 'striped', got 'ring'; choose one",
            lambda: spread.ring_attention(q, q, q, balance="ring"),
        ),
        (
            "[ring_attention] expected mask of this rank's rows and all keys, broadcastable to [2, 4, 9, 9], got "
            "[9, 8]; shard it along its rows only",
            lambda: spread.ring_attention(q, q, q, mask=torch.ones(9, 8, dtype=torch.bool)),
        ),
        (
            "[ring_attention] expected cu_seqlens as an int32 tensor or integers, got float32; convert it",
            lambda: spread.ring_attention(q[0], q[0], q[0], cu_seqlens=torch.tensor([0.0, 4.0])),
        ),
        (
            "[ring_attention] expected [rows, heads, head_dim] with cu_seqlens, got [2, 4, 9, 16]; pack the sequences "
            "along the first axis",
            lambda: spread.ring_attention(q, q, q, cu_seqlens=[0, 9]),
        ),
        (
            "[shard] expected x to be a torch tensor, got ndarray; convert it with torch.as_tensor",
            lambda: spread.shard(Q),
        ),
        (
            "[shard] expected dim as an axis of x [2, 4, 9, 16], got 7; pass the axis of rows",
            lambda: spread.shard(q, dim=7),
        ),
        (
            "[shard_positions] expected a length of at least 0, got -1; pass the number of rows of all ranks",
            lambda: spread.shard_positions(-1),
        ),
        (
            "[decode_attention] expected context_lens from 0 to 9, the size of this rank's cache, got [50]; enlarge "
            "the cache or correct the lengths",
            lambda: spread.decode_attention(token, cache, cache, context_lens=torch.tensor([50])),
        ),
        (
            "[decode_attention] expected k of q's head_dim, and k and v of equal shapes but for their last axis, got q "
            "[1, 8, 1, 64], k [1, 8, 9, 32] and v [1, 8, 9, 64]; correct the cache",
            lambda: spread.decode_attention(token, cache[..., :32], cache),
        ),
        (
            "[merge_states] expected lse of the shape of out without its last axis, got [1] for [1, 8, 64]; pass both "
            "as return_lse=True gives them",
            lambda: spread.merge_states(token, torch.ones(1)),
        ),
    ]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for message, call in cases:
            with pytest.raises(aule.AuleError) as caught:
                call()
            assert caught.value.message == message
    finally:
        dist.destroy_process_group()


# -- what is understood ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["NumPy", " numpy ", "NUMPY"])
def test_backends_in_any_case(backend: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q = KINDS[kind](np.random.default_rng(0).standard_normal((2, 9, 16), np.float32))
    expected = np.asarray(aule.flash_attention(q, q, q, backend="numpy"))
    np.testing.assert_array_equal(np.asarray(aule.flash_attention(q, q, q, backend=backend)), expected)
    monkeypatch.setenv("AULE_BACKEND", backend)
    np.testing.assert_array_equal(np.asarray(aule.flash_attention(q, q, q)), expected)


def test_dtypes_in_any_spelling() -> None:
    spellings: dict[str, list[Any]] = {
        "float32": ["float32", "fp32", "f32", "FP32", "torch.float32", np.float32, np.dtype("float32")],
        "float16": ["float16", "fp16", "f16", "half", np.float16],
        "bfloat16": ["bfloat16", "bf16", "BF16"],
        "float64": ["float64", "fp64", "double", np.float64],
        "float8_e4m3fn": ["fp8", "float8_e4m3fn", "e4m3"],
        "int32": ["int32", "i32", np.int32],
    }
    if torch is not None:
        for name, given in spellings.items():
            given.append(getattr(torch, name))
    for name, given in spellings.items():
        assert [dtype_name(x) for x in given] == [name] * len(given)
    assert [dtype_name(x) for x in ("float", "int", float, "", None, 3, object())] == [None] * 7
    for dtype in spellings["float16"]:
        assert aule.KVCache(2, 2, 16, dtype=dtype).dtype == "float16"
        assert aule.precompute_rope_frequencies(4, 8, dtype=dtype)[0].dtype in spellings["float16"]
        assert aule.kernels.SwiGLUKernel(4, 8, dtype=dtype).dtype == "f16"
        assert aule.attention(*QKV, input_precision=dtype).dtype == np.float16
    assert aule.KVCache(2, 2, 16, quantize="int8").quantize == "int8"


def test_signatures_show_what_functions_take() -> None:
    """Neither `inspect` nor `help` shows the parameter that collects unknown options."""
    functions = [*(getattr(aule, name) for name, *_ in OPTIONS), aule.scaled_dot_product_attention]
    for function in functions:
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        assert len(kinds) > 2 and inspect.Parameter.VAR_KEYWORD not in kinds


def test_dir_is_complete() -> None:
    names = dir(aule)
    assert {*aule.__all__, "integrations", "ir", "nn", "patch_model", "PatchReport"} <= set(names)
    assert not [name for name in names if name.startswith("_") and not name.startswith("__")]
    for name in names:
        if torch is not None or name not in ("nn", "patch_model", "PatchReport"):
            assert getattr(aule, name) is not None
    assert {"transformers", "diffusers", "flash_attn", "comfyui"} <= set(dir(aule.integrations))
