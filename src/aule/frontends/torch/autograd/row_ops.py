"""Row operations with gradients, and the tensors that they save for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from aule.engine import observe
from aule.errors import AuleError, InvalidArgumentError
from aule.frontends.torch import passes, repeated, route
from aule.frontends.torch.autograd.refuse import refuse_second
from aule.frontends.torch.calls import Results
from aule.frontends.torch.checks import no_forward_mode
from aule.frontends.torch.compile.vmap import row_op_one_by_one
from aule.frontends.torch.modes import grad_enabled, needs_operator
from aule.frontends.torch.row_ops import Options, Tensors, place, repeat_key
from aule.ops.shared.spec import OpSpec

Compute = Callable[[OpSpec, Tensors, Options, "str | None", tuple[str, ...]], Results]


def seen(spec: OpSpec, found: Results) -> Tensor | Results:
    """The results of an op that its caller gets: without those saved for the gradient."""
    return found[0] if len(spec.outputs) == 1 else found[: len(spec.outputs)]


def with_gradient(spec: OpSpec, tensors: Tensors, options: Options, backend: str | None) -> Tensor | Results:
    """An op whose results can be differentiated."""
    where = place(spec, options)
    if where is not None and grad_enabled():
        _require_no_leaf(spec, where, tensors[where])
    found = _RowOp.apply(spec, options, backend, *tensors)
    return seen(spec, found) if isinstance(found, tuple) else found


def _require_no_leaf(spec: OpSpec, number: int, x: Tensor | None) -> None:
    """Refuse to overwrite a leaf or a view of one; autograd itself would notice only after the kernel has run."""
    if x is None or not x.requires_grad:
        return
    got = None
    if x.is_leaf:
        got = "a leaf"
    elif x._is_view() and x._base.is_leaf and x._base.requires_grad:
        got = "a view of a leaf"
    elif x._is_view() and torch._C._autograd._get_creation_meta(x) != torch._C._autograd.CreationMeta.DEFAULT:
        got = "one of several views that were made at once"
    if got is not None:
        raise InvalidArgumentError(
            f"[{spec.name}] expected {spec.operands[number].name} that can be written over and needs a gradient, got "
            f"{got}; clone it first, or leave inplace out"
        )


class _RowOp(torch.autograd.Function):  # type: ignore[misc]
    """An op with its gradient; its inputs are the spec, the options, the backend and the tensors."""

    @staticmethod
    def forward(spec: OpSpec, options: Options, backend: str | None, *tensors: Tensor | None) -> Tensor | Results:
        found = _run(spec, tensors, options, backend, (*spec.outputs, *outputs_to_save(spec, tensors, backend)))
        found = tuple(x for x in found if x is not None)
        return found[0] if len(found) == 1 else found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor | Results) -> None:
        spec, ctx.options, ctx.backend, *tensors = inputs
        ctx.spec, ctx.caller = spec, observe.caller.get()
        ctx.set_materialize_grads(False)
        where = place(spec, ctx.options)
        if where is not None:
            ctx.mark_dirty(tensors[where])
        hidden: tuple[str, ...] = ()
        if isinstance(output, tuple) and len(output) > len(spec.outputs):
            ctx.mark_non_differentiable(*output[len(spec.outputs) :])
            hidden = outputs_to_save(spec, tensors, ctx.backend)
        ctx.save_for_backward(*saved(spec, tensors, output, hidden))

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> Results:
        spec: OpSpec = ctx.spec
        inputs = ctx.saved_tensors
        known = spec, douts[: len(spec.outputs)], inputs, ctx.options, ctx.backend, ctx.needs_input_grad[3:], _run
        with observe.called_by(ctx.caller):
            if not grad_enabled():  # unless second derivatives are wanted
                return (None, None, None, *gradients(*known))
            with torch.no_grad():
                found = gradients(*known)
        return (None, None, None, *refuse_second(found, *douts, *inputs, op=spec.name))

    @staticmethod
    def vmap(info: Any, dims: Any, spec: OpSpec, options: Options, backend: str | None, *tensors: Any) -> Any:
        def call(*mapped: Tensor | None) -> Tensor | Results:
            return with_gradient(spec, mapped, options, backend)

        return row_op_one_by_one(call, info, dims[3:], tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise no_forward_mode(ctx.spec.name)


def _run(spec: OpSpec, tensors: Tensors, options: Options, backend: str | None, wanted: tuple[str, ...]) -> Results:
    """A spec's results; by its operator inside a transform."""
    found = repeated.repeat(*repeat_key(spec, tensors, options, backend, wanted))
    if found is not None:
        return found
    if not needs_operator(tensors):
        return passes.compute(spec, tensors, options, backend, wanted)
    from aule.frontends.torch.compile import row_operators  # imports this module

    return row_operators.run(spec, tensors, options, backend, wanted)


