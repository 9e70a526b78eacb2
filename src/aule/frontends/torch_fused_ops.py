"""The ops of the catalogue as operators of PyTorch, ``torch.ops.aule.rms_norm`` and so on, for all that traces.

They are made from the specs: operands are tensors, options follow in order, and ``backend`` comes last. A gradient is
an operator too, with ``wanted``, one bool for each output; what is not wanted is an empty tensor. Importing this module
registers them, which a process that loads an exported program must do first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aule.frontends.torch_fused import DTYPES, compute, fresh, gradients, named_options, saved
from aule.frontends.torch_gradients import no_second_derivative
from aule.frontends.torch_views import dtype_name
from aule.frontends.torch_vmap import one_by_one
from aule.ops.catalogue import CATALOGUE
from aule.ops.spec import OpSpec
from aule.view import TensorView


def operator(spec: OpSpec) -> Any:
    """The operator of an op."""
    return getattr(torch.ops.aule, spec.name).default


def run(
    spec: OpSpec, tensors: Sequence[Any], options: Sequence[Any], backend: str | None, wanted: tuple[str, ...]
) -> tuple[Any, ...]:
    """`compute` by way of the operator."""
    if spec.name in CATALOGUE:
        found = operator(spec)(*tensors, *options, backend)
        return found if isinstance(found, tuple) else (found,)
    found = operator(spec)(*tensors, *options, backend, [name in wanted for name in spec.outputs])
    found = found if isinstance(found, tuple | list) else (found,)
    return tuple(x if name in wanted else None for name, x in zip(spec.outputs, found, strict=True))


def _schema(spec: OpSpec, gradient: bool) -> str:
    arguments = [f"Tensor{'?' if operand.optional else ''} {operand.name}" for operand in spec.operands]
    arguments += [f"{option.kind} {option.name}" for option in spec.options]
    arguments += ["str? backend", "bool[] wanted"] if gradient else ["str? backend"]
    results = ", ".join("Tensor" for _ in spec.outputs)
    return f"({', '.join(arguments)}) -> {results if len(spec.outputs) == 1 else f'({results})'}"


class _Arguments:
    """An operator's arguments, taken apart."""

    def __init__(self, spec: OpSpec, arguments: Sequence[Any], gradient: bool) -> None:
        count = len(spec.operands)
        self.tensors = arguments[:count]
        self.options = tuple(arguments[count : count + len(spec.options)])
        self.backend = arguments[count + len(spec.options)]
        flags = arguments[-1] if gradient else [True] * len(spec.outputs)
        self.wanted = tuple(name for name, want in zip(spec.outputs, flags, strict=True) if want)


def _register(spec: OpSpec, gradient: bool) -> Any:
    def returned(found: Sequence[Any], like: Any) -> Any:
        filled = tuple(like.new_empty(0) if x is None else x for x in found)
        return filled[0] if len(filled) == 1 else filled

    def real(*arguments: Any) -> Any:
        given = _Arguments(spec, arguments, gradient)
        found = compute(spec, given.tensors, given.options, given.backend, given.wanted)
        return returned(found[: len(spec.outputs)], given.tensors[0])

    def fake(*arguments: Any) -> Any:
        given = _Arguments(spec, arguments, gradient)
        views = {
            operand.name: TensorView(
                dtype_name(x, operand.name, spec.name), tuple(x.shape), x.stride(), str(x.device), None
            )
            for operand, x in zip(spec.operands, given.tensors, strict=True)
            if x is not None
        }
        call = spec.call(views, named_options(spec, given.options), given.wanted)
        first = given.tensors[0]
        outputs = [call.outputs.get(name) for name in spec.outputs]
        found = [x and fresh(x.shape, x.strides, dtype=DTYPES[x.dtype], device=first.device) for x in outputs]
        return returned(found, first)

    def mapped(info: Any, dims: Any, *arguments: Any) -> Any:
        def call(*given: Any) -> tuple[Any, ...]:
            found = operator(spec)(*given)
            return found if isinstance(found, tuple) else (found,)

        found, out_dims = one_by_one(call, info.batch_size, dims, arguments)
        return (found, out_dims) if len(found) > 1 else (found[0], out_dims[0])

    made = torch.library.custom_op(f"aule::{spec.name}", real, mutates_args=(), schema=_schema(spec, gradient))
    made.register_fake(fake)
    made.register_vmap(mapped)
    return made


def _keep(spec: OpSpec) -> Any:
    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given = _Arguments(spec, inputs, gradient=False)
        ctx.options, ctx.backend = given.options, given.backend
        ctx.save_for_backward(*saved(spec, given.tensors, output))

    return keep


def _differentiate(spec: OpSpec) -> Any:
    def backward(ctx: Any, *douts: Any) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[: len(spec.operands)]
        found = gradients(spec, douts, ctx.saved_tensors, ctx.options, ctx.backend, needs, run)
        return (*found, *(None for _ in spec.options), None)

    return backward


def _refuse(spec: OpSpec) -> Any:
    def refuse(ctx: Any, *grads: Any) -> Any:
        raise no_second_derivative(spec.name)

    return refuse


OPERATORS = {}
for _spec in CATALOGUE.values():
    OPERATORS[_spec.name] = _register(_spec, gradient=False)
    if _spec.gradient is not None:
        OPERATORS[_spec.gradient.name] = _register(_spec.gradient, gradient=True)
        OPERATORS[_spec.gradient.name].register_autograd(_refuse(_spec))
        OPERATORS[_spec.name].register_autograd(_differentiate(_spec), setup_context=_keep(_spec))
