"""Row operations (the ops of the catalogue) on tensors as calls."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from aule.engine.row_ops import host_device, is_gradient, on_host, result_views, row_op_plan
from aule.errors import InvalidArgumentError
from aule.frontends.torch.calls import Bound, Call, ContentsCheck, Output, Results
from aule.frontends.torch.checks import dtype_name
from aule.frontends.torch.modes import refuse_tracing
from aule.frontends.torch.views import CPU, DTYPES, ViewOf, fresh, host_array, view_on_host, written
from aule.ops.catalogue import CATALOGUE
from aule.ops.shared import spec as ops
from aule.ops.shared.checks import checked_flag, checked_integer, checked_number, not_plain
from aule.ops.shared.plan import Plan
from aule.ops.shared.spec import OpSpec, Option
from aule.runtime.base import Device

Tensors = Sequence[Tensor | None]
Options = tuple[object, ...]
_PLAIN = frozenset((float, int, bool, str, type(None)))
"""Types of options whose hash is that of their value."""


class RowOp(Call):
    """One row operation; its results are those of its spec.

    Parameters
    ----------
    tensors : sequence
        Operands in the order of the spec, None for those that are absent.
    options : tuple
        In the order of the spec.
    wanted : tuple of str
        Results to compute.
    """

    __slots__ = ("options", "spec", "wanted")

    def __init__(
        self, spec: OpSpec, tensors: Tensors, options: Options, backend: str | None, wanted: tuple[str, ...]
    ) -> None:
        self.op, self.spec, self.options, self.wanted = spec.name, spec, options, wanted
        self.tensors = {x.name: y for x, y in zip(spec.operands, tensors, strict=True) if y is not None}
        where = place(spec, options)
        self.destinations = {} if where is None else {spec.outputs[0]: self.tensors[spec.operands[where].name]}
        self.backend, self.results = backend, spec.results
        self.option_key = (spec.name, wanted, options)
        self.repeat_key = repeat_key(spec, tensors, options, backend, wanted)[0]

    @property
    def backward(self) -> bool:  # type: ignore[override]
        return is_gradient(self.spec)

    def _call(self, view: ViewOf) -> ops.Call:
        refuse_tracing(self.op)
        first = self.spec.operands[0].name
        views = {name: view(x, name, self.op, first) for name, x in self.tensors.items()}
        return self.spec.call(views, named_options(self.spec, self.options), self.wanted)

    def bind(self, view: ViewOf) -> Bound:
        try:
            hash(self.options)
        except TypeError:
            self._call(view)  # refuses most such options by their names
            raise not_plain(self.op, self.options) from None
        call = self._call(view)
        outputs = [Output(name, DTYPES[x.dtype], x.shape, x.strides) for name, x in call.outputs.items()]
        return Bound(call.problem, dict(call.views) | result_views(call), tuple(outputs))

    def plan(self, bound: Bound, device: Device, aligned: Mapping[str, bool]) -> Plan:
        return row_op_plan(self.spec, bound.problem, bound.views, device)

    def host_device(self, foreign: bool) -> Device | None:
        return host_device(self.backend)

    def through_host(self, device: Device | None) -> Results:
        call = self._call(view_on_host)
        arrays = on_host(self.spec, call, device)
        found: dict[str, Tensor] = {}
        for name, result in call.outputs.items():
            if name in self.destinations:
                found[name] = written(self.destinations[name])
                continue
            x = torch.from_numpy(arrays[name]).view(DTYPES[result.dtype])
            if result.strides not in (None, x.stride()):
                x = fresh(result.shape, result.strides, x.dtype, CPU).copy_(x)
            found[name] = x
        return tuple([found.get(name) for name in self.results])

    def all_tensors(self) -> list[Tensor]:
        return list(self.tensors.values())  # a result in place is an operand

    def with_tensors(self, tensors: dict[str, Tensor]) -> RowOp:
        values = not_in_place(self.spec, self.options) if self.destinations else self.options
        return RowOp(self.spec, [tensors.get(x.name) for x in self.spec.operands], values, self.backend, self.wanted)

    def contents_check(self, problem: Hashable) -> ContentsCheck | None:
        spec = self.spec
        integer_operands = [(i, name) for i, (name, x) in enumerate(self.tensors.items()) if not x.is_floating_point()]
        if spec.check is None or not integer_operands:
            return None
        found = spec.check

        def check(tensors: Sequence[Tensor]) -> None:
            arrays = {
                name: host_array(tensors[i], dtype_name(tensors[i], name, spec.name)) for i, name in integer_operands
            }
            found(spec.name, problem, arrays)

        return check


def repeat_key(
    spec: OpSpec, tensors: Tensors, options: Options, backend: str | None, wanted: tuple[str, ...]
) -> tuple[Hashable, list[Tensor]]:
    """Key and tensors under which a call may be repeated."""
    given = [x for x in tensors if x is not None]
    absent = () if len(given) == len(tensors) else tuple([x is None for x in tensors])
    return (spec.name, wanted, options, backend, absent), given


def place(spec: OpSpec, options: Options) -> int | None:
    """The number of the operand in whose place the result goes; None for fresh memory."""
    number = _inplace(spec)
    return 0 if number is not None and options[number] else None


@cache
def _inplace(spec: OpSpec) -> int | None:
    """The number of the option ``inplace``; None for ops without it, and for gradients, which are always fresh."""
    names = [option.name for option in spec.options] if spec.name in CATALOGUE else []
    return names.index("inplace") if "inplace" in names else None


def not_in_place(spec: OpSpec, options: Options) -> Options:
    """Options with which the result goes to fresh memory."""
    return tuple(False if option.name == "inplace" else x for option, x in zip(spec.options, options, strict=True))


def named_options(spec: OpSpec, options: Options) -> dict[str, object]:
    """Options by name."""
    return {option.name: value for option, value in zip(spec.options, options, strict=True)}


def by_value(spec: OpSpec, options: Options) -> Options:
    """The options with tensors and arrays replaced by their present values, since they are part of keys.

    Other objects stay as they are; the op's check refuses them.
    """
    if _PLAIN.issuperset(map(type, options)):
        return options
    return tuple(_value(spec.name, option, x) for option, x in zip(spec.options, options, strict=True))


def _value(op: str, option: Option, value: object) -> object:
    if type(value) in _PLAIN:
        return value
    try:
        if option.kind == "float":
            return checked_number(op, option.name, value)
        if option.kind == "bool":
            return checked_flag(op, option.name, value)
        if option.kind in ("int", "int?"):
            return checked_integer(op, option.name, value, "pass a Python int")
    except InvalidArgumentError:
        pass
    return value
