"""Checks of the arrays of an attention call: dtypes, devices and shapes, with a hint where a usual mistake fits."""

from __future__ import annotations

from typing import NoReturn

from aule.dtypes import either, usual_name
from aule.errors import DeviceMismatchError, InvalidDtypeError, InvalidShapeError
from aule.ops.attention.problem import FAR
from aule.ops.shared.checks import FLOAT_DTYPES, FLOATS
from aule.view import TensorView, restride

MAX_HEAD_DIM = 576
"""Largest head dimension of queries and keys, and of values."""

_LAYOUTS = {2: "[seq, head_dim]", 3: "[heads, seq, head_dim]", 4: "[batch, heads, seq, head_dim]"}
_AXES = ("batch", "heads", "seq", "head_dim")
_HEADS_FIRST = ("flash_attention", "decode_attention")
"""Functions whose arrays are given with heads before the sequence."""


def check_dtypes(op: str, q: TensorView, k: TensorView, v: TensorView) -> None:
    """Check that q, k and v have one dtype, of floats."""
    for name, view in (("q", q), ("k", k), ("v", v)):
        if view.dtype not in FLOAT_DTYPES:
            raise InvalidDtypeError(f"[{op}] expected {name} of {FLOATS}, got {view.dtype_name}; convert {name} first")
    if not q.dtype == k.dtype == v.dtype:
        raise InvalidDtypeError(
            f"[{op}] expected q, k and v of one dtype, got q {q.dtype_name}, k {k.dtype_name}, v {v.dtype_name}; "
            f"convert them to {q.dtype_name}"
        )


def check_devices(op: str, arrays: dict[str, TensorView | None]) -> None:
    """Check that all arrays are on the device of q."""
    present = {name: view.device for name, view in arrays.items() if view is not None}
    home = present["q"]
    if any(device != home for device in present.values()):
        found = ", ".join(f"{name} on {device}" for name, device in present.items())
        raise DeviceMismatchError(f"[{op}] expected all arrays on one device, got {found}; move them to {home}")


def check_rank(op: str, q: TensorView, k: TensorView, v: TensorView) -> int:
    """Return the number of axes, which q, k and v share."""
    for name, view in (("q", q), ("k", k), ("v", v)):
        if len(view.shape) not in _LAYOUTS:
            raise InvalidShapeError(
                f"[{op}] expected {name} of shape {either(tuple(_LAYOUTS.values()))}, got {list(view.shape)}; "
                f"reshape {name}"
            )
    ranks = {len(view.shape) for view in (q, k, v)}
    if len(ranks) != 1:
        raise InvalidShapeError(
            f"[{op}] expected q, k and v with the same number of axes, got q {list(q.shape)}, k {list(k.shape)}, "
            f"v {list(v.shape)}; add the missing axes of length 1"
        )
    return ranks.pop()


def check_shapes(op: str, q: TensorView, k: TensorView, v: TensorView, rank: int) -> None:
    """Check that the lengths of axes fit together; ``rank`` is the number of axes that the caller gave."""
    for name, view in (("k", k), ("v", v)):
        if view.shape[0] != q.shape[0]:
            _mismatch(op, 0, "q", q, name, view, f"give {name} the batch of q, or expand it")
    for axis in (1, 2):
        if k.shape[axis] != v.shape[axis]:
            _mismatch(op, axis, "k", k, "v", v, "every key needs its value")
    if q.shape[3] != k.shape[3]:
        _mismatch(op, 3, "q", q, "k", k, "only v may have another head_dim")
    _check_head_dims(op, q, v, rank)

    for name, view in (("q", q), ("k", k)):
        if view.shape[2] > FAR:
            raise InvalidShapeError(
                f"[{op}] expected {name} of at most 2**30 = {FAR} rows, got {view.shape[2]} (shape "
                f"{list(view.shape)}); split the sequence and merge the results with aule.merge_states"
            )

    heads_q, heads_kv = q.shape[1], k.shape[1]
    if not _divides(heads_kv, heads_q):
        remedy = "repeat or drop heads of k and v"
        others = (
            "k and v" if _divides(k.shape[2], heads_q) else "q, k and v" if _divides(k.shape[2], q.shape[2]) else ""
        )
        if op in _HEADS_FIRST and heads_kv > k.shape[2] and others:  # right with the other order of axes
            remedy = f"if {others} are [batch, seq, heads, head_dim], swap their axes 1 and 2: .swapaxes(1, 2)"
        raise InvalidShapeError(
            f"[{op}] expected heads_q to be a multiple of heads_kv, got heads_q {heads_q} and heads_kv {heads_kv} "
            f"(shapes {list(q.shape)} and {list(k.shape)}); {remedy}"
        )


