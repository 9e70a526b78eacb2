"""Attention with functions of the user: PyTorch's FlexAttention on every device, for NumPy arrays too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from aule.api.names import refuses_unknown, unknown_option
from aule.errors import InvalidArgumentError, InvalidShapeError
from aule.frontends import front_end, mask_evaluator
from aule.frontends.block_mask import BlockMask, MaskMod
from aule.ops.scores.functions.trace import OP
from aule.ops.shared.checks import checked_flag, checked_integer

ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]


class AuxRequest(NamedTuple):
    """Further results that `flex_attention` is to return; PyTorch's own serves as well."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """Further results of `flex_attention`; None if they were not asked for."""

    lse: Any = None
    max_scores: Any = None


@refuses_unknown
def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Any:
    """Attention with your own function of the scores, and your own mask.

    It has the signature and meaning of `torch.nn.attention.flex_attention.flex_attention`. The functions are traced
    into the kernel of the device at hand: nothing is compiled by PyTorch, and the scores are never stored.

    Parameters
    ----------
    query, key, value : array
        ``[batch, heads, seq, head_dim]``, as for `flash_attention`.
    score_mod : callable, optional
        ``score_mod(score, b, h, q_idx, kv_idx) -> score``: called once with symbols, for one score. It may use
        arithmetic, comparisons, ``torch.where`` and the like (or NumPy's), and index captured tensors. Captured tensors
        and numbers may change from call to call without a new kernel (0, 1 and powers of two as divisors excepted).
        Integers of fewer than 32 bits are computed as int32, so they do not wrap around as in PyTorch.
    block_mask : BlockMask, optional
        From `create_block_mask`, or PyTorch's own: keys that it drops are not attended to.
    scale : float, optional
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    enable_gqa : bool
        ``heads_q`` may be a multiple of ``heads_kv``.
    return_lse : bool
        Also return the log-sum-exp; the older way of ``return_aux``.
    kernel_options : dict, optional
        Accepted and ignored: they are PyTorch's.
    return_aux : AuxRequest, optional
        ``AuxRequest(lse=True)`` returns ``AuxOutput`` with the log-sum-exp as a second result. ``max_scores=True`` adds
        the largest score of each row, without gradients, which takes a second pass outside of the kernel.
    backend : str, optional
        As in `flash_attention`.

    Returns
    -------
    array or (array, array) or (array, AuxOutput)
        The kind, dtype and device of ``query``. A row that keeps no key is zero, its log-sum-exp -inf. For torch
        tensors query, key, value, captured tensors of ``score_mod`` and the log-sum-exp have gradients.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = v = np.ones((1, 2, 64, 16), np.float32)
    >>> slopes = np.array([0.5, 0.25], np.float32)
    >>> def alibi(score, b, h, q_idx, kv_idx):
    ...     return score - slopes[h] * abs(q_idx - kv_idx)
    >>> causal = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64)
    >>> flex_attention(q, k, v, alibi, causal, backend="numpy").shape
    (1, 2, 64, 16)
    """
    if unknown:
        raise unknown_option(flex_attention, unknown)
    return_lse, enable_gqa = checked_flag(OP, "return_lse", return_lse), checked_flag(OP, "enable_gqa", enable_gqa)
    if return_lse and return_aux is not None:
        raise InvalidArgumentError(f"[{OP}] expected return_lse or return_aux, got both; leave return_lse out")
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise InvalidArgumentError(
            f"[{OP}] expected return_aux as an AuxRequest, got {type(return_aux).__name__}; pass "
            "aule.AuxRequest(lse=True)"
        )
    end = front_end(query, OP)
    _check_shapes(query, key, value, enable_gqa)
    out, lse = end.flex_attention(query, key, value, score_mod, block_mask, scale, backend)
    if return_aux is not None:
        wanted = getattr(return_aux, "max_scores", False)  # PyTorch's before 2.10 has no such field
        largest = end.max_scores(query, key, score_mod, block_mask, scale) if wanted else None
        return out, AuxOutput(lse if return_aux.lse else None, largest)
    return (out, lse) if return_lse else out


