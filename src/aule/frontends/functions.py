"""Functions of the user in decoding and packed batches, before they are traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aule.errors import InvalidArgumentError, InvalidShapeError
from aule.frontends.block_mask import MASK_INPUTS, SCORE_INPUTS
from aule.ops.attention.validate import window_sides
from aule.ops.scores.functions.emit import MASK_FUNCTION, SCORE_FUNCTION
from aule.ops.scores.functions.trace import check_arguments
from aule.options import DecodeOptions

_PLACES = ("batch", "head", "query", "position", "key")
"""What a mask of decoding is traced with: the query's number among the newest tokens, and its place in the sequence."""


@dataclass(frozen=True)
class UserFunctions:
    """The functions of one call.

    Attributes
    ----------
    op : str
        The public function that was called, for messages.
    positions : bool
        Functions get the places of queries in their sequences; otherwise their numbers in the call.
    tree : array, optional
        Which of the newest keys each of the newest queries keeps: bool ``[tokens, tokens]`` or ``[batch, tokens,
        tokens]``.
    """

    op: str
    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    positions: bool = False
    tree: Any = None

    @staticmethod
    def of_decoding(options: DecodeOptions) -> UserFunctions:
        """The functions of a call of decoding."""
        return UserFunctions(options.op, options.score_mod, options.mask_mod, True, options.tree_mask)

    def each(self) -> Iterator[tuple[str, str, Callable[..., Any], Sequence[str]]]:
        """Name of the field, name of the buffers, function to trace, and its inputs, of each function there is."""
        if self.score_mod is not None:
            yield "score_mod", SCORE_FUNCTION, self.score_mod, self._inputs(SCORE_INPUTS)
        if self.tree is not None:
            yield "mask_mod", MASK_FUNCTION, self._with_tree(), _PLACES
        elif self.mask_mod is not None:
            yield "mask_mod", MASK_FUNCTION, self.mask_mod, self._inputs(MASK_INPUTS)

    def _inputs(self, names: Sequence[str]) -> Sequence[str]:
        return [{"query": "position"}.get(name, name) for name in names] if self.positions else names

    def _with_tree(self) -> Callable[..., Any]:
        """The mask function and the tree as one function."""
        mask_mod, tree = self.mask_mod, self.tree
        shared = len(tree.shape) == 2
        if mask_mod is not None:
            check_arguments(mask_mod, MASK_INPUTS, "mask_mod", self.op)

        def keeps(b: Any, h: Any, query: Any, position: Any, key: Any) -> Any:
            newest = key - (position - query)  # the key's number among the newest tokens
            kept = (newest < 0) | (tree[query, newest] if shared else tree[b, query, newest])
            return kept if mask_mod is None else kept & mask_mod(b, h, position, key)

        return keeps


def with_tree(options: DecodeOptions, batch: int, tokens: int | None, is_bool: bool) -> DecodeOptions:
    """Check a call with a tree mask, which replaces causality.

    Parameters
    ----------
    tokens : int, optional
        Queries of a sequence, of the longest if sequences are packed; None if only the device knows.
    is_bool : bool
        The mask is an array of bool.
    """
    op, shape = options.op, tuple(getattr(options.tree_mask, "shape", ()))
    if not is_bool:
        raise InvalidArgumentError(
            f"[{op}] expected tree_mask as an array of bool like q, got {type(options.tree_mask).__name__}"
            f"{'' if not shape else f' of {options.tree_mask.dtype}'}; True keeps a key"
        )
    packed = options.cu_seqlens_q is not None
    size = shape[-1] if shape else 0
    fits = tokens is None or (size >= tokens if packed else size == tokens)
    if len(shape) not in (2, 3) or shape[-2] != size or (len(shape) == 3 and shape[0] != batch) or not fits:
        wanted = "the tokens of the longest sequence" if tokens is None else f"tokens = {tokens}"
        raise InvalidShapeError(
            f"[{op}] expected tree_mask of shape [tokens, tokens] or [batch, tokens, tokens] with batch = {batch} and "
            f"{wanted}{' or more' if packed else ''}, got {list(shape)}; give a row for each of the newest queries and "
            "a column for each of the newest keys"
        )
    window = options.window
    if window is not None and not isinstance(window, (tuple, list)):
        window = (window_sides(op, window, True)[0], None)
    return options._replace(causal=False, window=window)
