"""Configurations of the CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aule.ir.types import SCALARS, Scalar, u32
from aule.ops.attention.config import Columns, ScoreConfig
from aule.ops.attention.problem import Rope
from aule.tile.vector import VectorUnit, work_type


@dataclass(frozen=True)
class CpuShape:
    """How a CPU kernel is cut up.

    Attributes
    ----------
    unit : VectorUnit
        Registers.
    rows : int
        Rows of Q that are multiplied with a panel at a time.
    panel : int
        Keys of a panel, whole vectors.
    block_q : int
        Rows of Q that one task holds.
    block_kv : int
        Keys that a task works on before it goes on to the next, whole panels: K and V of a block stay in the
        second-level cache while the rows pass over them, the scores of ``rows`` rows in the first.
    """

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
        """Vectors that hold a row of ``cols`` numbers."""
        return -(-cols // self.unit.lanes)

    def padded(self, cols: int) -> int:
        """Numbers in those vectors."""
        return self.vectors(cols) * self.unit.lanes


@dataclass(frozen=True, kw_only=True)
class CpuScoreConfig(ScoreConfig):
    """What the forward and the backward kernel both have.

    Attributes
    ----------
    pairs : bool
        Products are of pairs of bf16: Q, K, V and dO stay as they are, P and dS are rounded for them.
    mask_columns, bias_columns : {"unit", "same", "any"}
        How mask and bias run along a row.
    """

    shape: CpuShape
    pairs: bool = False
    mask_columns: Columns = "any"
    bias_columns: Columns = "any"

    @property
    def work(self) -> Scalar:
        """The type that is computed in."""
        return work_type(SCALARS[self.dtype])

    @property
    def factor(self) -> Scalar:
        """What an element of a product's operands is."""
        return u32 if self.pairs else self.work

    @property
    def step(self) -> int:
        """Numbers in it."""
        return 2 if self.pairs else 1


@dataclass(frozen=True, kw_only=True)
class CpuConfig(CpuScoreConfig):
    """A forward kernel for CPUs.

    Attributes
    ----------
    grouped : bool
        A task takes the rows of all query heads that share a key head, and a part of the keys (decoding); otherwise a
        block of rows of one query head, and all keys.
    split : bool
        The keys of a head are shared by several tasks: they leave partial results for `build_combine`.
    panels : {"workspace", "scratch", "none"}
        Where K is packed: before, once for all (`build_pack`), or by each task for itself, or not at all: a few rows
        are multiplied with K as it is.
    values : {"direct", "workspace", "scratch"}
        Where V is read: in place, or converted and padded beforehand, or by each task for itself.
    key_pairs : bool
        Where K is not packed: its products with Q are of pairs of bf16, both as they are. Those of P and V are not.
    """

    key_pairs: bool = False
    grouped: bool = False
    split: bool = False
    panels: Literal["workspace", "scratch", "none"] = "workspace"
    values: Literal["direct", "workspace", "scratch"] = "direct"


@dataclass(frozen=True)
class PackConfig:
    """The kernel that packs a matrix before the others run.

    Attributes
    ----------
    values : bool
        Convert V into padded rows too, beside packing K into panels.
    pairs : bool
        Panels hold pairs of columns of K, rows pairs of rows of V.
    unit : tuple of bool
        For k and v: the head dimension has stride 1.
    """

    dtype: str
    head_dim: int
    value_dim: int
    shape: CpuShape
    values: bool
    unit: tuple[bool, ...]
    packed: bool = False
    pairs: bool = False
    rope: Rope | None = None
    """K is rotated."""
    rope_unit: bool = True


@dataclass(frozen=True)
class CombineConfig:
    """The kernel that puts the partial results of a split together."""

    dtype: str
    value_dim: int
    shape: CpuShape
    lse: bool
    unit: bool


@dataclass(frozen=True, kw_only=True)
class CpuBackwardConfig(CpuScoreConfig):
    """The kernel of the gradients of q, k and v.

    Attributes
    ----------
    unit : tuple of bool
        For q, k, v, and the gradient of o: the head dimension has stride 1.
    direct_keys : bool
        K can be read in place as rows of whole vectors.
    scores : bool
        dS, the gradient of what is added to the scores, is stored too.
    """

    scores: bool = False
    direct_keys: bool = True


@dataclass(frozen=True)
class CpuDeltaConfig:
    """The kernel of ``delta = sum of dO * O`` along each row."""

    dtype: str
    value_dim: int
    shape: CpuShape
    unit: tuple[bool, bool]
    """For o and its gradient."""


@dataclass(frozen=True)
class GatherConfig:
    """The kernel that sums the parts of dQ."""

    dtype: str
    head_dim: int
    shape: CpuShape
