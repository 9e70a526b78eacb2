"""Trials of `fuzz.py`: arrays, calls on them and expected results, all as data.

`verdict` runs one and says what is wrong. The other files of this folder make trials of cases.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aule.errors import AuleError, DeviceMismatchError, InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.ops.shared.elements import stored
from aule.view import TensorView, contiguous_strides

Array = np.ndarray[Any, Any]

ELEMENTS: dict[str, Any] = {
    "f32": np.float32, "f16": np.float16, "f64": np.float64, "bf16": np.uint16, "e4m3": np.uint8, "bool": np.bool_,
    "i8": np.int8, "i32": np.int32, "i64": np.int64,
}  # fmt: skip
"""NumPy's type of stored elements; bf16 and fp8 as bits."""
SPECIAL = {"bf16": "bfloat16", "e4m3": "float8_e4m3fn"}
"""Types that NumPy lacks, by the name that ml_dtypes and torch have for them."""
MAXIMA = {"f16": 65504.0, "bf16": 3.38e38, "f32": 3.4e38, "f64": 1.79e308}
SMALLEST = {"f32": 1.2e-38, "bf16": 1.2e-38, "f64": 2.3e-308}
"""Numbers that may become zero."""
REFUSALS = (InvalidArgumentError, InvalidShapeError, InvalidDtypeError, DeviceMismatchError)
REFUSAL_CODES = ("_INIT", "_BACKEND", "_UNSUPPORTED", "_NO_GRADIENT")


class Name(str):
    """In the arguments of a step: the array or result of this name."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """An input: flat memory, and the strided part of it that is the array."""

    dtype: str
    flat: Array
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def of(self, flat: Array) -> Array:
        """The array in some memory like this one's."""
        if 0 in self.shape:
            return np.empty(self.shape, flat.dtype)
        steps = tuple(step * flat.itemsize for step in self.strides)
        return np.lib.stride_tricks.as_strided(flat[self.offset :], self.shape, steps)

    @property
    def view(self) -> TensorView:
        """For the oracle."""
        return TensorView(self.dtype, self.shape, self.strides, "host", self.of(self.flat))


