"""Rotary position embedding around attention: what a call gives, and the rotation on NumPy.

Kernels rotate on the way in and, of gradients, on the way out (`aule.tile.common.rotary`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.dtypes import usual_name
from aule.errors import InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.ops.shared.checks import checked_integer, checked_number
from aule.view import TensorView, restride

Array = npt.NDArray[Any]

MAX_POSITIONS = 2**31 - 1


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: pairs of columns of q and k are rotated by angles that depend on the position.

    Attributes
    ----------
    dtype : str
        Of the tables of cosines and sines, whose rows are positions and whose columns are pairs.
    dim : int
        Columns that are rotated, the first ones; even.
    interleaved : bool
        Column ``2 i`` is paired with ``2 i + 1``; otherwise ``i`` with ``i + dim // 2``.
    """

    dtype: str
    dim: int
    interleaved: bool

    @property
    def half(self) -> int:
        """Pairs of columns, which is columns of a table."""
        return self.dim // 2


def rope_tables(op: str, rope: Any) -> tuple[Any, Any]:
    """``rope`` of a call as its two arrays, or two times None."""
    if rope is None:
        return None, None
    if not isinstance(rope, (tuple, list)) or len(rope) != 2 or any(table is None for table in rope):
        got = f"{len(rope)} values" if isinstance(rope, (tuple, list)) else type(rope).__name__
        raise InvalidArgumentError(
            f"[{op}] expected rope as (cos, sin), got {got}; pass two arrays, as precompute_rope_frequencies gives them"
        )
    return rope[0], rope[1]


def rope_operands(
    op: str,
    cos: TensorView | None,
    sin: TensorView | None,
    interleaved: Any,
    problem: tuple[str, int, int],
    lengths: tuple[int, int],
) -> tuple[Rope | None, TensorView | None, TensorView | None]:
    """Check the tables of a call and bring them into normal form.

    Parameters
    ----------
    op : str
        The public function that was called, for messages.
    cos, sin : TensorView or None
        ``[positions, dim // 2]`` or ``[batch, positions, dim // 2]``, with a batch of 1 for all; or, of more than half
        of the head's columns, ``[..., dim]``, of which the second half repeats the first.
    problem : tuple
        dtype of q, head dimension and batch.
    lengths : tuple of int
        Of the longest sequences of q and of k.

    Returns
    -------
    rope : Rope or None
    cos, sin : TensorView or None
        ``[batch, 1, positions, dim // 2]``.
    """
    if not isinstance(interleaved, (bool, np.bool_)):
        raise InvalidArgumentError(
            f"[{op}] expected rope_interleaved to be True or False, got {interleaved!r}; pass a bool"
        )
    if cos is None or sin is None:
        if cos is not sin:
            raise InvalidArgumentError(f"[{op}] expected rope as (cos, sin), got one of the two; give both")
        return None, None, None
    dtype, head_dim, batch = problem
    for view in (cos, sin):
        if view.dtype not in ("f32", dtype) or view.dtype != cos.dtype:
            raise InvalidDtypeError(
                f"[{op}] expected cos and sin of rope both of float32 or both of q's dtype, {usual_name(dtype)}, got "
                f"{cos.dtype_name} and {sin.dtype_name}; convert them to float32"
            )
        if view.shape != cos.shape or len(view.shape) not in (2, 3) or (view.shape[:-2] or (1,))[0] not in (1, batch):
            raise InvalidShapeError(
                f"[{op}] expected cos and sin of rope of shape [positions, rotary_dim // 2] or [batch, positions, "
                f"rotary_dim // 2] with batch {batch} or 1, both alike, got {list(cos.shape)} and {list(sin.shape)}; "
                "reshape them"
            )
    if any(cos.shape[-2] < length for length in lengths):
        raise InvalidShapeError(
            f"[{op}] expected cos and sin of rope for at least {max(lengths)} positions, the longer of the sequences "
            f"of q and k, got {cos.shape[-2]}; precompute more"
        )
    half = _pairs(op, cos.shape[-1], head_dim, bool(interleaved))

    def table(view: TensorView) -> TensorView:
        steps = view.strides if len(view.shape) == 3 and view.shape[0] > 1 else (0, *view.strides[-2:])
        return restride(view, (batch, 1, view.shape[-2], half), (steps[0], 0, *steps[1:]))

    return Rope(cos.dtype, 2 * half, bool(interleaved)), table(cos), table(sin)


