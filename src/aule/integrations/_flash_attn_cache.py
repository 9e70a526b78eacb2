"""flash-attn's functions over a cache: new tokens appended in place, rotated, and attention over what is there."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from aule.api import decode_attention, flash_attention_paged
from aule.errors import AuleError, InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.frontends import torch_kvcache
from aule.kvcache import rotate
from aule.ops.decode.validate import MAX_PAGE


class CacheCall(NamedTuple):
    """A call of `flash_attn_with_kvcache`, as it was made, but for the options of attention."""

    op: str
    q: Any
    k_cache: Any
    v_cache: Any
    k: Any
    v: Any
    rotary_cos: Any
    rotary_sin: Any
    cache_seqlens: Any
    cache_batch_idx: Any
    cache_leftpad: Any
    block_table: Any
    rotary_interleaved: bool


def with_kvcache(call: CacheCall, options: dict[str, Any]) -> tuple[Any, Any]:
    """The result ``[batch, seq_q, heads, dim]`` and its log-sum-exp; ``options`` as for `aule.decode_attention`."""
    _check(call)
    q = call.q
    batch, rows, heads, _ = q.shape
    seqlens = _lengths(call, call.cache_seqlens)
    if call.k is not None:
        q, seqlens = _append(call, q, seqlens, options)
    out = q.new_empty(batch, rows, heads, call.v_cache.shape[3])
    options = options | {"out": out.transpose(1, 2), "return_lse": True}
    q = q.transpose(1, 2)
    if call.block_table is None and call.cache_batch_idx is None and call.cache_leftpad is None:
        k, v = (x[:batch].transpose(1, 2) for x in (call.k_cache, call.v_cache))
        _, lse = decode_attention(q, k, v, context_lens=seqlens, **options)
        return out, lse
    room = call.k_cache.shape[1] * (1 if call.block_table is None else call.block_table.shape[1])
    if seqlens is None:
        seqlens = torch.full((batch,), room, dtype=torch.int32, device=q.device)
    if call.block_table is not None:
        k, v, table = split_pages(call.op, call.k_cache, call.v_cache, call.block_table)
    else:
        k, v, table, seqlens = _as_pages(call, batch, seqlens)
    _, lse = flash_attention_paged(q, k, v, table, seqlens, **options)
    return out, lse


def split_pages(op: str, k_cache: Any, v_cache: Any, table: Any) -> tuple[Any, Any, Any]:
    """Pages of at most 256 keys: larger ones, which flash-attn has, as several."""
    page = k_cache.shape[1]
    if page <= MAX_PAGE:
        return k_cache, v_cache, table.to(torch.int32)
    parts = page // _divisor(page)
    k, v = (_cut(op, cache, parts) for cache in (k_cache, v_cache))
    inner = torch.arange(parts, dtype=torch.int32, device=table.device)
    return k, v, (table.to(torch.int32)[..., None] * parts + inner).flatten(1)


def _append(call: CacheCall, q: Any, seqlens: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Write new keys and values behind those in the cache: q, rotated where it has to be, and the new lengths."""
    batch, new = call.k.shape[:2]
    room = call.k_cache.shape[1] * (1 if call.block_table is None else call.block_table.shape[1])
    if q.is_cpu and batch and int(seqlens.max()) + new > room:
        raise InvalidShapeError(
            f"[{call.op}] expected room for {int(seqlens.max())} keys and {new} new ones, got {room}; give the cache "
            "more room"
        )
    step = torch.arange(new, dtype=torch.int32, device=q.device)
    positions = seqlens[:, None] + step
    size = call.k_cache.shape[1]
    if call.block_table is not None:
        table = call.block_table.to(torch.int32)
        number = positions // size
        pages = table.gather(1, number.clamp(max=table.shape[1] - 1).long())
        slots = torch.where(number < table.shape[1], pages * size + positions % size, -1)
    else:
        # On a GPU nobody has looked: what does not fit is dropped, and never written into the next sequence's rows.
        slots = torch.where(positions < size, _rows(call, batch)[:, None] * size + positions, -1)
    rope = None if call.rotary_cos is None else (call.rotary_cos.contiguous(), call.rotary_sin.contiguous())
    arrays = {"k": call.k, "v": call.v, "k_cache": call.k_cache, "v_cache": call.v_cache}
    arrays["places"] = torch.stack([slots.flatten(), positions.flatten()]).to(torch.int32)
    if rope is not None:
        arrays |= {"cos": rope[0], "sin": rope[1]}
    torch_kvcache.write(call.op, arrays, interleaved=call.rotary_interleaved, backend=options["backend"])
    if rope is not None:
        rows = torch.arange(q.shape[1], dtype=torch.int32, device=q.device)
        if not options["causal"] and tuple(options["window"]) == (-1, -1):
            rows = rows * 0  # flash-attn turns all of them by the angles of the first
        at = (seqlens[:, None] + rows).flatten()
        places = torch.stack([torch.arange(at.numel(), dtype=torch.int32, device=q.device), at])
        turned = rotate(call.op, q.transpose(1, 2), places, rope, call.rotary_interleaved, options["backend"])
        q = turned.transpose(1, 2)
    return q, seqlens + new