def _check_shapes(query: Any, key: Any, value: Any, enable_gqa: bool) -> None:
    shapes = [tuple(getattr(x, "shape", (0, 0, 0, 0))) for x in (query, key, value)]  # the front end refuses others
    if any(len(shape) != 4 for shape in shapes):
        raise InvalidShapeError(
            f"[{OP}] expected query, key and value of shape [batch, heads, seq, head_dim], got "
            f"{', '.join(str(list(shape)) for shape in shapes)}; add axes of length 1"
        )
    if not enable_gqa and shapes[0][1] != shapes[1][1] and hasattr(key, "shape"):
        raise InvalidShapeError(
            f"[{OP}] expected as many heads of key and value as of query, got {shapes[0][1]} and {shapes[1][1]}; pass "
            "enable_gqa=True to share heads of key and value"
        )


@refuses_unknown
def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    **unknown: NoReturn,
) -> BlockMask:
    """Make a mask for `flex_attention` from a function. Nothing is computed before the mask is used.

    A mask that is used again is quicker: it keeps lists of the tiles that it drops, and makes them again when PyTorch
    has counted a change of a captured tensor (writes through NumPy or ``.data`` are not counted: make a new mask).

    Parameters
    ----------
    mask_mod : callable
        ``mask_mod(b, h, q_idx, kv_idx) -> bool``: whether a query keeps a key. It is written like a ``score_mod``.
    B, H : int or None
        Batch and query heads that the mask differs for; None or 1 if it is the same for all.
    Q_LEN, KV_LEN : int
        Lengths of queries and keys.
    device, _compile
        Accepted and ignored: the function is traced when the mask is used.
    BLOCK_SIZE : int or (int, int)
        Queries and keys of a block when the mask is printed.

    Returns
    -------
    BlockMask

    Examples
    --------
    >>> mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 64), None, None, 256, 256, BLOCK_SIZE=64)
    >>> print(mask)
    BlockMask(shape=(1, 1, 256, 256), sparsity=56.2%)
    ░░
    ░░░░
      ░░░░
        ░░░░
    """
    op = "create_block_mask"
    if unknown:
        raise unknown_option(create_block_mask, unknown)
    _check_functions(op, (mask_mod,))
    numbers = {"B": 1 if B is None else B, "H": 1 if H is None else H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
    shape = tuple(checked_integer(op, name, n, "pass an int") for name, n in numbers.items())
    if min(shape) < 0:
        raise InvalidArgumentError(
            f"[{op}] expected lengths of at least 0, got {list(shape)}; pass the lengths of query and key"
        )
    sizes = BLOCK_SIZE if isinstance(BLOCK_SIZE, (tuple, list)) else (BLOCK_SIZE, BLOCK_SIZE)
    if len(sizes) != 2 or not all(isinstance(size, (int, np.integer)) and size >= 1 for size in sizes):
        raise InvalidArgumentError(
            f"[{op}] expected BLOCK_SIZE as an int of at least 1 or two of them, got {BLOCK_SIZE!r}; leave it out for "
            "128"
        )
    return BlockMask(mask_mod, shape, tuple(sizes), mask_evaluator)  # type: ignore[arg-type]


def _check_functions(op: str, functions: Sequence[Any]) -> None:
    for function in functions:
        if not callable(function):
            remedy = "pass its mask_mod" if hasattr(function, "mask_mod") else "pass mask_mod(b, h, q_idx, kv_idx)"
            raise InvalidArgumentError(f"[{op}] expected functions of masks, got {type(function).__name__}; {remedy}")


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask function that keeps what all of some mask functions keep."""
    _check_functions("and_masks", mask_mods)

    def and_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kept = noop_mask(b, h, q_idx, kv_idx)
        for mask_mod in mask_mods:
            kept = kept & mask_mod(b, h, q_idx, kv_idx)
        return kept

    return and_mask


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask function that keeps what any of some mask functions keeps."""
    _check_functions("or_masks", mask_mods)

    def or_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kept = q_idx < 0
        for mask_mod in mask_mods:
            kept = kept | mask_mod(b, h, q_idx, kv_idx)
        return kept

    return or_mask


def noop_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The mask function that keeps everything."""
    return q_idx >= 0
