"""AppendProblem: what a call writes into a cache, and the check of its operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aule.errors import DeviceMismatchError, InvalidDtypeError, InvalidShapeError
from aule.view import TensorView

FLOATS = ("f32", "f16", "bf16")
QUANTISED = {"int8": ("i8", 127.0), "fp8": ("e4m3", 448.0)}
"""Formats of quantised rows: element type, and its largest number."""
TINY = 1e-35
"""Rows with no element of this size are stored as zeros: the inverse of their scale would be infinite."""


@dataclass(frozen=True)
class AppendProblem:
    """Rows of new tokens, to be stored into their slots.

    Row ``[token, head]`` of k, and of v unless ``value_dim`` is 0, is stored at ``[slot // page, slot % page, head]``
    of its cache. A slot outside of the cache, such as -1, drops the token. The first ``rotary_dim`` elements of rows of
    k are rotated in fp32 by the angles of the token's position: element ``i`` with ``i + rotary_dim / 2``, or 2i with
    2i + 1 if ``interleaved``.

    A quantised row is stored as int8 or fp8 e4m3 with a scale, ``max |x|`` over the largest number of the type. A row
    with Inf or NaN has a scale of NaN.
    """

    tokens: int
    heads: int
    head_dim: int
    value_dim: int
    dtype: str
    quantize: str | None = None
    rotary_dim: int = 0
    interleaved: bool = False

    @property
    def stored(self) -> str:
        """Element type of the caches."""
        return self.dtype if self.quantize is None else QUANTISED[self.quantize][0]


def append_problem(op: str, views: Mapping[str, TensorView], *, interleaved: bool = False) -> AppendProblem:
    """Check what is appended.

    Parameters
    ----------
    op : str
        The caller's name, for messages.
    views : mapping
        ``k``, ``v`` (optional): new rows, ``[batch, tokens of each, heads, dim]``; ``k_cache``, ``v_cache``: ``[pages,
        page, heads, dim]``; ``k_scale``, ``v_scale`` of a quantised cache: without the last axis; ``cos``, ``sin`` if k
        is rotated: ``[positions, rotary_dim / 2]``, rows contiguous; ``places``: slots and positions, int32 ``[2,
        tokens]``, contiguous.
    """
    k, k_cache = views["k"], views["k_cache"]
    batch, each, heads, head_dim = k.shape
    quantize = next((name for name, (elem, _) in QUANTISED.items() if elem == k_cache.dtype), None)
    for name in ("k", "v") if "v" in views else ("k",):
        rows, cache = views[name], views[f"{name}_cache"]
        if rows.dtype not in FLOATS:
            raise InvalidDtypeError(
                f"[{op}] expected {name} of float32, float16 or bfloat16, got {rows.dtype_name}; convert it first"
            )
        if rows.dtype != k.dtype or (cache.dtype != rows.dtype if quantize is None else cache.dtype != k_cache.dtype):
            raise InvalidDtypeError(
                f"[{op}] expected k and v of one dtype, that of the cache unless it is quantised, got {k.dtype_name}, "
                f"{rows.dtype_name} and a cache of {cache.dtype_name}; convert them first"
            )
        wanted = (batch, each, heads, rows.shape[3])
        if rows.shape != wanted or cache.shape[:2] != k_cache.shape[:2] or cache.shape[2:] != (heads, rows.shape[3]):
            raise InvalidShapeError(
                f"[{op}] expected {name} of {batch * each} tokens, heads_kv {cache.shape[2]} and dim {cache.shape[3]}, "
                f"got {rows.shape[0] * rows.shape[1]} tokens, heads_kv {rows.shape[2]} and dim {rows.shape[3]}; make "
                "the cache with heads_kv= and head_dim= of the model"
            )
    rotary = 0
    if "cos" in views:
        rotary = _rotary(op, views["cos"], views["sin"], head_dim)
    if k_cache.shape[0] * k_cache.shape[1] >= 1 << 31:
        raise InvalidShapeError(f"[{op}] expected a cache of less than 2**31 tokens, got {k_cache.shape[:2]}; split it")
    places = views["places"]
    if places.dtype != "i32" or places.shape != (2, batch * each):
        raise InvalidShapeError(
            f"[{op}] expected a slot and a position for each of {batch * each} tokens, got {places.shape}; give lengths"
        )
    for name, view in views.items():
        if view.device != k.device:
            raise DeviceMismatchError(
                f"[{op}] expected {name} on {k.device} like k, got {view.device}; keep the cache where k and v are"
            )
    value_dim = views["v"].shape[3] if "v" in views else 0
    return AppendProblem(batch * each, heads, head_dim, value_dim, k.dtype, quantize, rotary, interleaved)


def _rotary(op: str, cos: TensorView, sin: TensorView, head_dim: int) -> int:
    rotary = 2 * cos.shape[-1]
    if len(cos.shape) != 2 or cos.shape != sin.shape or not 0 < rotary <= head_dim or cos.shape[0] == 0:
        raise InvalidShapeError(
            f"[{op}] expected cos and sin of [positions, at most {head_dim // 2}], got {cos.shape} and {sin.shape}; "
            "give one angle for each pair of elements"
        )
    if any(view.shape[1] > 1 and view.strides[1] != 1 for view in (cos, sin)):
        raise InvalidShapeError(
            f"[{op}] expected cos and sin with contiguous rows, got strides {cos.strides} and {sin.strides}; copy them"
        )
    if cos.dtype not in FLOATS or sin.dtype != cos.dtype:
        raise InvalidDtypeError(
            f"[{op}] expected cos and sin of one float dtype, got {cos.dtype_name} and {sin.dtype_name}; convert "
            "them first"
        )
    return rotary


def strides_of(views: Mapping[str, TensorView]) -> dict[str, Any]:
    """Scalars ``<name>_offset`` and ``<name>_stride<axis>`` of the kernels."""
    scalars: dict[str, Any] = {}
    for name, view in views.items():
        scalars[f"{name}_offset"] = view.offset
        scalars |= {f"{name}_stride{axis}": step for axis, step in enumerate(view.strides)}
    return scalars
