"""What every route of a torch tensor asks first: whether it is one, its dtype, whether a result fits there, and
options by value."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch

from aule.engine.memory import STORED
from aule.errors import AuleError, DeviceMismatchError, InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.ops.attention.validate import window_sides
from aule.ops.checked import checked_flag, checked_number
from aule.options import AttentionOptions, DecodeOptions

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


_STORED = STORED | {
    "bool": np.bool_, "u8": np.uint8, "i8": np.int8, "i32": np.int32, "i64": np.int64, "e4m3": np.uint8
}  # fmt: skip
"""NumPy's type for the elements of any array."""


class _Memory:
    """A tensor as NumPy asks for its memory; an array of it keeps the tensor."""

    def __init__(self, tensor: Any, interface: dict[str, Any]) -> None:
        self.tensor, self.__array_interface__ = tensor, interface


def host_array(tensor: Any, dtype: str) -> Any:
    """The memory of a CPU tensor as a NumPy array of stored elements. ``Tensor.numpy`` would leave the tensor with a
    storage that can never be resized, as FSDP does with parameters between their uses."""
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), _STORED[dtype])
    interface = {
        "version": 3,
        "shape": tuple(tensor.shape),
        "typestr": np.dtype(_STORED[dtype]).str,
        "data": (tensor.data_ptr(), False),
        "strides": tuple(tensor.element_size() * step for step in tensor.stride()),
    }
    return np.asarray(_Memory(tensor, interface))


def require_tensor(tensor: Any, name: str, op: str = "flash_attention", like: str = "q") -> None:
    """Refuse what is no tensor; ``like`` is the operand that is one."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidDtypeError(
            f"[{op}] expected {name} to be a torch tensor like {like}, got {type(tensor).__name__}; convert it first"
        )


def require_dense(tensor: Any, name: str, op: str) -> None:
    """Refuse tensors that have no element for each index, one step apart or some."""
    if tensor.is_nested:
        raise InvalidDtypeError(
            f"[{op}] expected {name} as a plain tensor, got a nested one; pass its values and offsets to "
            "aule.flash_attention_varlen"
        )
    if tensor.layout is not torch.strided:
        raise InvalidDtypeError(f"[{op}] expected {name} as a dense tensor, got {tensor.layout}; use .to_dense()")


def require_plain(tensor: Any, name: str, op: str = "flash_attention") -> None:
    """Refuse what is no tensor, and tensors whose elements are not simply in memory."""
    require_tensor(tensor, name, op)
    require_dense(tensor, name, op)
    if tensor.is_neg():
        raise InvalidDtypeError(
            f"[{op}] expected {name} as it lies in memory, got a view that PyTorch negates when it is read; use "
            ".resolve_neg()"
        )


_NUMBERS = frozenset((float, int, bool, type(None)))
_FLAGS = ("causal", "return_lse", "rope_interleaved")
_UNCHANGED: dict[str, Any] = {}


def by_value(op: str, options: AttentionOptions | DecodeOptions) -> dict[str, Any]:
    """Those of the numbers, flags and the window that are keys by identity, as tensors are, though their contents may
    change, or none at all, as lists and arrays are: as plain values. What is no such value is refused."""
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
        window_sides(op, window, True)  # refuses what is none
        pair = isinstance(window, (list, tuple))
        changed["window"] = tuple(x if x is None else int(x) for x in window) if pair else int(window)  # type: ignore
    return changed


def extent(x: Any) -> tuple[int, int]:
    """Addresses from a tensor's first element to behind its last."""
    start: int = x.data_ptr()
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.element_size()


Options = TypeVar("Options", AttentionOptions, DecodeOptions)


def keyed(op: str, options: Options) -> Options:
    """The options, of which none that is no array is a key by identity."""
    changed = by_value(op, options)
    return options._replace(**changed) if changed else options


def dtype_name(tensor: Any, name: str, op: str = "flash_attention") -> str:
    """The name of a tensor's dtype in the kernel language."""
    dtype = NAMES.get(tensor.dtype)
    if dtype is None:
        raise InvalidDtypeError(
            f"[{op}] expected {name} of float32, float16, bfloat16 or float64, got {tensor.dtype}; convert with .to"
        )
    return dtype


def integers(op: str, name: str, array: Any, shape: str = "") -> Any:
    """Lengths, tables and offsets as int32; ``shape`` is what messages say of it."""
    if not isinstance(array, torch.Tensor) or array.dtype not in (torch.int32, torch.int64):
        got = array.dtype if isinstance(array, torch.Tensor) else type(array).__name__
        raise InvalidDtypeError(f"[{op}] expected {name} as an int32 tensor{shape}, got {got}; convert it")
    if array.dtype is torch.int64 and array.is_cpu and array.numel():  # nobody waits for a device to look at its own
        least, most = (int(x) for x in array.aminmax())
        if least < -(2**31) or most >= 2**31:
            raise InvalidArgumentError(
                f"[{op}] expected {name} of int32's range, got numbers from {least} to {most}; correct them"
            )
    return array.to(torch.int32)


def checked_out(out: Any, shape: tuple[int, ...], q: Any, op: str = "flash_attention") -> Any:
    """An ``out`` argument that fits."""
    if not isinstance(out, torch.Tensor) or tuple(out.shape) != shape:
        got = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise InvalidShapeError(f"[{op}] expected out of shape {shape}, got {got}; allocate it like q")
    if out.dtype != q.dtype:
        raise InvalidDtypeError(f"[{op}] expected out of q's dtype, got {out.dtype}; allocate it like q")
    if out.numel() and any(n > 1 and step == 0 for n, step in zip(out.shape, out.stride(), strict=True)):
        raise InvalidShapeError(
            f"[{op}] expected out with memory for every element, got an expanded tensor; clone it first"
        )
    if out.device != q.device:
        raise DeviceMismatchError(f"[{op}] expected out on {q.device}, got {out.device}; allocate it like q")
    return out


def written(x: Any) -> Any:
    """A tensor that a kernel writes to: where autograd has kept it for a gradient, it is to find that out."""
    torch.autograd.graph.increment_version(x)
    return x


def refuse_tracing(op: str = "flash_attention") -> None:
    """Refuse TorchScript's tracing. Asked where a signature is new, as every one is there."""
    if torch._C._get_tracing_state() is not None:
        raise AuleError(
            "AULE_ERROR_UNSUPPORTED",
            f"[{op}] expected no torch.jit.trace, which makes tensors of lengths, got one; use torch.export",
        )
