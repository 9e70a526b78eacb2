"""Tracing functions of torch operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aule.frontends.functions import UserFunctions
from aule.frontends.numpy_flex import rebound
from aule.frontends.torch.checks import dtype_name
from aule.frontends.torch.functions import Functions, loaded_dtype
from aule.ops.scores.functions import trace as tracing
from aule.ops.scores.functions.program import BoundFunction
from aule.ops.scores.functions.trace import Symbol

_DTYPES = {
    "bool": torch.bool, "i32": torch.int32, "i64": torch.int64, "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip
"""Types of values in a function. Indices are int32, as in kernels of PyTorch."""


class _Recording(TorchFunctionMode):  # type: ignore[misc]
    """Sends every torch function that gets a symbol to the tracer; others, on captured tensors alone, run as usual."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = tracing.symbol_in([*args, *kwargs.values()])
        if found is None:
            return func(*args, **kwargs)
        if func is Tensor.__getitem__:
            return tracing.load(found.tracer, *args)
        return Symbol.__torch_function__(func, types, tuple(args), kwargs)


def traced(
    function: Callable[..., Any], inputs: Sequence[str], q: Tensor, name: str, op: str = tracing.OP
) -> tuple[BoundFunction, list[Tensor]]:
    """The program of a function for attention with queries like ``q``, and the tensors that it captured."""
    work = "f64" if q.dtype == torch.float64 else "f32"

    def dtype_of(tensor: Any) -> str:
        dtype = loaded_dtype(torch.as_tensor(tensor).dtype, q)  # an array of NumPy may be captured, too
        return dtype_name(torch.empty(0, dtype=dtype), f"a tensor captured by {name}", op)

    framework = tracing.Framework(dtype_of, lambda dtype: {"dtype": _DTYPES[dtype], "device": q.device})
    with _Recording():
        program, arrays = tracing.trace(rebound(function), inputs, work, framework, name, op)
    return program, [x if isinstance(x, Tensor) else torch.as_tensor(x, device=q.device) for x in arrays]


def traced_functions(functions: UserFunctions, q: Tensor) -> Functions:
    """The user's functions of a call, traced."""
    found = {name: traced(function, inputs, q, name, functions.op) for name, _, function, inputs in functions.each()}
    return Functions.of(found.get("score_mod"), found.get("mask_mod")).checked(q, functions.op)


def traced_pair(
    q: Tensor, op: str, functions: tuple[Callable[..., Any] | None, Callable[..., Any] | None]
) -> Functions | None:
    """Score function and mask function of a call on packed batches, traced; None if there are none."""
    return None if functions == (None, None) else traced_functions(UserFunctions(op, *functions), q)
