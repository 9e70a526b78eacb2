"""Packed batches of PyTorch tensors, with their gradients; CPU and CUDA tensors are used in place.

The forward pass is one launch for all sequences, the backward pass as many as for one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from aule import settings
from aule.backends import registry
from aule.engine.attention import (
    backward_on_host,
    forward_on_host,
    host_device,
    named,
    prepare_backward,
    prepare_forward,
)
from aule.engine.memory import host_view
from aule.errors import AuleError, DeviceMismatchError
from aule.frontends import torch_routes
from aule.frontends.torch_cuda import device_view, lies_over, raw_stream, signature
from aule.frontends.torch_gradients import CONSTANT, last, needs_gradient
from aule.frontends.torch_host import gradient_device, host_view_of, tensor_like
from aule.frontends.torch_launches import extras_aligned, prepared_steps
from aule.frontends.torch_routes import autocast, refuse_transforms
from aule.frontends.torch_views import checked_out, integers, keyed, refuse_tracing, require_plain, written
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands
from aule.ops.attention.varlen import OP, varlen_problem
from aule.options import AttentionOptions
from aule.view import TensorView, contiguous_strides


def flash_attention_varlen(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int | None, max_k: int | None, options: AttentionOptions
) -> Any:
    """As `aule.flash_attention_varlen`; a seed is a tensor on the device of ``q`` already."""
    refuse_tracing(OP)
    refuse_transforms(OP, (q, k, v, cu_q, cu_k, *options.arrays().values()), "call flash_attention on each sequence")
    options = keyed(OP, options)
    q, k, v = autocast(q, k, v)
    for name, tensor in {"q": q, "k": k, "v": v, **options.arrays()}.items():
        require_plain(tensor, name, OP)
        if tensor.device != q.device:
            raise DeviceMismatchError(
                f"[{OP}] expected {name} on {q.device} like q, got {tensor.device}; move it with .to"
            )
    call = _Call(_offsets("cu_seqlens_q", cu_q, q), _offsets("cu_seqlens_k", cu_k, q), max_q, max_k, options)
    wants_gradient = torch.is_grad_enabled() and needs_gradient(q, k, v, options)
    if wants_gradient:
        for name in (*CONSTANT, "out"):
            if getattr(getattr(options, name), "requires_grad", False) or (name == "out" and options.out is not None):
                raise _no_gradient(f"{name}=", f"detach {name}, or leave it away")
    drives = torch_routes.route(q, options.backend) == "cuda" and not _elsewhere(options)
    if not drives and q.device.type != "cpu":
        if wants_gradient:
            where = f"tensors on {q.device}" + (f" and backend {options.backend}" if options.backend else "")
            raise _no_gradient(where, "gradients are there for CUDA tensors on cuda, and for CPU tensors: move them")
        return _staged(q, k, v, call)
    run = _on_cuda if drives else _on_host
    if wants_gradient:
        out, lse = _Packed.apply(q, k, v, options.sinks, call, run)
    else:
        out, lse, _ = run(q, k, v, call, False)
    return (out, lse) if options.return_lse else out


@dataclass(frozen=True)
class _Call:
    """What a call has besides q, k and v."""

    cu_q: Any
    cu_k: Any
    max_q: int | None
    max_k: int | None
    options: AttentionOptions


Gradients = Callable[[Any, Any, Any, Any, Any, Any], tuple[Any, Any, Any]]
"""From q, k, v, out, log-sum-exp and the gradient of out to those of q, k and v. It holds on to none of them: what is
kept is autograd's matter, which may have it elsewhere meanwhile, or make it again."""


