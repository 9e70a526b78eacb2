"""Checks of the arguments of row operations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from aule.dtypes import usual_name
from aule.errors import DeviceMismatchError, InvalidDtypeError, InvalidShapeError
from aule.ir.types import SCALARS
from aule.ops.shared.checks import FLOAT_DTYPES, FLOATS
from aule.ops.shared.spec import Result
from aule.tile.vector.engine import work_type
from aule.view import TensorView, broadcast, contiguous_strides

MAX_LENGTH = 1 << 30
"""Most columns of a row: the sum of two column numbers stays below 2**31."""


def check_floats(op: str, main: str, views: Mapping[str, TensorView], alike: Iterable[str] = ()) -> None:
    """Check that all arrays are floats on one device: those in ``alike`` have the dtype of ``main``, and none is
    float64 unless ``main`` is."""
    first = views[main]
    for name, view in views.items():
        if view.dtype not in FLOAT_DTYPES:
            raise InvalidDtypeError(f"[{op}] expected {name} of {FLOATS}, got {view.dtype_name}; convert it first")
        if name in alike and view.dtype != first.dtype:
            raise InvalidDtypeError(
                f"[{op}] expected {name} of {main}'s dtype {first.dtype_name}, got {view.dtype_name}; convert "
                "one of them"
            )
        if view.dtype == "f64" and first.dtype != "f64":
            raise InvalidDtypeError(
                f"[{op}] expected {name} of at most 32 bits with {main} of {first.dtype_name}, got float64; convert it"
            )
    check_devices(op, main, views)


def check_devices(op: str, main: str, views: Mapping[str, TensorView]) -> None:
    """Check that all arrays are on the device of ``main``."""
    home = views[main].device
    for name, view in views.items():
        if view.device != home:
            raise DeviceMismatchError(f"[{op}] expected {name} on {home} like {main}, got {view.device}; move it there")


def check_rows(op: str, name: str, view: TensorView, least: int = 1) -> None:
    """Check that an array has rows, with at least ``least`` columns."""
    if not view.shape or not least <= view.shape[-1] <= MAX_LENGTH:
        raise InvalidShapeError(
            f"[{op}] expected {name} with a last axis of {least} to {MAX_LENGTH} columns, got shape "
            f"{list(view.shape)}; reshape it"
        )
    if math.prod(view.shape[:-1]) >= 1 << 31:
        raise InvalidShapeError(f"[{op}] expected {name} of fewer than 2**31 rows, got {list(view.shape)}; split it")


def check_shape(op: str, name: str, view: TensorView, shape: tuple[int, ...], remedy: str) -> None:
    """Check that an array has this shape."""
    if view.shape != shape:
        raise InvalidShapeError(f"[{op}] expected {name} of shape {list(shape)}, got {list(view.shape)}; {remedy}")


def checked_broadcast(op: str, name: str, view: TensorView, shape: tuple[int, ...], remedy: str) -> TensorView:
    """A view broadcast to a larger shape: stride 0 along axes that it lacks or that have length 1."""
    lead = len(shape) - len(view.shape)
    if lead < 0 or any(n not in (1, m) for n, m in zip(view.shape, shape[lead:], strict=True)):
        raise InvalidShapeError(
            f"[{op}] expected {name} broadcastable to {list(shape)}, got {list(view.shape)}; {remedy}"
        )
    return broadcast(view, shape, (*(None for _ in range(lead)), *range(len(view.shape))))


def statistics_result(dtype: str, shape: tuple[int, ...], count: int) -> Result:
    """The array of ``count`` statistics per row: the first of every row, then the second of every row ..."""
    return Result(work_type(SCALARS[dtype]).name, (count, *shape[:-1]))


def check_statistics(op: str, main: str, views: Mapping[str, TensorView], count: int) -> dict[str, TensorView]:
    """Check the statistics of the rows of ``main``, if given; return the other views."""
    if "statistics" in views:
        want, found = statistics_result(views[main].dtype, views[main].shape, count), views["statistics"]
        if found.dtype != want.dtype:
            raise InvalidDtypeError(
                f"[{op}] expected statistics of {usual_name(want.dtype)}, got {found.dtype_name}; leave them out"
            )
        check_shape(op, "statistics", found, want.shape, "leave them out")
    return {name: view for name, view in views.items() if name != "statistics"}


def has_statistics(views: Mapping[str, TensorView]) -> bool:
    """Whether a kernel can use the statistics of rows: they are given, and contiguous."""
    view = views.get("statistics")
    return view is not None and not view.offset and view.strides == contiguous_strides(view.shape)