def rounded(values: Array, dtype: str) -> Array:
    """Values as they are stored."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "bf16":
            return stored(np.ascontiguousarray(values, np.float32), "bf16").reshape(np.shape(values))
        return np.asarray(values).astype(ELEMENTS[dtype])


def buffer(values: Array, dtype: str, layout: str = "contiguous") -> Buffer:
    """An array of some values in a memory layout; what lies between its elements is NaN."""
    array = rounded(values, dtype)
    room, view = _laid(array, layout)
    offset = (view.__array_interface__["data"][0] - room.__array_interface__["data"][0]) // max(room.itemsize, 1)
    strides = tuple(step // room.itemsize for step in view.strides)
    if 0 in view.shape:
        return Buffer(dtype, np.zeros(1, array.dtype), array.shape, contiguous_strides(array.shape))
    return Buffer(dtype, room.reshape(-1), view.shape, strides, offset)


def _laid(array: Array, layout: str) -> tuple[Array, Array]:
    """Memory, and the view of it that holds the array."""
    if layout == "swapped" and array.ndim >= 3:
        room = np.ascontiguousarray(array.swapaxes(-3, -2))
        return room, room.swapaxes(-3, -2)
    if layout == "gap" and array.ndim:
        room = _unused((*(n + 1 for n in array.shape[:-1]), array.shape[-1] + 8), array.dtype)
        view = room[(*(slice(0, n) for n in array.shape[:-1]), slice(8, None))]
    elif layout == "step" and array.ndim:
        room = _unused((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        view = room[..., ::2]
    elif layout == "backward" and array.ndim >= 2:
        room = _unused(array.shape, array.dtype)
        view = room[..., ::-1, :]
    elif layout == "expanded" and array.ndim >= 3 and array.shape[0] > 1:
        room = np.ascontiguousarray(array[:1])
        return room, np.broadcast_to(room, array.shape)
    else:
        room = np.ascontiguousarray(array)
        return room, room.reshape(array.shape)
    view[...] = array
    return room, view


def _unused(shape: tuple[int, ...], dtype: Any) -> Array:
    fill = {np.uint16: 0x7FC0, np.uint8: 0x7F, np.bool_: True, np.int8: 99}.get(dtype.type, 0)
    return np.full(shape, np.nan if dtype.kind == "f" else fill, dtype)


@dataclass(frozen=True, eq=False)
class Step:
    """One call: where its results go, what is called, and with which arguments."""

    to: tuple[str, ...]
    call: str
    """Such as ``aule.flash_attention``, or ``cache.append`` for a method of a result."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    raises: str | None = None
    """The error of aule that it must raise."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """An expected result."""

    values: Array
    limit: Any
    """Largest error, a number or one for each element."""
    dtype: str
    skip: Array | bool = False
    """Elements about which nothing is promised."""
    loose: bool = False
    """Inf and NaN may stand for each other."""


@dataclass(eq=False)
class Trial:
    """A case as arrays, calls and expected results by name."""

    arrays: dict[str, Buffer]
    steps: list[Step]
    wanted: Callable[[], dict[str, Wanted]]
    front: str = "numpy"
    backend: str = "cpu"
    leaves: tuple[str, ...] = ()
    """Arrays that need a gradient."""
    written: tuple[str, ...] = ()
    refused: bool = False
    """A mistake, or something that the backend lacks: some call must be refused."""
    may_refuse: str | None = None
    """Words of an error with which a backend may refuse the call."""
    same_bits: bool = True
    """A second run has the same results to the bit."""

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "cuda" else "cpu"


# -- running -----------------------------------------------------------------------------------------------------------


def verdict(trial: Trial, twice: bool = False) -> str:
    """What is wrong with the results of a trial; empty if nothing is."""
    try:
        found, after = execute(trial)
    except AuleError as error:
        if trial.refused or (trial.may_refuse is not None and trial.may_refuse in str(error)):
            known = isinstance(error, REFUSALS) or error.code.endswith(REFUSAL_CODES)
            return "" if known else f"refused by {type(error).__name__}: {error}"
        trial.wanted()  # raises where the case itself is wrong
        return f"refused: {type(error).__name__}: {error}"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    if trial.refused:
        return "a call with a mistake was not refused"
    changed = [name for name, flat in after.items() if not _untouched(trial, name, flat)]
    if changed:
        return f"changed its inputs: {', '.join(changed)}"
    wrong = [text for name, want in trial.wanted().items() if (text := difference(name, found[name], want))]
    if not wrong and twice and trial.same_bits:
        again, _ = execute(trial)
        wrong = [f"{name} differs in a second run" for name in found if not _same(found[name], again[name])]
    return "; ".join(wrong)


def execute(trial: Trial) -> tuple[dict[str, Array], dict[str, Array]]:
    """Results by name, and the memory of the arrays after the calls."""
    made = {name: _array(trial, name, one) for name, one in trial.arrays.items()}
    known: dict[str, Any] = {name: array for name, (array, _) in made.items()}
    results: dict[str, Any] = {}
    try:
        for step in trial.steps:
            for name, value in zip(step.to, _called(step, known | results), strict=True):
                results[name] = value
    finally:
        if trial.steps and trial.steps[0].call == "aule.install":
            importlib.import_module("aule").uninstall()
    found = {name: _numbers(value) for name, value in results.items() if hasattr(value, "shape")}
    after = {name: _bits(flat) for name, (_, flat) in made.items() if flat is not None}
    return found, after


def _called(step: Step, known: dict[str, Any]) -> tuple[Any, ...]:
    function = _function(step.call, known)
    args = [_argument(value, known) for value in step.args]
    kwargs = {name: _argument(value, known) for name, value in step.kwargs.items()}
    if step.raises is not None:
        try:
            function(*args, **kwargs)
        except AuleError as error:
            if type(error).__name__ != step.raises:
                raise
            return ()
        raise AssertionError(f"{step.call} did not raise {step.raises}")
    result = function(*args, **kwargs)
    return () if not step.to else tuple(result) if len(step.to) > 1 or isinstance(result, tuple) else (result,)


def _function(call: str, known: dict[str, Any]) -> Any:
    first, *rest = call.split(".")
    found = known[first] if first in known else importlib.import_module(first)
    for i, name in enumerate(rest):
        if not hasattr(found, name):
            found = importlib.import_module(".".join([first, *rest[: i + 1]]))
            continue
        found = getattr(found, name)
    return found


def _argument(value: Any, known: dict[str, Any]) -> Any:
    if isinstance(value, Name):
        return known[value]
    if isinstance(value, (tuple, list)):
        return type(value)(_argument(one, known) for one in value)
    return value


def _array(trial: Trial, name: str, one: Buffer) -> tuple[Any, Any]:
    """The array for a call, and its memory; None where the array is a copy."""
    flat = one.flat.copy()
    if trial.front == "numpy":
        if one.dtype in SPECIAL:
            special = getattr(importlib.import_module("ml_dtypes"), SPECIAL[one.dtype])
            return one.of(flat.view(special)), flat
        return one.of(flat), flat
    import torch

    copied = any(step < 0 for step in one.strides)  # which torch lacks
    if copied:
        flat = np.ascontiguousarray(one.of(flat)).reshape(-1)
        one = Buffer(one.dtype, flat, one.shape, contiguous_strides(one.shape))
    memory = torch.from_numpy(flat.view(np.int16) if one.dtype == "bf16" else flat).to(trial.device)
    if one.dtype in SPECIAL:
        memory = memory.view(getattr(torch, SPECIAL[one.dtype]))
    tensor = torch.as_strided(memory, one.shape, one.strides, one.offset)
    if name in trial.leaves:
        tensor.requires_grad_()
    return tensor, None if copied else memory


def _numbers(value: Any) -> Array:
    """A result as float64."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.double().numpy() if value.is_floating_point() else value.numpy()
    return np.asarray(value).astype(np.float64)


