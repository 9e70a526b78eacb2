"""Indices into captured arrays that are known, before anything is computed, to lie outside of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from aule.errors import InvalidArgumentError
from aule.ops.scores.functions.evaluate import Evaluator
from aule.ops.scores.functions.program import BoundFunction, Graph, ScoreFunction
from aule.view import TensorView


def check_indices(
    functions: Mapping[str, BoundFunction | None], views: Mapping[str, TensorView], batch: int, heads: int, op: str
) -> None:
    """Refuse functions, by buffer name, that index captured arrays by a batch or head that these do not have.

    Other indices are not checked, as a mask may drop the rows and keys for which a function has no element; nor is an
    element that only one side of a ``where`` loads.
    """
    for name, function in functions.items():
        for load in _certain(function.program) if function is not None and batch * heads else ():
            assert function is not None
            node = function.program.nodes[load]
            shape = views[f"{name}{node.value}"].shape
            for axis, index in enumerate(node.args):
                _check(function, index, shape, axis, batch, heads, op)


def _check(
    function: BoundFunction, index: int, shape: tuple[int, ...], axis: int, batch: int, heads: int, op: str
) -> None:
    part = Graph.of(function.program).finish([index])
    used = {node.op for node in part.nodes}
    if not used & {"batch", "head"} or used & {"score", "query", "position", "key", "load"}:
        return
    inputs = {"batch": np.arange(batch)[:, None], "head": np.arange(heads)}
    found = np.broadcast_to(Evaluator(BoundFunction(part, function.numbers), []).results(inputs)[0], (batch, heads))
    outside = np.argwhere((found < -shape[axis]) | (found >= shape[axis]))
    if len(outside):
        b, h = outside[0]
        raise InvalidArgumentError(
            f"[{op}] expected indices from {-shape[axis]} to {shape[axis] - 1} for axis {axis} of a captured array of "
            f"shape {list(shape)}, got {found[b, h]} in batch {b}, head {h}; capture an array with that element"
        )


def _certain(program: ScoreFunction) -> list[int]:
    """Loads that the results need whatever conditions hold."""
    found, waiting = set(), list(program.results)
    while waiting:
        i = waiting.pop()
        if i not in found:
            found.add(i)
            node = program.nodes[i]
            waiting += node.args[:1] if node.op == "where" else node.args
    return sorted(i for i in found if program.nodes[i].op == "load")
