"""Explanations of calls on NumPy arrays: the front end of `aule.frontends.numpy` up to the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from aule.engine.attention import attention_views, forward_plan, host_device, op_of
from aule.engine.decode import decode_plan
from aule.engine.explain import Chosen, Explanation, choose, explain, views_on
from aule.engine.memory import host_view
from aule.engine.row_ops import host_device as row_op_device
from aule.engine.row_ops import result_views, row_op_plan
from aule.frontends import numpy as front_end
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands
from aule.ops.catalogue import CATALOGUE
from aule.ops.decode.plan.decode import decode_views
from aule.ops.shared.plan import Plan
from aule.options import AttentionOptions, DecodeOptions
from aule.runtime.base import Device
from aule.view import TensorView, contiguous_strides

Array = npt.NDArray[Any]
ONLY_CPU = "only the CPU computes in float64"
STAYS = "row operations stay on the CPU: copies to another device would take longer"


def flash_attention(q: Array, k: Array, v: Array, options: AttentionOptions) -> Explanation:
    """Explain a call of attention."""
    problem, operands = front_end.attention_call(q, k, v, options)
    out = None
    if options.out is not None:
        out = front_end.checked_out(options.out, operands.out_shape, problem.dtype)
        out = out[(None,) * (4 - out.ndim)]
    return _attention(problem, operands, out, options.backend)


def flash_attention_varlen(q: Array, k: Array, v: Array, *rest: Any) -> Explanation:
    """Explain a call of attention on packed batches; ``rest`` as for the call."""
    problem, operands = front_end.varlen_call(q, k, v, *rest)
    options: AttentionOptions = rest[2]
    _, heads, rows, dim = problem.out_shape
    # Results are [rows, heads, dim] in memory.
    view = TensorView(problem.dtype, problem.out_shape, (0, dim, heads * dim, 1), "host", None)
    if options.out is not None:
        out = front_end.checked_out(options.out, (rows, heads, dim), problem.dtype, op_of(problem))
        view = host_view(problem.dtype, out.transpose(1, 0, 2)[None])
    return _attention(problem, operands, view, options.backend)


def flex_attention(q: Array, k: Array, v: Array, *rest: Any) -> Explanation:
    """Explain a call of attention with functions of the user; ``rest`` as for the call."""
    from aule.frontends import numpy_flex  # few programs use it

    *given, backend = rest
    return _attention(*numpy_flex.flex_call(q, k, v, *given), None, backend)


def _attention(
    problem: AttentionProblem, operands: Operands, out: Array | TensorView | None, backend: str | None
) -> Explanation:
    if not isinstance(out, TensorView):
        out = _fresh(problem.dtype, problem.out_shape) if out is None else host_view(problem.dtype, out)
    device = host_device(problem.dtype, backend)
    views = attention_views(operands, out)
    otherwise = ONLY_CPU if problem.dtype == "f64" else None
    chosen = planned(device, backend, otherwise, views, ("o",), lambda x, d: forward_plan(problem, x, d))
    return explain(op_of(problem), problem, chosen)


def decode(q: Array, k: Array, v: Array, options: DecodeOptions) -> Explanation:
    """Explain a call of attention over a cache."""
    problem, operands = front_end.decode_call(q, k, v, options)
    out = _fresh(problem.dtype, problem.out_shape)
    if options.out is not None:
        given = front_end.checked_out(options.out, operands.out_shape, problem.dtype, options.op)
        out = host_view(problem.dtype, operands.lifted(given))
    device = host_device(problem.dtype, options.backend)
    otherwise = ONLY_CPU if problem.dtype == "f64" else None
    views = decode_views(operands, out)
    chosen = planned(
        device, options.backend, otherwise, views, ("o",), lambda x, d: decode_plan(options.op, problem, x, d)
    )
    return explain(options.op, problem, chosen)


def row_op(name: str, arrays: tuple[Any, ...], options: tuple[Any, ...], backend: str | None) -> Explanation:
    """Explain a call of a row operation."""
    spec = CATALOGUE[name]
    call = front_end.row_call(spec, arrays, options)
    views = dict(call.views) | result_views(call)
    device = row_op_device(backend)
    chosen = planned(device, backend, STAYS, views, call.outputs, lambda x, d: row_op_plan(spec, call.problem, x, d))
    return explain(name, call.problem, chosen)


def planned(
    device: Device | None,
    backend: str | None,
    otherwise: str | None,
    views: dict[str, TensorView],
    outputs: Any,
    plan: Callable[[dict[str, TensorView], Device], Plan],
) -> Chosen:
    """Plan a call on host arrays; ``outputs`` are the names of those that it writes, ``otherwise`` as for `choose`."""
    if device is None:
        return choose(None, backend, otherwise, Plan(()), copied=False)
    made = plan(views_on(device, views, outputs), device)
    return choose(device, backend, otherwise, made, copied=device.target.backend != "cpu")


def _fresh(dtype: str, shape: tuple[int, ...]) -> TensorView:
    return TensorView(dtype, shape, contiguous_strides(shape), "host", None)
