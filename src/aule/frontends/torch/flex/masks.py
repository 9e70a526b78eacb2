"""Masks of blocks: aule's own, and PyTorch's taken as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aule.errors import DeviceMismatchError, InvalidArgumentError
from aule.frontends.block_mask import MASK_INPUTS, BlockMask
from aule.frontends.torch.flex.lists import state_of
from aule.frontends.torch.flex.trace import traced
from aule.ops.scores.functions.evaluate import Evaluator
from aule.ops.scores.functions.program import BoundFunction
from aule.ops.scores.functions.trace import OP

_NO_MASK = 1 << 30
"""Blocks of PyTorch's mask that stands for none are this long."""


def mask_of(
    given: Any, q: Tensor, keys: int
) -> tuple[tuple[BoundFunction, list[Tensor]] | None, tuple[dict[Any, Any], Any] | None]:
    """The mask function of a call with queries ``q``, and the tensors that it captured, None if nothing is dropped; and
    where the mask keeps lists of tiles, with the state that they belong to."""
    if isinstance(given, BlockMask):
        work = "f64" if q.dtype == torch.float64 else "f32"
        found = given.trace((work, q.device), lambda: traced(given.mask_mod, MASK_INPUTS, q, "mask_mod"))
        given.check(q.shape[0], q.shape[1], q.shape[2], keys)
        state = state_of(found[1])
        return found, None if state is None else (given.lists, state)
    if given is None or _keeps_all(given, q):
        return None, None
    made_of = _state(given)
    known = getattr(given, "_aule_mask", None)
    if known is None or known[0] != made_of:
        # The tensors are kept alive: a new one in the place of an old one has another id only then.
        known = given._aule_mask = made_of, _of_torch(given), _tensors(given)
    return mask_of(known[1], q, keys)


def as_block_mask(given: Any, q: Tensor) -> BlockMask | None:
    """A mask of blocks, ours or PyTorch's; None if nothing is dropped. Dynamo reads this function."""
    if given is None or isinstance(given, BlockMask):
        return given
    return None if _keeps_all(given, q) else _of_torch(given)


def _keeps_all(given: Any, q: Tensor) -> bool:
    """Whether PyTorch's mask stands for none; other objects are refused."""
    if not all(hasattr(given, name) for name in ("kv_num_blocks", "kv_indices", "mask_mod", "BLOCK_SIZE")):
        raise InvalidArgumentError(
            f"[{OP}] expected block_mask of create_block_mask, aule's or PyTorch's, got {type(given).__name__}; "
            "make one with aule.create_block_mask"
        )
    if min(given.BLOCK_SIZE) >= _NO_MASK:
        return True
    if given.kv_num_blocks.device != q.device:
        raise DeviceMismatchError(
            f"[{OP}] expected block_mask on {q.device} like query, got {given.kv_num_blocks.device}; move it with .to"
        )
    return False


def _state(given: Any) -> list[Any]:
    """What PyTorch's mask is made of: it may be replaced, or changed in place."""
    tensors = _tensors(given)
    versions = [None if x is None or x.is_inference() else x._version for x in tensors]
    return [given.mask_mod, tuple(given.shape), tuple(given.BLOCK_SIZE), *map(id, tensors), *versions]


def _tensors(given: Any) -> tuple[Tensor | None, ...]:
    return given.kv_num_blocks, given.kv_indices, given.full_kv_num_blocks, given.full_kv_indices


def _of_torch(given: Any) -> BlockMask:
    """PyTorch's mask of blocks as one function: blocks that are listed as full are kept, those listed as partial where
    its function says so, and others are dropped."""
    shape = (1, 1, *given.shape)[-4:]
    size_q, size_kv = given.BLOCK_SIZE
    function: Callable[..., Any] | None = given.mask_mod
    columns = -(-shape[3] // size_kv)
    partial = _dense(given.kv_num_blocks, given.kv_indices, columns)
    full = None
    if given.full_kv_num_blocks is not None:
        full = _dense(given.full_kv_num_blocks, given.full_kv_indices, columns)
    batches, heads = shape[:2]

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        at = (b if batches > 1 else 0, h if heads > 1 else 0, q // size_q, kv // size_kv)
        kept = partial[at] if function is None else partial[at] & function(b, h, q, kv)
        return kept if full is None else kept | full[at]

    return BlockMask(mask_mod, shape, (size_q, size_kv), mask_evaluator)


def _dense(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Lists of blocks ``[batch, heads, rows, blocks]``, of which the first ``counts`` count, as booleans."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    dense = torch.zeros((*counts.shape, max(columns, indices.shape[-1]) + 1), dtype=torch.bool, device=indices.device)
    # Those that do not count go to one column more, which is cut off.
    places = torch.where(listed, indices, dense.shape[-1] - 1).to(torch.int64)
    dense = dense.scatter_(-1, places, True)[..., :columns].contiguous()
    return dense.view((1,) * (4 - dense.dim()) + dense.shape)


def mask_evaluator(block_mask: BlockMask) -> Evaluator:
    """The mask's function on NumPy arrays."""
    like = torch.empty(0)
    found, arrays = block_mask.trace("print", lambda: traced(block_mask.mask_mod, MASK_INPUTS, like, "mask_mod"))
    return Evaluator(found, [_on_host(x) for x in arrays])


def _on_host(x: Any) -> Any:
    x = x.detach().cpu()
    return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).numpy()
