"""Runs attention: plan, program, launch. The one place where a problem meets a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.backends import registry
from aule.engine import cpu
from aule.engine.memory import STORED, Arena, check_memory, host_view, zeroed
from aule.engine.probe import find_layout
from aule.engine.programs import StepLaunches, launch_of, launch_steps, load_steps, program
from aule.engine.tuning import tuned_shape
from aule.errors import AuleError
from aule.ops.attention import numpy_forward
from aule.ops.attention.forward import build_forward
from aule.ops.attention.plan import ForwardPlan, plan_backward, plan_forward
from aule.ops.attention.precision import refused
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands
from aule.ops.attention.varlen import pieces
from aule.ops.step import StepPlan
from aule.runtime import base
from aule.runtime.base import Device, Program
from aule.target import Target
from aule.view import TensorView, contiguous_strides

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Launch:
    """A forward pass that is ready to go: only memory is missing.

    Attributes
    ----------
    buffers : tuple of str
        Names of the memory in the order of the kernel's buffers.
    before : StepLaunches
        What is launched before it.
    beside : Program or None
        What is launched with it.
    """

    plan: ForwardPlan
    program: Program
    buffers: tuple[str, ...]
    before: StepLaunches
    beside: Program | None = None

    def arguments(self, memory: dict[str, Any]) -> list[Any]:
        """All arguments in the order of the kernel's parameters."""
        values = {f"{name}_ptr": buffer for name, buffer in memory.items()} | self.plan.scalars
        values |= {f"{name}_ptr": memory[other] for name, other in self.plan.renamed.items()}
        return [values[p.name] for p in self.program.artifact.params]

    def start(self, device: Device, memory: dict[str, Any], arena: Arena) -> None:
        """Launch on memory of the device, by buffer name; asynchronous."""
        if self.plan.idle:
            return
        memory = memory | self.workspace(device, arena)
        launch_steps(self.before, device, memory)
        launches = self.launches(memory)
        if len(launches) == 1:
            device.launch(*launches[0])
        else:
            device.launch_together(launches)

    def workspace(self, device: Device, arena: Arena) -> dict[str, Any]:
        """Memory that launches need beside the operands, by buffer name."""
        space = {name: arena.alloc(4 * count) for name, count in self.before.workspace.items()}
        return space | {name: zeroed(device, words) for name, words in self.before.zeroed.items()}

    def launches(self, memory: dict[str, Any]) -> list[base.Launch]:
        """What comes after the launches before, and may go together; ``memory`` by buffer name, workspaces included."""
        own = (self.program, self.plan.grid, self.arguments(memory))
        if self.plan.beside is None or self.beside is None:
            return [own]
        both = [own, launch_of(self.plan.beside, self.beside, memory)]
        return both[::-1] if self.plan.leading else both


def prepare_forward(
    problem: AttentionProblem,
    views: dict[str, TensorView],
    device: Device,
    aligned_base: dict[str, bool] | None = None,
) -> Launch:
    """Plan a forward pass on a device and build its kernel, or find both in memory."""
    check_memory("flash_attention", problem.dtype, views, device)
    if problem.dtype in ("f16", "bf16") or problem.precision is not None:
        find_layout(device)
    plan = plan_forward(problem, views, device.target, aligned_base, preferred=tuned_shape(device, problem))
    loaded = program(device, plan.config, lambda: build_forward(plan.config, device.target))
    before = load_steps(StepPlan(plan.before, plan.workspace, plan.zeroed), device)
    beside = None
    if plan.beside is not None:
        beside = load_steps(StepPlan((plan.beside,)), device).steps[0][1]
    buffers = (p.name.removesuffix("_ptr") for p in loaded.artifact.buffers)
    return Launch(plan, loaded, tuple(plan.renamed.get(name, name) for name in buffers), before, beside)


def named(operands: Operands, out: TensorView) -> dict[str, TensorView]:
    """The operands by the names that plans and kernels use; the log-sum-exp is contiguous and needs no view."""
    views = {"q": operands.q, "k": operands.k, "v": operands.v, "o": out}
    for name in ("mask", "bias", "alibi", "sinks", "seed", "cos", "sin", "cu_q", "cu_k"):
        view = getattr(operands, name)
        if view is not None:
            views[name] = view
    return views


