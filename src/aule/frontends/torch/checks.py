"""Checks of tensors and options that every route makes: kinds, dtypes, devices, ``out`` and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from aule.dtypes import shown
from aule.errors import AuleError, DeviceMismatchError, InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.ops.attention.validate import window_sides
from aule.ops.shared.checks import checked_flag, checked_number, wrong_kind
from aule.options import AttentionOptions, DecodeOptions

# -- tensors -----------------------------------------------------------------------------------------------------------

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
"""Names of dtypes in the kernel language."""


def require_tensor(tensor: object, name: str, op: str = "flash_attention", like: str = "q") -> None:
    """Refuse other objects than tensors; ``like`` names an operand that is a tensor."""
    if not isinstance(tensor, Tensor):
        raise wrong_kind(op, name, "a torch tensor", like, tensor)


def require_dense(tensor: Tensor, name: str, op: str) -> None:
    """Refuse nested and sparse tensors."""
    if tensor.is_nested:
        raise InvalidDtypeError(
            f"[{op}] expected {name} as a plain tensor, got a nested one; pass its values and offsets to "
            "aule.flash_attention_varlen"
        )
    if tensor.layout is not torch.strided:
        raise InvalidDtypeError(f"[{op}] expected {name} as a dense tensor, got {tensor.layout}; use .to_dense()")


def require_plain(tensor: object, name: str, op: str = "flash_attention", like: str = "q") -> None:
    """Refuse other objects than tensors, and tensors whose elements are not simply in memory."""
    require_tensor(tensor, name, op, like)
    assert isinstance(tensor, Tensor)
    require_dense(tensor, name, op)
    if tensor.is_neg():
        raise InvalidDtypeError(
            f"[{op}] expected {name} as it lies in memory, got a view that PyTorch negates when it is read; use "
            ".resolve_neg()"
        )


def require_same_device(op: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse other objects than tensors, and tensors on another device than the first."""
    like, home = next((name, x.device) for name, x in tensors.items())
    for name, tensor in tensors.items():
        require_tensor(tensor, name, op, like)
        if tensor.device != home:
            raise DeviceMismatchError(
                f"[{op}] expected {name} on {home} like {like}, got {tensor.device}; move it with .to"
            )


def dtype_name(tensor: Tensor, name: str, op: str = "flash_attention") -> str:
    """The name of a tensor's dtype in the kernel language."""
    dtype = NAMES.get(tensor.dtype)
    if dtype is None:
        whole = "" if tensor.dtype.is_floating_point or tensor.is_complex() else "int32 or int64 for indices, else "
        raise InvalidDtypeError(
            f"[{op}] expected {name} of {whole}float32, float16, bfloat16 or float64, got {shown(tensor.dtype)}; "
            "convert with .to"
        )
    return dtype


def integers(op: str, name: str, array: object, shape: str = "") -> Tensor:
    """Lengths, tables and offsets as int32; ``shape`` is appended to the expected kind in messages."""
    if not isinstance(array, Tensor) or array.dtype not in (torch.int32, torch.int64):
        got = shown(array.dtype) if isinstance(array, Tensor) else type(array).__name__
        raise InvalidDtypeError(f"[{op}] expected {name} as an int32 tensor{shape}, got {got}; convert it")
    if array.dtype is torch.int64 and array.is_cpu and array.numel():  # a device's contents would have to be waited for
        least, most = (int(x) for x in array.aminmax())
        if least < -(2**31) or most >= 2**31:
            raise InvalidArgumentError(
                f"[{op}] expected {name} of int32's range, got numbers from {least} to {most}; correct them"
            )
    return array.to(torch.int32)


def checked_out(out: object, shape: tuple[int, ...], q: Tensor, op: str = "flash_attention") -> Tensor:
    """Check an ``out`` argument and return it."""
    if not isinstance(out, Tensor) or tuple(out.shape) != shape:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise InvalidShapeError(f"[{op}] expected out of shape {shape}, got {got}; allocate it like q")
    if out.dtype != q.dtype:
        raise InvalidDtypeError(f"[{op}] expected out of q's dtype, got {shown(out.dtype)}; allocate it like q")
    if out.numel() and any(n > 1 and step == 0 for n, step in zip(out.shape, out.stride(), strict=True)):
        raise InvalidShapeError(
            f"[{op}] expected out with memory for every element, got an expanded tensor; clone it first"
        )
    if out.device != q.device:
        raise DeviceMismatchError(f"[{op}] expected out on {q.device}, got {out.device}; allocate it like q")
    return out


# -- options -----------------------------------------------------------------------------------------------------------

_NUMBERS = frozenset((float, int, bool, type(None)))
_FLAGS = ("causal", "return_lse", "rope_interleaved")
_UNCHANGED: dict[str, Any] = {}
Options = TypeVar("Options", AttentionOptions, DecodeOptions)


def by_value(op: str, options: AttentionOptions | DecodeOptions) -> dict[str, Any]:
    """The options that are tensors, arrays or lists, as plain numbers, flags and windows; nearly always none.

    Options are part of keys: a tensor's hash does not depend on its contents, and lists have none. Other objects are
    refused.
    """
    scale, softcap, window = options.scale, options.softcap, options.window
    if (
        type(scale) in _NUMBERS
        and type(softcap) in _NUMBERS
        and type(options.causal) is bool
        and type(options.return_lse) is bool
        and type(getattr(options, "rope_interleaved", False)) is bool
        and (type(window) in _NUMBERS or (type(window) is tuple and _NUMBERS.issuperset(map(type, window))))
    ):
        return _UNCHANGED
    changed: dict[str, Any] = {}
    for name, value in (("scale", scale), ("softcap", softcap)):
        if type(value) not in _NUMBERS:
            changed[name] = checked_number(op, name, value)
    for name in _FLAGS:
        flag = getattr(options, name, False)
        if type(flag) is not bool:
            changed[name] = checked_flag(op, name, flag)
    if type(window) not in _NUMBERS:
        window_sides(op, window, True)  # refuses what is no window
        pair = isinstance(window, (list, tuple))
        changed["window"] = tuple(x if x is None else int(x) for x in window) if pair else int(window)  # type: ignore
    return changed


def keyed(op: str, options: Options) -> Options:
    """The options with every number, flag and window as a plain value; see `by_value`."""
    changed = by_value(op, options)
    return options._replace(**changed) if changed else options


# -- gradients ---------------------------------------------------------------------------------------------------------


def no_gradient(got: str | None, remedy: str, op: str = "flash_attention") -> AuleError:
    """The error for tensors that need a gradient where there is none; ``got`` says what prevents it."""
    reason = "" if got is None else f" with {got}"
    message = f"[{op}] expected tensors that need no gradient, got requires_grad=True{reason}; {remedy}"
    return AuleError("AULE_ERROR_NO_GRADIENT", message)


def no_second_derivative(op: str = "flash_attention") -> AuleError:
    """The error for a gradient of a gradient."""
    theirs = "PyTorch's own operators"
    if op.startswith("flash_attention"):
        theirs = "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
    return AuleError(
        "AULE_ERROR_NO_GRADIENT",
        f"[{op}] expected one derivative, got a second; use {theirs} where you need it",
    )


def no_forward_mode(op: str = "flash_attention") -> AuleError:
    """The error for forward-mode differentiation."""
    return AuleError(
        "AULE_ERROR_NO_GRADIENT",
        f"[{op}] expected reverse-mode differentiation, got forward mode (jvp); use torch.func.vjp",
    )
