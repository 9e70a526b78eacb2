"""Decoding of multi-head latent attention (DeepSeek): one key head, whose first columns are the values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import numpy as np

from aule.api.names import refuses_unknown, unknown_option
from aule.api.types import A, Array, Integers, LatentKeywords
from aule.dtypes import shown
from aule.errors import InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.frontends import front_end
from aule.ops.shared.checks import checked_flag, checked_integer
from aule.options import DecodeOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OP = "mla_decode"
_LARGEST = 2**31 - 1


@overload
def mla_decode(
    q: A,
    kv_cache: Array,
    block_tables: Integers | None = ...,
    context_lens: Integers | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[LatentKeywords],
) -> A: ...
@overload
def mla_decode(
    q: A,
    kv_cache: Array,
    block_tables: Integers | None = ...,
    context_lens: Integers | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[LatentKeywords],
) -> tuple[A, A]: ...
@overload
def mla_decode(
    q: A,
    kv_cache: Array,
    block_tables: Integers | None = ...,
    context_lens: Integers | None = ...,
    *,
    return_lse: bool,
    **options: Unpack[LatentKeywords],
) -> A | tuple[A, A]: ...
@refuses_unknown
def mla_decode(
    q: Array,
    kv_cache: Array,
    block_tables: Integers | None = None,
    context_lens: Integers | None = None,
    *,
    scale: float | None,
    value_dim: int = 512,
    indices: Integers | None = None,
    causal: bool = True,
    kv_scale: Array | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Any:
    """Decode with multi-head latent attention in its absorbed form.

    All query heads attend to one key head, the latent vector and the rotated part of each token. The values are its
    first ``value_dim`` columns, so the cache is read once for both products where the kernel can.

    Parameters
    ----------
    q : array
        ``[batch, heads, dim]``, or ``[batch, heads, tokens, dim]`` for the last few tokens of each sequence; ``dim`` is
        576 for DeepSeek V2 and V3.
    kv_cache : array
        The pool: ``[pages, page, dim]``, pages of 1 to 256 keys. Of q's dtype, or int8, or float8_e4m3fn, with scales.
    block_tables, context_lens
        As in `flash_attention_paged`. None with ``indices``.
    scale : float
        Factor of the scores: that of the model's heads before absorption (192 columns in DeepSeek V3:
        ``192 ** -0.5``, times its YaRN factor). None stands for ``dim ** -0.5``.
    value_dim : int
        Columns of the cache that are values.
    indices : int array, optional
        ``[batch, tokens, topk]``, or ``[batch, topk]`` if q has no token axis: the keys that each token attends to, as
        in DeepSeek V3.2's sparse attention, by their places in the pool (page number times page size, plus the place in
        the page). Negative numbers stand for none. Needs a pool in which pages follow each other without gaps.
    kv_scale : float32 array, optional
        ``[pages, page]``: the factor of each token of an int8 or fp8 cache.
    causal, return_lse, out, backend
        As in `flash_attention_paged`. ``causal`` has no effect with ``indices``.

    Returns
    -------
    array or (array, array)
        ``[batch, heads, value_dim]``, or with a token axis as q has; with ``return_lse`` also float32 of that shape
        without its last axis. A row without keys gives zeros and -inf.
    """
    if unknown:
        raise unknown_option(mla_decode, unknown)
    causal, return_lse = checked_flag(_OP, "causal", causal), checked_flag(_OP, "return_lse", return_lse)
    value_dim = checked_integer(_OP, "value_dim", value_dim, "count the columns of the values")
    _check_rank("kv_cache", kv_cache, (3,), "[pages, page, dim]")
    if not 1 <= value_dim <= kv_cache.shape[-1]:
        raise InvalidShapeError(
            f"[{_OP}] expected value_dim from 1 to the {kv_cache.shape[-1]} columns of kv_cache, got {value_dim}; the "
            "values are its first columns"
        )
    given = {"block_tables": block_tables, "context_lens": context_lens, "indices": indices}
    names = [name for name, x in given.items() if x is not None]
    if names not in (["block_tables", "context_lens"], ["indices"]):
        raise InvalidArgumentError(
            f"[{_OP}] expected block_tables and context_lens, or indices, got {' and '.join(names) or 'none of them'}; "
            "pass the pages and length of each sequence, or the keys of each token"
        )
    _check_cache(q, kv_cache, kv_scale)
    options = DecodeOptions(
        context_lens, block_tables, causal=causal, scale=scale, return_lse=return_lse, out=out, backend=backend,
        latent=True,
    )  # fmt: skip
    if indices is not None:
        return _sparse(q, kv_cache, kv_scale, value_dim, indices, options)
    return _decode(q, kv_cache, kv_scale, value_dim, options)


def _decode(q: Any, kv_cache: Any, kv_scale: Any, value_dim: int, options: DecodeOptions) -> Any:
    """Attention over a pool with one key head."""
    k = kv_cache[:, :, None]
    if kv_scale is not None:
        scales = kv_scale[:, :, None]
        options = options._replace(k_scale=scales, v_scale=scales)
    return front_end(q, _OP).decode(q, k, k[..., :value_dim], options)


def _sparse(q: Any, kv_cache: Any, kv_scale: Any, value_dim: int, indices: Any, options: DecodeOptions) -> Any:
    """Attention of every token to its own keys: a pool of pages of one key, and each token as a sequence."""
    _check_rank("q", q, (3, 4), "[batch, heads, dim] or [batch, heads, tokens, dim]")
    pages, page, dim = kv_cache.shape
    if pages > 1 and _stride(kv_cache, 0) != page * _stride(kv_cache, 1):
        raise InvalidShapeError(
            f"[{_OP}] expected a kv_cache whose pages follow each other without gaps, got strides with gaps; indices "
            "count through all pages"
        )
    tokens = q.shape[2] if q.ndim == 4 else 1
    lead = (q.shape[0], tokens) if q.ndim == 4 else (q.shape[0],)
    if tuple(getattr(indices, "shape", ()))[:-1] != lead:
        wanted, got = ", ".join(map(str, lead)), list(getattr(indices, "shape", ()))
        raise InvalidShapeError(f"[{_OP}] expected indices of [{wanted}, topk], got {got}; give every token its keys")
    table, lens = _keys_first(indices.reshape(-1, indices.shape[-1]), pages * page)
    pool = kv_cache.reshape(pages * page, 1, dim)
    scales = None if kv_scale is None else kv_scale.reshape(pages * page, 1)
    rows = q.swapaxes(1, 2).reshape(-1, q.shape[1], dim) if q.ndim == 4 else q
    if q.ndim == 4 and options.out is not None:
        raise InvalidArgumentError(
            f"[{_OP}] expected no out with indices and a token axis, got one; copy the result, or pass single tokens"
        )
    found = _decode(rows, pool, scales, value_dim, options._replace(block_tables=table, context_lens=lens))
    if q.ndim == 3:
        return found
    results = tuple(x.reshape(*lead, *x.shape[1:]).swapaxes(1, 2) for x in (found if options.return_lse else (found,)))
    return results if options.return_lse else results[0]


def _keys_first(indices: Any, keys: int) -> tuple[Any, Any]:
    """Rows of indices with the negative ones last, as int32, and how many are not negative.

    In host memory they are compared with the number of ``keys`` in the pool.
    """
    if hasattr(indices, "is_floating_point"):  # a torch tensor, which stays on its device
        if indices.is_floating_point():
            raise _no_integers(indices)
        ordered = indices.long().sort(-1, descending=True).values
        if ordered.is_cpu and ordered.numel():
            _check_largest(int(ordered[:, 0].max()), keys)
        # On a device larger ones must not wrap round to places of the pool.
        return ordered.clamp(max=_LARGEST).int(), (ordered >= 0).sum(-1).int()
    numbers = np.asarray(indices)
    if numbers.dtype.kind not in "iu":
        raise _no_integers(numbers)
    numbers = np.sort(numbers, axis=-1)[:, ::-1]
    if numbers.size:
        _check_largest(int(numbers[:, 0].max()), keys)
    return numbers.astype(np.int32), (numbers >= 0).sum(-1, dtype=np.int32)


def _check_largest(index: int, keys: int) -> None:
    if index >= keys:
        raise InvalidArgumentError(
            f"[{_OP}] expected indices below {keys}, the keys of the pool, got {index}; an index is page number times "
            "page size, plus the place in the page"
        )


def _no_integers(indices: Any) -> InvalidArgumentError:
    return InvalidArgumentError(f"[{_OP}] expected indices of integers, got {indices.dtype}; convert them to int32")


def _check_cache(q: Any, kv_cache: Any, kv_scale: Any) -> None:
    """Check what the pool of latents and its scales have in common with q, by the names that the caller knows."""
    if not getattr(q, "shape", ()):
        return  # the front end refuses it
    if q.shape[-1] != kv_cache.shape[-1]:
        raise InvalidShapeError(
            f"[{_OP}] expected q and kv_cache of equal dim, got q {list(q.shape)} and kv_cache {list(kv_cache.shape)}; "
            "both have the latent columns and the rotated ones"
        )
    if kv_scale is None:
        if shown(q.dtype) != shown(kv_cache.dtype):
            raise InvalidDtypeError(
                f"[{_OP}] expected kv_cache of q's dtype, or int8 or float8_e4m3fn with kv_scale, got "
                f"{shown(kv_cache.dtype)} without kv_scale for q of {shown(q.dtype)}; convert it, or pass its scales"
            )
        return
    if shown(q.dtype) == shown(kv_cache.dtype):
        raise InvalidArgumentError(
            f"[{_OP}] expected kv_scale only with a cache of int8 or float8_e4m3fn, got one with "
            f"{shown(kv_cache.dtype)}; leave it out"
        )
    if tuple(getattr(kv_scale, "shape", ())) != tuple(kv_cache.shape[:2]):
        raise InvalidShapeError(
            f"[{_OP}] expected kv_scale of [pages, page] = {list(kv_cache.shape[:2])}, got "
            f"{list(getattr(kv_scale, 'shape', ()))}; give each token one factor"
        )


def _stride(array: Any, axis: int) -> int:
    """Distance between neighbours along an axis; in elements or bytes."""
    steps = array.stride() if hasattr(array, "stride") else np.asarray(array).strides
    return int(steps[axis])


def _check_rank(name: str, array: Any, ranks: tuple[int, ...], form: str) -> None:
    shape = getattr(array, "shape", None)
    if shape is None or len(shape) not in ranks:
        got = type(array).__name__ if shape is None else str(list(shape))
        raise InvalidShapeError(f"[{_OP}] expected {name} of {form}, got {got}; reshape it")
