"""What a product is traced from: two factors, a result, and how they are cut up."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir.types import PANEL
from aule.tile.fragment_shape import row_stride
from aule.tile.simt_shape import SimtShape
from aule.tile.warpgroup import PanelShape


@dataclass(frozen=True)
class StoredConfig:
    """A matrix in memory.

    Attributes
    ----------
    name : str
        Of its buffer and its numbers.
    axes : int
        By whose strides a row is found; 0 of a vector.
    unit : bool
        Neighbouring columns are neighbours in memory.
    aligned : bool
        As many elements as travel together, up to 16 bytes, start at a multiple of their size, and rows have whole ones
        only.
    loose : bool
        They may travel together from wherever they start: on CPUs.
    """

    name: str
    dtype: str
    axes: int
    unit: bool
    aligned: bool
    loose: bool = False


@dataclass(frozen=True)
class Affine:
    """A factor is normalised on its way in, row by row as it is stored: weight and bias, where there are such."""

    weight: StoredConfig | None
    bias: StoredConfig | None


@dataclass(frozen=True)
class FactorConfig:
    """A factor of a product. ``across`` says that its stored rows are numbers of the summed dimension, and not rows
    (of the left factor) or columns (of the right one) of the result."""

    stored: StoredConfig
    across: bool
    norm: Affine | None = None


@dataclass(frozen=True)
class FragmentBlocks:
    """How a product on matrix units is cut up.

    Attributes
    ----------
    rows, cols, depth : int
        Of the result's tile that a workgroup has, and of a step along the summed dimension.
    down, along : int
        Subgroups of a workgroup down the rows and along the columns of the tile.
    stages : int
        Steps that are in shared memory at a time.
    group : int
        Tiles above each other that are worked on at the same time, so that caches keep what they share.
    """

    rows: int
    cols: int
    depth: int
    down: int
    along: int
    stages: int
    lanes: int = 32
    registers: int = 255
    group: int = 8

    @property
    def threads(self) -> int:
        return self.down * self.along * self.lanes

    def panel(self, across: bool, outer: int) -> tuple[int, int, int]:
        """Rows and columns of a factor's step as it is stored, and elements from one row to the next in shared
        memory."""
        rows, cols = (self.depth, outer) if across else (outer, self.depth)
        return rows, cols, row_stride(cols)

    def shared_elements(self, left_across: bool, right_across: bool) -> int:
        """Elements of all stages."""
        panels = self.panel(left_across, self.rows), self.panel(right_across, self.cols)
        return self.stages * sum(rows * stride for rows, _, stride in panels)


@dataclass(frozen=True)
class DirectBlocks(FragmentBlocks):
    """A product whose left factor comes straight into registers, out of memory that has it in the order of fragments
    (`aule.ops.linear.pack_fragments`); only the right one is in shared memory."""

    def shared_elements(self, left_across: bool, right_across: bool) -> int:
        rows, _, stride = self.panel(right_across, self.cols)
        return self.stages * rows * stride


WARPGROUP_STAGES = 4
"""Two steps that may be multiplied by warpgroups, and the two that follow."""


@dataclass(frozen=True)
class WarpgroupBlocks:
    """How a product of warpgroups is cut up: the result's tile of a workgroup, whose warpgroups have 64 rows each, and
    the tiles above each other that are worked on at the same time."""

    rows: int
    cols: int
    registers: int = 255
    group: int = 8

    @property
    def depth(self) -> int:
        return PANEL

    @property
    def threads(self) -> int:
        return 2 * self.rows

    def panel(self, across: bool, outer: int) -> PanelShape:
        """A factor's step as it is stored."""
        return PanelShape(self.depth, outer) if across else PanelShape(outer, self.depth)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of all stages, and of where warpgroups meet."""
        return WARPGROUP_STAGES * 2 * self.depth * (self.rows + self.cols) + 16


@dataclass(frozen=True)
class VectorBlocks:
    """How a product on a CPU is cut up: the result's tile of a task, and the part of the summed dimension for which
    both factors are brought together."""

    rows: int
    cols: int
    depth: int
    lanes: int


Blocks = FragmentBlocks | WarpgroupBlocks | SimtShape | VectorBlocks


@dataclass(frozen=True)
class ProductConfig:
    """``out[i, j] = sum over k of left[i, k] * right[j, k] + bias[j]``.

    Attributes
    ----------
    work : str
        The dtype that is summed up in.
    whole : bool
        The summed dimension has whole steps only.
    packed : bool
        On a CPU: the right factor has been packed, panel by panel, by another kernel.
    runs : bool
        The result can be stored in whole runs.
    """

    name: str
    work: str
    left: FactorConfig
    right: FactorConfig
    out: StoredConfig
    bias: str | None
    blocks: Blocks
    whole: bool
    index64: bool
    packed: bool = False
    runs: bool = False
