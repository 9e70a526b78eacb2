"""A function on a part of the scores, and along which axes of the scores its values differ."""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from aule.ops.scores.functions.evaluate import Evaluator
from aule.ops.scores.functions.program import BoundFunction, Graph, Node, ScoreFunction

STARTS = ("batch", "head", "query", "key")
"""What the elements of the array count that `part_of` adds."""
Along = Literal["none", "query", "key", "difference", "all"]
"""The value is one for all scores of a head; one for each query row; one for each key; one for each difference of key
and row; or one for each score."""
_INTEGERS = ("i32", "i64")


@functools.lru_cache(maxsize=256)
def part_of(function: ScoreFunction) -> ScoreFunction:
    """The function on a part of the scores, whose inputs count from 0.

    Where the part begins is one more captured array, of int32: an element for each of `STARTS`.
    """
    graph = Graph(function.work, arrays=list(function.arrays), numbers=list(function.numbers))
    starts = graph.array("i32", 1)
    place: list[int] = []
    for node in function.nodes:
        if node.op in STARTS:
            start = graph.load(starts, [graph.literal(STARTS.index(node.op))])
            place.append(graph.binary("add", graph.input(node.op), start))
        else:
            place.append(graph.add(node.op, tuple(place[i] for i in node.args), node.dtype, node.value))
    return graph.finish(place[i] for i in function.results)


@functools.lru_cache(maxsize=256)
def spreads(function: ScoreFunction) -> tuple[Along, ...]:
    """How the value of each node differs among the scores of a head."""
    found: list[Along] = []
    slopes: list[tuple[int, int] | None] = []
    for node in function.nodes:
        slope = _slope(function, node, [slopes[i] for i in node.args])
        own: Along = "all" if node.op == "score" else "none"
        for i in node.args:
            own = together(own, found[i])
        found.append(own if slope is None else _of_slope(*slope))
        slopes.append((0, 0) if slope is None and own == "none" else slope)
    return tuple(found)


@functools.lru_cache(maxsize=16)
def kept_differences(mask: BoundFunction, rows: int, keys: int) -> npt.NDArray[Any]:
    """How many of the differences of key and row, from ``1 - rows`` on, a mask may keep before each and before the end.

    Only conditions of the difference alone count, such as a causal mask or a window, if they are known on the host.
    """
    program, kept = mask.program, np.ones(max(rows + keys - 1, 0), np.bool_)
    waiting, along = list(program.results), spreads(program)
    while waiting:
        node = waiting.pop()
        if program.nodes[node].op == "and":
            waiting += program.nodes[node].args
        elif along[node] == "difference":
            condition = Graph.of(program).finish([node])
            if any(x.op in ("load", "batch", "head", "position") for x in condition.nodes):
                continue
            apart = np.arange(1 - rows, keys)
            inputs = {"query": np.maximum(-apart, 0), "key": np.maximum(apart, 0)}
            kept &= Evaluator(BoundFunction(condition, mask.numbers), []).results(inputs)[0]
    return np.concatenate([[0], np.cumsum(kept)])


def together(one: Along, other: Along) -> Along:
    """How what is made of two values differs."""
    if one == other or other == "none":
        return one
    return other if one == "none" else "all"


def _of_slope(query: int, key: int) -> Along:
    if query == 0 or key == 0:
        return "query" if query else "key" if key else "none"
    return "difference" if query == -key else "all"


def _slope(function: ScoreFunction, node: Node, args: list[tuple[int, int] | None]) -> tuple[int, int] | None:
    """How a value grows with the row and with the key; None if not by a fixed step each."""
    if node.op in ("query", "position", "key"):
        return (0, 1) if node.op == "key" else (1, 0)
    known = [x for x in args if x is not None]
    if not args or len(known) < len(args):
        return None
    if node.op == "neg" or (node.op == "cast" and node.dtype != "bool" and _from_integer(function, node)):
        sign = -1 if node.op == "neg" else 1
        return sign * known[0][0], sign * known[0][1]
    if node.op in ("add", "sub"):
        sign = -1 if node.op == "sub" else 1
        return known[0][0] + sign * known[1][0], known[0][1] + sign * known[1][1]
    if node.op == "mul" and node.dtype in _INTEGERS:
        for i, other in ((0, 1), (1, 0)):
            factor = function.nodes[node.args[i]]
            if factor.op == "literal":
                times = int(factor.value or 0)
                return known[other][0] * times, known[other][1] * times
    return None


def _from_integer(function: ScoreFunction, node: Node) -> bool:
    return function.nodes[node.args[0]].dtype in _INTEGERS
