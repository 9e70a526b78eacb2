"""Score functions on NumPy arrays, all elements at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.ops.scores.functions.program import BoundFunction, Node

Array = npt.NDArray[Any]
_DTYPES: dict[str, Any] = {"bool": np.bool_, "i32": np.int32, "i64": np.int64, "f32": np.float32, "f64": np.float64}

NAMES = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "floordiv": "floor_divide", "mod": "remainder",
    "min": "minimum", "max": "maximum", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "shl": "left_shift", "shr": "right_shift", "lt": "less", "le": "less_equal", "gt": "greater",
    "ge": "greater_equal", "eq": "equal", "ne": "not_equal", "neg": "negative", "abs": "absolute",
    "not": "bitwise_not", "exp": "exp", "exp2": "exp2", "log": "log", "log2": "log2", "sqrt": "sqrt", "sin": "sin",
    "cos": "cos", "tanh": "tanh", "floor": "floor", "where": "where", "detach": "copy",
}  # fmt: skip
"""NumPy's functions by operation; other frameworks have most of them under the same names."""
_erf = np.vectorize(math.erf, otypes=[np.float64])
_FUNCTIONS: dict[str, Any] = {op: getattr(np, name) for op, name in NAMES.items()} | {
    "rsqrt": lambda x: 1 / np.sqrt(x), "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "erf": lambda x: _erf(x).astype(x.dtype),
}  # fmt: skip


def apply(op: str, values: Sequence[Any], dtypes: Sequence[str]) -> Any:
    """One operation on arrays or numbers of some types."""
    arrays = [np.asarray(x, dtype=_DTYPES[dtype]) for x, dtype in zip(values, dtypes, strict=True)]
    with np.errstate(all="ignore"):
        return np.asarray(_FUNCTIONS[op](*arrays))


@dataclass(frozen=True)
class Evaluator:
    """A function with what it captured.

    Attributes
    ----------
    arrays : sequence of ndarray
        Captured arrays; bf16 as float32.
    exact : bool
        Compute float32 in float64.
    """

    function: BoundFunction
    arrays: Sequence[Array]
    exact: bool = False

    def __call__(self, **inputs: Any) -> Array:
        """The first result for inputs (`program.INPUTS`) that broadcast against each other."""
        return self.results(inputs)[0]

    def results(self, inputs: Mapping[str, Any]) -> list[Array]:
        """All results.

        Indices outside of a captured array are clamped, as in kernels; negative ones count from its end.
        """
        values: list[Any] = []
        for node in self.function.program.nodes:
            values.append(self._value(node, [values[i] for i in node.args], inputs))
        return [values[i] for i in self.function.program.results]

    def _dtype(self, dtype: str) -> str:
        return "f64" if self.exact and dtype == "f32" else dtype

    def _value(self, node: Node, args: list[Any], inputs: Mapping[str, Any]) -> Any:
        dtype = _DTYPES[self._dtype(node.dtype)]
        if node.op == "literal":
            return dtype(node.value)
        if node.op == "number":
            return dtype(self.function.numbers[int(node.value or 0)])
        if node.op == "load":
            array = self.arrays[int(node.value or 0)]
            at = [np.clip(np.where(i < 0, i + n, i), 0, n - 1) for i, n in zip(args, array.shape, strict=True)]
            return array[tuple(at)].astype(dtype)
        if node.op == "cast":
            with np.errstate(all="ignore"):
                return np.asarray(args[0]).astype(dtype)
        if node.op in inputs:
            return np.asarray(inputs[node.op], dtype=dtype)
        nodes = self.function.program.nodes
        return apply(node.op, args, [self._dtype(nodes[i].dtype) for i in node.args])