def _bits(flat: Any) -> Array:
    if hasattr(flat, "detach"):
        import torch

        flat = flat.detach().cpu()
        flat = (flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat.view(torch.uint8)).numpy()
    return np.asarray(flat)


def _untouched(trial: Trial, name: str, after: Array) -> bool:
    """Whether memory is as before; of an array that is written to, the memory between its elements."""
    one = trial.arrays[name]
    after = np.frombuffer(after.tobytes(), one.flat.dtype).copy()
    if name in trial.written:
        if any(step < 0 for step in one.strides):
            return True
        one.of(after)[...] = one.of(one.flat)
    return after.tobytes() == one.flat.tobytes()


def _same(first: Array, second: Array) -> bool:
    return first.shape == second.shape and bool(np.array_equal(first, second, equal_nan=True))


def difference(name: str, found: Array, want: Wanted) -> str:
    """Where a result is too far from the expected one; empty if nowhere."""
    if found.shape != want.values.shape:
        return f"{name} has shape {list(found.shape)}, expected {list(want.values.shape)}"
    right = want.values
    with np.errstate(all="ignore"):
        skip = want.skip | (np.isfinite(right) & (np.abs(right) >= 0.99 * MAXIMA[want.dtype]))
        error = np.where(found == right, 0.0, np.abs(found - right))
    if want.loose:
        error = np.where(~np.isfinite(right) & ~np.isfinite(found), 0.0, error)
    error = np.where(np.isnan(right) & np.isnan(found), 0.0, np.where(np.isnan(error), np.inf, error))
    error = np.where(skip, 0.0, error)
    bad = error > np.maximum(want.limit, SMALLEST.get(want.dtype, 0.0))
    if not bad.any():
        return ""
    with np.errstate(all="ignore"):
        at = np.unravel_index(int(np.argmax(np.where(bad, error / np.maximum(want.limit, 1e-300), -1))), error.shape)
    limit = np.broadcast_to(want.limit, error.shape)[at]
    return (
        f"{name} is wrong at {int(bad.sum())} of {bad.size} places, worst {[int(i) for i in at]}: {found[at]:.9g}, "
        f"expected {right[at]:.9g}, error {error[at]:.3g} of {limit:.3g} allowed"
    )


def names(values: Iterable[str]) -> list[Name]:
    return [Name(value) for value in values]
