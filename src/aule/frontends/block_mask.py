"""BlockMask: a mask function with the lengths that it was made for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.errors import InvalidArgumentError
from aule.ops.scores.functions.evaluate import Evaluator
from aule.ops.scores.functions.program import BoundFunction
from aule.ops.scores.functions.trace import OP

MaskMod = Callable[[Any, Any, Any, Any], Any]
MASK_INPUTS = ("batch", "head", "query", "key")
SCORE_INPUTS = ("score", *MASK_INPUTS)
_MOST = 64
"""Rows and columns of the picture that `print` shows."""
_SHADES = "█░ "
"""All kept, some kept, none kept."""


class BlockMask:
    """Which keys each query keeps, as a function; made by `create_block_mask`.

    Kernels run the function tile by tile and skip what it drops, so nothing of the size of the mask is ever stored.

    Attributes
    ----------
    mask_mod : callable
        ``mask_mod(b, h, q_idx, kv_idx) -> bool``.
    shape : tuple of int
        ``(batch, heads, queries, keys)``; a batch or number of heads of 1 fits any.
    block_size : tuple of int
        Queries and keys of a block, for `to_dense`, `sparsity` and `print`.
    """

    def __init__(
        self,
        mask_mod: MaskMod,
        shape: tuple[int, int, int, int],
        block_size: tuple[int, int],
        evaluator: Callable[[BlockMask], Evaluator],
    ) -> None:
        self.mask_mod, self.shape, self.block_size, self._evaluator = mask_mod, shape, block_size, evaluator
        self._traced: dict[Any, tuple[MaskMod, tuple[BoundFunction, list[Any]]]] = {}
        """What front ends traced, by the type that is computed in, with the function that it was made of."""
        self.lists: dict[Any, Any] = {}
        """Lists of tiles that front ends keep for the next use."""

    def trace(self, key: Any, how: Callable[[], tuple[BoundFunction, list[Any]]]) -> tuple[BoundFunction, list[Any]]:
        """The traced function: traced once, and again if ``mask_mod`` was replaced."""
        known = self._traced.get(key)
        if known is None or known[0] is not self.mask_mod:
            known = self._traced[key] = self.mask_mod, how()
            self.lists.clear()
        return known[1]

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Refuse a call that the mask was not made for."""
        check_shape(self.shape, batch, heads, queries, keys)

    def to(self, device: object) -> BlockMask:
        """The mask itself, which lies on no device; tensors that its function captured stay where they are, as with
        PyTorch's."""
        return self

    # -- looking at it -------------------------------------------------------------------------------------------------

    def to_dense(self) -> npt.NDArray[np.int8]:
        """How much of each block is kept: 0 for nothing, 1 for some, 2 for all of it.

        Returns
        -------
        ndarray
            int8 ``[batch, heads, blocks of queries, blocks of keys]``.
        """
        rows, columns = (-(-n // size) for n, size in zip(self.shape[2:], self.block_size, strict=True))
        found = np.zeros((*self.shape[:2], rows, columns), np.int8)
        for place, kept in self._blocks():
            ends = np.arange(0, self.shape[3], self.block_size[1])
            some = np.logical_or.reduceat(kept, ends, axis=1).any(axis=0)
            full = np.logical_and.reduceat(kept, ends, axis=1).all(axis=0)
            found[place] = some.astype(np.int8) + full
        return found

    def sparsity(self) -> float:
        """The percentage of blocks in which nothing is kept."""
        dense = self.to_dense()
        return 100.0 * float((dense == 0).mean()) if dense.size else 0.0

    def _blocks(self) -> Iterator[tuple[tuple[int, int, int], npt.NDArray[np.bool_]]]:
        """Batch, head and number of each block of queries, with what it keeps."""
        evaluate = self._evaluator(self)
        batches, heads, queries, keys = self.shape
        size, key = self.block_size[0], np.arange(keys)[None]
        for b, h, block in np.ndindex(batches, heads, -(-queries // size)):
            query = np.arange(block * size, min((block + 1) * size, queries))[:, None]
            kept = evaluate(batch=b, head=h, query=query, key=key)
            yield (b, h, block), np.broadcast_to(kept, (len(query), keys)).astype(np.bool_)

    def to_string(self) -> str:
        """A picture of the first batch and head, one sign for each block or group of blocks."""
        dense = self.to_dense()[0, 0]
        step = max(-(-max(dense.shape) // _MOST), 1)
        lines = []
        for r in range(0, dense.shape[0], step):
            line = ""
            for c in range(0, dense.shape[1], step):
                part = dense[r : r + step, c : c + step]
                line += _SHADES[0 if (part == 2).all() else 2 if (part == 0).all() else 1] * 2
            lines.append(line.rstrip())
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"BlockMask(shape={self.shape}, block_size={self.block_size}, mask_mod={self.mask_mod!r})"

    def __str__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.1f}%)\n{self.to_string()}"


def check_shape(shape: Sequence[int], batch: int, heads: int, queries: int, keys: int) -> None:
    """Refuse a call that a mask of a shape was not made for."""
    if shape[0] in (1, batch) and shape[1] in (1, heads) and (shape[2], shape[3]) == (queries, keys):
        return
    raise InvalidArgumentError(
        f"[{OP}] expected a block mask for batch {batch}, {heads} heads, {queries} queries and {keys} keys, "
        f"got {list(shape)}; make one with create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)"
    )
