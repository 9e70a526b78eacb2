"""Tracing functions of torch operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aule.frontends.numpy_flex import rebound
from aule.frontends.torch.checks import dtype_name
from aule.ops.scores.functions import trace as tracing
from aule.ops.scores.functions.program import BoundFunction
from aule.ops.scores.functions.trace import Symbol


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
    function: Callable[..., Any], inputs: Sequence[str], q: Tensor, name: str
) -> tuple[BoundFunction, list[Tensor]]:
    """The program of a function for attention with queries like ``q``, and the tensors that it captured."""
    work = "f64" if q.dtype == torch.float64 else "f32"

    def dtype_of(tensor: Any) -> str:
        tensor = torch.as_tensor(tensor)  # an array of NumPy may be captured, too
        return dtype_name(tensor, f"a tensor captured by {name}", tracing.OP)

    with _Recording():
        program, arrays = tracing.trace(rebound(function), inputs, work, dtype_of, name, q.device)
    return program, [x if isinstance(x, Tensor) else torch.as_tensor(x, device=q.device) for x in arrays]
