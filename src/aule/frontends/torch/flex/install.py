"""The function that `aule.install` puts in the place of PyTorch's ``flex_attention``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from aule.backends import registry
from aule.engine.observe import called_by
from aule.errors import AuleError
from aule.frontends.torch.checks import NAMES
from aule.frontends.torch.flex.entry import flex_attention as compute
from aule.frontends.torch.flex.max_scores import max_scores
from aule.frontends.torch.modes import read_by_dynamo
from aule.frontends.torch.route import home
from aule.frontends.torch.sdpa.functions import replace_imports
from aule.ops.attention.validate import attention_problem
from aule.ops.scores.functions.trace import OP
from aule.view import TensorView

_NAME = "flex_attention"
_made: dict[Any, Any] = {}
"""Our function by the one that it replaced."""


def put(settings_now: Callable[[], tuple[bool, str | None]], count: Callable[[str | None], None]) -> None:
    """Replace PyTorch's function, in its module and where it was imported by its name."""
    original = _module().flex_attention
    if original in _made.values():
        return
    ours = _made.get(original)
    if ours is None:
        ours = _made[original] = _replacement(original, settings_now, count)
    _exchange(original, ours)


def take_out() -> None:
    """Restore PyTorch's own function."""
    for original, ours in _made.items():
        _exchange(ours, original)


def _exchange(old: Any, new: Any) -> None:
    # Somebody may have replaced our function since; theirs stays, and ours passes every call on.
    if _module().flex_attention is old:
        _module().flex_attention = new
    replace_imports(old, new, _NAME)


def _module() -> Any:
    from torch.nn.attention import flex_attention

    return flex_attention


def _replacement(
    original: Callable[..., Any],
    settings_now: Callable[[], tuple[bool, str | None]],
    count: Callable[[str | None], None],
) -> Callable[..., Any]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def serve(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        active, backend = settings_now()
        if active:
            try:
                with called_by("install"):
                    result = _served(compute, backend, *arguments, **options)
            except _PassOn as reason:
                count(str(reason))
            except AuleError as error:
                count(error.code)
            else:
                count(None)
                return result
        return original(*arguments, **options)

    count_in_graph = torch.compiler.assume_constant_result(count)

    def flex_attention(*arguments: Any, **options: Any) -> Any:
        if not read_by_dynamo():
            return serve(arguments, options)
        active, backend = settings_now()
        if active:
            try:
                result = _served(_in_graph, backend, *arguments, **options)
            except _PassOn as reason:
                count_in_graph(f"{reason.args[0]}")
            else:
                count_in_graph(None)
                return result
        return original(*arguments, **options)

    return wraps(original)(flex_attention)


def _in_graph(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, scale: float | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    """The operator of a graph; Dynamo reads this function."""
    from aule.frontends.torch.compile import flex  # imports the compiler

    reason = _refusal(f"{q.dtype}", q.shape[-1], v.shape[-1])
    found = None if reason else flex.in_graph(q, k, v, score_mod, block_mask, scale, backend)
    if found is None:
        raise _PassOn(reason or "a function that aule cannot trace")
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refusal(dtype: str, head_dim: int, value_dim: int) -> str | None:
    """Why tensors of a type and head dimension are not served; None if they are. Called while a graph is made."""
    kind = NAMES.get(getattr(torch, dtype.removeprefix("torch.")), dtype)
    q, v = (TensorView(kind, (1, 1, 1, dim), (dim, dim, dim, 1), "cpu", None) for dim in (head_dim, value_dim))
    try:
        attention_problem(q=q, k=q, v=v, op=OP)
    except AuleError as error:
        return error.code
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _missing_engine() -> str | None:
    """Why the CPU engine cannot serve; None if it can. NumPy would be slower than PyTorch."""
    try:
        registry.find("cpu")
    except AuleError as error:
        return error.code
    return None


class _PassOn(Exception):
    """A call that goes to PyTorch's function; its text is the reason, the same for calls that are alike."""


def _served(
    compute: Callable[..., tuple[Tensor, Tensor]],
    backend: str | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """What PyTorch's function would return, by a function that computes it; Dynamo reads this function."""
    for x in (query, key, value):
        if type(x) not in (Tensor, Parameter) or x.dim() != 4:
            raise _PassOn("not plain tensors of four axes")
    if not (enable_gqa or query.shape[1] == key.shape[1]) or (return_lse and return_aux is not None):
        raise _PassOn("a call that PyTorch refuses, too")
    largest = getattr(return_aux, "max_scores", False)
    if largest and read_by_dynamo():
        raise _PassOn("max_scores in a graph")
    if backend is None and not home(query).in_place:
        raise _PassOn(f"tensors of {query.device.type}")
    missing = _missing_engine() if backend is None and query.is_cpu else None
    if missing is not None:
        raise _PassOn(missing)
    out, lse = compute(query, key, value, score_mod, block_mask, scale, backend)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        found = max_scores(query, key, score_mod, block_mask, scale) if largest else None
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=found)
    return (out, lse) if return_lse else out
