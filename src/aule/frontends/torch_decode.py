"""Decoding with PyTorch tensors."""

from __future__ import annotations

from typing import Any

import torch

from aule.engine.attention import host_device_of
from aule.engine.decode import decode_on_host
from aule.errors import DeviceMismatchError, InvalidDtypeError, InvalidShapeError
from aule.frontends.numpy import states_message
from aule.frontends.torch_host import host_view_of
from aule.frontends.torch_views import NAMES, checked_out, require_tensor
from aule.ops.decode.validate import decode_problem
from aule.options import DecodeOptions


def decode(q: Any, k: Any, v: Any, options: DecodeOptions) -> Any:
    """As `aule.decode_attention` and `aule.flash_attention_paged`."""
    if q.is_cpu:
        return _on_host(q, k, v, options)
    return _staged(q, k, v, options)


def _integers(op: str, name: str, array: Any) -> Any:
    """Lengths, tables and offsets as int32."""
    if not isinstance(array, torch.Tensor) or array.dtype not in (torch.int32, torch.int64):
        got = array.dtype if isinstance(array, torch.Tensor) else type(array).__name__
        raise InvalidDtypeError(f"[{op}] expected {name} as an int32 tensor, got {got}; convert it")
    return array.to(torch.int32)


# -- host --------------------------------------------------------------------------------------------------------------


def _on_host(q: Any, k: Any, v: Any, options: DecodeOptions) -> Any:
    tensors = {"q": q, "k": k, "v": v, **options.arrays()}
    tensors |= {name: _integers(options.op, name, array) for name, array in options.indices().items()}
    views: dict[str, Any] = {name: host_view_of(tensor, name) for name, tensor in tensors.items()}
    problem, operands = decode_problem(options.op, **views, **options.plain())
    out = options.out
    if out is None:
        out = torch.empty(operands.out_shape, dtype=q.dtype)
    else:
        checked_out(out, operands.out_shape, q)
    target = operands.lifted(host_view_of(out, "out").storage)
    device = host_device_of(NAMES.get(q.dtype, ""), options.backend)
    _, lse = decode_on_host(problem, operands, device, target)
    return (out, torch.from_numpy(lse).reshape(operands.lse_shape)) if options.return_lse else out


def _staged(q: Any, k: Any, v: Any, options: DecodeOptions) -> Any:
    """Tensors on a device that aule does not drive directly go through the host and come back."""
    for name, tensor in {"k": k, "v": v, **options.arrays()}.items():
        require_tensor(tensor, name)
        if tensor.device != q.device:
            raise DeviceMismatchError(
                f"[{options.op}] expected {name} on {q.device} like q, got {tensor.device}; move it with .to"
            )
    moved = {name: array.cpu() for name, array in (options.arrays() | options.indices()).items()}
    result = _on_host(q.cpu(), k.cpu(), v.cpu(), options._replace(out=None, **moved))
    out, lse = result if options.return_lse else (result, None)
    if options.out is not None:
        out = checked_out(options.out, tuple(out.shape), q).copy_(out)
    out = out.to(q.device)
    return out if lse is None else (out, lse.to(q.device))


# -- merging -----------------------------------------------------------------------------------------------------------


def merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """As `aule.merge_states`; of tensors on any device, by PyTorch's own operators."""
    for name, tensor in (("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)):
        require_tensor(tensor, name)
    if not (o_a.shape == o_b.shape and lse_a.shape == lse_b.shape == o_a.shape[:-1]):
        raise InvalidShapeError(states_message(o_a, lse_a, o_b, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    level = torch.where(lse == -torch.inf, 0, lse)  # nothing on either side: exp(-inf + inf) would be NaN
    work = torch.float64 if o_a.dtype == torch.float64 else torch.float32
    parts = []
    for o, own in ((o_a, lse_a), (o_b, lse_b)):
        weight = torch.exp(own - level).to(work)[..., None]
        # Selected, not multiplied by 0: a side without keys may hold anything.
        parts.append(torch.where(weight != 0, o.to(work) * weight, 0))
    return (parts[0] + parts[1]).to(o_a.dtype), lse