# -- saved tensors -----------------------------------------------------------------------------------------------------


def required_gradient(spec: OpSpec) -> OpSpec:
    """The gradient of an op; all of the catalogue have one."""
    assert spec.gradient is not None and spec.gradients is not None
    return spec.gradient


@cache
def saved_names(spec: OpSpec) -> tuple[str, ...]:
    """Operands and outputs of an op that its gradient needs."""
    theirs = {f"d{name}" for name in spec.outputs}
    return tuple(operand.name for operand in required_gradient(spec).operands if operand.name not in theirs)


def saved(
    spec: OpSpec, tensors: Tensors, output: Tensor | Results, hidden: tuple[str, ...] = ()
) -> list[Tensor | None]:
    """Tensors for the gradient, in the order of `saved_names`; None for those that it does not need.

    ``hidden`` names the results at the end of ``output`` that callers do not get.
    """
    known = dict(zip((operand.name for operand in spec.operands), tensors, strict=True))
    unused = _unused(spec, tensors)
    known |= dict.fromkeys(spec.saved_outputs)
    known |= dict(zip((*spec.outputs, *hidden), output if isinstance(output, tuple) else (output,), strict=True))
    for operand in required_gradient(spec).operands:
        if operand.stands_for is not None and operand.name in hidden:
            unused |= {name for name, _, _ in _sparing(spec)} - {operand.name}
            known[operand.stands_for] = known[operand.name]
    return [None if name in unused else known[name] for name in saved_names(spec)]


def _unused(spec: OpSpec, tensors: Tensors) -> set[str]:
    """Results of an op that would save its gradient no work."""
    host = tensors[0] is not None and tensors[0].is_cpu
    return {name for name, number, small in _sparing(spec) if tensors[number] is None or not (host or small)}


@cache
def _sparing(spec: OpSpec) -> tuple[tuple[str, int, bool], ...]:
    """Results that save the gradient the work of an operand: name, the operand's number, and whether on GPUs too."""
    numbers = {operand.name: i for i, operand in enumerate(spec.operands)}
    operands = required_gradient(spec).operands
    return tuple((x.name, numbers[x.spares], x.small) for x in operands if x.spares is not None)


@cache
def _standing_in(spec: OpSpec) -> frozenset[str]:
    """Results that replace an operand and all other saved results."""
    return frozenset(x.name for x in required_gradient(spec).operands if x.stands_for is not None)


def outputs_to_save(spec: OpSpec, tensors: Tensors, backend: str | None) -> tuple[str, ...]:
    """Results that a call computes only for its gradient."""
    first = tensors[0]
    if not spec.saved_outputs or first is None:
        return ()
    kind = route.route(first, backend).saves(first, backend)
    if kind == "nothing":
        return ()
    unused = _unused(spec, tensors)
    standing_in = _standing_in(spec) - unused
    if standing_in and kind == "one result":
        return tuple(standing_in)
    return tuple(name for name in spec.saved_outputs if name not in unused | _standing_in(spec))


# -- gradients ---------------------------------------------------------------------------------------------------------


def gradients(
    spec: OpSpec,
    douts: Tensors,
    saved: Tensors,
    options: Options,
    backend: str | None,
    needs: Sequence[bool],
    run: Compute,
) -> Results:
    """The gradient of each operand that needs one, else None; ``run`` computes a spec.

    ``douts`` are None for outputs without a gradient; if all of them are, so are the gradients of the operands.
    """
    gradient = required_gradient(spec)
    assert spec.gradients is not None
    given = next((x for x in douts if x is not None), None)
    if given is None:
        return (None,) * len(spec.operands)
    known = dict(zip(saved_names(spec), saved, strict=True))
    known |= {f"d{name}": dout for name, dout in zip(spec.outputs, douts, strict=True)}
    for operand in gradient.operands:
        if known[operand.name] is None and not operand.optional:
            known[operand.name] = torch.zeros_like(given)  # ops with several such outputs give them one shape
    owned = [
        spec.gradients.get(operand.name) if need else None for operand, need in zip(spec.operands, needs, strict=True)
    ]
    for operand, need, name in zip(spec.operands, needs, owned, strict=True):
        if need and name is None:
            raise AuleError(
                "AULE_ERROR_NO_GRADIENT",
                f"[{spec.name}] expected {operand.name} to need no gradient, got requires_grad=True; detach it",
            )
    wanted = tuple(name for name in gradient.outputs if name in owned)
    results = run(gradient, [known[operand.name] for operand in gradient.operands], options, backend, wanted)
    by_name = dict(zip(gradient.outputs, results, strict=True))
    return tuple(None if name is None else by_name[name] for name in owned)
