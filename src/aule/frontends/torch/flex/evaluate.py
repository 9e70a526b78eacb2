"""Score functions on tensors, all elements at once, by torch's own operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aule.ops.scores.functions.evaluate import NAMES
from aule.ops.scores.functions.program import Node, ScoreFunction

_DTYPES = {
    "bool": torch.bool, "i32": torch.int32, "i64": torch.int64, "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip
_OTHERS = {
    "eq": "eq", "shl": "bitwise_left_shift", "shr": "bitwise_right_shift", "detach": "clone", "rsqrt": "rsqrt",
    "sigmoid": "sigmoid", "erf": "erf",
}  # fmt: skip
"""Functions that torch has under other names than NumPy."""
_FUNCTIONS: dict[str, Any] = {op: getattr(torch, name) for op, name in (NAMES | _OTHERS).items()}


@dataclass(frozen=True)
class Evaluator:
    """What a function captured, and where it is computed.

    Attributes
    ----------
    name : str
        Captured tensors are named ``{name}0``, ``{name}1`` ...
    """

    name: str
    captured: Mapping[str, Tensor]
    numbers: Sequence[float | int]
    device: torch.device

    def values(self, program: ScoreFunction, roots: Sequence[int], inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Values of some nodes of a program for inputs (`program.INPUTS`) that broadcast against each other."""
        values: dict[int, Tensor] = {}
        for i in sorted(program.inputs_of(*roots)):
            node = program.nodes[i]
            values[i] = self._node(node, [values[a] for a in node.args], inputs)
        return [values[i] for i in roots]

    def _node(self, node: Node, args: list[Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        dtype = _DTYPES[node.dtype]
        if node.op in ("literal", "number"):
            value = node.value if node.op == "literal" else self.numbers[int(node.value or 0)]
            assert value is not None
            return torch.full((), value, dtype=dtype, device=self.device)
        if node.op == "load":
            array = self.captured[f"{self.name}{node.value}"].detach()
            return array[tuple(inside(i, n) for i, n in zip(args, array.shape, strict=True))].to(dtype)
        if node.op == "cast":
            return args[0].to(dtype)
        if node.op in inputs:
            return inputs[node.op].to(dtype)
        found: Tensor = _FUNCTIONS[node.op](*args)
        return found


def inside(index: Tensor, size: int) -> Tensor:
    """An index within an axis: negative ones count from its end, and others are clamped, as in kernels."""
    index = index.to(torch.int64)
    return torch.where(index < 0, index + size, index).clamp(0, size - 1)
