"""flash-attn's attention over a cache: rotates new tokens, appends them in place, and attends to the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from aule import settings
from aule.api.decode import decode_attention, flash_attention_paged
from aule.api.kvcache import rotate
from aule.errors import DeviceMismatchError, InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.frontends.torch import kvcache
from aule.frontends.torch.checks import integers, no_gradient, require_plain
from aule.frontends.torch.decode import check_decode
from aule.frontends.torch.modes import refuse_transforms
from aule.ops.decode.validate import MAX_PAGE
from aule.options import DecodeOptions


class CacheCall(NamedTuple):
    """The arguments of `flash_attn_with_kvcache`, except for the options of attention."""

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
    """Return the result ``[batch, seq_q, heads, dim]`` and its log-sum-exp; ``options`` as for `aule.decode_attention`.

    The cache is written only after all checks that the host can make.
    """
    _check_combination(call)
    _check_tensors(call)
    _check_rows(call)
    call = _with_own_table(call)
    batch, rows, heads, _ = call.q.shape
    room = call.k_cache.shape[1] * (1 if call.block_table is None else call.block_table.shape[1])
    seqlens = _lengths(call, room)
    lens = seqlens if call.k is None else seqlens + call.k.shape[1]
    k, v, table, lens = _keys(call, room, lens)
    q = call.q
    if call.k is not None:
        layout = "HND" if table is None else "NHD"
        check_decode(
            call.op, q.transpose(1, 2), k, v, DecodeOptions(lens, table, layout=layout, return_lse=True, **options)
        )
        _check_new(call, options)
        q = _append(call, q, seqlens, options)
    out = q.new_empty(batch, rows, heads, call.v_cache.shape[3])
    options = options | {"out": out.transpose(1, 2), "return_lse": True}
    if table is None:
        _, lse = decode_attention(q.transpose(1, 2), k, v, context_lens=lens, **options)
    else:
        _, lse = flash_attention_paged(q.transpose(1, 2), k, v, table, lens, **options)
    return out, lse


def _keys(call: CacheCall, room: int, lens: Any) -> tuple[Any, Any, Any, Any]:
    """Return keys, values, block table and lengths for `aule.flash_attention_paged`.

    Without a table they are for `aule.decode_attention`.
    """
    batch = call.q.shape[0]
    if call.block_table is None and call.cache_batch_idx is None and call.cache_leftpad is None:
        return *(x[:batch].transpose(1, 2) for x in (call.k_cache, call.v_cache)), None, lens
    if lens is None:
        lens = torch.full((batch,), room, dtype=torch.int32, device=call.q.device)
    if call.cache_leftpad is not None:
        return _as_keys(call, room, lens)
    if call.block_table is None:
        return *_as_pages(call, batch), lens
    return *split_pages(call.op, call.k_cache, call.v_cache, call.block_table), lens


def _with_own_table(call: CacheCall) -> CacheCall:
    """Return the call with one row of the block table for each sequence, chosen by ``cache_batch_idx``."""
    if call.block_table is None:
        return call
    table = call.block_table.to(call.q.device, torch.int32)
    if call.cache_batch_idx is not None:
        last = table.shape[0] - 1
        table = table[_integers(call, "cache_batch_idx", call.cache_batch_idx, last).clamp(0, last).long()]
    return call._replace(block_table=table)


def split_pages(op: str, k_cache: Any, v_cache: Any, table: Any) -> tuple[Any, Any, Any]:
    """Split pages of more than `MAX_PAGE` keys, which flash-attn allows, into equal smaller ones."""
    page = k_cache.shape[1]
    table = integers(op, "block_table", table)
    if page <= MAX_PAGE:
        return k_cache, v_cache, table
    parts = page // _divisor(page)
    k, v = (_divided(op, cache, parts) for cache in (k_cache, v_cache))
    inner = torch.arange(parts, device=table.device)
    return k, v, _page_numbers((table.long()[..., None] * parts + inner).flatten(1))


def _page_numbers(numbers: Any) -> Any:
    """Return page numbers as int32; those that do not fit stay outside of every pool."""
    return numbers.clamp(-1, 2**31 - 1).to(torch.int32)


def _append(call: CacheCall, q: Any, seqlens: Any, options: dict[str, Any]) -> Any:
    """Write new keys and values after those in the cache; return q, rotated if there are rotary tables."""
    batch, new = call.k.shape[:2]
    step = torch.arange(new, dtype=torch.int32, device=q.device)
    positions = seqlens[:, None] + step
    size = call.k_cache.shape[1]
    if call.block_table is not None:
        table = call.block_table
        number = positions // size
        pages = table.gather(1, number.clamp(max=table.shape[1] - 1).long())
        slots = torch.where(number < table.shape[1], pages * size + positions % size, -1)
    else:
        # Lengths on a GPU are not checked: keys that do not fit are dropped, not written into the next sequence's rows.
        slots = torch.where(positions < size, _rows(call, batch)[:, None] * size + positions, -1)
    rope = None if call.rotary_cos is None else (call.rotary_cos.contiguous(), call.rotary_sin.contiguous())
    arrays = {"k": call.k, "v": call.v, "k_cache": call.k_cache, "v_cache": call.v_cache}
    arrays["places"] = torch.stack([slots.flatten(), positions.flatten()]).to(torch.int32)
    if rope is not None:
        arrays |= {"cos": rope[0], "sin": rope[1]}
    kvcache.write(call.op, arrays, interleaved=call.rotary_interleaved, backend=options["backend"])
    if rope is not None:
        rows = torch.arange(q.shape[1], dtype=torch.int32, device=q.device)
        if not _uses_positions(options):
            rows = rows * 0  # flash-attn rotates all of them by the angles of the first
        at = (seqlens[:, None] + rows).flatten()
        places = torch.stack([torch.arange(at.numel(), dtype=torch.int32, device=q.device), at])
        rotated = rotate(call.op, q.transpose(1, 2), places, rope, call.rotary_interleaved, options["backend"])
        q = rotated.transpose(1, 2)
    return q


def _uses_positions(options: dict[str, Any]) -> bool:
    """Return whether a query's position decides which keys it attends to."""
    return bool(options["causal"]) or tuple(options["window"]) != (-1, -1)


