"""What is fixed about a kernel while it is traced.

What is not here (lengths, strides, scale, window sizes) is a parameter of the kernel, so that one kernel serves all but
those that `ForwardConfig.whole` is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aule.ops.attention.problem import Rope
from aule.tile.fragment_shape import FragmentShape
from aule.tile.simt_shape import SimtShape

Columns = Literal["unit", "same", "any"]
"""How a mask or bias runs along a row: consecutive elements, one element for all keys, or any stride."""

Paging = Literal["none", "shift", "divide"]
"""Keys one behind the other; in pages whose size is a power of two; in pages of any other size."""


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """What every attention kernel must know: types, dimensions, and what happens between scores and softmax.

    Attributes
    ----------
    left, right : bool
        The band of kept keys has this side.
    mask, bias : str or None
        Element type; "bits" for a boolean mask that comes as `mask_tiles` leaves it.
    listed : bool
        Tiles that the mask leaves over are in a list (`mask_tiles`); where they are partly dropped it is applied.
    packed : bool
        Sequences of different lengths lie one behind the other; where each begins is in buffers.
    lens : bool
        The number of keys of each sequence is in a buffer, and keys are not packed: decoding.
    paging : {"none", "shift", "divide"}
        How keys lie; pages go with ``lens``.
    unit : tuple of bool
        For q, k, v, o: the head dimension has stride 1.
    rope : Rope or None
        q and k are rotated, and the gradients rotated back.
    turned : bool
        q and k come rotated already.
    rope_unit, rope_aligned : bool
        Rows of the tables have stride 1, and can be read as vectors as long as those of q, k, v.
    """

    dtype: str
    head_dim: int
    value_dim: int
    left: bool = False
    right: bool = False
    softcap: bool = False
    mask: str | None = None
    bias: str | None = None
    listed: bool = False
    alibi: bool = False
    sinks: bool = False
    lse: bool = False
    dropout: bool = False
    packed: bool = False
    lens: bool = False
    paging: Paging = "none"
    unit: tuple[bool, ...] = (True, True, True, True)
    rope: Rope | None = None
    turned: bool = False
    rope_unit: bool = True
    rope_aligned: bool = False

    @property
    def everywhere(self) -> bool:
        """Every tile may have dropped keys."""
        return (self.mask is not None and not self.listed) or self.bias is not None

    @property
    def keeps_all(self) -> bool:
        """Nothing happens to scores on the way to softmax: every row keeps every key that there is."""
        return not (self.left or self.right or self.softcap or self.mask or self.bias or self.alibi)

    @property
    def drops_later(self) -> bool:
        """Nothing happens to scores but that rows drop keys to the right."""
        return self.right and not (self.left or self.softcap or self.mask or self.bias or self.alibi)


@dataclass(frozen=True, kw_only=True)
class ForwardConfig(ScoreConfig):
    """A forward kernel for GPUs.

    Attributes
    ----------
    aligned : tuple of bool
        For q, k, v, o: rows can be read or written as vectors of four.
    index64 : bool
        Element indices need 64 bits.
    tail : bool
        Workgroups have pieces of blocks (`tail.py`).
    whole : bool
        Rows of q, k, v and o follow each other in memory without a gap, and are whole tiles.
    """

    shape: SimtShape
    aligned: tuple[bool, ...] = (True, True, True, True)
    index64: bool = False
    tail: bool = False
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class FragmentConfig(ScoreConfig):
    """A forward kernel for matrix units.

    Attributes
    ----------
    aligned : tuple of bool
        For q, k, v, o: rows can be read or written as vectors of eight.
    index64 : bool
        Element indices need 64 bits.
    folded : bool
        The scale is part of the exponent. It must be positive, and nothing may be added to scores.
    factor : str or None
        Type to which Q, K and V are rounded on their way in; None: they have it already.
    pairs : tuple of str
        Which of mask and bias, where they are added, can be read two keys at a time.
    one_loop : bool
        Over warpgroups: tiles with dropped keys are so many that they are in one loop with the others.
    linear : bool
        Over warpgroups: ALiBi is all that every score is modified by, and no row keeps a key to the right of where it
        stands, so that what is added grows with the key.
    tail : bool
        As in `ForwardConfig`; not over warpgroups.
    whole : bool
        Every row keeps every key, and blocks of rows and tiles of keys are full (`forward_whole.py`).
    """

    shape: FragmentShape
    aligned: tuple[bool, ...] = (True, True, True, True)
    index64: bool = False
    folded: bool = False
    factor: str | None = None
    pairs: tuple[str, ...] = ()
    one_loop: bool = False
    linear: bool = False
    tail: bool = False
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class BackwardConfig(ScoreConfig):
    """A kernel of the gradients for GPUs.

    Attributes
    ----------
    of : {"queries", "keys"}
        dQ, or dK and dV.
    sums : bool
        The kernel of dK and dV also adds what its keys bring to dQ to sums in fp32. Which workgroup comes first is
        chance, so the last bits of dQ may differ from run to run.
    unit, aligned : tuple of bool
        For q, k, v and the gradient of o, as in `ForwardConfig`. The gradients that are made are contiguous.
    """

    of: Literal["queries", "keys"]
    shape: SimtShape
    sums: bool = False
    scores: bool = False
    """The kernel of dQ also stores dS, the gradient of what is added to the scores."""
    aligned: tuple[bool, ...] = (True, True, True, True)
    index64: bool = False


@dataclass(frozen=True, kw_only=True)
class FragmentBackwardConfig(ScoreConfig):
    """A kernel of the gradients for matrix units.

    Attributes
    ----------
    of : {"queries", "keys"}
        dQ, or dK and dV.
    shape : FragmentShape
        ``block_q`` are the rows that a workgroup owns, ``block_kv`` those of a tile that it passes over.
    sums : bool
        As in `BackwardConfig`.
    unit, aligned, folded
        As in `FragmentConfig`, for q, k, v and the gradient of o.
    cut : bool
        The last blocks of keys are cut (`cut.py`).
    """

    of: Literal["queries", "keys"]
    shape: FragmentShape
    sums: bool = False
    aligned: tuple[bool, ...] = (True, True, True, True)
    index64: bool = False
    folded: bool = False
    cut: bool = False


@dataclass(frozen=True)
class DeltaConfig:
    """The kernel of ``delta = sum of dO * O`` along each row, for GPUs.

    Attributes
    ----------
    lanes : int
        Threads that share a row: lanes of a subgroup, or 1.
    unit, aligned : tuple of bool
        For o and its gradient.
    """

    dtype: str
    value_dim: int
    threads: int
    lanes: int
    unit: tuple[bool, ...]
    aligned: tuple[bool, ...]
    index64: bool
    clear: bool = False
    """dQ's sums are set to zero."""
    run: int = 4
    """Neighbouring elements that travel together."""


@dataclass(frozen=True)
class RoundConfig:
    """The kernel that brings dQ's sums, scaled, into the type of the result, for GPUs.

    Attributes
    ----------
    shape : SimtShape or None
        Of the kernel that has added them up; None for one on matrix units, whose sums lie as fragments do.
    """

    dtype: str
    head_dim: int
    threads: int
    index64: bool
    shape: SimtShape | None
    rope: Rope | None = None
    """dQ is rotated back."""
    rope_unit: bool = True
    quads: bool = False
    """Sums of whole blocks lie four together, two neighbours in each of two rows."""
    octets: bool = False
    """Of eight neighbours of a row, sums of the even columns lie together, and those of the odd ones."""

    @property
    def run(self) -> int:
        """Neighbouring elements that one thread brings."""
        return 2 if self.head_dim % 2 == 0 else 1
