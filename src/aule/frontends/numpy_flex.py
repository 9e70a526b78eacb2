"""Attention with functions of the user on NumPy arrays, and tracing of functions that capture NumPy arrays."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from aule.engine.attention import forward_on_host, host_device
from aule.engine.memory import reports_shortage
from aule.errors import InvalidArgumentError
from aule.frontends import numpy as front_end
from aule.frontends.block_mask import MASK_INPUTS, SCORE_INPUTS, BlockMask
from aule.frontends.functions import UserFunctions
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands, attention_problem
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.validate import DecodeOperands
from aule.ops.scores.functions import trace as tracing
from aule.ops.scores.functions.emit import MASK_FUNCTION, SCORE_FUNCTION
from aule.ops.scores.functions.evaluate import Evaluator
from aule.ops.scores.functions.indices import check_indices
from aule.ops.scores.functions.program import BoundFunction
from aule.view import restride

Array = npt.NDArray[Any]
_DTYPES = {name: np.dtype(kind) for name, kind in (
    ("bool", np.bool_), ("i32", np.int32), ("i64", np.int64), ("f32", np.float32), ("f64", np.float64)
)}  # fmt: skip
_WIDENED = (np.dtype(np.int16), np.dtype(np.uint16), np.dtype(np.uint32))
"""Integers that kernels do not load."""
_MOST_SCORES = 1 << 22
"""Scores that `max_scores` computes at a time."""


class CapturedArray(np.ndarray[Any, Any]):
    """A captured array that can be indexed with symbols."""

    def __getitem__(self, index: Any) -> Any:
        symbol = tracing.symbol_in(index if isinstance(index, tuple) else (index,))
        return super().__getitem__(index) if symbol is None else tracing.load(symbol.tracer, self, index)


def rebound(function: Any, depth: int = 4) -> Any:
    """The function with the NumPy arrays of its closure and globals as `CapturedArray`, and functions that it calls.

    NumPy asks an array, not its index, what ``array[index]`` means, so a plain array would not see a symbol.
    """

    def seen(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return x.view(CapturedArray)
        if isinstance(x, (tuple, list)):
            inside = [seen(y) for y in x]
            return x if all(a is b for a, b in zip(x, inside, strict=True)) else type(x)(inside)
        return x if x is function else rebound(x, depth - 1)

    if isinstance(function, functools.partial) and depth:
        named = {name: seen(x) for name, x in function.keywords.items()}
        return functools.partial(rebound(function.func, depth - 1), *map(seen, function.args), **named)
    if not isinstance(function, types.FunctionType) or depth == 0:
        return function

    cells = [_contents(cell) for cell in function.__closure__ or ()]
    named = {n: function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__}
    named = {n: seen(x) for n, x in named.items() if _own(function, x)}
    inside = [seen(x) for x in cells]
    defaults = seen(function.__defaults__) if function.__defaults__ else None
    same = all(a is b for a, b in zip(cells, inside, strict=True)) and defaults is function.__defaults__
    if same and all(x is function.__globals__[n] for n, x in named.items()):
        return function
    made = types.FunctionType(
        function.__code__,
        {**function.__globals__, **named},
        function.__name__,
        defaults,
        tuple(types.CellType(x) for x in inside) or None,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _own(function: types.FunctionType, x: Any) -> bool:
    """Whether a global is an array, or a function of the same module."""
    return isinstance(x, np.ndarray) or (isinstance(x, types.FunctionType) and x.__module__ == function.__module__)


def traced(
    function: Callable[..., Any], inputs: Sequence[str], work: str, name: str, op: str = tracing.OP
) -> tuple[BoundFunction, list[Array]]:
    """The program of a function, and the arrays that it captured."""
    framework = tracing.Framework(
        lambda x: front_end.view(_loadable(np.zeros(1, x.dtype), work), f"an array captured by {name}", op).dtype,
        lambda dtype: {"dtype": _DTYPES[dtype]},
    )
    return tracing.trace(rebound(function), inputs, work, framework, name, op)


def _loadable(x: Array, work: str) -> Array:
    """An array in a type that kernels load. NumPy makes float64 by default, which few devices compute with."""
    if x.dtype == np.float64 and work == "f32":
        return x.astype(np.float32)
    return x.astype({2: np.int32, 4: np.int64}[x.dtype.itemsize]) if x.dtype in _WIDENED else x


Problem = TypeVar("Problem", AttentionProblem, DecodeProblem)
Given = TypeVar("Given", Operands, DecodeOperands)


def with_functions(problem: Problem, operands: Given, functions: UserFunctions) -> tuple[Problem, Given]:
    """A call with the user's functions, traced, and the arrays that they captured."""
    work = "f64" if problem.dtype == "f64" else "f32"
    found = {name: traced(function, inputs, work, name, functions.op) for name, _, function, inputs in functions.each()}
    return bound(problem, operands, found, functions.op)


