"""PyTorch tensors. Imported only when torch is loaded already.

CPU tensors are used in place. CUDA tensors are used in place on the current stream: the first call of a signature
plans and builds, every further one goes from one dictionary look-up to the launch. Tensors elsewhere (ROCm, XPU, MPS)
are staged through the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from aule import settings
from aule.backends import registry
from aule.engine.attention import forward_on_host, host_device, named, prepare_forward
from aule.errors import AuleError, DeviceMismatchError, InvalidDtypeError, InvalidShapeError
from aule.ops.attention.validate import attention_problem
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
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_launches: dict[Any, _CudaLaunch] = {}
_MAX_LAUNCHES = 4096


def accepts(array: object) -> bool:
    return isinstance(array, torch.Tensor)


def flash_attention(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """Attention on torch tensors."""
    if torch.is_grad_enabled():
        _refuse_gradients((q, k, v, options.mask, options.bias, options.alibi_slopes, options.sinks, options.out))
    forced = options.backend or settings.backend() or "cuda"
    if q.device.type == "cuda" and torch.version.cuda and forced.startswith("cuda"):
        return _on_cuda(q, k, v, options)
    if q.device.type == "cpu":
        return _on_host(q, k, v, options)
    return _staged(q, k, v, options)


_PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def to_precision(tensor: Any, precision: str) -> Any:
    """Convert floats to ``"fp16"``, ``"bf16"`` or ``"fp32"``; without a copy when they are that already."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise InvalidDtypeError(
            f"[attention] expected torch tensors of floats to convert to {precision}, got {got}; convert with .to"
        )
    return tensor.to(_PRECISIONS[precision])


def _refuse_gradients(tensors: tuple[Any, ...]) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise AuleError(
                "AULE_ERROR_NO_GRADIENT",
                "[flash_attention] expected tensors that need no gradient, got one with requires_grad=True; this "
                "version has the forward pass only: call it under torch.no_grad() or with .detach()",
            )


# -- CUDA ------------------------------------------------------------------------------------------------------------


class _CudaLaunch:
    """One signature: the launch with everything fixed but pointers and stream."""

    __slots__ = ("extra", "lse_shape", "out_shape", "prepared")

    def __init__(self, prepared: Any, out_shape: tuple[int, ...], lse_shape: Any, extra: tuple[str, ...]) -> None:
        self.prepared = prepared
        self.out_shape = out_shape
        self.lse_shape = lse_shape
        self.extra = extra


def _on_cuda(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    o = options
    try:
        qp, kp, vp = q.data_ptr(), k.data_ptr(), v.data_ptr()
    except AttributeError:
        _require_tensor(k, "k")
        _require_tensor(v, "v")
        raise
    key: Any = (
        q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype,
        v.device, (qp | kp | vp) & 15, o.causal, o.scale, o.window, o.softcap, o.causal_align, o.return_lse, o.backend,
    )  # fmt: skip
    arrays = (o.mask, o.bias, o.alibi_slopes, o.sinks, o.out)
    if any(a is not None for a in arrays):
        key += tuple(_signature(a) for a in arrays)
    try:
        launch = _launches.get(key)
    except TypeError:  # a window given as a list
        return _on_cuda(q, k, v, replace(o, window=tuple(o.window)))  # type: ignore[arg-type]
    if launch is None:
        launch = _prepare(q, k, v, options)
        if len(_launches) >= _MAX_LAUNCHES:
            _launches.clear()
        _launches[key] = launch
    out = torch.empty(launch.out_shape, dtype=q.dtype, device=q.device) if o.out is None else o.out
    lse = None
    if launch.prepared is not None:
        pointers = [qp, kp, vp, out.data_ptr()]
        for name in launch.extra:
            pointers.append(getattr(o, name).data_ptr())
        if o.return_lse:
            lse = torch.empty(launch.lse_shape, dtype=torch.float32, device=q.device)
            pointers.append(lse.data_ptr())
        launch.prepared.launch(pointers, _stream(q.device))
    elif o.return_lse:
        lse = torch.empty(launch.lse_shape, dtype=torch.float32, device=q.device)
    return (out, lse) if o.return_lse else out


def _stream(device: Any) -> int:
    if _raw_stream is not None:
        return int(_raw_stream(device.index))
    return int(torch.cuda.current_stream(device).cuda_stream)


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
    lifted = 4 - len(out.shape)
    out = TensorView(out.dtype, (1,) * lifted + out.shape, (0,) * lifted + out.strides, out.device, out.storage)
    memory = named(operands, out)
    aligned = {name: tensor.data_ptr() % 16 == 0 for name, tensor in (("q", q), ("k", k), ("v", v))}
    if options.out is not None:
        aligned["o"] = options.out.data_ptr() % 16 == 0
    launch = prepare_forward(problem, memory, device, aligned)
    prepared = None
    if launch.plan.grid[0]:
        scalars = launch.arguments(dict.fromkeys((*memory, "lse")))
        prepared = device.prepare(launch.program, launch.plan.grid, scalars)
    fields = {"mask": "mask", "bias": "bias", "alibi": "alibi_slopes", "sinks": "sinks"}
    extra = tuple(fields[name] for name in launch.buffers if name in fields)
    return _CudaLaunch(prepared, operands.out_shape, operands.lse_shape, extra)


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
    tensors = {"q": q, "k": k, "v": v, **options.arrays()}
    views: dict[str, Any] = {name: _host_view(tensor, name) for name, tensor in tensors.items()}
    problem, operands = attention_problem(**views, **options.plain())
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
    result = _on_host(q.cpu(), k.cpu(), v.cpu(), replace(options, out=None, **moved))
    out, lse = result if options.return_lse else (result, result)
    if options.out is not None:
        out = _checked_out(options.out, tuple(out.shape), q).copy_(out)
    out = out.to(q.device)
    return (out, lse.to(q.device)) if options.return_lse else out
