"""Explanations of calls on torch tensors: each op's `Call` and its route, up to the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aule.engine.explain import Chosen, Explanation, choose, explain, views_on
from aule.frontends.numpy import VarlenFunctions
from aule.frontends.numpy_explain import ONLY_CPU, STAYS
from aule.frontends.torch import decode as decoding
from aule.frontends.torch import entry, row_ops, varlen
from aule.frontends.torch import route as routes
from aule.frontends.torch.attention import AttentionCall, Backward, Forward, Saved
from aule.frontends.torch.autograd import attention as attention_gradients
from aule.frontends.torch.autograd import row_ops as row_gradients
from aule.frontends.torch.calls import Call, Results
from aule.frontends.torch.checks import keyed, require_tensor
from aule.frontends.torch.devices.base import Planned
from aule.frontends.torch.flex import calls as flex_calls
from aule.frontends.torch.flex import decode as flex_decode
from aule.frontends.torch.flex import entry as flex_entry
from aule.frontends.torch.flex.captured import first_call
from aule.frontends.torch.flex.trace import traced_pair
from aule.frontends.torch.modes import grad_enabled, refuse_transforms
from aule.frontends.torch.row_ops import Options, RowOp, Tensors
from aule.frontends.torch.varlen import packed_call
from aule.frontends.torch.views import aligned, fresh, view_on_device, view_on_host
from aule.ops.attention.varlen import OP as VARLEN
from aule.ops.catalogue import CATALOGUE
from aule.ops.scores.functions.trace import OP as FLEX
from aule.ops.shared.plan import Plan
from aule.ops.shared.spec import OpSpec
from aule.options import AttentionOptions, DecodeOptions

_TRAINING = "CPU tensors stay on the CPU where gradients are wanted"
_OUTSIDE = "call explain outside of them"


def flash_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Explanation:
    """Explain a call of attention, and of its gradients if it records them."""
    _check("flash_attention", q, k, v, options)
    options = keyed("flash_attention", _completed("flash_attention", q, options))
    q, k, v = _as_autocast_would(q, k, v)
    if not (grad_enabled() and attention_gradients.needs_gradient(q, k, v, options)):
        return _explained(Forward(q, k, v, options))
    attention_gradients.check_gradients(q, k, v, options)
    forward = Forward(q, k, v, options._replace(return_lse=True, out=None), training=True)
    exact = options.deterministic or torch.are_deterministic_algorithms_enabled()
    scores = any(x is not None and x.requires_grad for x in (options.mask, options.bias))
    backward = Backward(_saved(forward), options._replace(deterministic=exact), scores)
    return _explained(forward, _explained(backward))


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: tuple[object, object],
    longest: tuple[int | None, int | None],
    options: AttentionOptions,
    functions: VarlenFunctions = (None, None),
) -> Explanation:
    """Explain a call of attention on packed batches, and of its gradients if it records them."""
    _check(VARLEN, q, k, v, options)
    options = _completed(VARLEN, q, options)
    q, k, v = _as_autocast_would(q, k, v)
    packed = packed_call((q, k, v), offsets, longest, options, traced_pair(q, VARLEN, functions))
    training = grad_enabled() and attention_gradients.needs_gradient(q, k, v, options)
    forward = varlen.Forward(q, k, v, packed, training)
    return _explained(forward, _explained(varlen.Backward(_saved(forward), packed)) if training else None)


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    backend: str | None,
) -> Explanation:
    """Explain a call of attention with functions of the user, and of its gradients if it records them."""
    options = flex_entry.options_of(scale, backend)
    _check(FLEX, q, k, v, options)
    q, k, v = _as_autocast_would(q, k, v)
    k, v = flex_entry.shared_keys(q, k, v)
    functions = flex_entry.functions_of(score_mod, block_mask, q, k)
    wanted = [name for name, x in functions.of_score.items() if x.requires_grad]
    if not (grad_enabled() and (wanted or any(x.requires_grad for x in (q, k, v)))):
        return _explained(flex_calls.Forward(q, k, v, options, functions, None))
    forward = flex_calls.Forward(q, k, v, options, functions, True)
    options = options._replace(deterministic=torch.are_deterministic_algorithms_enabled())
    saved = _saved(forward)
    backward = flex_calls.Backward(saved, options, functions, None)
    part = first_call(saved, options, functions, wanted) if wanted else None
    return _explained(forward, _explained(backward, None if part is None else _explained(part)))


def decode(q: Tensor, k: Tensor, v: Tensor, options: DecodeOptions) -> Explanation:
    """Explain a call of attention over a cache."""
    refuse_transforms(options.op, (q, k, v), _OUTSIDE)
    call = decoding.decode_call(q, k, v, options)
    return _explained(flex_decode.with_functions(call) if options.has_functions else call)


def row_op(name: str, tensors: tuple[Tensor | None, ...], options: Options, backend: str | None) -> Explanation:
    """Explain a call of a row operation, and of its gradient if it records one."""
    spec = CATALOGUE[name]
    refuse_transforms(name, tensors, _OUTSIDE)
    options = row_ops.by_value(spec, options)
    for operand, x in zip(spec.operands, tensors, strict=True):
        if x is not None and operand.name != "seed":
            require_tensor(x, operand.name, name, spec.operands[0].name)
    if spec.seed is not None:
        drops, device = spec.option("dropout_p", options) != 0, tensors[0].device  # type: ignore[union-attr]
        words = torch.zeros(2, dtype=torch.int32, device=device) if drops else None
        tensors = (*tensors[: spec.seed], words, *tensors[spec.seed + 1 :])
    if not (grad_enabled() and any(x is not None and x.requires_grad for x in tensors)):
        return _explained(RowOp(spec, tensors, options, backend, spec.outputs))
    hidden = row_gradients.outputs_to_save(spec, tensors, backend)
    call = RowOp(spec, tensors, options, backend, (*spec.outputs, *hidden))
    results = _empty(call)
    made = tuple(results[name] for name in call.wanted)
    found: list[Explanation] = []

    def explained(
        gradient: OpSpec, given: Tensors, values: Options, where: str | None, wanted: tuple[str, ...]
    ) -> Results:
        found.append(_explained(RowOp(gradient, given, values, where, wanted)))
        return (None,) * len(gradient.outputs)

    kept = row_gradients.saved(spec, tensors, made, hidden)
    needs = [x is not None and x.requires_grad for x in tensors]
    row_gradients.gradients(spec, made[: len(spec.outputs)], kept, options, backend, needs, explained)
    return _explained(call, found[0])


# -- parts of a call ---------------------------------------------------------------------------------------------------


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> None:
    for name, x in {"q": q, "k": k, "v": v, **options.arrays()}.items():
        if name != "seed":
            require_tensor(x, name, op)
    refuse_transforms(op, (q, k, v), _OUTSIDE)


def _completed(op: str, q: Tensor, options: AttentionOptions) -> AttentionOptions:
    """The options as a call completes them, with a seed that is not drawn: that would change the generator."""
    return entry.completed(op, q, options._replace(seed=0) if options.seed is None else options)


def _as_autocast_would(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of undefined contents with the dtypes and strides that autocast would give."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x if x.dtype in (dtype, torch.float64) else torch.empty_like(x, dtype=dtype).requires_grad_(x.requires_grad)
        for x in tensors
    )


def _empty(call: Call) -> dict[str, Tensor]:
    """A call's results by name, with undefined contents: memory is allocated, and nothing is written."""
    where = call.first.device
    bound = call.bind(view_on_host if where.type == "cpu" else view_on_device)
    return {x.name: fresh(x.shape, x.strides, x.dtype, where) for x in bound.outputs}


