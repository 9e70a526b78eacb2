"""OpSpec: a complete description of one op, so that the engine and front ends need no code for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from aule.ops.shared.elements import Array
from aule.ops.shared.plan import Plan
from aule.target import Target
from aule.view import TensorView


@dataclass(frozen=True)
class Operand:
    """An array that an op takes. Front ends make one named ``seed`` from a number: its two words.

    Attributes
    ----------
    spares : str or None
        In a gradient: this operand is a result of the op and spares a CPU the work of the named operand. It is saved if
        that operand is given and memory is the host's; on a device, reading it would cost more than it saves.
    small : bool
        An operand with ``spares`` that has only some numbers for each row, and is saved for GPUs as well.
    stands_for : str or None
        A result that CPUs save instead of the named operand and all other results, for rows of bf16, which they are
        slow to read once there are many.
    """

    name: str
    optional: bool = False
    spares: str | None = None
    small: bool = False
    stands_for: str | None = None


@dataclass(frozen=True)
class Option:
    """A plain value that an op takes; ``kind`` as in the schema of a PyTorch operator."""

    name: str
    kind: Literal["float", "bool", "int", "int?", "str"]
    default: Any


@dataclass(frozen=True)
class Result:
    """What one output of a call will be.

    Attributes
    ----------
    place : str or None
        The operand in whose memory it lies; None for fresh memory.
    strides : tuple of int or None
        Strides of fresh memory from PyTorch, if it is not contiguous; other front ends' memory is.
    """

    dtype: str
    shape: tuple[int, ...]
    place: str | None = None
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """A valid call.

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

    A gradient is an op as well: its operands are named like operands and outputs of its op, with ``d`` before an
    output's name for that output's gradient; its options are the op's.

    Attributes
    ----------
    outputs : tuple of str
        Callers may want only some outputs of a gradient.
    saved_outputs : tuple of str
        Further outputs that are computed only to be saved for the gradient, where that makes it faster. Callers do not
        see them, and the gradient's operands of these names are optional.
    bind : callable
        ``bind(op, views, options, wanted) -> Call`` checks a call. ``views`` holds the operands that were given,
        ``wanted`` the names of the outputs to compute.
    plan : callable
        ``plan(problem, views, target) -> Plan``; ``views`` holds operands and outputs by name, which is also the name
        of the kernels' buffers.
    compute : callable
        ``compute(problem, arrays, wanted) -> arrays`` computes with NumPy, in the precision of the arrays it is given
        (float32, or float64 for the reference).
    check : callable, optional
        ``check(op, problem, arrays)`` refuses wrong contents of operands that are not floats; called on every call
        whose arrays are in host memory. Contents on a device cannot be seen.
    products : bool
        It multiplies matrices: the layout of a device's matrix units is found out first.
    gradient : OpSpec, optional
    gradients : dict
        Which output of ``gradient`` belongs to which operand; the others have none.
    """

    name: str
    operands: tuple[Operand, ...]
    outputs: tuple[str, ...]
    options: tuple[Option, ...]
    bind: Callable[[str, Mapping[str, TensorView], Mapping[str, Any], tuple[str, ...]], Call]
    plan: Callable[[Any, Mapping[str, TensorView], Target], Plan]
    compute: Callable[[Any, Mapping[str, Array], tuple[str, ...]], dict[str, Array]]
    check: Callable[[str, Any, Mapping[str, Array]], None] | None = None
    products: bool = False
    gradient: OpSpec | None = None
    gradients: Mapping[str, str] | None = None
    saved_outputs: tuple[str, ...] = ()

    def with_gradient(
        self,
        operands: tuple[Operand, ...],
        compute: Callable[[Any, Mapping[str, Array], tuple[str, ...]], dict[str, Array]],
        gradients: Mapping[str, str],
        **changes: Any,
    ) -> OpSpec:
        """This op with a gradient that has these operands, and the values of ``gradients`` as outputs; ``changes`` are
        other fields in which it differs from this op."""
        outputs = tuple(dict.fromkeys(gradients.values()))
        common = replace(self, name=f"{self.name}_backward", check=None, saved_outputs=())
        gradient = replace(common, operands=operands, outputs=outputs, compute=compute, **changes)
        return replace(self, gradient=gradient, gradients=gradients)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of all outputs, those saved for the gradient included."""
        return (*self.outputs, *self.saved_outputs)

    @property
    def seed(self) -> int | None:
        """The index of the operand ``seed``, which comes with an option ``dropout_p``; None without one."""
        return next((i for i, operand in enumerate(self.operands) if operand.name == "seed"), None)

    def option(self, name: str, options: Sequence[Any]) -> Any:
        """The value of an option, from a call's options in the order of the spec."""
        return options[[option.name for option in self.options].index(name)]

    def call(
        self, views: Mapping[str, TensorView], options: Mapping[str, Any], wanted: tuple[str, ...] | None = None
    ) -> Call:
        """Check a call."""
        return self.bind(self.name, views, options, self.outputs if wanted is None else wanted)

    def reference(self, call: Call, arrays: Mapping[str, Array]) -> dict[str, npt.NDArray[np.float64]]:
        """Compute the right results in float64; ``arrays`` hold the operands' values in any precision."""
        doubled = {name: array.astype(np.float64) for name, array in arrays.items() if array.dtype.kind == "f"}
        with np.errstate(all="ignore"):
            return self.compute(call.problem, {**arrays, **doubled}, tuple(call.outputs))
