"""Runs attention: plans a problem on a device, loads its kernels, and computes on host or device arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.backends import registry
from aule.engine import host
from aule.engine.memory import STORED, check_memory, host_view
from aule.engine.probe import find_layout
from aule.engine.run import PreparedCall, prepare
from aule.errors import AuleError
from aule.ops.attention import numpy_forward
from aule.ops.attention.precision import refused
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands
from aule.ops.attention.varlen import OP as VARLEN
from aule.ops.attention.varlen import sequences
from aule.ops.shared.plan import Plan
from aule.runtime.base import Device
from aule.target import Target
from aule.view import TensorView

Array = npt.NDArray[Any]
_OP = "flash_attention"


def op_of(problem: AttentionProblem) -> str:
    """The public function of a problem."""
    return _OP if problem.packed is None else VARLEN


def forward_plan(
    problem: AttentionProblem,
    views: dict[str, TensorView],
    device: Device,
    aligned_base: dict[str, bool] | None = None,
) -> Plan:
    """Plan a forward pass on a device.

    Parameters
    ----------
    views : dict
        As for `plan_forward`. The log-sum-exp, if wanted, is the buffer ``lse``: contiguous, in the type that is
        computed in.
    aligned_base : dict, optional
        As for `plan_forward`; unused on the CPU.
    """
    if device.target.backend == "cpu":
        from aule.ops.attention.cpu import plan as cpu  # imported late: `import aule` is to be quick

        return cpu.plan_forward(problem, views, device.target)
    check_memory(_OP, views, device)
    if problem.dtype in ("f16", "bf16") or problem.precision is not None:
        find_layout(device)
    from aule.ops.attention.plan.forward import plan_forward  # imported late: a CPU's first call is to be quick
    from aule.ops.decode.plan.few_rows import plan_few_rows

    few = plan_few_rows(problem, views, device.target, aligned_base)
    return few or plan_forward(problem, views, device.target, aligned_base)


def backward_plan(
    problem: AttentionProblem,
    views: dict[str, TensorView],
    device: Device,
    aligned_base: dict[str, bool] | None = None,
) -> Plan:
    """Plan the gradients on a device; ``views`` are as for `plan_backward`, ``aligned_base`` as for `forward_plan`."""
    if device.target.backend == "cpu":
        from aule.ops.attention.cpu import plan as cpu

        return cpu.plan_backward(problem, views, device.target)
    check_memory(_OP, views, device)
    if problem.dtype in ("f16", "bf16"):
        find_layout(device)
    from aule.ops.attention.plan.backward import plan_backward

    return plan_backward(problem, views, device.target, aligned_base)


def prepare_forward(problem: AttentionProblem, views: dict[str, TensorView], device: Device) -> PreparedCall:
    """Plan a forward pass on a device, as `forward_plan` does, and load its kernels."""
    op = op_of(problem)
    if device.target.backend == "cpu":
        from aule.ops.attention.cpu import plan as cpu

        return host.prepare_once(op, cpu.plan_forward, problem, views, device)
    return prepare(forward_plan(problem, views, device), device, op=op)


def prepare_backward(problem: AttentionProblem, views: dict[str, TensorView], device: Device) -> PreparedCall:
    """Plan the gradients on a device, as `backward_plan` does, and load their kernels."""
    op = op_of(problem)
    if device.target.backend == "cpu":
        from aule.ops.attention.cpu import plan as cpu

        return host.prepare_once(op, cpu.plan_backward, problem, views, device, backward=True)
    return prepare(backward_plan(problem, views, device), device, op=op, backward=True)


def attention_views(operands: Operands, out: TensorView) -> dict[str, TensorView]:
    """Return the operands by the names that plans and kernels use; the log-sum-exp is contiguous and needs no view."""
    views = {"q": operands.q, "k": operands.k, "v": operands.v, "o": out}
    for name in ("mask", "bias", "alibi", "sinks", "seed", "cos", "sin", "cu_q", "cu_k"):
        view = getattr(operands, name)
        if view is not None:
            views[name] = view
    return {**views, **operands.captured}


# -- arrays on the device ----------------------------------------------------------------------------------------------


def forward_on_device(problem: AttentionProblem, operands: Operands, device: Device, out: TensorView, lse: Any) -> None:
    """Compute on arrays on the device; asynchronous. ``lse`` is an Allocation or None."""
    views = attention_views(operands, out)
    prepare_forward(problem, views, device).run({name: view.storage for name, view in views.items()} | {"lse": lse})


def gradients_on_device(problem: AttentionProblem, views: dict[str, TensorView], device: Device, lse: Any) -> None:
    """Compute gradients of arrays on the device; ``views`` as for `plan_backward`, ``lse`` an Allocation."""
    prepare_backward(problem, views, device).run({name: view.storage for name, view in views.items()} | {"lse": lse})


# -- arrays in host memory ---------------------------------------------------------------------------------------------


def host_device(dtype: str, spec: str | None) -> Device | None:
    """Return the device for arrays in host memory; None means NumPy. Only the CPU computes in float64."""
    if dtype == "f64" and registry.requested_backend(spec) is None:
        try:
            return registry.find("cpu")
        except AuleError:
            return None
    return registry.choose(spec)


def forward_on_host(
    problem: AttentionProblem,
    operands: Operands,
    device: Device | None,
    out: Array | None = None,
    exact_lse: bool = False,
) -> tuple[Array, Array | None]:
    """Compute on host arrays, through a device or with NumPy; the results are finished on return.

    Parameters
    ----------
    out : ndarray, optional
        ``problem.out_shape``, of any strides; made when not given.
    exact_lse : bool
        Return the log-sum-exp in the type that is computed in, as the backward pass needs it, and not as float32.
    """
    if out is None:
        out = np.empty(problem.out_shape, STORED[problem.dtype])
    views = attention_views(operands, host_view(problem.dtype, out))
    on_numpy, prepared = partial(_forward_on_numpy, problem, operands), partial(prepare_forward, problem)
    out, lse = host.attend(op_of(problem), problem, views, device, on_numpy, prepared)
    return out, lse if lse is None or exact_lse else lse.astype(np.float32, copy=False)


def _forward_on_numpy(problem: AttentionProblem, operands: Operands, out: Array, lse: Array | None) -> None:
    if problem.precision is not None:
        raise refused(problem, Target("numpy", "NumPy"))
    if problem.packed is None:
        numpy_forward.forward(problem, operands, out, lse)
        return
    for one in sequences(problem, operands):
        own = None if lse is None else lse[:, :, one.rows]
        numpy_forward.forward(one.problem, one.operands, out[:, :, one.rows], own, one.number)


def scores_on_host(
    problem: AttentionProblem,
    operands: Operands,
    device: Device,
    out: Array,
    lse: Array,
    dout: TensorView,
    ds: Array,
    dlse: TensorView | None = None,
) -> None:
    """Compute the gradient of what is added to the scores alone, on host arrays.

    Parameters are as for `backward_on_host`; rows of ``ds`` may be longer, of a multiple of 8 elements.
    """
    if out.size and operands.k.shape[2]:
        work = "f64" if problem.dtype == "f64" else "f32"
        _backward_on_host(problem, operands, device, out, lse, dout, dlse, {"ds": host_view(work, ds)})


def backward_on_host(
    problem: AttentionProblem,
    operands: Operands,
    device: Device,
    out: Array,
    lse: Array,
    dout: TensorView,
    ds: Array | None = None,
    dlse: TensorView | None = None,
) -> tuple[Array, Array, Array]:
    """Compute the gradients of q, k and v on host arrays.

    Parameters
    ----------
    out, lse : ndarray
        Results of the forward pass, four and three axes; ``lse`` in the type that is computed in.
    dout : TensorView
        The gradient of ``out``, with four axes.
    ds : ndarray, optional
        Zeros ``[batch, heads_q, seq_q, seq_kv]`` in the type that is computed in; receives the gradient of the scores'
        additive term.
    dlse : TensorView, optional
        The gradient of ``lse``: contiguous, in its type.
    """
    dtype, work = problem.dtype, "f64" if problem.dtype == "f64" else "f32"
    grads = [np.empty(view.shape, STORED[dtype]) for view in (operands.q, operands.k, operands.v)]
    if out.size == 0 or operands.k.shape[2] == 0:
        for array in grads:
            array.fill(0)
    else:
        outputs = {name: host_view(dtype, array) for name, array in zip(("dq", "dk", "dv"), grads, strict=True)}
        if ds is not None:
            outputs["ds"] = host_view(work, ds)
        _backward_on_host(problem, operands, device, out, lse, dout, dlse, outputs)
    return grads[0], grads[1], grads[2]


def _backward_on_host(
    problem: AttentionProblem,
    operands: Operands,
    device: Device,
    out: Array,
    lse: Array,
    dout: TensorView,
    dlse: TensorView | None,
    outputs: dict[str, TensorView],
) -> None:
    work = "f64" if problem.dtype == "f64" else "f32"
    inputs = attention_views(operands, host_view(problem.dtype, out)) | {"do": dout, "lse": host_view(work, lse)}
    if dlse is not None:
        inputs["dlse"] = dlse

    def prepared(views: dict[str, TensorView]) -> PreparedCall:
        return prepare_backward(problem, host.without_lse(views), device)

    host.compute(_OP, device, inputs, outputs, prepared, uploaded=("ds",))
