"""Read by mypy, never run: what the public functions take and give. Every ignored error must be one."""

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import torch

import aule

N = npt.NDArray[np.float32]
T = torch.Tensor


def attention(n: N, t: T, flag: bool, mask: npt.NDArray[np.bool_], offsets: npt.NDArray[np.int32]) -> None:
    assert_type(aule.flash_attention(n, n, n), N)
    assert_type(aule.flash_attention(t, t, t, causal=False, window=(3, None)), T)
    assert_type(aule.flash_attention(t, t, t, return_lse=False), T)
    assert_type(aule.flash_attention(t, t, t, return_lse=True), tuple[T, T])
    assert_type(aule.flash_attention(n, n, n, return_lse=True, mask=mask, out=n), tuple[N, N])
    assert_type(aule.flash_attention(n, n, n, return_lse=flag), N | tuple[N, N])
    assert_type(aule.flash_attention(t, t, t, precision=torch.float16, rope=(t, t)), T)
    assert_type(aule.aule_attention(t, t, t, True, 0.5, return_lse=True), tuple[T, T])
    assert_type(aule.flash_attention_rope(n, n, n, n, n, softcap=3.0), N)
    assert_type(aule.flash_attention_varlen(t, t, t, t, t, 4, 4, dropout_p=0.1), T)
    assert_type(aule.flash_attention_varlen(n, n, n, offsets, [0, 4, 9], return_lse=True), tuple[N, N])
    assert_type(aule.attention(n, n, n, input_precision="fp16"), N)
    assert_type(aule.scaled_dot_product_attention(t, t, t, t, is_causal=True), T)


def caches(n: N, t: T, ints: npt.NDArray[np.int32], half: npt.NDArray[np.float16]) -> None:
    assert_type(aule.decode_attention(t, t, t, context_lens=t), T)
    assert_type(aule.decode_attention(n, n, n, context_lens=[3, 4], return_lse=True), tuple[N, N])
    assert_type(aule.flash_attention_paged(n, n, n, ints, ints, layout="HND"), N)
    assert_type(aule.cascade_attention(t, t, t, t, t, shared_pages=2, return_lse=True), tuple[T, T])
    assert_type(aule.merge_states(half, n, half, n), tuple[npt.NDArray[np.float16], N])
    cache = aule.KVCache(4, 2, 16, dtype=np.float16)
    cache.append(cache.allocate(), n, n)
    assert_type(cache.attend(t, [0], return_lse=True), tuple[T, T])
    assert_type(cache.attend(n, 0, scale=0.5), N)


def rows(n: N, t: T, labels: npt.NDArray[np.int64]) -> None:
    assert_type(aule.rms_norm(n, n, eps=1e-5), N)
    assert_type(aule.layer_norm(t), T)
    assert_type(aule.residual_rms_norm(t, t, t), tuple[T, T])
    assert_type(aule.residual_layer_norm(n, n), tuple[N, N])
    assert_type(aule.cross_entropy(n, labels, reduction="sum"), N)
    assert_type(aule.layer_norm_linear(t, None, None, t), T)
    assert_type(aule.swiglu(n), N)
    assert_type(aule.geglu(t, t), T)
    assert_type(aule.rope(t, t, t), T)
    assert_type(aule.rms_norm_rope(n, None, n, n), N)
    assert_type(aule.softmax_dropout(n, dropout_p=0.5), N)
    assert_type(aule.precompute_rope_frequencies(4, 8), tuple[npt.NDArray[Any], npt.NDArray[Any]])
    assert_type(aule.precompute_rope_frequencies(4, 8, device="cpu"), tuple[Any, Any])


def mistakes(n: N, t: T) -> None:
    aule.flash_attention(n, n, n, is_causal=True)  # type: ignore[call-overload]
    aule.flash_attention(n, n, n, softmax_scale=1.0)  # type: ignore[call-overload]
    aule.flash_attention(n, n, n, True)  # type: ignore[call-overload]
    aule.flash_attention(n, n)  # type: ignore[call-overload]
    aule.flash_attention([1.0], [1.0], [1.0])  # type: ignore[call-overload]
    aule.flash_attention(n, n, n, causal_align="left")  # type: ignore[call-overload]
    aule.flash_attention(n, n, n, scale="1")  # type: ignore[call-overload]
    aule.flash_attention(n, n, n, mask=[[True]])  # type: ignore[call-overload]
    print(aule.flash_attention(n, n, n, return_lse=True).shape)  # type: ignore[attr-defined]
    aule.flash_attention_varlen(t, t, t, t, t, mask=t)  # type: ignore[call-overload]
    aule.flash_attention_paged(n, n, n, n, n, layout="NDH")  # type: ignore[call-overload]
    aule.decode_attention(t, t, t, dropout_p=0.5)  # type: ignore[call-overload]
    aule.rms_norm(n, epsilon=1e-5)  # type: ignore[arg-type]
    aule.rms_norm(t, (16,))  # type: ignore[arg-type]
    aule.KVCache(4, 2, 16, block_size=8)  # type: ignore[arg-type]
    aule.scaled_dot_product_attention(t, t, t, causal=True)  # type: ignore[arg-type]
