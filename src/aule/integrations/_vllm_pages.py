"""Attention over vLLM's cache of keys and values; needs torch but not vLLM.

A layer's cache is one tensor ``[blocks, heads_kv, block, head_dim + value_dim]`` in any order in memory: a token's key
is followed by its value. Both are read in place as strided views. A slot is the number of a token's place in the cache:
``block number * block size + row``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from aule.api.attention import flash_attention_varlen
from aule.api.decode import flash_attention_paged
from aule.errors import InvalidShapeError

OP = "vllm"
LARGEST_FP8 = 448.0
"""The largest number of float8_e4m3fn."""


class LayerCache(NamedTuple):
    """Keys and values of a layer, ``[blocks, heads_kv, block, dim]``, views of one tensor."""

    k: Any
    v: Any


@dataclass(frozen=True)
class Batch:
    """The sequences of one step, shared by all layers.

    Attributes
    ----------
    tokens : int
        Query tokens of all sequences; further rows of q are padding.
    longest : int
        Most query tokens of a sequence.
    starts : Tensor
        int32 ``[sequences + 1]``: where each sequence's tokens begin in q.
    lens : Tensor
        int32 ``[sequences]``: keys of each sequence, those of its new tokens included.
    tables : Tensor
        int32 ``[sequences, blocks]``: blocks of each sequence.
    causal : bool
        Whether tokens attend to earlier tokens only.
    even : bool
        Every sequence has ``longest`` query tokens.
    """

    tokens: int
    longest: int
    starts: Any
    lens: Any
    tables: Any
    causal: bool = True
    even: bool = False


def make_batch(starts: Any, starts_on_host: Any, lens: Any, tables: Any, causal: bool) -> Batch:
    """Describe a step; ``starts_on_host`` is a copy of ``starts`` in host memory, so that nothing waits for a GPU."""
    counts = starts_on_host.diff()
    longest = int(counts.max()) if len(counts) else 0
    even = bool((counts == longest).all())
    return Batch(int(starts_on_host[-1]), longest, starts, lens, tables, causal, even)


@dataclass(frozen=True)
class Scoring:
    """The options of a layer's attention.

    Attributes
    ----------
    scale, softcap : float
        Factor of the scores; their bound, or None.
    window : int or None
        Keys that a token attends to, itself included.
    alibi_slopes, sinks : Tensor or None
        float32 ``[heads_q]``.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    alibi_slopes: Any = None
    sinks: Any = None

    def options(self, causal: bool) -> dict[str, Any]:
        """Keyword arguments of aule's functions."""
        window = None
        if self.window is not None:
            window = (self.window - 1, 0 if causal else self.window - 1)
        return {
            "causal": causal,
            "scale": self.scale,
            "softcap": self.softcap,
            "window": window,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
        }


def layer_cache(kv_cache: Any, head_dim: int) -> LayerCache:
    """Split a layer's cache into keys and values, without a copy."""
    _check_cache(kv_cache, head_dim)
    if kv_cache.dtype is torch.uint8:
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    return LayerCache(kv_cache[..., :head_dim], kv_cache[..., head_dim:])


def _check_cache(kv_cache: Any, head_dim: int) -> None:
    if kv_cache.dim() != 4 or kv_cache.shape[3] <= head_dim:
        raise InvalidShapeError(
            f"[{OP}] expected a cache [blocks, heads_kv, block, head_dim + value_dim] with head_dim {head_dim}, got "
            f"{list(kv_cache.shape)}; install the version of vLLM that docs/vllm.md names"
        )


def store(kv_cache: Any, key: Any, value: Any, slots: Any, scales: tuple[float, float] = (1.0, 1.0)) -> None:
    """Write new tokens into their slots of a layer's cache; tokens with negative slots are padding.

    Parameters
    ----------
    key, value : Tensor
        ``[tokens, heads_kv, dim]``; rows past those of ``slots`` are padding.
    slots : Tensor
        Integers ``[tokens]``.
    scales : (float, float)
        Factors of the stored keys and values of an fp8 cache, which holds ``key / scale``.
    """
    _check_cache(kv_cache, key.shape[2])
    slots = slots.long()
    new = [x[: slots.shape[0]] for x in (key, value)]
    if not slots.is_cpu:
        # On a GPU nothing waits for the slots: padding goes to block 0, which vLLM gives to no sequence.
        slots = slots.clamp(min=0)
    elif slots.numel() and int(slots.min()) < 0:
        real = slots >= 0
        slots, new = slots[real], [x[real] for x in new]
    if kv_cache.dtype in (torch.uint8, torch.float8_e4m3fn):  # written as bytes, which every device can index
        new = [_as_fp8(x, scale) for x, scale in zip(new, scales, strict=True)]
        kv_cache = kv_cache.view(torch.uint8)
    block = kv_cache.shape[2]
    kv_cache.transpose(1, 2)[slots // block, slots % block] = torch.cat(new, -1)


def _as_fp8(x: Any, scale: float) -> Any:
    return (x.float() / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8)


def attend(
    q: Any,
    cache: LayerCache,
    batch: Batch,
    scoring: Scoring,
    out: Any,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Attention of the step's tokens over the cache, which holds their own keys already.

    Parameters
    ----------
    q, out : Tensor
        ``[rows, heads_q, dim]``, at least ``batch.tokens`` rows; padding is neither read nor written.
    scales : (float, float)
        As for `store`.
    """
    q, out = q[: batch.tokens], out[: batch.tokens]
    options = scoring.options(batch.causal) | {"layout": "HND"}
    if cache.k.dtype is torch.float8_e4m3fn:
        options |= _scale_options(cache, scales)
    if batch.even:
        q, out = (_by_sequence(x, batch) for x in (q, out))
    else:
        options |= {"cu_seqlens_q": batch.starts, "max_seqlen_q": batch.longest}
    flash_attention_paged(q, cache.k, cache.v, batch.tables, batch.lens, out=out, **options)


def _by_sequence(x: Any, batch: Batch) -> Any:
    """View rows of equally many tokens each as ``[sequences, heads, tokens, dim]``, or ``[sequences, heads, dim]``."""
    return x if batch.longest == 1 else x.unflatten(0, (-1, batch.longest)).transpose(1, 2)


def _scale_options(cache: LayerCache, scales: tuple[float, float]) -> dict[str, Any]:
    """One factor for all keys and one for all values, as tensors of stride 0 in the shape that aule expects."""
    shape, device = cache.k.shape[:3], cache.k.device
    return {f"{name}_scale": _on_device(scale, device).expand(shape) for name, scale in zip("kv", scales, strict=True)}


@lru_cache(maxsize=1024)
def _on_device(scale: float, device: torch.device) -> Any:
    """A factor in the device's memory, copied once, not in every step of every layer."""
    return torch.tensor(scale, dtype=torch.float32, device=device)


def attend_without_cache(q: Any, key: Any, value: Any, batch: Batch, scoring: Scoring, out: Any) -> None:
    """Attention of encoder models: every sequence attends to its own tokens, which are in ``key`` and ``value``."""
    q, key, value = (x[: batch.tokens] for x in (q, key, value))
    found = flash_attention_varlen(
        q, key, value, batch.starts, batch.starts, batch.longest, batch.longest, **scoring.options(batch.causal)
    )
    out[: batch.tokens].copy_(found)