def bound(
    problem: Problem, operands: Given, found: Mapping[str, tuple[BoundFunction, list[Array]]], op: str
) -> tuple[Problem, Given]:
    """A call with traced functions, by the name of the problem's field."""
    work = "f64" if problem.dtype == "f64" else "f32"
    views = {
        f"{buffer}{i}": front_end.view(_loadable(np.asarray(x), work), "a captured array", op)
        for name, buffer in (("score_mod", SCORE_FUNCTION), ("mask_mod", MASK_FUNCTION))
        for i, x in enumerate(found[name][1] if name in found else ())
    }
    score_mod, mask_mod = (found[name][0] if name in found else None for name in ("score_mod", "mask_mod"))
    check_indices({SCORE_FUNCTION: score_mod, MASK_FUNCTION: mask_mod}, views, problem.batch, problem.heads_q, op)
    return replace(problem, score_mod=score_mod, mask_mod=mask_mod), replace(operands, captured=views)


@reports_shortage
def flex_attention(
    q: Array,
    k: Array,
    v: Array,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    backend: str | None,
) -> tuple[Array, Array]:
    """Attention and its log-sum-exp; finished on return."""
    problem, operands = flex_call(q, k, v, score_mod, block_mask, scale)
    out, lse = forward_on_host(problem, operands, host_device(problem.dtype, backend))
    assert lse is not None
    return out.reshape(operands.out_shape).view(q.dtype), lse.reshape(operands.lse_shape)


def max_scores(q: Array, k: Array, score_mod: Callable[..., Any] | None, block_mask: Any, scale: float | None) -> Array:
    """The largest score of each row after the functions, a part of the scores at a time."""
    problem, operands = flex_call(q, k, k, score_mod, block_mask, scale)
    work = np.float64 if problem.dtype == "f64" else np.float32
    found = np.full(q.shape[:3], -np.inf, work)
    (batch, heads, rows), (heads_kv, keys) = q.shape[:3], (k.shape[1], k.shape[2])
    if found.size == 0 or keys == 0:
        return found
    captured = operands.captured or {}
    evaluators = {
        name: Evaluator(
            function, [np.asarray(captured[f"{name}{i}"].storage) for i in range(len(function.program.arrays))]
        )
        for name, function in ((SCORE_FUNCTION, problem.score_mod), (MASK_FUNCTION, problem.mask_mod))
        if function is not None
    }
    step, factor = max(_MOST_SCORES // keys, 1), q.shape[3] ** -0.5 if scale is None else scale
    for b, h, first in product(range(batch), range(heads), range(0, rows, step)):
        part = q[b, h, first : first + step].astype(work)
        scores = part @ k[b % k.shape[0], h * heads_kv // heads].astype(work).T * work(factor)
        inputs = {"batch": b, "head": h, "query": np.arange(first, first + len(part))[:, None], "key": np.arange(keys)}
        if SCORE_FUNCTION in evaluators:
            scores = np.broadcast_to(evaluators[SCORE_FUNCTION](score=scores, **inputs), scores.shape)
        if MASK_FUNCTION in evaluators:
            scores = np.where(evaluators[MASK_FUNCTION](**inputs), scores, -np.inf)
        found[b, h, first : first + step] = scores.max(axis=1)
    return found


def flex_call(
    q: Array, k: Array, v: Array, score_mod: Callable[..., Any] | None, block_mask: Any, scale: float | None
) -> tuple[AttentionProblem, Operands]:
    """Check a call of attention with functions of the user, and trace them."""
    views: dict[str, Any] = {"q": front_end.view(q, "query", tracing.OP, "query")}
    for name, x in (("key", k), ("value", v)):
        view = front_end.view(x, name, tracing.OP, "query")
        if view.shape[0] == 1:  # keys of one batch serve all, as in PyTorch
            view = restride(view, (q.shape[0], *view.shape[1:]), (0, *view.strides[1:]))
        views[name[0]] = view
    problem, operands = attention_problem(**views, scale=scale, return_lse=True, op=tracing.OP)
    work = "f64" if problem.dtype == "f64" else "f32"
    found: dict[str, tuple[BoundFunction, list[Array]]] = {}
    if score_mod is not None:
        found["score_mod"] = traced(score_mod, SCORE_INPUTS, work, "score_mod")
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            raise InvalidArgumentError(
                f"[{tracing.OP}] expected block_mask of aule.create_block_mask, got {type(block_mask).__name__}; "
                "make one with aule.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)"
            )
        block_mask.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        mask_mod = block_mask.mask_mod
        found["mask_mod"] = block_mask.trace(work, lambda: traced(mask_mod, MASK_INPUTS, work, "mask_mod"))
    return bound(problem, operands, found, tracing.OP)


def mask_evaluator(block_mask: BlockMask) -> Evaluator:
    """The mask's function on NumPy arrays."""
    found, arrays = block_mask.trace("f32", lambda: traced(block_mask.mask_mod, MASK_INPUTS, "f32", "mask_mod"))
    return Evaluator(found, arrays)
