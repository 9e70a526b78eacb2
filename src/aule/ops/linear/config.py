"""Configurations of matrix products: two factors, a result, and their tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from aule.ir.types import PANEL
from aule.tile.fragment.shape import row_stride
from aule.tile.simt.shape import SimtShape
from aule.tile.warpgroup.engine import PanelShape


@dataclass(frozen=True)
class StoredConfig:
    """A matrix in memory.

    Attributes
    ----------
    name : str
        Name of its buffer, and prefix of its scalars.
    axes : int
        Axes by whose strides a row is found; 0 for a vector.
    unit : bool
        Columns have stride 1.
    aligned : bool
        Runs of elements that are loaded together, up to 16 bytes, are aligned to their size, and rows have full runs.
    unaligned_loads : bool
        Runs may be loaded from any address: on CPUs.
    """

    name: str
    dtype: str
    axes: int
    unit: bool
    aligned: bool
    unaligned_loads: bool = False


@dataclass(frozen=True)
class Affine:
    """Weight and bias of a factor that is normalised when it is loaded, along its stored rows; None without one."""

    weight: StoredConfig | None
    bias: StoredConfig | None


@dataclass(frozen=True)
class FactorConfig:
    """A factor of a product. With ``depth_major`` its stored rows run along the summed dimension; else they are rows
    (of the left factor) or columns (of the right one) of the result."""

    stored: StoredConfig
    depth_major: bool
    norm: Affine | None = None


@dataclass(frozen=True)
class FragmentBlocks:
    """Tiles of a product on matrix units: ``rows`` × ``cols`` of the result, in steps of ``depth`` along the sum.

    A workgroup has ``down`` × ``along`` subgroups, and ``stages`` steps in shared memory at a time. Groups of ``group``
    tiles above each other are computed at the same time, so that caches hold what they share.
    """

    engine: ClassVar = "fragment"

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

    def panel(self, depth_major: bool, outer: int) -> tuple[int, int, int]:
        """Stored rows and columns of a factor's step, and elements from one row to the next in shared memory."""
        rows, cols = (self.depth, outer) if depth_major else (outer, self.depth)
        return rows, cols, row_stride(cols)

    def shared_elements(self, left_depth_major: bool, right_depth_major: bool) -> int:
        """Elements of all stages."""
        panels = self.panel(left_depth_major, self.rows), self.panel(right_depth_major, self.cols)
        return self.stages * sum(rows * stride for rows, _, stride in panels)


@dataclass(frozen=True)
class DirectBlocks(FragmentBlocks):
    """Tiles of a product whose left factor is loaded straight into registers, from memory in the order of fragments
    (`aule.ops.linear.pack_fragments`); only the right one is in shared memory."""

    def shared_elements(self, left_depth_major: bool, right_depth_major: bool) -> int:
        rows, _, stride = self.panel(right_depth_major, self.cols)
        return self.stages * rows * stride


WARPGROUP_STAGES = 4
"""Two steps that warpgroups may be multiplying, and the two that follow."""


@dataclass(frozen=True)
class WarpgroupBlocks:
    """Tiles of a product of warpgroups: the result's tile of a workgroup, whose warpgroups have 64 rows each, and the
    tiles above each other that are computed at the same time."""

    engine: ClassVar = "warpgroup"

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

    def panel(self, depth_major: bool, outer: int) -> PanelShape:
        """A factor's step as it is stored."""
        return PanelShape(self.depth, outer) if depth_major else PanelShape(outer, self.depth)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of all stages, and of the warpgroups' barrier."""
        return WARPGROUP_STAGES * 2 * self.depth * (self.rows + self.cols) + 16


@dataclass(frozen=True)
class VectorBlocks:
    """Tiles of a product on a CPU: a task's tile, and the part of the summed dimension that is packed at a time."""

    engine: ClassVar = "vector"

    rows: int
    cols: int
    depth: int
    lanes: int


Blocks = FragmentBlocks | WarpgroupBlocks | SimtShape | VectorBlocks


@dataclass(frozen=True)
class ProductConfig:
    """``out[i, j] = sum over k of left[i, k] * right[j, k] + bias[j]``, summed in the dtype ``work``.

    With ``full_steps`` the summed dimension has full steps only; with ``runs`` the result can be stored in full runs.
    ``packed``, on a CPU: another kernel has packed the right factor, panel by panel.
    """

    name: str
    work: str
    left: FactorConfig
    right: FactorConfig
    out: StoredConfig
    bias: str | None
    blocks: Blocks
    full_steps: bool
    index64: bool
    packed: bool = False
    runs: bool = False
