"""precompute_rope_frequencies: tables of rotary position embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, overload

from aule.api.names import refuses_unknown, unknown_option
from aule.errors import OutOfMemoryError
from aule.frontends import maker
from aule.ops.rope.tables import checked_frequencies, frequencies

if TYPE_CHECKING:
    import numpy.typing as npt


@overload
def precompute_rope_frequencies(
    seq_len: int, head_dim: int, base: float = ..., device: None = ..., dtype: str | None = ...
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...
@overload
def precompute_rope_frequencies(
    seq_len: int, head_dim: int, base: float = ..., device: Any = ..., dtype: Any = ...
) -> tuple[Any, Any]: ...
@refuses_unknown
def precompute_rope_frequencies(
    seq_len: int, head_dim: int, base: float = 10000.0, device: Any = None, dtype: Any = None, **unknown: NoReturn
) -> tuple[Any, Any]:
    """Cosines and sines of rotary position embeddings.

    Parameters
    ----------
    seq_len : int
        Positions, from 0 on.
    head_dim : int
        Columns to rotate; even.
    base : float
        Pair ``i`` is rotated by ``base ** (-2 i / head_dim)`` per position.
    device : torch.device or str, optional
        Give torch tensors there; otherwise, unless ``dtype`` is one of torch, NumPy arrays.
    dtype : str or dtype, optional
        float32 (the default), float16, bfloat16 or float64. They are computed in float64 and rounded once.

    Returns
    -------
    cos, sin : array
        ``[seq_len, head_dim // 2]``.
    """
    op = "precompute_rope_frequencies"
    if unknown:
        raise unknown_option(precompute_rope_frequencies, unknown)
    seq_len, head_dim, base = checked_frequencies(op, seq_len, head_dim, base, ("seq_len", "head_dim"))
    end = maker(device, dtype, op)
    try:
        cos, sin = frequencies(seq_len, head_dim, base)
    except MemoryError as error:
        nbytes = 8 * seq_len * (head_dim // 2)
        raise OutOfMemoryError(f"[{op}] expected {nbytes} bytes, got none ({error}); take less", nbytes) from error
    return end.make(cos, device, dtype, op), end.make(sin, device, dtype, op)