def _pairs(op: str, width: int, head_dim: int, interleaved: bool) -> int:
    """How many pairs of columns tables of a width rotate."""
    if 1 <= width <= head_dim // 2:
        return width
    if not 1 <= width <= head_dim or width % 2:
        raise InvalidShapeError(
            f"[{op}] expected cos and sin of rope with at most head_dim // 2 = {head_dim // 2} columns, one for each "
            f"pair that is rotated, or twice as many whose halves repeat, got {width}; cut them"
        )
    if interleaved:
        raise InvalidShapeError(
            f"[{op}] expected cos and sin of rope with one column for each pair with rope_interleaved, at most "
            f"head_dim // 2 = {head_dim // 2}, got {width}; pass cos[..., ::2] where neighbours repeat, and "
            "cos[..., :n // 2] where halves do"
        )
    return width // 2


def exactly(values: Array) -> Array:
    """What `rotate` rounds with where nothing is to be rounded."""
    return values


def rotate(
    rope: Rope, x: Array, cos: Array, sin: Array, rounded: Callable[[Array], Array] = exactly, back: bool = False
) -> Array:
    """The rows of ``x``, rotated.

    Parameters
    ----------
    x : ndarray
        ``[..., rows, head_dim]``.
    cos, sin : ndarray
        ``[..., rows, rope.half]`` for the rows' positions; the leading axes are broadcast.
    rounded : callable
        Applied to each product and sum, and to the tables.
    back : bool
        The other way round, which is what gradients need.
    """
    first, second = (slice(0, rope.dim, 2), slice(1, rope.dim, 2)) if rope.interleaved else (
        slice(0, rope.half), slice(rope.half, rope.dim)
    )  # fmt: skip
    c, s = rounded(cos), rounded(-sin if back else sin)
    x1, x2 = x[..., first], x[..., second]
    result = np.array(x)
    result[..., first] = rounded(rounded(x1 * c) - rounded(x2 * s))
    result[..., second] = rounded(rounded(x2 * c) + rounded(x1 * s))
    return result


def checked_frequencies(op: str, positions: Any, dim: Any, base: Any, names: tuple[str, str]) -> tuple[int, int, float]:
    """What `frequencies` takes, or a clear error; ``names`` are those of the first two to the caller."""
    rows, columns = names
    remedy = "pass the number of columns to rotate"
    positions, dim = checked_integer(op, rows, positions, remedy), checked_integer(op, columns, dim, remedy)
    if not 0 <= positions <= MAX_POSITIONS or not 2 <= dim <= MAX_POSITIONS or dim % 2:
        raise InvalidArgumentError(
            f"[{op}] expected an even {columns} >= 2 and {rows} from 0 to {MAX_POSITIONS}, got {dim} and {positions}; "
            f"{remedy}"
        )
    if not 0.0 < checked_number(op, "base", base) < math.inf:
        raise InvalidArgumentError(f"[{op}] expected a finite base > 0, got {base}; 10000 is the usual one")
    return positions, dim, float(base)


def frequencies(positions: int, dim: int, base: float) -> tuple[Array, Array]:
    """Cosines and sines, fp64 ``[positions, dim // 2]``, of the angles ``position * base ** (-2 i / dim)``."""
    angles = np.empty((positions, dim // 2))  # first, so that where there is no room nothing has been computed
    np.multiply(np.arange(positions)[:, None], base ** (np.arange(dim // 2) * (-2.0 / dim)), out=angles)
    return np.cos(angles), np.sin(angles)
