"""PyTorch tensors. Imported only when torch is loaded already.

CPU tensors are used in place. CUDA tensors are used in place on the current stream: the first call of a signature
plans and builds, every further one goes from one dictionary look-up to the launch. Tensors elsewhere (ROCm, XPU, MPS)
are staged through the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aule import settings
from aule.backends import registry
from aule.engine.attention import (
    backward_on_host,
    contiguous_strides,
    forward_on_host,
    host_device,
    host_view,
    named,
    prepare_backward,
    prepare_forward,
)
from aule.errors import AuleError, DeviceMismatchError, InvalidDtypeError, InvalidShapeError
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands, attention_problem, checked_dropout, checked_seed
from aule.options import AttentionOptions
from aule.view import TensorView

_NAMES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float64: "f64",
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
_CUDA_BUILD = torch.version.cuda is not None
_launches: dict[Any, _CudaLaunch] = {}
_MAX_LAUNCHES = 4096


def accepts(array: object) -> bool:
    return isinstance(array, torch.Tensor)


def flash_attention(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """Attention on torch tensors."""
    if options.dropout_p != 0.0 or options.seed is not None:
        options = _seeded(q, options)
    if torch.is_grad_enabled() and _needs_gradient(q, k, v, options):
        return _with_gradient(q, k, v, options)
    if _drives(q, options):
        return _on_cuda(q, k, v, options)
    if q.device.type == "cpu":
        return _on_host(q, k, v, options)
    return _staged(q, k, v, options)


def _seeded(q: Any, options: AttentionOptions) -> AttentionOptions:
    """The options with a seed on the device of ``q`` where weights are dropped: the given one, or one drawn there from
    PyTorch's generator, which `torch.manual_seed` sets. Nothing waits for the device, and a CUDA graph can hold it."""
    p = checked_dropout("flash_attention", options.dropout_p)
    number = checked_seed("flash_attention", options.seed)
    if p == 0.0:
        return options._replace(dropout_p=p, seed=None)
    if number is None:
        drawn = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    else:
        signed = number - 2**64 if number >= 2**63 else number
        drawn = torch.full((1,), signed, dtype=torch.int64, device=q.device)
    return options._replace(dropout_p=p, seed=drawn.view(torch.int32))


def _drives(q: Any, options: AttentionOptions) -> bool:
    """Whether a tensor is one of CUDA's that is to be computed on where it lies."""
    return q.is_cuda and _CUDA_BUILD and (options.backend is None or options.backend.startswith("cuda"))


_PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def to_precision(tensor: Any, precision: str) -> Any:
    """Convert floats to ``"fp16"``, ``"bf16"`` or ``"fp32"``; without a copy when they are that already."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise InvalidDtypeError(
            f"[attention] expected torch tensors of floats to convert to {precision}, got {got}; convert with .to"
        )
    return tensor.to(_PRECISIONS[precision])


# -- gradients ---------------------------------------------------------------------------------------------------------


def _needs_gradient(q: Any, k: Any, v: Any, options: AttentionOptions) -> bool:
    return any(getattr(x, "requires_grad", False) for x in (q, k, v, options.out, *options.arrays().values()))


def _with_gradient(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """Attention whose result can be differentiated with respect to q, k, v, additive masks, bias and sinks."""
    for name in ("alibi_slopes", "out"):
        if getattr(getattr(options, name), "requires_grad", False):
            raise _no_gradient(name, f"detach {name}, which has no gradient here")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _require_tensor(tensor, name)
    if options.out is not None:
        raise _no_gradient("out=", "leave out= away, or call it under torch.no_grad()")
    if isinstance(options.scale, torch.Tensor) or isinstance(options.window, list):  # keyed by value, not by identity
        scale = None if options.scale is None else float(options.scale)
        window = tuple(options.window) if isinstance(options.window, list) else options.window
        options = options._replace(scale=scale, window=window)
    if _drives(q, options):
        function = _CudaAttention
    elif q.device.type == "cpu":
        function = _HostAttention
    else:
        where = f"tensors on {q.device}" + (f" and backend {options.backend}" if options.backend else "")
        raise _no_gradient(where, "gradients are there for CUDA tensors on cuda, and for CPU tensors: move them")
    # As arguments of their own, so that autograd sees them.
    out, lse = function.apply(q, k, v, options.mask, options.bias, options.sinks, options)
    return (out, lse) if options.return_lse else out


def _added_gradients(ctx: Any, dout: Any, out: Any, lse: Any, ds: Any, mask: Any, bias: Any, sinks: Any) -> list[Any]:
    """Gradients of mask, bias and sinks, each where it is wanted, from dS and the log-sum-exp."""
    result: list[Any] = []
    for wanted, tensor in zip(ctx.needs_input_grad[3:5], (mask, bias), strict=True):
        # What was broadcast is summed over.
        result.append(ds.sum_to_size(tensor.shape).to(tensor.dtype) if wanted else None)
    if not ctx.needs_input_grad[5]:
        return [*result, None]
    work = lse.dtype
    delta = (dout.to(work) * out.to(work)).sum(-1)
    weight = torch.exp(sinks.to(work)[:, None] - lse)  # of the sink, in every row
    return [*result, -(weight * delta).reshape(-1, *lse.shape[-2:]).sum((0, 2)).to(sinks.dtype)]


def _zero_scores(ctx: Any, problem: AttentionProblem, device: Any) -> Any:
    """Where dS goes, when it is wanted."""
    if not any(ctx.needs_input_grad[3:5]):
        return None
    shape = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
    return torch.zeros(shape, dtype=torch.float64 if problem.dtype == "f64" else torch.float32, device=device)


def _no_gradient(got: str, remedy: str) -> AuleError:
    return AuleError(
        "AULE_ERROR_NO_GRADIENT",
        f"[flash_attention] expected tensors that need no gradient, got requires_grad=True with {got}; {remedy}",
    )


def _once(ctx: Any, dout: Any, gradients: Callable[[Any, Any], Any]) -> Any:
    """Gradients that say clearly that they cannot be differentiated again, instead of being taken for constants."""
    if not torch.is_grad_enabled():
        return gradients(ctx, dout)
    with torch.no_grad():
        found = gradients(ctx, dout)
    inputs = [x for x in (dout, *ctx.saved_tensors) if x is not None]
    return tuple(None if grad is None else _Last.apply(grad, *inputs) for grad in found)


class _Last(torch.autograd.Function):  # type: ignore[misc]
    """A gradient on whose own gradient there is nothing."""

    @staticmethod
    def forward(ctx: Any, grad: Any, *inputs: Any) -> Any:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AuleError(
            "AULE_ERROR_NO_GRADIENT",
            "[flash_attention] expected one derivative, got a second; use torch.nn.functional."
            "scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH) where you need it",
        )


class _HostAttention(torch.autograd.Function):  # type: ignore[misc]
    """Attention on CPU tensors, with its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, bias: Any, sinks: Any, options: AttentionOptions) -> Any:
        problem, operands = _host_problem(q, k, v, options._replace(return_lse=True))
        device = _gradient_device(options.backend or settings.backend())
        out = torch.empty(operands.out_shape, dtype=q.dtype)
        target = _host_view(out, "out").storage
        _, lse = forward_on_host(problem, operands, device, target[(None,) * (4 - target.ndim)], exact_lse=True)
        assert lse is not None
        ctx.call = (problem, operands, device, lse)
        ctx.save_for_backward(q, k, v, out, mask, bias, sinks)
        shown = torch.from_numpy(lse.reshape(operands.lse_shape).astype("float32", copy=True))
        ctx.mark_non_differentiable(shown)
        return out, shown

    @staticmethod
    def backward(ctx: Any, dout: Any, _: Any) -> Any:
        return _once(ctx, dout, _HostAttention._gradients)

    @staticmethod
    def _gradients(ctx: Any, dout: Any) -> Any:
        problem, operands, device, lse = ctx.call
        # Raises when one of them was changed in place since: the operands are views of their memory.
        q, k, v, out, mask, bias, sinks = ctx.saved_tensors
        results = []
        for name, tensor in (("out", out), ("dout", dout)):
            array = _host_view(tensor, name).storage
            results.append(host_view(problem.dtype, array[(None,) * (4 - array.ndim)]))
        ds = _zero_scores(ctx, problem, "cpu")
        stored = None if ds is None else ds.numpy()
        grads = backward_on_host(problem, operands, device, results[0].storage, lse, results[1], stored)
        added = _added_gradients(
            ctx, dout, out, torch.from_numpy(lse.reshape(operands.lse_shape)), ds, mask, bias, sinks
        )
        return (*(_tensor_like(g, x) for g, x in zip(grads, (q, k, v), strict=True)), *added, None)


def _gradient_device(spec: str | None) -> Any:
    """The device for CPU tensors that need a gradient: the CPU, unless there is only another or one is forced."""
    try:
        device = registry.find(spec or "cpu")
    except AuleError:
        if spec is not None:
            raise
        device = registry.choose(None)
    if device is None:
        raise _no_gradient(
            "NumPy", 'NumPy alone computes none: pip install "aule-attention[cpu]", or choose a device with backend='
        )
    return device


