"""Configurations: what is fixed about a kernel while it is traced.

Lengths, strides, scale and window sizes are parameters of the kernel, so that one kernel serves many problems.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aule.ops.rope.tables import Rope
from aule.ops.scores.config import ScoreConfig
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape


@dataclass(frozen=True, kw_only=True)
class GpuConfig(ScoreConfig):
    """What the configurations of GPU kernels share.

    Attributes
    ----------
    aligned : tuple of bool
        For q, k, v and o: rows can be read or written as vectors, of four elements in simt kernels, of eight on matrix
        units. Backward kernels, whose gradients are contiguous, have the gradient of o in place of o, in ``unit``, too.
    index64 : bool
        Element indices need 64 bits.
    """

    aligned: tuple[bool, ...] = (True, True, True, True)
    index64: bool = False


@dataclass(frozen=True, kw_only=True)
class ForwardConfig(GpuConfig):
    """A simt forward kernel.

    Attributes
    ----------
    pieces : bool
        Workgroups take pieces of blocks (`SplitBlocks` of `plan/split.py`).
    full_tiles : bool
        Rows of q, k, v and o are dense in memory and fill all tiles.
    """

    shape: SimtShape
    pieces: bool = False
    full_tiles: bool = False


@dataclass(frozen=True, kw_only=True)
class FragmentConfig(GpuConfig):
    """A forward kernel on matrix units.

    Attributes
    ----------
    folded : bool
        The scale is part of the exponent. It must be positive, and nothing may be added to scores.
    factor : str or None
        Type to which Q, K and V are rounded; None if they have it already.
    pairs : tuple of str
        Which of an additive mask and bias can be read two keys at a time.
    one_loop : bool
        Over warpgroups: there are so many edge tiles that they share one loop with the others.
    linear : bool
        Over warpgroups: ALiBi is the only modifier of every score, and no row keeps a key to the right of its position,
        so that the bias is linear in the key.
    pieces : bool
        As in `ForwardConfig`; over warpgroups some blocks are divided into pieces (`SplitLastWave`).
    full_tiles : bool
        Every row keeps every key, and blocks of rows and tiles of keys are full (`forward_full_tiles.py`).
    """

    shape: FragmentShape
    folded: bool = False
    factor: str | None = None
    pairs: tuple[str, ...] = ()
    one_loop: bool = False
    linear: bool = False
    pieces: bool = False
    full_tiles: bool = False


@dataclass(frozen=True, kw_only=True)
class BackwardConfig(GpuConfig):
    """A simt backward kernel.

    Attributes
    ----------
    of : {"queries", "keys", "scores"}
        Computes dQ, or dK and dV, or dS alone.
    sums : bool
        The kernel of dK and dV also adds its keys' share of dQ to sums in fp32. The order of workgroups varies, so the
        last bits of dQ may differ from run to run.
    scores : bool
        Stores dS, the gradient of what is added to the scores; not the kernel of dK and dV.
    """

    of: Literal["queries", "keys", "scores"]
    shape: SimtShape
    sums: bool = False
    scores: bool = False


@dataclass(frozen=True, kw_only=True)
class FragmentBackwardConfig(GpuConfig):
    """A backward kernel on matrix units.

    Attributes
    ----------
    of : {"queries", "keys", "scores"}
        Computes dQ, or dK and dV, or dS, the gradient of what is added to the scores.
    shape : FragmentShape
        A workgroup owns ``block_q`` rows and passes over tiles of ``block_kv`` rows.
    sums : bool
        As in `BackwardConfig`.
    folded : bool
        As in `FragmentConfig`.
    one_block : bool
        With ``sums``: a block has all keys, so that nobody else adds to its rows of dQ, and they are stored.
    shared_blocks : bool
        Several workgroups share each of the last blocks of keys, or of all (`SplitLastWave` of `plan/split.py`).
    """

    of: Literal["queries", "keys", "scores"]
    shape: FragmentShape
    sums: bool = False
    one_block: bool = False
    folded: bool = False
    shared_blocks: bool = False


@dataclass(frozen=True)
class DeltaConfig:
    """The GPU kernel of ``delta = sum of dO * O`` along each row.

    Attributes
    ----------
    lanes : int
        Threads that share a row: lanes of a subgroup, or 1.
    unit, aligned : tuple of bool
        For o and its gradient.
    clear : bool
        Also sets the sums of dQ to zero.
    run : int
        Neighbouring elements that are moved together.
    lse_gradient : bool
        The log-sum-exp has a gradient, too, which is subtracted.
    """

    dtype: str
    value_dim: int
    threads: int
    lanes: int
    unit: tuple[bool, ...]
    aligned: tuple[bool, ...]
    index64: bool
    clear: bool = False
    run: int = 4
    lse_gradient: bool = False


@dataclass(frozen=True)
class RoundConfig:
    """The GPU kernel that scales the sums of dQ and rounds them to the type of the result.

    Attributes
    ----------
    shape : SimtShape or None
        Shape of the simt kernel that made the sums; None for matrix units, whose sums lie as fragments do.
    rope : Rope or None
        dQ is rotated back.
    quads : bool
        The sums of entire blocks lie in groups of four: two neighbours in each of two rows.
    octets : bool
        Of eight neighbours of a row, the sums of the even columns lie together, and those of the odd ones.
    """

    dtype: str
    head_dim: int
    threads: int
    index64: bool
    shape: SimtShape | None
    rope: Rope | None = None
    rope_unit: bool = True
    quads: bool = False
    octets: bool = False

    @property
    def run(self) -> int:
        """Neighbouring elements of a thread."""
        return 2 if self.head_dim % 2 == 0 else 1
