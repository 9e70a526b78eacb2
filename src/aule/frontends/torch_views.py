"""What every route of a torch tensor asks first: whether it is one, its dtype, and whether a result fits there."""

from __future__ import annotations

from typing import Any

import torch

from aule.errors import AuleError, DeviceMismatchError, InvalidDtypeError, InvalidShapeError

NAMES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float64: "f64",
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "e4m3",
}


def require_tensor(tensor: Any, name: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidDtypeError(
            f"[flash_attention] expected {name} to be a torch tensor like q, got {type(tensor).__name__}; "
            "convert it first"
        )


def dtype_name(tensor: Any, name: str) -> str:
    dtype = NAMES.get(tensor.dtype)
    if dtype is None:
        raise InvalidDtypeError(
            f"[flash_attention] expected {name} of float32, float16, bfloat16 or float64, got {tensor.dtype}; "
            "convert with .to"
        )
    return dtype


def checked_out(out: Any, shape: tuple[int, ...], q: Any) -> Any:
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


def refuse_tracing() -> None:
    """Refuse TorchScript's tracing. Asked where a signature is new, as every one is there."""
    if torch._C._get_tracing_state() is not None:
        raise AuleError(
            "AULE_ERROR_UNSUPPORTED",
            "[flash_attention] expected no torch.jit.trace, which makes tensors of lengths, got one; use torch.export",
        )