def _saved(forward: AttentionCall) -> Saved:
    """What a forward pass leaves for its gradients, which are taken to be contiguous."""
    made, given = _empty(forward), forward.tensors
    return Saved(given["q"], given["k"], given["v"], made["o"], made["lse"], torch.empty_like(made["o"]))


# -- plans -------------------------------------------------------------------------------------------------------------


def _explained(call: Call, gradients: Explanation | None = None) -> Explanation:
    where = routes.route(call.first, call.backend)
    if where is routes.HOST:
        problem, chosen = _on_host(call, foreign=False)
    elif isinstance(where, Planned):
        problem, chosen = _in_place(call, where)
    else:
        home = call.first.device
        # Contents of indices decide plans; those of floats do not, and are not copied.
        there = {name: _host_copy(x) for name, x in call.tensors.items()}
        problem, chosen = _on_host(call.with_tensors(there), foreign=True)
        chosen = chosen._replace(copied=True, reason=f"{chosen.reason}; tensors on {home} go through the host")
    return explain(call.op, problem, chosen, call.backward, gradients)


def _host_copy(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu") if x.is_floating_point() else x.cpu()


def _in_place(call: Call, where: Planned) -> tuple[Any, Chosen]:
    call = call.placed(on_host=False)
    device = where.device(call)
    bound = call.bind(where.view)
    plan = call.plan(bound, device, aligned(call.tensors | call.destinations))
    reason = f"tensors on {call.first.device} are used in place"
    return bound.problem, choose(device, call.backend, reason, plan, copied=False)


def _on_host(call: Call, foreign: bool) -> tuple[Any, Chosen]:
    call = call.placed(on_host=True)
    device = call.host_device(foreign)
    bound = call.bind(view_on_host)
    otherwise = _otherwise(call, bound.problem, foreign)
    if device is None:
        return bound.problem, choose(None, call.backend, otherwise, Plan(()), copied=False)
    views = views_on(device, bound.views, {x.name for x in bound.outputs})
    plan = call.plan(bound._replace(views=views), device, {})
    return bound.problem, choose(device, call.backend, otherwise, plan, copied=device.target.backend != "cpu")


def _otherwise(call: Call, problem: Any, foreign: bool) -> str | None:
    """Why the device of a call in host memory was chosen; None for the order of preference."""
    if isinstance(call, RowOp):
        return STAYS
    training = call.backward or (isinstance(call, Forward) and call.training is not None)
    if training and not foreign:
        return _TRAINING
    return ONLY_CPU if problem.dtype == "f64" else None