def _check_head_dims(op: str, q: TensorView, v: TensorView, rank: int) -> None:
    for name, view in (("q", q), ("v", v)):
        if not 1 <= view.shape[3] <= MAX_HEAD_DIM:
            whose = "q and k" if name == "q" else "v"
            remedy = "split the last axis over more heads"
            if view.shape[3] == 0:
                remedy = "pad the last axis"
            elif rank == 3:
                remedy = (
                    "three axes are [heads, seq, head_dim]: for [batch, seq, embed], reshape to [batch, seq, heads, "
                    "head_dim] and swap axes 1 and 2"
                )
            raise InvalidShapeError(
                f"[{op}] expected the head_dim of {whose} in 1..{MAX_HEAD_DIM}, got {view.shape[3]}; {remedy}"
            )


def _divides(part: int, total: int) -> bool:
    return total % part == 0 if part else total == 0


def _mismatch(op: str, axis: int, a: str, left: TensorView, b: str, right: TensorView, remedy: str) -> NoReturn:
    raise InvalidShapeError(
        f"[{op}] expected {a} and {b} of equal {_AXES[axis]}, got {a} {left.shape[axis]} and {b} {right.shape[axis]} "
        f"(shapes {list(left.shape)} and {list(right.shape)}); {remedy}"
    )


# -- options -----------------------------------------------------------------------------------------------------------


def score_operand(op: str, name: str, view: TensorView, dtype: str, shape: tuple[int, ...]) -> TensorView:
    """Check a mask or a bias, and broadcast it to the shape of the scores."""
    if view.dtype not in FLOAT_DTYPES and not (name == "mask" and view.dtype == "bool"):
        expected, remedy = "floats", "convert it to float32"
        if name == "mask":
            index = _key_padding(view, shape)
            converted = f"({name} != 0){index}" if index else f"{name} != 0"
            expected, remedy = "bool or floats", f"pass {converted}, in which True means attend"
        elif view.dtype == "bool":
            remedy = "pass a boolean array as mask"
        raise InvalidDtypeError(f"[{op}] expected {name} of {expected}, got {view.dtype_name}; {remedy}")
    if view.dtype == "f64" and dtype != "f64":
        raise InvalidDtypeError(
            f"[{op}] expected {name} of at most 32 bits with q of {usual_name(dtype)}, got float64; convert {name} to "
            "float32"
        )
    lifted = lift(view) if 2 <= len(view.shape) <= 4 else None
    if lifted is None or any(size not in (1, full) for size, full in zip(lifted.shape, shape, strict=True)):
        index = _key_padding(view, shape)
        remedy = f"pass {name}{index}" if index else "give each axis its full length or 1"
        raise InvalidShapeError(
            f"[{op}] expected {name} broadcastable to [batch, heads_q, seq_q, seq_kv] = {list(shape)}, got "
            f"{list(view.shape)}; {remedy}"
        )
    # An axis of length 1 is read at index 0 only: stride 0 also where nothing is broadcast gives one key per layout.
    strides = tuple(0 if size == 1 else stride for size, stride in zip(lifted.shape, lifted.strides, strict=True))
    return restride(view, shape, strides)


def _key_padding(view: TensorView, shape: tuple[int, ...]) -> str:
    """The index that adds the axes which a mask of keys, or of each batch, lacks; empty if it is neither."""
    batch, _, seq_q, seq_kv = shape
    if view.shape == (batch, seq_kv) and batch not in (1, seq_q):
        return "[:, None, None, :]"
    if view.shape == (seq_kv,):
        return "[None, None, None, :]"
    return "[:, None]" if view.shape == (batch, seq_q, seq_kv) else ""


def alibi_operand(op: str, view: TensorView, batch: int, heads_q: int) -> TensorView:
    """Check slopes and bring them into the form of `Operands.alibi`."""
    _check_f32(op, "alibi_slopes", view)
    if view.shape == (heads_q,):
        return restride(view, (batch, heads_q), (0, *view.strides))
    if view.shape == (batch, heads_q):
        return view
    raise InvalidShapeError(
        f"[{op}] expected alibi_slopes of shape [heads_q] = [{heads_q}] or [batch, heads_q] = [{batch}, {heads_q}], "
        f"got {list(view.shape)}; give one slope per query head"
    )


def sinks_operand(op: str, view: TensorView, heads_q: int) -> TensorView:
    """Check sinks."""
    _check_f32(op, "sinks", view)
    if view.shape != (heads_q,):
        raise InvalidShapeError(
            f"[{op}] expected sinks of shape [heads_q] = [{heads_q}], got {list(view.shape)}; "
            "give one logit per query head"
        )
    return view


def _check_f32(op: str, name: str, view: TensorView) -> None:
    if view.dtype != "f32":
        raise InvalidDtypeError(f"[{op}] expected {name} of float32, got {view.dtype_name}; convert {name}")


def lift(view: TensorView) -> TensorView:
    """The view with missing leading axes of length 1 and stride 0."""
    lead = 4 - len(view.shape)
    if lead == 0:
        return view
    return restride(view, (1,) * lead + view.shape, (0,) * lead + view.strides)