class _CudaAttention(torch.autograd.Function):  # type: ignore[misc]
    """Attention on CUDA tensors, with its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, bias: Any, sinks: Any, options: AttentionOptions) -> Any:
        out, lse = _on_cuda(q, k, v, options._replace(return_lse=True))
        ctx.options = options._replace(mask=None, bias=None, sinks=None)  # kept as saved tensors
        ctx.save_for_backward(q, k, v, out, lse, mask, bias, sinks)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, _: Any) -> Any:
        return _once(ctx, dout, _CudaAttention._gradients)

    @staticmethod
    def _gradients(ctx: Any, dout: Any) -> Any:
        q, k, v, out, lse, mask, bias, sinks = ctx.saved_tensors
        options = ctx.options._replace(mask=mask, bias=bias, sinks=sinks)
        want_scores = any(ctx.needs_input_grad[3:5])
        grads, ds = _cuda_gradients(q, k, v, out, lse, dout, options, want_scores)
        return (*grads, *_added_gradients(ctx, dout, out, lse, ds, mask, bias, sinks), None)


def _tensor_like(array: Any, like: Any) -> Any:
    """An array of stored elements as a tensor of another's dtype and shape."""
    return torch.from_numpy(array).view(like.dtype).reshape(like.shape)


# -- CUDA ------------------------------------------------------------------------------------------------------------


class _CudaLaunch:
    """One signature: the launch with everything fixed but pointers and stream. ``launch`` is None for an empty one."""

    __slots__ = ("extra", "launch", "like_q", "lse_shape", "out_shape")

    def __init__(self, launch: Any, like_q: bool, out_shape: Any, lse_shape: Any, extra: tuple[str, ...]) -> None:
        self.launch = launch
        self.like_q = like_q
        self.out_shape = out_shape
        self.lse_shape = lse_shape
        self.extra = extra


def _on_cuda(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """From one dictionary look-up to the launch: what stands here is the cost of a repeated call."""
    causal, scale, window, softcap, mask, bias, alibi, sinks, dropout_p, _, align, want_lse, out, backend = options
    if isinstance(scale, torch.Tensor):
        return _on_cuda(q, k, v, options._replace(scale=float(scale)))  # keyed by value, not by identity
    try:
        qp, kp, vp, index = q.data_ptr(), k.data_ptr(), v.data_ptr(), q.get_device()
        key: Any = (
            q.shape, q.stride(), q.dtype, index, k.shape, k.stride(), k.dtype, k.get_device(), v.shape, v.stride(),
            v.dtype, v.get_device(), (qp | kp | vp) & 15, causal, scale, window, softcap, align, want_lse, backend,
            dropout_p,
        )  # fmt: skip
        if mask is not None or bias is not None or alibi is not None or sinks is not None or out is not None:
            key += tuple(_signature(x) for x in (mask, bias, alibi, sinks, out))
        found = _launches.get(key)
    except AttributeError:
        _require_tensor(k, "k")
        _require_tensor(v, "v")
        raise
    except TypeError:  # a window given as a list
        return _on_cuda(q, k, v, options._replace(window=tuple(window)))  # type: ignore[arg-type]
    if found is None:
        # Looked up here and not on every call: reading the environment costs 1.3 us.
        if backend is None and not (settings.backend() or "cuda").startswith("cuda"):
            return _staged(q, k, v, options)
        found = _prepare(q, k, v, options)
        if len(_launches) >= _MAX_LAUNCHES:
            _launches.clear()
        _launches[key] = found
    if out is None:  # empty_like is the quicker way to an output, by 3 us
        out = torch.empty_like(q) if found.like_q else q.new_empty(found.out_shape)
    lse = q.new_empty(found.lse_shape, dtype=torch.float32) if want_lse else None
    if found.launch is not None:
        pointers = [qp, kp, vp, out.data_ptr()]
        if found.extra:
            pointers += [getattr(options, name).data_ptr() for name in found.extra]
        if lse is not None:
            pointers.append(lse.data_ptr())
        found.launch(pointers, _raw_stream(index))
    return (out, lse) if want_lse else out


def _raw_stream(index: int) -> int:
    """Native handle of the current stream; replaced by PyTorch's own quick look-up where there is one."""
    return int(torch.cuda.current_stream(index).cuda_stream)


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)


def _signature(tensor: Any) -> Any:
    if tensor is None or not isinstance(tensor, torch.Tensor):
        return type(tensor)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15)


