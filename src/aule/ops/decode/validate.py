"""Checks the arrays of a call and brings them into normal form: a `DecodeProblem` and its operands.

This runs only on the first call of a signature and favours clear messages over speed, except for `check_numbers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.errors import DeviceMismatchError, InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.ops.attention.validate import attention_problem
from aule.ops.attention.varlen import heads_first, longest_sequence
from aule.ops.decode.problem import QUANTISED, DecodeProblem
from aule.ops.shared.checks import checked_choice
from aule.view import TensorView

MAX_PAGE = 256
"""Most keys of a page."""

_UNSIGNED = np.dtype(np.uint32)

LAYOUTS = {"NHD": "[pages, page, heads_kv, dim]", "HND": "[pages, heads_kv, page, dim]"}


@dataclass(frozen=True, eq=False)
class DecodeOperands:
    """The arrays of one call in normal form.

    Attributes
    ----------
    q : TensorView
        ``[batch, heads_q, seq_q, dim]``, or ``[1, heads_q, total_q, dim]`` if sequences are packed.
    k, v : TensorView
        ``[batch, heads_kv, seq_kv, dim]``, or ``[pages, heads_kv, page, dim]``, in any order in memory.
    k_scale, v_scale : TensorView or None
        f32, shape of k and v without the last axis, if these are quantised.
    tables : TensorView or None
        i32 ``[batch, pages of the longest sequence]``, if the cache is paged.
    lens : TensorView or None
        i32 ``[batch]``: number of keys of each sequence.
    cu_q : TensorView or None
        i32 ``[batch + 1]``, if sequences are packed: first row of q of each.
    alibi : TensorView or None
        f32 ``[batch, heads_q]``, stride 0 on the batch axis if all batches share the slopes.
    sinks : TensorView or None
        f32 ``[heads_q]``.
    form : {"rows", "token", "packed"}
        Axes of the caller's q: ``[batch, heads_q, seq_q, dim]``, ``[batch, heads_q, dim]`` or ``[total_q, heads_q,
        dim]``; results have the same form.
    captured : mapping
        Arrays that the user's functions captured, by buffer name.
    """

    q: TensorView
    k: TensorView
    v: TensorView
    k_scale: TensorView | None = None
    v_scale: TensorView | None = None
    tables: TensorView | None = None
    lens: TensorView | None = None
    cu_q: TensorView | None = None
    alibi: TensorView | None = None
    sinks: TensorView | None = None
    form: str = "rows"
    captured: Mapping[str, TensorView] = field(default_factory=dict)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.returned((*self.q.shape[:3], self.v.shape[3]))

    @property
    def lse_shape(self) -> tuple[int, ...]:
        batch, heads, rows = self.q.shape[:3]
        return {"rows": (batch, heads, rows), "token": (batch, heads), "packed": (heads, rows)}[self.form]

    def returned(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape ``[batch, heads, rows, dim]`` in the caller's form."""
        batch, heads, rows, dim = shape
        return {"rows": shape, "token": (batch, heads, dim), "packed": (rows, heads, dim)}[self.form]

    def lifted(self, array: Any) -> Any:
        """A host array of ``out_shape`` as a view with the four axes of the normal form."""
        if self.form == "packed":
            return array.transpose(1, 0, 2)[None]
        return array[:, :, None] if self.form == "token" else array