def forward_on_device(problem: AttentionProblem, operands: Operands, device: Device, out: TensorView, lse: Any) -> None:
    """Compute on arrays that live on the device; asynchronous. ``lse`` is an Allocation or None."""
    views = named(operands, out)
    if device.target.backend == "cpu":
        cpu.forward(problem, views, device, lse)
        return
    launch = prepare_forward(problem, views, device)
    with Arena(device) as arena:
        launch.start(device, {name: view.storage for name, view in views.items()} | {"lse": lse}, arena)


def host_device(problem: AttentionProblem, spec: str | None) -> Device | None:
    """The device for arrays in host memory; None stands for NumPy. float64 is computed by the CPU alone."""
    return host_device_of(problem.dtype, spec)


def host_device_of(dtype: str, spec: str | None) -> Device | None:
    """The same before there is a problem."""
    if dtype == "f64" and registry.asked(spec) is None:
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
        Give the log-sum-exp in the type that is computed in (`cpu.work_dtype`), as the backward pass needs it, and not
        always as float32.
    """
    shape = problem.out_shape
    if out is None:
        out = np.empty(shape, STORED[problem.dtype])
    lse_dtype = cpu.work_dtype(problem) if exact_lse else np.float32
    lse = np.empty(shape[:3], lse_dtype) if problem.return_lse else None
    if device is not None and device.target.backend == "cpu":
        _forward_on_cpu(problem, operands, device, out, lse)
        return out, lse
    if device is None:
        target = np.empty(out.shape, out.dtype) if _overlaps(operands, out) else out
        _forward_on_numpy(problem, operands, target, lse)
        if target is not out:
            out[...] = target
        return out, lse

    with Arena(device) as arena:
        views = named(operands, _result_view(problem))
        check_memory("flash_attention", problem.dtype, views, device)
        views = {name: view if name == "o" else arena.bring(view) for name, view in views.items()}
        launch = prepare_forward(problem, views, device)
        if not launch.plan.idle:
            memory = {name: view.storage for name, view in views.items()}
            memory["o"] = arena.alloc(out.size * out.itemsize)
            memory["lse"] = arena.alloc(lse.nbytes) if lse is not None else None
            launch.start(device, memory, arena)
            finished = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
            device.download(memory["o"], finished)
            if finished is not out:
                out[...] = finished
            if lse is not None:
                device.download(memory["lse"], lse)
    return out, lse


def _forward_on_numpy(problem: AttentionProblem, operands: Operands, out: Array, lse: Array | None) -> None:
    if problem.precision is not None:
        raise refused(problem, Target("numpy", "NumPy"))
    if problem.packed is None:
        numpy_forward.forward(problem, operands, out, lse)
        return
    for piece in pieces(problem, operands):
        own = None if lse is None else lse[:, :, piece.rows]
        numpy_forward.forward(piece.problem, piece.operands, out[:, :, piece.rows], own, piece.number)


def _forward_on_cpu(
    problem: AttentionProblem, operands: Operands, device: Device, out: Array, lse: Array | None
) -> None:
    """Compute with the CPU engine, in place. The log-sum-exp of an fp64 problem is computed in fp64."""
    target = np.empty(out.shape, out.dtype) if _overlaps(operands, out) else out
    kept = lse if lse is None or lse.dtype == cpu.work_dtype(problem) else np.empty(lse.shape, cpu.work_dtype(problem))
    cpu.forward(problem, named(operands, host_view(problem.dtype, target)), device, kept)
    if target is not out:
        out[...] = target
    if lse is not None and kept is not lse:
        lse[...] = kept


def prepare_backward(
    problem: AttentionProblem,
    views: dict[str, TensorView],
    device: Device,
    aligned_base: dict[str, bool] | None = None,
) -> StepLaunches:
    """Plan the gradients on a GPU and build their kernels, or find both in memory. ``views`` as for `plan_backward`."""
    check_memory("flash_attention", problem.dtype, views, device)
    if problem.dtype in ("f16", "bf16"):
        find_layout(device)
    return load_steps(plan_backward(problem, views, device.target, aligned_base), device)


def gradients_on_device(problem: AttentionProblem, views: dict[str, TensorView], device: Device, lse: Any) -> None:
    """Gradients of tensors that live on the device; ``views`` as for `plan_backward`, ``lse`` an Allocation."""
    if device.target.backend == "cpu":
        cpu.backward(problem, views, device, lse)
        return
    ready = prepare_backward(problem, views, device)
    with Arena(device) as arena:
        memory = {name: view.storage for name, view in views.items()} | {"lse": lse}
        memory |= {name: arena.alloc(4 * count) for name, count in ready.workspace.items()}
        memory |= {name: zeroed(device, words) for name, words in ready.zeroed.items()}
        launch_steps(ready, device, memory)


def backward_on_host(
    problem: AttentionProblem,
    operands: Operands,
    device: Device,
    out: Array,
    lse: Array,
    dout: TensorView,
    ds: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v on host arrays.

    Parameters
    ----------
    out, lse : ndarray
        Results of the forward pass, four and three axes; ``lse`` in the type that is computed in (`cpu.work_dtype`).
    dout : TensorView
        The gradient of ``out``, with four axes.
    ds : ndarray, optional
        Zeros ``[batch, heads_q, seq_q, seq_kv]`` of the type that is computed in: gets the gradient of what is added to
        the scores.
    """
    dtype = problem.dtype
    grads = {
        name: np.empty(view.shape, STORED[dtype])
        for name, view in zip("qkv", (operands.q, operands.k, operands.v), strict=True)
    }
    if out.size == 0 or operands.k.shape[2] == 0:
        for array in grads.values():
            array.fill(0)
    elif device.target.backend == "cpu":
        views = named(operands, host_view(dtype, out)) | {"do": dout}
        views |= {f"d{name}": host_view(dtype, array) for name, array in grads.items()}
        if ds is not None:
            views["ds"] = host_view("f64" if dtype == "f64" else "f32", ds)
        cpu.backward(problem, views, device, lse)
    else:
        views = named(operands, host_view(dtype, out)) | {"do": dout}
        _backward_through_device(problem, views, device, lse, grads, ds)
    return grads["q"], grads["k"], grads["v"]