def _prepare(q: Any, k: Any, v: Any, options: AttentionOptions) -> _CudaLaunch:
    """Validate, plan and build; what a signature needs once."""
    tensors = {"q": q, "k": k, "v": v, **options.arrays()}
    views: dict[str, Any] = {name: _device_view(tensor, name, q) for name, tensor in tensors.items()}
    problem, operands = attention_problem(**views, **options.plain())
    device: Any = registry.find(options.backend or f"cuda:{q.device.index}")
    if device is None or device.index != q.device.index:
        raise DeviceMismatchError(
            f"[flash_attention] expected tensors on {options.backend}, got {q.device}; move them or drop backend="
        )
    if options.out is None:
        strides = torch.empty(operands.out_shape, device="meta").stride()
        out = TensorView(problem.dtype, operands.out_shape, tuple(strides), "cuda", None)
    else:
        out = _device_view(_checked_out(options.out, operands.out_shape, q), "out", q)
    memory = named(operands, _lifted(out))
    aligned = {name: tensor.data_ptr() % 16 == 0 for name, tensor in (("q", q), ("k", k), ("v", v))}
    if options.out is not None:
        aligned["o"] = options.out.data_ptr() % 16 == 0
    launch = prepare_forward(problem, memory, device, aligned)
    start = None
    if launch.plan.grid[0]:
        scalars = launch.arguments(dict.fromkeys((*memory, "lse")))
        start = device.prepare(launch.program, launch.plan.grid, scalars).launch
    fields = {"mask": "mask", "bias": "bias", "alibi": "alibi_slopes", "sinks": "sinks", "seed": "seed"}
    extra = tuple(fields[name] for name in launch.buffers if name in fields)
    like_q = tuple(q.shape) == operands.out_shape and q.is_contiguous()
    return _CudaLaunch(start, like_q, operands.out_shape, operands.lse_shape, extra)


_gradient_launches: dict[Any, Any] = {}


