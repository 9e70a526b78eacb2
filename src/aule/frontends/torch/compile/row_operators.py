"""Row operations as operators of PyTorch, ``torch.ops.aule.rms_norm`` and so on, for tracing.

They are made from the specs: operands are tensors, options follow in order, and ``backend`` comes last. A gradient is
an operator too, with ``wanted``, one bool for each output; an unwanted output is an empty tensor. Importing this module
registers them, which a process that loads an exported program must do first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from aule.frontends.torch.autograd.row_ops import gradients, saved
from aule.frontends.torch.calls import Results
from aule.frontends.torch.checks import dtype_name, no_second_derivative
from aule.frontends.torch.compile import formulas
from aule.frontends.torch.compile.vmap import Dim, Info, row_op_one_by_one
from aule.frontends.torch.modes import as_operator, in_onnx_export
from aule.frontends.torch.passes import compute
from aule.frontends.torch.row_ops import Options, Tensors, named_options
from aule.frontends.torch.views import DTYPES, fresh
from aule.ops.catalogue import CATALOGUE
from aule.ops.shared.spec import Call, OpSpec
from aule.view import TensorView


def operator(spec: OpSpec) -> Callable[..., Any]:
    """The operator of an op."""
    return getattr(torch.ops.aule, spec.name).default  # type: ignore[no-any-return]


def run(spec: OpSpec, tensors: Tensors, options: Options, backend: str | None, wanted: tuple[str, ...]) -> Results:
    """`aule.frontends.torch.passes.compute` by the operator."""
    if spec.name in CATALOGUE:
        found = operator(spec)(*tensors, *options, backend)
        return found if isinstance(found, tuple) else (found,)
    found = operator(spec)(*tensors, *options, backend, [name in wanted for name in spec.outputs])
    found = found if isinstance(found, tuple | list) else (found,)
    return tuple(x if name in wanted else None for name, x in zip(spec.outputs, found, strict=True))


def traced(spec: OpSpec, tensors: Tensors, options: Options, backend: str | None) -> Tensor | tuple[Tensor, ...]:
    """The op in a graph: its operator or, for ONNX export, PyTorch's own operators."""
    if in_onnx_export():
        _checked(spec, tensors, options, spec.outputs)
        return formulas.row_op(spec, tensors, options)
    return operator(spec)(*tensors, *options, backend)


def _checked(spec: OpSpec, tensors: Tensors, options: Options, wanted: tuple[str, ...]) -> Call:
    """Check a call while it is traced."""
    views = {
        operand.name: TensorView(
            dtype_name(x, operand.name, spec.name), tuple(x.shape), x.stride(), str(x.device), None
        )
        for operand, x in zip(spec.operands, tensors, strict=True)
        if x is not None
    }
    return spec.call(views, named_options(spec, options), wanted)


def _schema(spec: OpSpec, gradient: bool) -> str:
    arguments = [f"Tensor{'?' if operand.optional else ''} {operand.name}" for operand in spec.operands]
    arguments += [f"{option.kind} {option.name}" for option in spec.options]
    arguments += ["str? backend", "bool[] wanted"] if gradient else ["str? backend"]
    results = ", ".join("Tensor" for _ in spec.outputs)
    return f"({', '.join(arguments)}) -> {results if len(spec.outputs) == 1 else f'({results})'}"


class _Arguments:
    def __init__(self, spec: OpSpec, arguments: Sequence[Any], gradient: bool) -> None:
        count = len(spec.operands)
        self.tensors: Sequence[Any] = arguments[:count]
        self.options = tuple(arguments[count : count + len(spec.options)])
        self.backend = arguments[count + len(spec.options)]
        flags = arguments[-1] if gradient else [True] * len(spec.outputs)
        self.wanted = tuple(name for name, want in zip(spec.outputs, flags, strict=True) if want)


def _register(spec: OpSpec, gradient: bool) -> Any:
    def returned(found: Tensors, like: Tensor) -> Tensor | tuple[Tensor, ...]:
        filled = tuple(like.new_empty(0) if x is None else x for x in found)
        return filled[0] if len(filled) == 1 else filled

    @as_operator
    def real(*arguments: Any) -> Tensor | tuple[Tensor, ...]:
        given = _Arguments(spec, arguments, gradient)
        found = compute(spec, given.tensors, given.options, given.backend, given.wanted)
        return returned(found[: len(spec.outputs)], given.tensors[0])

    def fake(*arguments: Any) -> Tensor | tuple[Tensor, ...]:
        given = _Arguments(spec, arguments, gradient)
        call = _checked(spec, given.tensors, given.options, given.wanted)
        first = given.tensors[0]
        outputs = [call.outputs.get(name) for name in spec.outputs]
        found = [x and fresh(x.shape, x.strides, DTYPES[x.dtype], first.device) for x in outputs]
        return returned(found, first)

    def mapped(info: Info, dims: Sequence[Dim], *arguments: Any) -> Any:
        return row_op_one_by_one(operator(spec), info, dims, arguments)

    made = torch.library.custom_op(f"aule::{spec.name}", real, mutates_args=(), schema=_schema(spec, gradient))
    made.register_fake(fake)
    made.register_vmap(mapped)
    return made


def _keep(spec: OpSpec) -> Callable[..., None]:
    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor | Results) -> None:
        given = _Arguments(spec, inputs, gradient=False)
        ctx.options, ctx.backend = given.options, given.backend
        ctx.save_for_backward(*saved(spec, given.tensors, output))

    return keep


def _differentiate(spec: OpSpec) -> Callable[..., Results]:
    def backward(ctx: Any, *douts: Tensor | None) -> Results:
        needs = ctx.needs_input_grad[: len(spec.operands)]
        found = gradients(spec, douts, ctx.saved_tensors, ctx.options, ctx.backend, needs, run)
        return (*found, *(None for _ in spec.options), None)

    return backward


def _refuse(spec: OpSpec) -> Callable[..., NoReturn]:
    def refuse(ctx: Any, *grads: Tensor) -> NoReturn:
        raise no_second_derivative(spec.name)

    return refuse


OPERATORS = {}
for _spec in CATALOGUE.values():
    OPERATORS[_spec.name] = _register(_spec, gradient=False)
    if _spec.gradient is not None:
        OPERATORS[_spec.gradient.name] = _register(_spec.gradient, gradient=True)
        OPERATORS[_spec.gradient.name].register_autograd(_refuse(_spec))
        OPERATORS[_spec.name].register_autograd(_differentiate(_spec), setup_context=_keep(_spec))