class _Packed(torch.autograd.Function):  # type: ignore[misc]
    """Attention on packed batches, with its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sinks: Any, call: _Call, run: Any) -> Any:
        out, lse, ctx.gradients = run(q, k, v, call, True)
        shown = lse.float() if lse.dtype != torch.float32 else lse.clone()
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.mark_non_differentiable(shown)
        return out, shown

    @staticmethod
    def backward(ctx: Any, dout: Any, _: Any) -> Any:
        refuse_transforms(OP, (dout,), "call flash_attention on each sequence")
        # Raises when one of them was changed in place since. Asked for once: checkpointing has them only once.
        saved = ctx.saved_tensors
        q, k, v, sinks, out, lse = saved
        dout = dout.resolve_neg()  # nobody can be told to hand over another
        with torch.no_grad():
            grads = ctx.gradients(q, k, v, out, lse, dout)
            of_sinks = None
            if ctx.needs_input_grad[3]:
                delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).T
                of_sinks = -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum(1).to(sinks.dtype)
        return (*last((*grads, of_sinks), dout, *saved), None, None)


# -- host --------------------------------------------------------------------------------------------------------------


def _on_host(q: Any, k: Any, v: Any, call: _Call, wants_gradient: bool) -> tuple[Any, Any, Gradients]:
    options = call.options
    further = {**options.arrays(), "cu_q": call.cu_q, "cu_k": call.cu_k}
    kept: dict[str, Any] = {name: host_view_of(tensor, name, OP) for name, tensor in further.items()}
    plain = options.plain() | ({"return_lse": True} if wants_gradient else {})

    def bound(q: Any, k: Any, v: Any) -> tuple[AttentionProblem, Operands]:
        views: dict[str, Any] = {name: host_view_of(x, name, OP) for name, x in (("q", q), ("k", k), ("v", v))}
        return varlen_problem(**views, **kept, max_q=call.max_q, max_k=call.max_k, **plain)

    problem, operands = bound(q, k, v)
    if wants_gradient:
        device = gradient_device(q, options.backend, training=True, foreign=False)
    else:
        device = host_device(problem, options.backend)
    _, heads, rows, dim = problem.out_shape
    out = options.out
    if out is None:
        out = torch.empty((rows, heads, dim), dtype=q.dtype)
    else:
        written(checked_out(out, (rows, heads, dim), q, OP))
    target = host_view_of(out, "out").storage.transpose(1, 0, 2)[None]
    _, found = forward_on_host(problem, operands, device, target, exact_lse=wants_gradient)
    lse = None if found is None else torch.from_numpy(found[0])

    def gradients(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any) -> tuple[Any, Any, Any]:
        problem, operands = bound(q, k, v)
        results = [host_view_of(x, name).storage.transpose(1, 0, 2)[None] for name, x in (("out", out), ("dout", dout))]
        grad_of_out = host_view(problem.dtype, results[1])
        asked = _as_asked(problem)
        grads = backward_on_host(asked, operands, device, results[0], lse.numpy()[None], grad_of_out)
        dq, dk, dv = (tensor_like(g, x.transpose(0, 1)[None]) for g, x in zip(grads, (q, k, v), strict=True))
        return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)

    return out, lse, gradients


def _staged(q: Any, k: Any, v: Any, call: _Call) -> Any:
    """Tensors on a device that aule does not drive directly go through the host and come back."""
    options = call.options
    moved = {name: array.cpu() for name, array in options.arrays().items()}
    there = replace(call, cu_q=call.cu_q.cpu(), cu_k=call.cu_k.cpu(), options=options._replace(out=None, **moved))
    out, lse, _ = _on_host(q.cpu(), k.cpu(), v.cpu(), there, False)
    if options.out is not None:
        out = checked_out(options.out, tuple(out.shape), q, OP).copy_(out)
    out = out.to(q.device)
    return (out, lse.to(q.device)) if options.return_lse else out


# -- CUDA --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Ready:
    """One signature planned and built: launches, each with the names of its buffers, and what they share."""

    problem: AttentionProblem
    operands: Operands
    device: Any
    launches: tuple[tuple[Any, tuple[str, ...]], ...]
    workspace: Mapping[str, int]


_ready: dict[Any, _Ready] = {}
_MAX_READY = 4096


def _on_cuda(q: Any, k: Any, v: Any, call: _Call, wants_gradient: bool) -> tuple[Any, Any, Gradients]:
    """On the current stream. A launch is planned once for each signature, to which the longest lengths belong."""
    options = call.options
    max_q, max_k = (
        int(offsets.diff().max()) if longest is None and len(offsets) > 1 else longest or 0
        for offsets, longest in ((call.cu_q, call.max_q), (call.cu_k, call.max_k))
    )
    call = replace(call, max_q=max_q, max_k=max_k)
    arrays = {**options.arrays(), "cu_q": call.cu_q, "cu_k": call.cu_k}
    plain = options.plain() | {"return_lse": wants_gradient or options.return_lse}
    given = {"q": q, "k": k, "v": v}
    rows, heads, dim = len(q), q.shape[1] if q.dim() > 1 else 0, v.shape[-1] if v.dim() else 0
    out = options.out
    if out is None:  # rows that no sequence has are zero
        out = q.new_zeros((rows, heads, dim))
    elif lies_over(checked_out(out, (rows, heads, dim), q, OP), q, k, v):
        made, lse, gradients_of = _on_cuda(q, k, v, replace(call, options=options._replace(out=None)), wants_gradient)
        return out.copy_(made), lse, gradients_of
    else:
        written(out)
    lse = q.new_full((heads, rows), -torch.inf, dtype=torch.float32) if plain["return_lse"] else None
    numbers = (*plain.values(), max_q, max_k, options.backend)
    kept = arrays | {"alibi": options.alibi_slopes, "cos": options.rope_cos, "sin": options.rope_sin}

    def planned(given: dict[str, Any], out: Any) -> tuple[Any, _Ready]:
        key = (*(signature(x) for x in (*given.values(), *arrays.values(), out)), *arrays, *numbers)
        return key, _remembered(key, lambda: _plan_forward(given, arrays, out, call, plain))

    _launch(planned(given, out)[1], kept | given | {"o": out, "lse": lse}, q)

    def gradients(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any) -> tuple[Any, Any, Any]:
        given = {"q": q, "k": k, "v": v}
        key, ready = planned(given, out)
        made = {f"d{n}": x.new_zeros((x.shape[1], x.shape[0], x.shape[2])) for n, x in given.items()}
        used = kept | given | made | {"o": out, "do": dout, "lse": lse}
        problem = _as_asked(ready.problem)
        backward = _remembered(
            (*key, signature(out), signature(dout), problem.deterministic),
            lambda: _plan_backward(problem, ready, used, q),
        )
        _launch(backward, used, q)
        return made["dq"].transpose(0, 1), made["dk"].transpose(0, 1), made["dv"].transpose(0, 1)

    return out, lse, gradients


def _remembered(key: Any, plan: Callable[[], _Ready]) -> _Ready:
    found = _ready.get(key)
    if found is None:
        if len(_ready) >= _MAX_READY:
            _ready.clear()
        found = _ready[key] = plan()
    return found


def _launch(ready: _Ready, memory: dict[str, Any], q: Any) -> None:
    stream = raw_stream(q.get_device())
    memory = memory | {
        name: torch.empty(count, dtype=torch.float32, device=q.device) for name, count in ready.workspace.items()
    }
    for launch, buffers in ready.launches:
        launch([memory[name].data_ptr() for name in buffers], stream)


def _plan_forward(
    given: dict[str, Any], arrays: dict[str, Any], out: Any, call: _Call, plain: dict[str, Any]
) -> _Ready:
    q, backend = given["q"], call.options.backend
    views: dict[str, Any] = {name: device_view(x, name, OP) for name, x in (given | arrays).items()}
    problem, operands = varlen_problem(**views, max_q=call.max_q, max_k=call.max_k, **plain)
    device: Any = registry.find(backend or f"cuda:{q.device.index}")
    if device is None or device.index != q.device.index:
        raise DeviceMismatchError(f"[{OP}] expected tensors on {backend}, got {q.device}; move them or drop backend=")
    layout = named(operands, _turned_view(out))
    aligned = {name: x.data_ptr() % 16 == 0 for name, x in (*given.items(), ("o", out))} | extras_aligned(call.options)
    launch = prepare_forward(problem, layout, device, aligned)
    launches: tuple[tuple[Any, tuple[str, ...]], ...] = ()
    if launch.plan.grid[0]:
        scalars = launch.arguments(dict.fromkeys((*layout, "lse")))
        launches = ((device.prepare(launch.program, launch.plan.grid, scalars).launch, launch.buffers),)
    return _Ready(problem, operands, device, launches, {})


def _plan_backward(problem: AttentionProblem, forward: _Ready, memory: dict[str, Any], q: Any) -> _Ready:
    operands, device = forward.operands, forward.device
    views = named(operands, _turned_view(memory["o"])) | {"do": _turned_view(memory["do"])}
    for name in ("dq", "dk", "dv"):
        shape = (1, *memory[name].shape)
        views[name] = TensorView(problem.dtype, shape, contiguous_strides(shape), str(q.device), None)
    names = ("q", "k", "v", "o", "do", *(("cos", "sin") if problem.rope is not None else ()))
    aligned = {name: memory[name].data_ptr() % 16 == 0 for name in names}
    ready = prepare_backward(problem, views, device, aligned)
    return _Ready(problem, operands, device, tuple(prepared_steps(ready, device)), ready.workspace)


def _turned_view(tensor: Any) -> TensorView:
    """``[rows, heads, dim]`` as ``[1, heads, rows, dim]``."""
    view = device_view(tensor.transpose(0, 1), "out", OP)
    return replace(view, shape=(1, *view.shape), strides=(0, *view.strides))


def _as_asked(problem: AttentionProblem) -> AttentionProblem:
    """The problem of gradients, when these are computed: PyTorch may be told then to be deterministic."""
    exactly = problem.deterministic or torch.are_deterministic_algorithms_enabled()
    return replace(problem, deterministic=exactly)


def _elsewhere(options: AttentionOptions) -> bool:
    """Whether the environment names a backend that CUDA tensors have to be copied to."""
    return options.backend is None and not (settings.backend() or "cuda").startswith("cuda")


def _offsets(name: str, offsets: Any, q: Any) -> Any:
    found = integers(OP, name, offsets, " [batch + 1]")
    if found.device != q.device:
        raise DeviceMismatchError(f"[{OP}] expected {name} on {q.device} like q, got {found.device}; move it with .to")
    return found


def _no_gradient(got: str, remedy: str) -> AuleError:
    return AuleError(
        "AULE_ERROR_NO_GRADIENT",
        f"[{OP}] expected tensors that need no gradient, got requires_grad=True with {got}; {remedy}",
    )