def decode_problem(
    op: str,
    q: TensorView,
    k: TensorView,
    v: TensorView,
    *,
    context_lens: TensorView | None = None,
    block_tables: TensorView | None = None,
    cu_seqlens_q: TensorView | None = None,
    max_seqlen_q: int | None = None,
    k_scale: TensorView | None = None,
    v_scale: TensorView | None = None,
    layout: str = "NHD",
    causal: bool = True,
    scale: float | None = None,
    window: int | Sequence[int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: TensorView | None = None,
    sinks: TensorView | None = None,
    return_lse: bool = False,
    latent: bool = False,
) -> tuple[DecodeProblem, DecodeOperands]:
    """Check one call and bring its operands into normal form.

    Parameters
    ----------
    op : str
        The public function that was called, for messages: `aule.flash_attention_paged` with ``block_tables``,
        otherwise `aule.decode_attention`. The other parameters are theirs, arrays as views.
    latent : bool
        ``v`` is the first columns of ``k``.

    Returns
    -------
    problem : DecodeProblem
    operands : DecodeOperands

    Raises
    ------
    InvalidShapeError, InvalidDtypeError, InvalidArgumentError, DeviceMismatchError
        With what was expected, what was found and the remedy. Contents of block tables, lengths and offsets are checked
        only in host memory.
    """
    arrays = {
        "q": q, "k": k, "v": v, "context_lens": context_lens, "block_tables": block_tables, "k_scale": k_scale,
        "v_scale": v_scale, "cu_seqlens_q": cu_seqlens_q, "alibi_slopes": alibi_slopes, "sinks": sinks,
    }  # fmt: skip
    _check_devices(op, arrays)
    paged = block_tables is not None
    q4, form = _queries(op, q, cu_seqlens_q)
    checked_choice(op, "layout", layout, tuple(LAYOUTS), "it is the order of the cache's axes")
    k4, v4 = (_cache(op, name, view, layout, paged) for name, view in (("k", k), ("v", v)))
    _check_cache_dtypes(op, q, k, v)
    batch = _batch(op, q4, cu_seqlens_q)
    _check_cache_shapes(op, batch, k4, v4, paged)
    page, pages, seq_kv = 0, 0, k4.shape[2]
    if block_tables is not None:
        page, pages = k4.shape[2], k4.shape[0]
        _check_indices(op, "block_tables", block_tables, (batch, None))
        seq_kv = block_tables.shape[1] * page
    if context_lens is not None:
        _check_indices(op, "context_lens", context_lens, (batch,))
    swap = paged and layout == "NHD"
    k_scale, v_scale = _scale(op, "k_scale", k_scale, k4, swap), _scale(op, "v_scale", v_scale, v4, swap)
    seq_q = q4.shape[2]
    if cu_seqlens_q is not None:
        seq_q = longest_sequence(op, "q", cu_seqlens_q, seq_q, max_seqlen_q)
    elif max_seqlen_q is not None:
        raise InvalidArgumentError(f"[{op}] expected max_seqlen_q with cu_seqlens_q only, got {max_seqlen_q}; drop it")

    # Attention's own checks of heads, dimensions and options, on stand-ins with the shapes of one padded batch.
    def stand_in(heads: int, rows: int, dim: int) -> TensorView:
        return TensorView(q.dtype, (batch, heads, rows, dim), (0, 0, 0, 0), q.device, None)

    attention, operands = attention_problem(
        stand_in(q4.shape[1], seq_q, q4.shape[3]),
        stand_in(k4.shape[1], seq_kv, k4.shape[3]),
        stand_in(v4.shape[1], seq_kv, v4.shape[3]),
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        return_lse=return_lse,
        op=op,
    )
    problem = DecodeProblem(
        batch=batch,
        heads_q=attention.heads_q,
        heads_kv=attention.heads_kv,
        seq_q=seq_q,
        seq_kv=seq_kv,
        head_dim=attention.head_dim,
        value_dim=attention.value_dim,
        dtype=q.dtype,
        cache=k.dtype,
        scale=attention.scale,
        causal=attention.causal,
        window=attention.window,
        softcap=attention.softcap,
        alibi=attention.alibi,
        sinks=attention.sinks,
        return_lse=attention.return_lse,
        lens=context_lens is not None,
        page=page,
        pages=pages,
        total_q=None if cu_seqlens_q is None else q4.shape[2],
        latent=latent,
    )
    check_contents(op, problem, context_lens, block_tables)
    return problem, DecodeOperands(
        q=q4,
        k=k4,
        v=v4,
        k_scale=k_scale,
        v_scale=v_scale,
        tables=block_tables,
        lens=context_lens,
        cu_q=cu_seqlens_q,
        alibi=operands.alibi,
        sinks=operands.sinks,
        form=form,
    )


def check_contents(op: str, problem: DecodeProblem, lens: TensorView | None, tables: TensorView | None) -> None:
    """Check the contents of lengths and block tables that are in host memory."""
    if lens is not None and lens.is_host:
        check_numbers(op, problem, lens.storage, tables.storage if tables is not None and tables.is_host else None)


def check_numbers(
    op: str, problem: DecodeProblem, lengths: npt.NDArray[np.int32], table: npt.NDArray[np.int32] | None
) -> None:
    """Check the contents of host arrays of lengths and block tables; fast, since every call does so."""
    if lengths.size and _largest(lengths) > problem.seq_kv:
        wrong = int(np.flatnonzero((lengths < 0) | (lengths > problem.seq_kv))[0])
        raise InvalidShapeError(
            f"[{op}] expected context_lens from 0 to {problem.seq_kv}, the size of the cache, got {lengths[wrong]} "
            f"for sequence {wrong}; enlarge the cache or correct the lengths"
        )
    if table is None or not table.size or _largest(table) < problem.pages:  # all are valid, unused ones included
        return
    used = np.arange(table.shape[1])[None] < -(-lengths.astype(np.int64) // max(problem.page, 1))[:, None]
    outside = used & ((table < 0) | (table >= problem.pages))
    if outside.any():
        sequence, entry = (int(i) for i in np.argwhere(outside)[0])
        raise InvalidArgumentError(
            f"[{op}] expected block_tables of pages 0..{problem.pages - 1}, got {table[sequence, entry]} as page "
            f"{entry} of sequence {sequence}, which has {lengths[sequence]} keys; give each used page its number"
        )


def _largest(numbers: npt.NDArray[np.int32]) -> int:
    """Largest number of an array read as unsigned, so that negative ones are very large.

    Faster than ``view(np.uint32).max()``.
    """
    return int(np.maximum.reduce(numbers.view(_UNSIGNED), axis=None))


def _check_devices(op: str, arrays: dict[str, TensorView | None]) -> None:
    present = {name: view.device for name, view in arrays.items() if view is not None}
    home = present["q"]
    # Lengths, tables and offsets are small and made on the host; the launch copies them.
    small = ("context_lens", "block_tables", "cu_seqlens_q")
    elsewhere = {n: d for n, d in present.items() if d != home and n not in small}
    if elsewhere:
        found = ", ".join(f"{name} on {device}" for name, device in elsewhere.items())
        raise DeviceMismatchError(f"[{op}] expected all arrays on one device, got q on {home}, {found}; move them")


def _queries(op: str, q: TensorView, cu_q: TensorView | None) -> tuple[TensorView, str]:
    rank = len(q.shape)
    if cu_q is not None:
        if rank != 3:
            raise InvalidShapeError(
                f"[{op}] expected q of shape [rows of all sequences, heads_q, head_dim] with cu_seqlens_q, got "
                f"{list(q.shape)}; concatenate the sequences along the first axis"
            )
        return heads_first(q), "packed"
    if rank == 4:
        return q, "rows"
    if rank != 3:
        raise InvalidShapeError(
            f"[{op}] expected q of shape [batch, heads_q, seq_q, head_dim] or, for one token each, [batch, heads_q, "
            f"head_dim], got {list(q.shape)}; add or merge axes of q"
        )
    return _inserted(q, 2), "token"


def _inserted(view: TensorView, axis: int) -> TensorView:
    """The view with an additional axis of length 1."""
    shape = (*view.shape[:axis], 1, *view.shape[axis:])
    strides = (*view.strides[:axis], 0, *view.strides[axis:])
    storage = np.expand_dims(view.storage, axis) if view.is_host else view.storage
    return TensorView(view.dtype, shape, strides, view.device, storage, view.offset)


def _swapped(view: TensorView) -> TensorView:
    """The view with axes 1 and 2 swapped."""

    def swap(of: tuple[int, ...]) -> tuple[int, ...]:
        return (of[0], of[2], of[1], *of[3:])

    storage = view.storage.swapaxes(1, 2) if view.is_host else view.storage
    return TensorView(view.dtype, swap(view.shape), swap(view.strides), view.device, storage, view.offset)


def _cache(op: str, name: str, view: TensorView, layout: str, paged: bool) -> TensorView:
    expected = LAYOUTS[layout] if paged else "[batch, heads_kv, max_len, dim]"
    shown = f"{name}_cache" if paged else name
    if len(view.shape) != 4:
        raise InvalidShapeError(f"[{op}] expected {shown} of shape {expected}, got {list(view.shape)}; reshape it")
    view = _swapped(view) if paged and layout == "NHD" else view
    if paged and not 1 <= view.shape[2] <= MAX_PAGE:
        raise InvalidShapeError(
            f"[{op}] expected pages of 1..{MAX_PAGE} keys, got {view.shape[2]} in {shown} of layout {layout} = "
            f"{expected}; reshape the pool, or pass the other layout"
        )
    return view


def _check_cache_dtypes(op: str, q: TensorView, k: TensorView, v: TensorView) -> None:
    if k.dtype != v.dtype or k.dtype not in (q.dtype, *QUANTISED):
        raise InvalidDtypeError(
            f"[{op}] expected k and v both of q's dtype, int8 or float8_e4m3fn, got q {q.dtype_name}, k "
            f"{k.dtype_name}, v {v.dtype_name}; convert them"
        )


def _batch(op: str, q: TensorView, cu_q: TensorView | None) -> int:
    if cu_q is None:
        return q.shape[0]
    if cu_q.dtype != "i32" or len(cu_q.shape) != 1 or cu_q.shape[0] < 1:
        raise InvalidDtypeError(
            f"[{op}] expected cu_seqlens_q as int32 [batch + 1], got {cu_q.dtype_name} {list(cu_q.shape)}; convert it"
        )
    return cu_q.shape[0] - 1


def _check_cache_shapes(op: str, batch: int, k: TensorView, v: TensorView, paged: bool) -> None:
    if not paged and k.shape[0] != batch:
        raise InvalidShapeError(
            f"[{op}] expected k of the batch of q, {batch}, got {list(k.shape)}; give each sequence its own cache, or "
            "expand it with stride 0"
        )
    if k.shape[:3] != v.shape[:3]:
        raise InvalidShapeError(
            f"[{op}] expected k and v alike but for head_dim, got {list(k.shape)} and {list(v.shape)} (as [.., "
            "heads_kv, keys, dim]); every key needs its value"
        )


def _check_indices(op: str, name: str, view: TensorView, shape: tuple[int | None, ...]) -> None:
    fits = len(view.shape) == len(shape) and all(n in (None, m) for n, m in zip(shape, view.shape, strict=True))
    if view.dtype != "i32" or not fits:
        wanted = ", ".join("max_pages" if n is None else f"batch = {n}" for n in shape)
        kind = InvalidShapeError if view.dtype == "i32" else InvalidDtypeError
        raise kind(f"[{op}] expected {name} as int32 [{wanted}], got {view.dtype_name} {list(view.shape)}; convert it")


def _scale(op: str, name: str, scale: TensorView | None, cache: TensorView, swap: bool) -> TensorView | None:
    """Check the scales of K or V, and swap axes 1 and 2 if the caller's layout needs it."""
    quantised = cache.dtype in QUANTISED
    if (scale is not None) != quantised:
        raise InvalidArgumentError(
            f"[{op}] expected {name} {'with' if quantised else 'only with'} a cache of int8 or float8_e4m3fn, got "
            f"{'none' if scale is None else 'one'} with {cache.dtype_name}; "
            + ("give one scale for each token and head" if quantised else "drop it")
        )
    if scale is None:
        return None
    if scale.dtype != "f32":
        raise InvalidDtypeError(f"[{op}] expected {name} of float32, got {scale.dtype_name}; convert it")
    view = _swapped(scale) if swap and len(scale.shape) == 3 else scale
    if view.shape != cache.shape[:3]:
        raise InvalidShapeError(
            f"[{op}] expected {name} of the cache's shape without its last axis, got {list(scale.shape)}; give one "
            "scale for each token and head"
        )
    return view
