"""`context_parallel`: models whose tensors are shards compute their attention over all ranks, without changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.backends import mha
from torch.nn import functional

from aule.distributed.entry import attention
from aule.distributed.group import mesh_rings
from aule.distributed.positions import check_balance
from aule.errors import InvalidArgumentError, InvalidShapeError
from aule.frontends.torch.modes import called_by
from aule.frontends.torch.sdpa.functions import replace_imports

__all__ = ["context_parallel"]


class Context(NamedTuple):
    """A mesh, and how rows are divided over it."""

    mesh: Any
    balance: str

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Attention over the rows of all ranks."""
        return attention(q, k, v, mesh=self.mesh, balance=self.balance, **options)


_active: list[Context] = []
"""Contexts entered, the innermost last. For all threads: autograd may run checkpointed layers in its own."""


def current() -> Context | None:
    """Return the innermost context; None outside of all."""
    return _active[-1] if _active else None


@contextmanager
def context_parallel(mesh: Any = None, *, balance: str = "zigzag") -> Iterator[None]:
    """Compute all attention inside over the rows of all ranks: a context manager.

    Inside, ``torch.nn.functional.scaled_dot_product_attention`` and transformers models with
    ``attn_implementation="aule"`` take their tensors for shards, as `shard` gives them. Everything else in a model
    works on rows and needs no change, except that positions must be those of the sequence: give `shard_positions` as
    ``position_ids``. Run the backward pass inside, too, if layers are checkpointed. Attention by other functions stays
    that of this rank's rows alone: those of aule, ``flex_attention``, and ``torch.nn.MultiheadAttention`` with
    ``need_weights=True``.

    Parameters
    ----------
    mesh : DeviceMesh or ProcessGroup, optional
        As for `attention`; default: a ring of all ranks.
    balance : {"zigzag", "contiguous", "striped"}
        How rows are divided.
    """
    op = "context_parallel"
    check_balance(op, balance)
    mesh_rings(op, mesh)
    before, fused = functional.scaled_dot_product_attention, mha.get_fastpath_enabled()
    _active.append(Context(mesh, balance))
    functional.scaled_dot_product_attention = _scaled_dot_product_attention
    replace_imports(before, _scaled_dot_product_attention)
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(fused)
        functional.scaled_dot_product_attention = before
        replace_imports(_scaled_dot_product_attention, before)
        _active.pop()


@called_by("context_parallel")
def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute PyTorch's function of this name over the rows of all ranks; a mask has this rank's rows and all keys."""
    context, op = current(), "scaled_dot_product_attention"
    assert context is not None
    if attn_mask is not None and is_causal:
        raise InvalidArgumentError(f"[{op}] expected attn_mask or is_causal, got both; leave one out")
    if not enable_gqa and query.ndim > 2 and query.shape[-3] != key.shape[-3]:
        raise InvalidShapeError(
            f"[{op}] expected as many key heads as query heads, got {key.shape[-3]} and {query.shape[-3]}; pass "
            "enable_gqa=True"
        )
    return context.attend(
        query, key, value, mask=attn_mask, dropout_p=dropout_p, causal=is_causal, causal_align="top-left", scale=scale
    )
