"""RopeProblem: a rotation of pairs of columns, and the check of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from aule.errors import InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.ops.norm.problem import checked_eps
from aule.ops.rows.checks import check_devices, check_floats, check_rows, check_shape, checked_broadcast
from aule.ops.rows.problem import RowProblem
from aule.ops.shared.checks import checked_flag, checked_integer
from aule.ops.shared.elements import Array
from aule.ops.shared.spec import Call, Result
from aule.view import TensorView, broadcast, every_nth, packed_strides

_ONE_EACH = "it has one row for each position, or one for each position of each batch"


@dataclass(frozen=True)
class RopeProblem(RowProblem):
    """Rotation of pairs of columns by one angle per pair and position.

    ``(a, b) -> (a * cos - b * sin, b * cos + a * sin)``, as ONNX defines RotaryEmbedding. A pair is columns ``i`` and
    ``i + pairs``, or with ``interleaved`` columns ``2i`` and ``2i + 1``; columns from ``2 * pairs`` on are unchanged.
    With ``inverse`` the angles are negative: that is the gradient. With ``inplace`` the result overwrites ``x``.

    With ``position_ids`` the tables have ``positions`` rows, which is else 0. ``eps`` is that of an RMSNorm before the
    rotation; None without one.
    """

    pairs: int
    interleaved: bool
    positions: int
    inverse: bool
    eps: float | None
    inplace: bool = False

    @property
    def rest(self) -> int:
        """Columns that are not rotated."""
        return self.length - 2 * self.pairs


def bind_rope(op: str, views: Mapping[str, TensorView], options: Mapping[str, Any], wanted: tuple[str, ...]) -> Call:
    """Check a rotation, with or without norm, or its gradient.

    Tables are broadcast, without a copy, to ``[*x.shape[:-1], pairs]``; with position ids, tables are
    ``[positions, pairs]`` and ids are broadcast to ``x.shape[:-1]``.
    """
    main = "x" if "x" in views else "dy"
    floats = {name: view for name, view in views.items() if name != "position_ids"}
    check_floats(op, main, floats, ("x", "dy"))
    check_devices(op, main, views)
    x = views[main]
    check_rows(op, main, x)
    if "dy" in views:
        check_shape(op, "dy", views["dy"], x.shape, "give it the shape of the result")
    if "weight" in views:
        check_shape(op, "weight", views["weight"], x.shape[-1:], "give it one number for each column of x")
    pairs = _pairs(op, x, views["cos"], options["rotary_dim"])
    normal = dict(views)
    ids = views.get("position_ids")
    interleaved = checked_flag(op, "interleaved", options["interleaved"])
    for name in ("cos", "sin"):
        normal[name] = _table(op, name, views[name], x, pairs, interleaved, ids is not None)
    check_shape(op, "sin", normal["sin"], normal["cos"].shape, "give it the shape of cos")
    if ids is not None:
        normal["position_ids"] = _positions(op, ids, x)
    problem = RopeProblem(
        dtype=x.dtype,
        shape=x.shape,
        pairs=pairs,
        interleaved=interleaved,
        positions=0 if ids is None else normal["cos"].shape[0],
        inverse="dy" in views,
        eps=checked_eps(op, options["eps"]) if "eps" in options else None,
        inplace=checked_flag(op, "inplace", options.get("inplace", False)) and "dy" not in views,
    )
    spread = any(n > 1 and step == 0 for n, step in zip(x.shape, x.strides, strict=True))
    if problem.inplace and spread and 0 not in x.shape:  # NumPy's empty arrays have strides of 0
        raise InvalidArgumentError(
            f"[{op}] expected x with memory for every element, got a broadcast array; copy it first, or leave inplace "
            "out"
        )
    outputs = {}
    packed = packed_strides(x)  # as PyTorch's elementwise ops: heads stay between positions
    for name in wanted:
        if name != "dweight":
            outputs[name] = Result(x.dtype, x.shape, "x" if problem.inplace else None, packed)
        elif "weight" in views:
            outputs[name] = Result(views["weight"].dtype, x.shape[-1:])
    return Call(problem, normal, outputs)


def _pairs(op: str, x: TensorView, cos: TensorView, rotary_dim: int | None) -> int:
    """How many pairs of columns are rotated."""
    if len(cos.shape) < 2:
        raise InvalidShapeError(f"[{op}] expected cos of shape [seq, pairs], got {list(cos.shape)}; add an axis")
    dim, width = x.shape[-1], cos.shape[-1]
    if rotary_dim is None:
        columns = 2 * width if 2 * width <= dim else width
    else:
        columns = checked_integer(op, "rotary_dim", rotary_dim, "leave it out for all that cos has")
        if columns not in (width, 2 * width):
            raise InvalidArgumentError(
                f"[{op}] expected rotary_dim to be the width of cos or twice that, {width} or {2 * width}, got "
                f"{rotary_dim}; leave it out"
            )
    if columns % 2 or not 2 <= columns <= dim:
        raise InvalidShapeError(
            f"[{op}] expected cos and sin for an even number of at most {dim} columns of x, got a width of {width}; "
            "give one number for each pair of columns, or each number twice"
        )
    return columns // 2


def _table(
    op: str, name: str, view: TensorView, x: TensorView, pairs: int, interleaved: bool, indexed: bool
) -> TensorView:
    """A table with one number per pair."""
    if view.shape[-1] == 2 * pairs:  # one per column: each number twice
        view = every_nth(view, 2) if interleaved else every_nth(view, 1, pairs)
    if view.shape[-1] != pairs:
        raise InvalidShapeError(
            f"[{op}] expected {name} with {pairs} or {2 * pairs} columns, got {list(view.shape)}; give it those of cos"
        )
    if indexed:
        if len(view.shape) != 2 or not (view.shape[0] or 0 in x.shape):
            raise InvalidShapeError(
                f"[{op}] expected {name} of shape [positions, {pairs}] with position_ids, got {list(view.shape)}; "
                "leave position_ids out, or take the table of all positions"
            )
        return view
    if len(view.shape) == 3 and len(x.shape) == 4:  # [batch, seq, pairs] beside [batch, heads, seq, dim]
        view = broadcast(view, (view.shape[0], 1, *view.shape[1:]), (0, None, 1, 2))
    return checked_broadcast(op, name, view, (*x.shape[:-1], pairs), _ONE_EACH)


def check_positions(op: str, problem: RopeProblem, arrays: Mapping[str, Array]) -> None:
    """Check that positions in host memory are rows of the tables."""
    ids = arrays.get("position_ids")
    if ids is None or not ids.size or 0 in problem.shape:
        return
    ids = ids[tuple(slice(0, 1) if step == 0 else slice(None) for step in ids.strides)]  # each number once
    if ids.min() < 0 or ids.max() >= problem.positions:
        place = tuple(int(i) for i in np.argwhere((ids < 0) | (ids >= problem.positions))[0])
        raise InvalidArgumentError(
            f"[{op}] expected position_ids of 0 to {problem.positions - 1}, the rows of cos and sin, got "
            f"{int(ids[place])} at {list(place)}; give the tables more rows"
        )


def _positions(op: str, ids: TensorView, x: TensorView) -> TensorView:
    if ids.dtype not in ("i32", "i64"):
        raise InvalidDtypeError(f"[{op}] expected position_ids of int32 or int64, got {ids.dtype_name}; convert them")
    if len(ids.shape) == 2 and len(x.shape) == 4:  # [batch, seq] beside [batch, heads, seq, dim]
        ids = broadcast(ids, (ids.shape[0], 1, ids.shape[1]), (0, None, 1))
    return checked_broadcast(op, "position_ids", ids, x.shape[:-1], _ONE_EACH)
