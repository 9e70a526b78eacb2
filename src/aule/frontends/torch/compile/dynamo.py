"""Functions that PyTorch's compiler puts into its graphs without tracing into them.

Tracing would fail on errors, caches and locks. Later stages of compilation run these functions with fake tensors, where
they become operators of `aule.frontends.torch.compile`. Imported only while compiling, since it imports the compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aule.frontends.torch import entry
from aule.frontends.torch.calls import Results
from aule.frontends.torch.sdpa import functions as sdpa
from aule.options import AttentionOptions


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> entry.WithLse:
    """`aule.flash_attention`, with the fields of its options."""
    return entry.flash_attention(q, k, v, AttentionOptions(*options))


def _scaled_dot_product_attention(*arguments: Any) -> Tensor:
    return sdpa.compute(*arguments)


def _installed(number: int, *arguments: Any) -> Tensor:
    """The function that `aule.install` put in the place of PyTorch's."""
    return sdpa.serve(number, *arguments)


def _row_op(name: str, backend: str | None, tensors: int, *arguments: Any) -> Tensor | Results:
    """A row operation; the first ``tensors`` of the arguments are its tensors."""
    return entry.row_op(name, arguments[:tensors], arguments[tensors:], backend)


_row_op_in_graph = torch.compiler.allow_in_graph(_row_op)


def row_op(
    name: str, tensors: tuple[Tensor | None, ...], options: tuple[object, ...], backend: str | None
) -> Tensor | Results:
    """A row operation in a graph."""
    return _row_op_in_graph(name, backend, len(tensors), *tensors, *options)


flash_attention = torch.compiler.allow_in_graph(_flash_attention)
scaled_dot_product_attention = torch.compiler.allow_in_graph(_scaled_dot_product_attention)
installed = torch.compiler.allow_in_graph(_installed)
flash_attention_varlen = torch.compiler.disable(entry.flash_attention_varlen)
decode = torch.compiler.disable(entry.decode)
"""Packed batches and decoding have no operator: a graph ends before such a call, and the next begins after it."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def call_outside(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function between two graphs."""
    return function(*args, **kwargs)
