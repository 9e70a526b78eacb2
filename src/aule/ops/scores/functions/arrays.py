"""Operations on small arrays inside of a function, such as the row of a captured array: every element is traced."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from aule.ops.scores.functions.operations import METHODS
from aule.ops.scores.functions.symbols import Symbol, Tracer, check_unrolled, fail, symbol_of, unrolled

OF_ARRAYS: set[Callable[..., Any]] = set()
"""Operations that take arrays as they are. All others are of numbers, and done for each element."""


def _register(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OF_ARRAYS.add(function)
        METHODS.update(dict.fromkeys(names, function))
        return function

    return register


def _reduced(t: Tracer, x: Any, dim: Any, keepdim: bool, join: Callable[[int, int], int], empty: int | None) -> Symbol:
    """An array with some axes, or all of them, joined."""
    nodes = unrolled(t, x)
    axes = range(nodes.ndim) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
    axes = sorted({operator.index(axis) % max(nodes.ndim, 1) for axis in axes}) if nodes.ndim else []
    for axis in reversed(axes):
        parts = list(np.moveaxis(nodes, axis, 0))
        if not parts and empty is None:
            fail("the largest of no elements", "reduce arrays with elements")
        while len(parts) > 1:  # in pairs: a short chain of operations, and small errors
            pairs = [_joined(a, b, join) for a, b in zip(parts[::2], parts[1::2], strict=False)]
            parts = pairs + parts[len(pairs) * 2 :]
        found = parts[0] if parts else np.full(np.delete(nodes.shape, axis), empty, object)
        nodes = np.expand_dims(found, axis) if keepdim else found
    return symbol_of(t, nodes)


def _joined(a: Any, b: Any, join: Callable[[int, int], int]) -> Any:
    found: Any = np.empty(np.shape(a), object)
    first: Any = np.asarray(a, object)
    second: Any = np.asarray(b, object)
    for at in np.ndindex(found.shape):
        found[at] = join(first[at], second[at])
    return found


def _reduction(op: str) -> Callable[..., Symbol]:
    def reduce(t: Tracer, x: Any, dim: Any = None, keepdim: bool = False, **names: Any) -> Symbol:
        axis, kept = names.pop("axis", dim), names.pop("keepdims", keepdim)
        if names:
            fail(f"a reduction with {', '.join(names)}", "leave these options out")
        if op in ("and", "or"):
            return _reduced(t, _as_bools(t, x), axis, kept, lambda a, b: t.graph.binary(op, a, b), t.node(op == "and"))
        empty = None if op in ("min", "max") else t.node(int(op == "mul"))
        return _reduced(t, x, axis, kept, lambda a, b: t.graph.binary(op, a, b), empty)

    return reduce


def _as_bools(t: Tracer, x: Any) -> Symbol:
    nodes = unrolled(t, x)
    found = np.empty(nodes.shape, object)
    for at in np.ndindex(nodes.shape):
        found[at] = t.graph.cast(nodes[at], "bool")
    return symbol_of(t, found)


_sum = _register("sum")(_reduction("add"))
for _names, _op in ((("prod",), "mul"), (("amin",), "min"), (("amax",), "max"), (("any",), "or"), (("all",), "and")):
    _register(*_names)(_reduction(_op))


def _extreme(op: str) -> Callable[..., Symbol]:
    def reduce(t: Tracer, x: Any, *others: Any, **names: Any) -> Symbol:
        if others or "dim" in names:
            fail(f"{op} of more than one array", f"use torch.a{op} for an axis, torch.{op}imum for two values")
        found: Symbol = _reduction(op)(t, x, **names)
        return found

    return reduce


for _op in ("min", "max"):
    _register(_op)(_extreme(_op))


@_register("mean")
def _mean(t: Tracer, x: Any, dim: Any = None, keepdim: bool = False, **names: Any) -> Symbol:
    total = _sum(t, x, dim, keepdim, **names)
    count = unrolled(t, x).size // max(unrolled(t, total).size, 1)
    found: Symbol = total / count
    return found


@_register("dot", "vdot", "inner")
def _dot(t: Tracer, x: Any, y: Any) -> Symbol:
    shapes = [tuple(z.shape) for z in (x, y)]
    if shapes[0] != shapes[1] or len(shapes[0]) != 1:
        fail(f"a dot product of arrays of shape {list(shapes[0])} and {list(shapes[1])}", "pass two of one length")
    found: Symbol = _sum(t, (x if isinstance(x, Symbol) else symbol_of(t, unrolled(t, x))) * y)
    return found


@_register("unsqueeze")
def _unsqueeze(t: Tracer, x: Any, dim: int) -> Symbol:
    return symbol_of(t, np.expand_dims(unrolled(t, x), operator.index(dim)))


@_register("squeeze")
def _squeeze(t: Tracer, x: Any, dim: Any = None) -> Symbol:
    nodes = unrolled(t, x)
    axis = None if dim is None else operator.index(dim)
    if not nodes.ndim or (axis is not None and nodes.shape[axis] != 1):
        return symbol_of(t, nodes)
    return symbol_of(t, np.squeeze(nodes, axis))


@_register("stack")
def _stack(t: Tracer, values: Any, dim: int = 0) -> Symbol:
    parts = [unrolled(t, x if hasattr(x, "shape") else t.symbol(t.node(x))) for x in values]
    if len({part.shape for part in parts}) != 1:
        fail("arrays of different shapes in a stack", "give them one shape")
    check_unrolled((len(parts), *parts[0].shape))
    return symbol_of(t, np.stack(parts, operator.index(dim)))
