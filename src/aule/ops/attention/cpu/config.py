"""Configurations of the CPU's attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from aule.ir.types import SCALARS, Scalar, u32
from aule.ops.scores.config import Columns, ScoreConfig
from aule.tile.vector.engine import VectorUnit, work_type


@dataclass(frozen=True)
class CpuShape:
    """Block sizes of a CPU kernel.

    Attributes
    ----------
    unit : VectorUnit
        Vector registers.
    rows : int
        Rows of Q that are multiplied with a panel at a time.
    panel : int
        Keys of a panel, a multiple of the lanes.
    block_q : int
        Rows of Q of a task.
    block_kv : int
        Keys of a block, a multiple of the panel. K and V of a block stay in the second-level cache while all rows use
        them, the scores of ``rows`` rows in the first-level cache.
    """

    engine: ClassVar = "vector"

    unit: VectorUnit
    rows: int
    panel: int
    block_q: int
    block_kv: int

    @property
    def lanes(self) -> int:
        return self.unit.lanes

    @property
    def panel_vectors(self) -> int:
        return self.panel // self.unit.lanes

    def vectors(self, cols: int) -> int:
        """Vectors that hold a row of ``cols`` elements."""
        return -(-cols // self.unit.lanes)

    def padded(self, cols: int) -> int:
        """``cols`` rounded up to full vectors."""
        return self.vectors(cols) * self.unit.lanes


@dataclass(frozen=True, kw_only=True)
class CpuScoreConfig(ScoreConfig):
    """What the configurations of the forward and the backward kernel share.

    Attributes
    ----------
    pairs : bool
        Products run on pairs of bf16; P and dS are rounded to bf16 for them.
    mask_columns, bias_columns : {"unit", "same", "any"}
        Layout of mask and bias along a row.
    """

    shape: CpuShape
    pairs: bool = False
    mask_columns: Columns = "any"
    bias_columns: Columns = "any"

    @property
    def score_unit(self) -> float:
        """Scores are what they are (`NaturalMaximum`)."""
        return 1.0

    @property
    def work(self) -> Scalar:
        """Type that the kernel computes in."""
        return work_type(SCALARS[self.dtype])

    @property
    def factor(self) -> Scalar:
        """Element type of the products' operands."""
        return u32 if self.pairs else self.work

    @property
    def step(self) -> int:
        """Values in an element of the products' operands."""
        return 2 if self.pairs else 1


@dataclass(frozen=True, kw_only=True)
class CpuConfig(CpuScoreConfig):
    """A forward kernel for CPUs.

    Attributes
    ----------
    grouped : bool
        A task has the few rows of all query heads that share a key head, and a split of the keys; otherwise a block of
        rows of one query head, and all keys.
    split : bool
        Several tasks share the keys of a head and leave partial results for `build_combine`.
    panels : {"workspace", "scratch", "none"}
        K is packed by `build_pack`, once for all tasks; by each task for itself; or not at all, and is read in place.
    values : {"direct", "workspace", "scratch"}
        V is read in place; or converted and padded by `build_pack`; or by each task for itself.
    key_pairs : bool
        Q and an unpacked K are multiplied as pairs of bf16, P and V are not.
    softmax_rows : int
        Rows that softmax takes at a time, a power of two, as far as it divides the rows there are. Several rows hide
        the latency of reductions over lanes.
    prefetch_keys : int
        Keys ahead of use at which an unpacked K, and V with it, is prefetched into the cache: rows are too few to hide
        memory's latency.
    long_row : int
        Bytes of a row of an unpacked K from which a few rows of Q are multiplied with it row by row, if they fit into
        registers.
    """

    softmax_rows: int
    prefetch_keys: int
    long_row: int
    key_pairs: bool = False
    grouped: bool = False
    split: bool = False
    panels: Literal["workspace", "scratch", "none"] = "workspace"
    values: Literal["direct", "workspace", "scratch"] = "direct"


@dataclass(frozen=True, kw_only=True)
class PackConfig(CpuScoreConfig):
    """The kernel that packs K into panels before the forward kernel runs, in pairs of columns if products use pairs.

    Attributes
    ----------
    values : bool
        Convert V into padded rows, too.
    unit : tuple of bool
        For k and v: the head dimension has stride 1.
    """

    values: bool


@dataclass(frozen=True, kw_only=True)
class CpuBackwardConfig(CpuScoreConfig):
    """The kernel of the gradients of q, k and v.

    Attributes
    ----------
    unit : tuple of bool
        For q, k, v and the gradient of o: the head dimension has stride 1.
    scores : bool
        Store dS, the gradient of what is added to the scores.
    operands : bool
        Compute the gradients of q, k and v; else only dS.
    direct_keys : bool
        Read K in place as rows of full vectors.
    """

    scores: bool = False
    operands: bool = True
    direct_keys: bool = True


@dataclass(frozen=True)
class CpuDeltaConfig:
    """The kernel that computes ``delta = sum of dO * O`` along each row.

    Attributes
    ----------
    unit : tuple of bool
        For o and its gradient: the head dimension has stride 1.
    lse_gradient : bool
        The log-sum-exp has a gradient, too, which is subtracted.
    """

    dtype: str
    value_dim: int
    shape: CpuShape
    unit: tuple[bool, ...]
    lse_gradient: bool = False


@dataclass(frozen=True)
class DqSumConfig:
    """The kernel that sums the partial sums of dQ."""

    dtype: str
    head_dim: int
    shape: CpuShape