def _backward_through_device(
    problem: AttentionProblem,
    views: dict[str, TensorView],
    device: Device,
    lse: Array,
    grads: dict[str, Array],
    ds: Array | None,
) -> None:
    if ds is not None:
        views["ds"] = host_view("f32", ds)
    check_memory("flash_attention", problem.dtype, views, device)
    with Arena(device) as arena:
        views = {name: arena.bring(view) for name, view in views.items()}
        for name, array in grads.items():
            memory = arena.alloc(array.nbytes)
            views[f"d{name}"] = TensorView(
                problem.dtype, array.shape, contiguous_strides(array.shape), "device", memory
            )
        ready = prepare_backward(problem, views, device)
        buffers = {name: view.storage for name, view in views.items()}
        buffers["lse"] = arena.bring(host_view("f32", lse[None])).storage
        buffers |= {name: arena.alloc(4 * count) for name, count in ready.workspace.items()}
        buffers |= {name: zeroed(device, words) for name, words in ready.zeroed.items()}
        launch_steps(ready, device, buffers)
        for name, array in grads.items():
            device.download(buffers[f"d{name}"], array)
        if ds is not None:
            device.download(buffers["ds"], ds)


def _overlaps(operands: Operands, out: Array) -> bool:
    """Rows are written while others are still to be read: an ``out`` that lies over an input gets them at the end."""
    inputs = named(operands, operands.q).values()
    return any(np.may_share_memory(out, view.storage) for view in inputs)


def _result_view(problem: AttentionProblem) -> TensorView:
    shape = problem.out_shape
    return TensorView(problem.dtype, shape, contiguous_strides(shape), "device", None)