def _as_pages(call: CacheCall, batch: int) -> tuple[Any, Any, Any]:
    """View a contiguous cache as pages, for ``cache_batch_idx``."""
    size = call.k_cache.shape[1]
    first = _rows(call, batch)[:, None]
    parts = size // _divisor(size)
    table = first * parts + torch.arange(parts, dtype=torch.int32, device=first.device)
    return *(_divided(call.op, cache, parts) for cache in (call.k_cache, call.v_cache)), table


def _as_keys(call: CacheCall, room: int, lens: Any) -> tuple[Any, Any, Any, Any]:
    """View a cache as pages of one key each, for ``cache_leftpad``."""
    size = call.k_cache.shape[1]
    table = _rows(call, call.q.shape[0])[:, None] if call.block_table is None else call.block_table
    left = _integers(call, "cache_leftpad", call.cache_leftpad, room)
    at = left[:, None] + torch.arange(room, dtype=torch.int32, device=left.device)
    at = at.clamp(0, room - 1).long()
    pages = _page_numbers(table.long().gather(1, at // size) * size + at % size)
    k, v = (_divided(call.op, cache, size) for cache in (call.k_cache, call.v_cache))
    return k, v, pages, (lens - left).clamp(min=0)


def _divided(op: str, cache: Any, parts: int) -> Any:
    """View ``[n, size, heads, dim]`` as ``[n * parts, size / parts, heads, dim]``."""
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
    """Return the largest allowed page size that divides ``size``."""
    return max(n for n in range(1, min(size, MAX_PAGE) + 1) if size % n == 0)


def _rows(call: CacheCall, batch: int) -> Any:
    if call.cache_batch_idx is None:
        return torch.arange(batch, dtype=torch.int32, device=call.q.device)
    return _integers(call, "cache_batch_idx", call.cache_batch_idx, call.k_cache.shape[0] - 1)


def _lengths(call: CacheCall, room: int) -> Any:
    """Return the number of keys of each sequence as int32 on q's device; None if all rows are full."""
    given = call.cache_seqlens
    if given is None:
        return None
    batch = call.q.shape[0]
    if isinstance(given, int) and not isinstance(given, bool):
        clamped = max(min(given, 1 << 31), -(1 << 31))  # fits int64, and values outside int32 stay outside
        given = torch.full((batch,), clamped, device="cpu")
    found = _integers(call, "cache_seqlens", given, room)
    new = 0 if call.k is None else call.k.shape[1]
    if _readable(given) and batch and int(given.max()) + new > room:
        more = "the cache more room" if call.block_table is None else "block_table more columns"
        raise InvalidShapeError(
            f"[{call.op}] expected room for {int(given.max())} keys and {new} new ones, got {room}; give {more}"
        )
    return found


def _readable(numbers: Any) -> bool:
    """Return whether to check numbers: in host memory always, on a device if the user asks for it."""
    return bool(numbers.is_cpu) or settings.check_indices()


def _integers(call: CacheCall, name: str, given: Any, most: int) -> Any:
    """Move one number per sequence to q's device; readable numbers are checked to be from 0 to ``most``."""
    batch = call.q.shape[0]
    is_integer = isinstance(given, torch.Tensor) and given.dtype in (torch.int32, torch.int64)
    if not is_integer or tuple(given.shape) != (batch,):
        got = f"{given.dtype} {list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
        raise InvalidDtypeError(f"[{call.op}] expected {name} as an int32 tensor [{batch}], got {got}; convert it")
    if _readable(given) and batch:
        least, largest = (int(x) for x in given.aminmax())
        if least < 0 or largest > most:
            more = "the cache more room" if call.block_table is None else "block_table more columns or rows"
            raise InvalidArgumentError(
                f"[{call.op}] expected {name} from 0 to {most}, got {given.tolist()}; correct it, or give {more}"
            )
    return given.to(call.q.device, torch.int32)


def _check_combination(call: CacheCall) -> None:
    op = call.op
    if (call.k is None) != (call.v is None) or (call.rotary_cos is None) != (call.rotary_sin is None):
        raise InvalidArgumentError(f"[{op}] expected k and v, and rotary_cos and rotary_sin, in pairs, got one of two")
    if call.k is not None and call.cache_seqlens is None:
        raise InvalidArgumentError(f"[{op}] expected cache_seqlens with k and v, got None; say where they belong")
    if call.rotary_cos is not None and call.k is None:
        raise InvalidArgumentError(f"[{op}] expected k and v with rotary_cos, got none; rotate q before the call")


def _check_tensors(call: CacheCall) -> None:
    op = call.op
    refuse_transforms(op, call[1:], "call it outside of them")
    for name in ("k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin"):
        tensor = getattr(call, name)
        if tensor is None:
            continue
        require_plain(tensor, name, op)
        if tensor.device != call.q.device:
            raise DeviceMismatchError(
                f"[{op}] expected {name} on {call.q.device} like q, got {tensor.device}; move it with .to"
            )
        if torch.is_grad_enabled() and (tensor.requires_grad or call.q.requires_grad):
            raise no_gradient(None, "use torch.no_grad()", op)


def _check_rows(call: CacheCall) -> None:
    op = call.op
    if call.block_table is not None:
        shape = tuple(integers(op, "block_table", call.block_table).shape)
        batch = call.q.shape[0]
        fits = len(shape) == 2 and (shape[0] == batch or (call.cache_batch_idx is not None and shape[0] > 0))
        if not fits:
            raise InvalidShapeError(
                f"[{op}] expected block_table of [{batch}, max_pages], got {list(shape)}; give each sequence a row"
            )
        if call.cache_leftpad is not None and 0 in (shape[1], call.k_cache.shape[1]):
            raise InvalidShapeError(f"[{op}] expected room for keys with cache_leftpad, got none; add pages")
    elif call.k_cache.shape[1] == 0 and not (call.cache_batch_idx is None and call.cache_leftpad is None):
        got = list(call.k_cache.shape)
        raise InvalidShapeError(f"[{op}] expected k_cache with room for keys, got {got}; make it longer")


def _check_new(call: CacheCall, options: dict[str, Any]) -> None:
    """Check the new keys and values, and where they are written."""
    op, batch = call.op, call.q.shape[0]
    for name in ("k", "v"):
        shape = tuple(getattr(call, name).shape)
        if shape[:2] != (batch, call.k.shape[1]):
            raise InvalidShapeError(
                f"[{op}] expected {name} of [{batch}, {call.k.shape[1]}, heads_kv, head_dim], got {list(shape)}; give "
                "each sequence as many new tokens"
            )
        cache = getattr(call, f"{name}_cache")
        if any(n > 1 and step == 0 for n, step in zip(cache.shape, cache.stride(), strict=True)):
            raise InvalidShapeError(
                f"[{op}] expected {name}_cache with memory for every element, got an expanded tensor; clone it first"
            )
    chosen = call.cache_batch_idx
    if chosen is not None and _readable(chosen) and len(set(chosen.tolist())) != batch:
        raise InvalidArgumentError(
            f"[{op}] expected every row of the cache once in cache_batch_idx with k and v, got {chosen.tolist()}; one "
            "would overwrite the other"
        )
    lens = call.cache_seqlens
    if call.rotary_cos is not None and batch and (isinstance(lens, int) or _readable(lens)):
        further = max(call.k.shape[1], call.q.shape[1] if _uses_positions(options) else 1)
        needed = (lens if isinstance(lens, int) else int(lens.max())) + further
        if call.rotary_cos.dim() == 2 and call.rotary_cos.shape[0] < needed:  # other shapes are refused later
            raise InvalidShapeError(
                f"[{op}] expected rotary_cos and rotary_sin of at least {needed} positions, got "
                f"{call.rotary_cos.shape[0]}; compute more"
            )