def _as_pages(call: CacheCall, batch: int, seqlens: Any) -> tuple[Any, Any, Any, Any]:
    """A contiguous cache as a pool of pages: for rows chosen by ``cache_batch_idx``, and keys that begin somewhere."""
    size = call.k_cache.shape[1]
    first = _rows(call, batch)[:, None]
    if call.cache_leftpad is None:
        page = _divisor(size)
        parts = size // page
        table = first * parts + torch.arange(parts, dtype=torch.int32, device=first.device)
    else:
        left = _integers(call, "cache_leftpad", call.cache_leftpad, batch)
        parts = size
        at = left[:, None] + torch.arange(size, dtype=torch.int32, device=first.device)
        table = first * size + at.clamp(max=size - 1)
        seqlens = (seqlens - left).clamp(min=0)
    k, v = (_cut(call.op, cache, parts) for cache in (call.k_cache, call.v_cache))
    return k, v, table, seqlens


def _cut(op: str, cache: Any, parts: int) -> Any:
    """``[n, size, heads, dim]`` as ``[n * parts, size / parts, heads, dim]``, in place."""
    n, size, heads, dim = cache.shape
    if n > 1 and cache.stride(0) != size * cache.stride(1):
        raise InvalidShapeError(
            f"[{op}] expected a cache whose sequences lie behind each other, got strides {cache.stride()}; make it "
            "contiguous"
        )
    each = size // parts
    steps = (each * cache.stride(1), *cache.stride()[1:])
    return cache.as_strided((n * parts, each, heads, dim), steps)


def _divisor(size: int) -> int:
    """The largest size of a page into equal ones of which ``size`` keys can be cut."""
    return max(n for n in range(1, min(size, MAX_PAGE) + 1) if size % n == 0)


def _rows(call: CacheCall, batch: int) -> Any:
    """The row of the cache that each sequence has."""
    if call.cache_batch_idx is None:
        return torch.arange(batch, dtype=torch.int32, device=call.q.device)
    return _integers(call, "cache_batch_idx", call.cache_batch_idx, batch)


def _lengths(call: CacheCall, given: Any) -> Any:
    batch = call.q.shape[0]
    if given is None:
        return None
    if isinstance(given, int):
        return torch.full((batch,), given, dtype=torch.int32, device=call.q.device)
    return _integers(call, "cache_seqlens", given, batch)


def _integers(call: CacheCall, name: str, given: Any, batch: int) -> Any:
    integers = isinstance(given, torch.Tensor) and given.dtype in (torch.int32, torch.int64)
    if not integers or tuple(given.shape) != (batch,):
        got = f"{given.dtype} {list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
        raise InvalidDtypeError(f"[{call.op}] expected {name} as an int32 tensor [{batch}], got {got}; convert it")
    return given.to(torch.int32)


def _check(call: CacheCall) -> None:
    op = call.op
    if (call.k is None) != (call.v is None) or (call.rotary_cos is None) != (call.rotary_sin is None):
        raise InvalidArgumentError(f"[{op}] expected k and v, and rotary_cos and rotary_sin, in pairs, got one of two")
    if call.k is not None and call.cache_seqlens is None:
        raise InvalidArgumentError(f"[{op}] expected cache_seqlens with k and v, got None; say where they belong")
    if call.rotary_cos is not None and call.k is None:
        raise InvalidArgumentError(f"[{op}] expected k and v with rotary_cos, got none; rotate q before the call")
    if call.block_table is not None and (call.cache_batch_idx is not None or call.cache_leftpad is not None):
        raise InvalidArgumentError(
            f"[{op}] expected a block_table without cache_batch_idx and cache_leftpad, got one of these; put it into "
            "the table"
        )
    tensors = (call.q, call.k_cache, call.v_cache, call.k, call.v)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise AuleError(
            "AULE_ERROR_NO_GRADIENT",
            f"[{op}] expected tensors that need no gradient, got requires_grad=True; use torch.no_grad()",
        )
