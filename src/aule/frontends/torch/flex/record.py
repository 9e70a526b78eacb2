"""Functions of the user inside graphs that PyTorch's compiler makes.

Dynamo reads this file. It runs the user's function on tensors of no axes, whose values do not matter, and so follows
captured tensors and numbers wherever they come from; a mode notes each operation. The notes are text, which an operator
takes as an argument beside the captured tensors and numbers. When the operator runs, `replayed` gives the notes back as
a function, which is traced like any other. The operations that were run for the notes have no use in the graph, and
the compiler drops them.

This file is written in the Python that Dynamo knows. What cannot be recorded is a TypeError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aule.frontends.torch.views import work_dtype
from aule.ops.scores.functions.operations import operation
from aule.ops.scores.functions.symbols import call

_INDEX = "getitem"


class Recording:
    """Notes about functions, and what they use of their surroundings.

    Attributes
    ----------
    tensors, integers, floats : list
        What the functions captured; notes refer to them by number.
    """

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.tensors: list[Tensor] = []
        self.integers: list[int] = []
        self.floats: list[float] = []
        self.values: list[Tensor] = []
        self.notes: list[str] = []

    def function(self, function: Callable[..., Any], inputs: Sequence[str]) -> str:
        """The notes of a function, as JSON: its operations, and its result."""
        self.notes, device = [], self.like.device
        types = [work_dtype(self.like) if name == "score" else torch.int32 for name in inputs]
        self.values = [torch.zeros((), dtype=dtype, device=device) for dtype in types]
        with _Noting(self):
            result = self.operand(function(*self.values))
        return f"[[{', '.join(self.notes)}], {result}]"

    def note(self, name: str, args: Sequence[Any], options: dict[str, Any], result: Any) -> None:
        """Note an operation."""
        known = operation(name)
        if known is None or not isinstance(result, Tensor):
            raise TypeError(f"expected an operation that can be traced, got {name}")
        named = ", ".join([f'"{key}": {self.operand(x)}' for key, x in options.items()])
        self.notes.append(f'["{known}", {self._list(args)}, {{{named}}}]')
        self.values.append(result)

    def knows(self, values: Sequence[Any]) -> bool:
        """Whether some of the values, or of those in tuples of them, come from the function's inputs."""
        return any([self.knows(x) if isinstance(x, (tuple, list)) else self._place(x) >= 0 for x in values])

    def _place(self, x: Any) -> int:
        """The number of a value; that of the last operation, if it was changed in place. -1 for others."""
        for i in range(len(self.values) - 1, -1, -1):
            if x is self.values[i]:
                return i
        return -1

    def _list(self, values: Sequence[Any]) -> str:
        return f"[{', '.join([self.operand(x) for x in values])}]"

    def operand(self, x: Any) -> str:
        """An operand in JSON: a kind and a value."""
        if isinstance(x, Tensor):
            at = self._place(x)
            return f'["value", {at}]' if at >= 0 else f'["tensor", {_number(self.tensors, x)}]'
        if x is None or isinstance(x, bool):
            return f'["plain", {"null" if x is None else "true" if x else "false"}]'
        if isinstance(x, (int, torch.SymInt)):
            self.integers.append(x)
            return f'["integer", {len(self.integers) - 1}]'
        if isinstance(x, (float, torch.SymFloat)):
            self.floats.append(x)
            return f'["float", {len(self.floats) - 1}]'
        if isinstance(x, (tuple, list, torch.Size)):
            return f'["tuple", {self._list(x)}]'
        if isinstance(x, (str, torch.dtype, torch.device)):
            return f'["plain", "{x}"]'
        raise TypeError(f"expected numbers and tensors in a function, got {type(x).__name__}")


def _number(known: list[Tensor], x: Tensor) -> int:
    for i, y in enumerate(known):
        if x is y:
            return i
    known.append(x)
    return len(known) - 1


class _Noting(TorchFunctionMode):  # type: ignore[misc]
    """Notes every torch function of a value that comes from the inputs. Others are part of the graph."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if not self.recording.knows([*args, *options.values()]):
            return func(*args, **options)
        name = f"{func.__name__}"
        # PyTorch would read the index, which has no value yet.
        result = _element(args[0], args[1]) if operation(name) == _INDEX else func(*args, **options)
        self.recording.note(name, args, options, result)
        return result


def _element(x: Tensor, index: Any) -> Tensor:
    """A tensor like an element of another, or like a part of it."""
    axes = len(index) if isinstance(index, tuple) else 1
    return torch.zeros(x.shape[axes:], dtype=x.dtype, device=x.device)


@lru_cache
def _read(text: str) -> Any:
    return json.loads(text)


def replayed(
    text: str, tensors: Sequence[Tensor], integers: Sequence[int], floats: Sequence[float]
) -> Callable[..., Any]:
    """The function of some notes, to be traced."""
    notes, result = _read(text)

    def function(*inputs: Any) -> Any:
        values = list(inputs)
        places = {"value": values, "tensor": tensors, "integer": integers, "float": floats}

        def operand(x: Any) -> Any:
            kind, value = x
            if kind == "plain":
                return value
            return tuple(map(operand, value)) if kind == "tuple" else places[kind][value]

        for name, args, options in notes:
            given = list(map(operand, args))
            named = {key: operand(x) for key, x in options.items()}
            values.append(given[0][given[1]] if name == _INDEX else call(name, given, named))
        return operand(result)

    return function
