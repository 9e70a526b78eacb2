"""The launch of a matrix product: choice of its kernel, its configuration and scalars. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from aule.errors import InvalidShapeError
from aule.ir import KernelIR
from aule.ops.linear.blocks import choose_blocks, packs, steps_rows
from aule.ops.linear.config import (
    Affine,
    Blocks,
    DirectBlocks,
    FactorConfig,
    FragmentBlocks,
    ProductConfig,
    StoredConfig,
    VectorBlocks,
    WarpgroupBlocks,
)
from aule.ops.linear.product_direct import DirectProduct
from aule.ops.linear.product_fragment import StagedProduct
from aule.ops.linear.product_lines import LineProduct
from aule.ops.linear.product_simt import build_product_simt
from aule.ops.linear.product_vector import VectorProduct
from aule.ops.linear.product_warpgroup import WarpgroupProduct
from aule.ops.rows.views import RowLayout, extent, row_layout, view_width
from aule.ops.shared.plan import Step, grid_of
from aule.target import Target
from aule.tile.common.matrix import QUAD
from aule.tile.fragment.shape import RUN
from aule.tile.simt.shape import SimtShape
from aule.view import TensorView


@dataclass(frozen=True, eq=False)
class FactorView:
    """A factor of a product by its buffer's name; for ``depth_major`` see `FactorConfig`; ``norm`` is weight and bias
    of its normalisation."""

    name: str
    view: TensorView
    depth_major: bool = False
    norm: tuple[TensorView | None, TensorView | None] | None = None


@dataclass(frozen=True)
class _Operands:
    """Configurations of a product's operands, and the scalars that they need.

    ``width`` is the number of elements that a kernel loads together.
    """

    width: int
    unaligned: bool
    scalars: dict[str, int | float] = field(default_factory=dict)

    def stored(self, name: str, view: TensorView, width: int, vector: bool = False) -> StoredConfig:
        axes = 0
        self.scalars.update({f"{name}_offset": view.offset, f"{name}_col_stride": view.strides[-1]})
        if not vector:  # a single row may have only one axis, too
            layout = _rows_of(view)
            axes = len(layout.sizes)
            self.scalars.update({f"{name}_axis{i}": size for i, size in enumerate(layout.sizes)})
            self.scalars.update({f"{name}_stride{i}": step for i, step in enumerate(layout.strides["rows"])})
        unit = view.strides[-1] == 1 or view.shape[-1] == 1
        aligned = view_width(view) >= min(width, 16 // view.itemsize)
        return StoredConfig(name, view.dtype, axes, unit, aligned, self.unaligned and unit)

    def factor(self, given: FactorView) -> FactorConfig:
        norm = None
        if given.norm is not None:
            both = zip(("weight_norm", "bias_norm"), given.norm, strict=True)
            norm = Affine(*(None if x is None else self.stored(n, x, self.width, vector=True) for n, x in both))
        return FactorConfig(self.stored(given.name, given.view, self.width), given.depth_major, norm)


def product_step(
    name: str,
    dtype: str,
    left: FactorView,
    right: FactorView,
    out: tuple[str, TensorView],
    target: Target,
    bias: TensorView | None = None,
) -> Step:
    """The launch of ``out[i, j] = sum over k of left[i, k] * right[j, k] + bias[j]``."""
    (rows, cols), (outer, inner) = _sizes(left.view), _sizes(right.view)
    m, k = (cols, rows) if left.depth_major else (rows, cols)
    n = inner if right.depth_major else outer
    if max(m, n, k) >= 1 << 30:
        raise InvalidShapeError(f"[{name}] expected matrices of fewer than 2**30 rows, got {max(m, n, k)}; split them")
    aligned = min(view_width(left.view), view_width(right.view)) >= RUN
    plain = left.norm is None and right.norm is None
    if steps_rows(target):
        plain = plain and all(len(_rows_of(factor.view).sizes) <= 1 for factor in (left, right))
    packed = packs(target, m) and right.norm is None  # normalised rows are not stored
    blocks = choose_blocks(target, dtype, (m, n, k), left.depth_major, right.depth_major, aligned, plain, packed)
    width = RUN if isinstance(blocks, FragmentBlocks | WarpgroupBlocks) else QUAD
    operands = _Operands(width, isinstance(blocks, VectorBlocks), {"m": m, "n": n, "k": k})
    if bias is not None:
        operands.stored("bias", bias, 1, vector=True)
    tile_rows, tile_cols, depth = _tile(blocks)
    used = [left.view, right.view, out[1]]
    config = ProductConfig(
        name=name,
        work="f64" if dtype == "f64" else "f32",
        left=operands.factor(left),
        right=operands.factor(right),
        out=operands.stored(*out, 2 if isinstance(blocks, FragmentBlocks) else width),
        bias=None if bias is None else bias.dtype,
        blocks=blocks,
        full_steps=k % depth == 0,
        packed=packed,
        runs=isinstance(blocks, DirectBlocks) and n % RUN == 0 and out[1].itemsize == 2 and view_width(out[1]) >= RUN,
        index64=max(*(extent(view) for view in used), 3 * max(m, k)) + 2 * (tile_rows + tile_cols) > 2**31 - 1,
    )
    count = -(-m // tile_rows) * -(-n // tile_cols)
    if isinstance(blocks, WarpgroupBlocks):  # as few workgroups as take no more rounds over the device
        count = -(-count // -(-count // max(target.compute_units, 1)))
    return Step(config, build_product, grid_of(name, count, target), operands.scalars)


def build_product(config: ProductConfig, target: Target) -> KernelIR:
    """Trace a product."""
    blocks = config.blocks
    if isinstance(blocks, WarpgroupBlocks):
        return WarpgroupProduct(config, blocks, target).build()
    if isinstance(blocks, DirectBlocks):
        return DirectProduct(config, blocks, target).build()
    if isinstance(blocks, FragmentBlocks):
        return (LineProduct if blocks.stages == 1 else StagedProduct)(config, blocks, target).build()
    if isinstance(blocks, VectorBlocks):
        return VectorProduct(config, blocks, target).build()
    return build_product_simt(config, blocks, target)


def _tile(blocks: Blocks) -> tuple[int, int, int]:
    """Rows and columns of a tile, and depth of a step."""
    if not isinstance(blocks, SimtShape):
        return blocks.rows, blocks.cols, blocks.depth
    return blocks.block_q, blocks.block_kv, blocks.chunk_k


def _rows_of(view: TensorView) -> RowLayout:
    return row_layout(view.shape, {"rows": view})


def _sizes(view: TensorView) -> tuple[int, int]:
    return math.prod(view.shape[:-1]), view.shape[-1]
