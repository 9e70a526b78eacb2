"""Gradients of tensors that a score function captured, from the gradient of the modified scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aule.frontends.torch.functions import Functions
from aule.ops.scores.functions.differentiate import derivatives
from aule.ops.scores.functions.emit import SCORE_FUNCTION
from aule.ops.scores.functions.evaluate import NAMES
from aule.ops.scores.functions.program import Node, ScoreFunction

_DTYPES = {
    "bool": torch.bool, "i32": torch.int32, "i64": torch.int64, "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip
_OTHERS = {
    "eq": "eq", "shl": "bitwise_left_shift", "shr": "bitwise_right_shift", "detach": "clone", "rsqrt": "rsqrt",
    "sigmoid": "sigmoid",
}  # fmt: skip
"""Functions that torch has under other names than NumPy."""
_FUNCTIONS: dict[str, Any] = {op: getattr(torch, name) for op, name in (NAMES | _OTHERS).items()}


def captured_gradients(
    functions: Functions, wanted: Sequence[str], ds: Tensor, q: Tensor, k: Tensor, scale: float
) -> dict[str, Tensor]:
    """Gradients of captured tensors, by buffer name.

    Parameters
    ----------
    wanted : sequence of str
        Buffer names of captured tensors.
    ds : Tensor
        ``[batch, heads_q, seq_q, seq_kv]``: the gradient of the modified scores.
    """
    assert functions.score_mod is not None
    program, numbers = functions.score_mod.program, functions.score_mod.numbers
    places = {int(name.removeprefix(SCORE_FUNCTION)): name for name in wanted}
    loads = tuple(i for i, node in enumerate(program.nodes) if node.op == "load" and node.value in places)
    partial = derivatives(program, loads)
    sums = {name: torch.zeros(functions.captured[name].shape, dtype=ds.dtype, device=ds.device) for name in wanted}
    needs_scores = any(partial.depends_on(i, "score") for i in partial.results[1:])
    group = q.shape[1] // max(k.shape[1], 1)
    query, key = (torch.arange(n, device=q.device, dtype=torch.int32) for n in ds.shape[2:])
    for b in range(ds.shape[0]):
        for h in range(ds.shape[1]):
            inputs: dict[str, Any] = {"batch": b, "head": h, "query": query[:, None], "key": key[None]}
            if needs_scores:
                inputs["score"] = (q[b, h].to(ds.dtype) @ k[b, h // group].to(ds.dtype).T) * scale
            values = _values(program, inputs, functions.captured, numbers)
            parts = _values(partial, inputs, functions.captured, numbers)
            for load, root in zip(loads, partial.results[1:], strict=True):
                node = program.nodes[load]
                # Where the key is dropped the derivative may be infinite.
                added = torch.where(ds[b, h] == 0, 0.0, ds[b, h] * parts[root])
                _scatter(sums[places[int(node.value or 0)]], [values[i] for i in node.args], added)
    return {name: x.to(functions.captured[name].dtype) for name, x in sums.items()}


def _scatter(total: Tensor, indices: Sequence[Tensor], added: Tensor) -> None:
    """Add to elements of a captured tensor, which may occur many times."""
    at = torch.zeros((), dtype=torch.int64, device=total.device)
    for index, size in zip(indices, total.shape, strict=True):
        at = at * size + _inside(index, size)
    # In a fixed order: PyTorch's is deterministic here where asked for.
    total.view(-1).index_put_((at.expand(added.shape).reshape(-1),), added.reshape(-1).to(total.dtype), accumulate=True)


def _inside(index: Tensor, size: int) -> Tensor:
    index = index.to(torch.int64)
    return torch.where(index < 0, index + size, index).clamp(0, size - 1)


def _values(
    program: ScoreFunction, inputs: Mapping[str, Any], captured: Mapping[str, Tensor], numbers: Sequence[float | int]
) -> list[Tensor]:
    """All values of a program."""
    device = inputs["query"].device
    values: list[Tensor] = []
    for node in program.nodes:
        args = [values[i] for i in node.args]
        values.append(_value(node, args, inputs, captured, numbers, device))
    return values


def _value(
    node: Node,
    args: list[Tensor],
    inputs: Mapping[str, Any],
    captured: Mapping[str, Tensor],
    numbers: Sequence[float | int],
    device: torch.device,
) -> Tensor:
    dtype = _DTYPES[node.dtype]
    if node.op in ("literal", "number"):
        value = node.value if node.op == "literal" else numbers[int(node.value or 0)]
        return torch.tensor(value, dtype=dtype, device=device)
    if node.op == "load":
        array = captured[f"{SCORE_FUNCTION}{node.value}"].detach()
        return array[tuple(_inside(i, n) for i, n in zip(args, array.shape, strict=True))].to(dtype)
    if node.op == "cast":
        return args[0].to(dtype)
    if node.op in ("score", "batch", "head", "query", "key"):
        given = inputs.get(node.op, 0.0)  # a score that no result needs
        return given if isinstance(given, Tensor) else torch.tensor(given, dtype=dtype, device=device)
    found: Tensor = _FUNCTIONS[node.op](*args)
    return found
