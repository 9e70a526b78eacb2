"""The front end of `Explained` arrays: it plans calls instead of computing them.

A public function of aule picks the front end by its first array. Given an `Explained` one it comes here, with its
arguments in order, and ends with `Found`, which carries the explanation past whatever it would do with a result.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from aule.engine.explain import Explanation
from aule.frontends import by_type, dlpack, front_end, numpy_explain
from aule.options import AttentionOptions, DecodeOptions


class Explained:
    """The first array of a call that is to be explained."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype = array, getattr(array, "shape", ()), getattr(array, "dtype", None)
        self.ndim = len(self.shape)

    def swapaxes(self, *axes: int) -> Explained:
        """As of the array."""
        return Explained(self.array.swapaxes(*axes))

    def reshape(self, *shape: int) -> Explained:
        """As of the array."""
        return Explained(self.array.reshape(*shape))


class Found(Exception):
    """The end of a call that was explained."""

    def __init__(self, explanation: Explanation) -> None:
        super().__init__()
        self.explanation = explanation


def accepts(array: object) -> bool:
    """Whether this front end serves an array."""
    return isinstance(array, Explained)


def flash_attention(q: Explained, k: Any, v: Any, options: AttentionOptions) -> None:
    """End with the explanation of attention."""
    raise Found(_home("flash_attention", q).flash_attention(q.array, k, v, options))


def flash_attention_varlen(q: Explained, k: Any, v: Any, *rest: Any) -> None:
    """End with the explanation of attention on packed batches."""
    raise Found(_home("flash_attention_varlen", q).flash_attention_varlen(q.array, k, v, *rest))


def flex_attention(q: Explained, k: Any, v: Any, *rest: Any) -> None:
    """End with the explanation of attention with functions of the user."""
    raise Found(_home("flex_attention", q).flex_attention(q.array, k, v, *rest))


def decode(q: Explained, k: Any, v: Any, options: DecodeOptions) -> None:
    """End with the explanation of attention over a cache."""
    raise Found(_home(options.op, q).decode(q.array, k, v, options))


def row_op(name: str, arrays: tuple[Any, ...], options: tuple[Any, ...], backend: str | None) -> None:
    """End with the explanation of a row operation."""
    first: Explained = arrays[0]
    raise Found(_home(name, first).row_op(name, (first.array, *arrays[1:]), options, backend))


def _home(op: str, first: Explained) -> ModuleType:
    """The module that explains calls on arrays of a kind."""
    if front_end(first.array, op).__name__ != "aule.frontends.torch.entry":
        return numpy_explain
    from aule.frontends.torch import explain

    return explain


def on_host(array: Any) -> Any:
    """A DLPack array of another framework than PyTorch as a NumPy array; anything else as it is."""
    foreign = dlpack.accepts(array) and front_end(array) is dlpack
    return dlpack.host(array, "array", "explain") if foreign else array


by_type[Explained] = sys.modules[__name__]