def _cuda_gradients(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, options: AttentionOptions, want_scores: bool
) -> tuple[list[Any], Any]:
    """Gradients of q, k and v on the current stream, and of what is added to the scores where it is wanted."""
    given = {"q": q, "k": k, "v": v, "o": out, "do": dout}
    arrays = options.arrays()
    # Planned once per signature, like the forward pass.
    key = (
        *(_signature(x) for x in (*given.values(), *arrays.values())), *arrays, options.causal, options.scale,
        options.window, options.softcap, options.causal_align, options.backend, want_scores, options.dropout_p,
    )  # fmt: skip
    ready = _gradient_launches.get(key)
    if ready is None:
        ready = _prepare_gradients(given, arrays, options, want_scores)
        if len(_gradient_launches) >= _MAX_LAUNCHES:
            _gradient_launches.clear()
        _gradient_launches[key] = ready
    launches, workspace, score_shape = ready
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    ds = torch.zeros(score_shape, dtype=torch.float32, device=q.device) if want_scores else None
    if not launches:
        return [grad.zero_() for grad in grads], ds
    memory = given | arrays | {"lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))
    memory |= {name: torch.empty(count, dtype=torch.float32, device=q.device) for name, count in workspace.items()}
    memory["alibi"], memory["ds"] = options.alibi_slopes, ds
    stream = _raw_stream(q.get_device())
    for launch, buffers in launches:
        launch([memory[name].data_ptr() for name in buffers], stream)
    return grads, ds


def _prepare_gradients(
    given: dict[str, Any], arrays: dict[str, Any], options: AttentionOptions, want_scores: bool
) -> Any:
    q = given["q"]
    views: dict[str, Any] = {name: _device_view(x, name, q) for name, x in (given | arrays).items()}
    results = {name: _lifted(views.pop(name)) for name in ("o", "do")}
    problem, operands = attention_problem(**views, **options.plain())
    device: Any = registry.find(options.backend or f"cuda:{q.device.index}")
    memory = named(operands, results["o"]) | {"do": results["do"]}
    for name, view in (("dq", operands.q), ("dk", operands.k), ("dv", operands.v)):
        memory[name] = TensorView(problem.dtype, view.shape, contiguous_strides(view.shape), "cuda", None)
    score_shape = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
    if want_scores:
        memory["ds"] = TensorView("f32", score_shape, contiguous_strides(score_shape), "cuda", None)
    aligned = {name: x.data_ptr() % 16 == 0 for name, x in given.items()}
    ready = prepare_backward(problem, memory, device, aligned)
    launches = []
    for step, loaded in ready.steps:
        scalars = [step.scalars.get(p.name) for p in loaded.artifact.params]  # None in the place of a buffer
        buffers = tuple(p.name.removesuffix("_ptr") for p in loaded.artifact.buffers)
        launches.append((device.prepare(loaded, step.grid, scalars).launch, buffers))
    return launches, ready.workspace, score_shape


def _lifted(view: TensorView) -> TensorView:
    """The same view with four axes."""
    lead = 4 - len(view.shape)
    return TensorView(view.dtype, (1,) * lead + view.shape, (0,) * lead + view.strides, view.device, view.storage)


def _require_tensor(tensor: Any, name: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidDtypeError(
            f"[flash_attention] expected {name} to be a torch tensor like q, got {type(tensor).__name__}; "
            "convert it first"
        )


def _device_view(tensor: Any, name: str, q: Any) -> TensorView:
    _require_tensor(tensor, name)
    return TensorView(_dtype(tensor, name), tuple(tensor.shape), tensor.stride(), str(tensor.device), tensor.data_ptr())


def _dtype(tensor: Any, name: str) -> str:
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None:
        raise InvalidDtypeError(
            f"[flash_attention] expected {name} of float32, float16, bfloat16 or float64, got {tensor.dtype}; "
            "convert with .to"
        )
    return dtype


def _checked_out(out: Any, shape: tuple[int, ...], q: Any) -> Any:
    if not isinstance(out, torch.Tensor) or tuple(out.shape) != shape:
        got = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise InvalidShapeError(f"[flash_attention] expected out of shape {shape}, got {got}; allocate it like q")
    if out.dtype != q.dtype:
        raise InvalidDtypeError(f"[flash_attention] expected out of q's dtype, got {out.dtype}; allocate it like q")
    if any(n > 1 and step == 0 for n, step in zip(out.shape, out.stride(), strict=True)):
        raise InvalidShapeError(
            "[flash_attention] expected out with memory for every element, got an expanded tensor; clone it first"
        )
    if out.device != q.device:
        raise DeviceMismatchError(f"[flash_attention] expected out on {q.device}, got {out.device}; allocate it like q")
    return out


# -- host ------------------------------------------------------------------------------------------------------------


def _on_host(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """CPU tensors are NumPy arrays over the same memory; bfloat16 goes by its bits."""
    problem, operands = _host_problem(q, k, v, options)
    out = options.out
    if out is None:
        out = torch.empty(operands.out_shape, dtype=q.dtype)
    else:
        _checked_out(out, operands.out_shape, q)
    target = _host_view(out, "out").storage
    lifted = target[(None,) * (4 - target.ndim)]
    _, lse = forward_on_host(problem, operands, host_device(problem, options.backend), lifted)
    if not options.return_lse:
        return out
    assert lse is not None
    return out, torch.from_numpy(lse.reshape(operands.lse_shape))


def _host_problem(q: Any, k: Any, v: Any, options: AttentionOptions) -> tuple[AttentionProblem, Operands]:
    tensors = {"q": q, "k": k, "v": v, **options.arrays()}
    views: dict[str, Any] = {name: _host_view(tensor, name) for name, tensor in tensors.items()}
    return attention_problem(**views, **options.plain())


def _host_view(tensor: Any, name: str) -> TensorView:
    _require_tensor(tensor, name)
    if tensor.device.type != "cpu":
        raise DeviceMismatchError(
            f"[flash_attention] expected {name} on the CPU like q, got {tensor.device}; move it with .to"
        )
    dtype = _dtype(tensor, name)
    plain = tensor.detach()
    array = (plain.view(torch.uint16) if dtype == "bf16" else plain).numpy()
    return TensorView(dtype, tuple(tensor.shape), tensor.stride(), "host", array)


def _staged(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """Tensors on a device that aule does not drive directly go through the host and come back."""
    for name, tensor in {"k": k, "v": v, **options.arrays()}.items():
        _require_tensor(tensor, name)
        if tensor.device != q.device:
            raise DeviceMismatchError(
                f"[flash_attention] expected {name} on {q.device} like q, got {tensor.device}; move it with .to"
            )
    moved = {name: array.cpu() for name, array in options.arrays().items()}
    result = _on_host(q.cpu(), k.cpu(), v.cpu(), options._replace(out=None, **moved))
    out, lse = result if options.return_lse else (result, result)
    if options.out is not None:
        out = _checked_out(options.out, tuple(out.shape), q).copy_(out)
    out = out.to(q.device)
    return (out, lse.to(q.device)) if options.return_lse else out
