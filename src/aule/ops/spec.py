"""OpSpec: everything of one op, so that the engine and every front end can serve it without knowing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from aule.ops.step import StepPlan
from aule.target import Target
from aule.view import TensorView

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Operand:
    """An array that an op takes. One named ``seed`` is made by front ends from a number: the two words of it.

    Attributes
    ----------
    spares : str or None
        Of a gradient: the operand whose work this one, a result of the op, spares a CPU. It is kept where that one is
        given and memory is the host's; on a device it would cost more to read than to do without.
    small : bool
        It would not: it has some numbers for each row, and is kept for GPUs as well.
    stands_for : str or None
        A result that CPUs keep in place of that operand and of all other results, for rows of bf16: those are what
        takes them time, once they are many.
    """

    name: str
    optional: bool = False
    spares: str | None = None
    small: bool = False
    stands_for: str | None = None


@dataclass(frozen=True)
class Option:
    """A plain value that an op takes; ``kind`` as in an operator's schema of PyTorch."""

    name: str
    kind: Literal["float", "bool", "int", "int?", "str"]
    default: Any


@dataclass(frozen=True)
class Result:
    """What one output of a call will be; with ``place`` it lies in the memory of that operand. Fresh memory of PyTorch
    has ``strides``, where they are not those of a contiguous array; other front ends' is contiguous."""

    dtype: str
    shape: tuple[int, ...]
    place: str | None = None
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """A call that was found to be valid.

    Attributes
    ----------
    problem : hashable
        The maths with its shapes and options; never memory.
    views : dict
        The operands by name, in the problem's normal form.
    outputs : dict
        What each wanted output will be, by name.
    """

    problem: Any
    views: Mapping[str, TensorView]
    outputs: Mapping[str, Result]


@dataclass(frozen=True, eq=False)
class OpSpec:
    """One op.

    A gradient is an op as well: its operands are named like operands and outputs of the op it belongs to, and ``d`` and
    an output's name for that output's gradient; its options are the op's.

    Attributes
    ----------
    outputs : tuple of str
        Of a gradient, callers may want some only.
    kept : tuple of str
        Further outputs, which are made for the gradient alone and where it will gain by them: no caller sees them, and
        the gradient's operands of these names are optional.
    bind : callable
        ``bind(op, views, options, wanted) -> Call``: checks a call. ``views`` holds the operands that were given,
        ``wanted`` the names of the outputs to compute.
    plan : callable
        ``plan(problem, views, target) -> StepPlan``; ``views`` holds operands and outputs, all by name, which is also
        that of the kernels' buffers.
    compute : callable
        ``compute(problem, arrays, wanted) -> arrays``: the same on NumPy, in the precision of the arrays it is given
        (float32, or float64 for the reference).
    check : callable, optional
        ``check(op, problem, arrays)``: refuses what operands that are not floats must not contain; asked on every call
        whose arrays are in host memory, since what a device has cannot be seen.
    products : bool
        It multiplies matrices: a device's matrix units are looked for first.
    gradient : OpSpec, optional
    gradients : dict
        Which output of ``gradient`` belongs to which operand; the others have none.
    """

    name: str
    operands: tuple[Operand, ...]
    outputs: tuple[str, ...]
    options: tuple[Option, ...]
    bind: Callable[[str, Mapping[str, TensorView], Mapping[str, Any], tuple[str, ...]], Call]
    plan: Callable[[Any, Mapping[str, TensorView], Target], StepPlan]
    compute: Callable[[Any, Mapping[str, Array], tuple[str, ...]], dict[str, Array]]
    check: Callable[[str, Any, Mapping[str, Array]], None] | None = None
    products: bool = False
    gradient: OpSpec | None = None
    gradients: Mapping[str, str] | None = None
    kept: tuple[str, ...] = ()

    @property
    def results(self) -> tuple[str, ...]:
        """All that it can compute."""
        return (*self.outputs, *self.kept)

    @property
    def seed(self) -> int | None:
        """The number of the operand that is a seed, which there is with an option ``dropout_p``; None without one."""
        return next((i for i, operand in enumerate(self.operands) if operand.name == "seed"), None)

    def option(self, name: str, options: Sequence[Any]) -> Any:
        """One of a call's options, which are in the order of the spec."""
        return options[[option.name for option in self.options].index(name)]

    def call(
        self, views: Mapping[str, TensorView], options: Mapping[str, Any], wanted: tuple[str, ...] | None = None
    ) -> Call:
        """Check a call."""
        return self.bind(self.name, views, options, self.outputs if wanted is None else wanted)

    def reference(self, call: Call, arrays: Mapping[str, Array]) -> dict[str, npt.NDArray[np.float64]]:
        """What is right, in float64; ``arrays`` hold the operands' values in any precision."""
        doubled = {name: array.astype(np.float64) for name, array in arrays.items() if array.dtype.kind == "f"}
        with np.errstate(all="ignore"):
            return self.compute(call.problem, {**arrays, **doubled}, tuple(call.outputs))
