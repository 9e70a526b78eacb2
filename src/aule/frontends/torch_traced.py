"""Calls that PyTorch's compiler takes into its graphs as they are.

It would otherwise read the Python of a whole call, and stumble over what is no part of a graph: errors, caches, locks.
So it sees one function, which the later stages of compilation run with fake tensors and which becomes an operator of
`aule.frontends.torch_ops` there. Imported only while compiling, since it imports the compiler.
"""

from __future__ import annotations

from typing import Any

import torch

from aule.frontends import torch as front_end
from aule.frontends import torch_sdpa
from aule.options import AttentionOptions


def _flash_attention(q: Any, k: Any, v: Any, *options: Any) -> Any:
    """`aule.flash_attention`, with the fields of its options."""
    return front_end.flash_attention(q, k, v, AttentionOptions(*options))


def _scaled_dot_product_attention(*arguments: Any) -> Any:
    """`aule.scaled_dot_product_attention`."""
    return torch_sdpa.compute(*arguments)


def _installed(number: int, *arguments: Any) -> Any:
    """What `aule.install` put in the place of PyTorch's function."""
    return torch_sdpa.serve(number, *arguments)


flash_attention = torch.compiler.allow_in_graph(_flash_attention)
scaled_dot_product_attention = torch.compiler.allow_in_graph(_scaled_dot_product_attention)
installed = torch.compiler.allow_in_graph(_installed)
flash_attention_varlen = torch.compiler.disable(front_end.flash_attention_varlen)
decode = torch.compiler.disable(front_end.decode)
"""Packed batches and decoding have no operator: a graph ends before one, and the next begins behind it."""
