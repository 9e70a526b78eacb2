"""From a linear layer behind a normalisation to the launches that compute it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from aule.errors import InvalidShapeError
from aule.ir import KernelIR
from aule.ops.linear.blocks import choose_blocks, normalises_before, packs
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
from aule.ops.linear.pack_fragments import PANEL, FragmentsConfig, build_pack_fragments
from aule.ops.linear.pack_vector import PackConfig, build_pack, panel_numbers
from aule.ops.linear.problem import LayerNormLinearProblem
from aule.ops.linear.product_direct import build_product_direct
from aule.ops.linear.product_fragment import build_product_fragment
from aule.ops.linear.product_lines import build_product_lines
from aule.ops.linear.product_simt import build_product_simt
from aule.ops.linear.product_vector import build_product_vector
from aule.ops.linear.product_warpgroup import build_product_warpgroup
from aule.ops.linear.statistics import statistics_step
from aule.ops.norm.plan import plan_norm, plan_norm_gradient
from aule.ops.norm.problem import NormProblem
from aule.ops.rowwise import extent, lay_out, view_width
from aule.ops.step import Step, StepPlan, grid_of
from aule.target import Target
from aule.tile.fragment_shape import RUN
from aule.tile.matrix import QUAD
from aule.tile.simt_shape import SimtShape
from aule.view import TensorView, contiguous_strides


def plan_layer_norm_linear(
    problem: LayerNormLinearProblem, views: Mapping[str, TensorView], target: Target
) -> StepPlan:
    """Plan the forward pass: ``x``, ``weight``, ``y`` and, where present, ``weight_norm``, ``bias_norm``, ``bias``."""
    if not problem.rows:
        return StepPlan(())
    weight, out, bias = Given("weight", views["weight"]), ("y", views["y"]), views.get("bias")

    def product(left: Given) -> Step:
        return product_step("layer_norm_linear", problem.dtype, left, weight, out, target, bias)

    rows = _rows(problem)
    step = product(rows)
    direct = isinstance(step.config.blocks, DirectBlocks)
    if not direct and normalises_before(target, step.config.blocks, problem.features):
        return StepPlan((_normalise_step(problem, views, rows, target), step), _room(rows))
    changing = product(Given("x", views["x"], norm=_affine(views)))
    statistics, workspace = statistics_step(problem.norm, views["x"], target), {"statistics": 3 * problem.rows}
    # Where the left factor is packed before, it is normalised on the way.
    steps = _packed(step, target, workspace, changing) if direct else _packed(changing, target, workspace)
    return StepPlan((statistics, *steps), workspace)


def plan_layer_norm_linear_gradient(
    problem: LayerNormLinearProblem, views: Mapping[str, TensorView], target: Target
) -> StepPlan:
    """Plan the gradient: ``dy``, the operands of the forward pass, and what is wanted of their gradients.

    The gradient of the normalised rows, ``dy @ weight``, is the only thing of their size that reaches memory; from it
    the gradient of the normalisation makes the rest.
    """
    steps: list[Step] = []
    workspace: dict[str, int] = {}
    zeroed: dict[str, int] = {}
    if not problem.rows:
        return StepPlan(())

    def add(plan: StepPlan, names: Mapping[str, str]) -> None:
        steps.extend(replace(step, renamed=names) for step in plan.steps)
        for memory, wanted in ((workspace, plan.workspace), (zeroed, plan.zeroed)):
            for name, count in wanted.items():
                memory[name] = max(memory.get(name, 0), count)

    x, dy = views["x"], views["dy"]
    inner = {"weight_norm": "weight", "bias_norm": "bias"}
    wanted = {"dx": "dx", **{f"d{ours}": f"d{theirs}" for ours, theirs in inner.items()}}
    if any(name in views for name in wanted):
        work = "f64" if problem.dtype == "f64" else "f32"
        normal = TensorView(work, problem.shape, contiguous_strides(problem.shape), "device", None)
        right = Given("weight", views["weight"], across=True)
        left = Given("dy", dy)
        product = product_step("linear_backward", problem.dtype, left, right, ("dnormal", normal), target)
        steps += _packed(product, target, workspace)
        workspace["dnormal"] = math.prod(problem.shape)
        given = {"dy": normal, "x": x}
        given |= {theirs: views[ours] for ours, theirs in inner.items() if ours in views}
        given |= {theirs: views[ours] for ours, theirs in wanted.items() if ours in views}
        names = {"dy": "dnormal"} | {theirs: ours for ours, theirs in (inner | wanted).items()}
        add(plan_norm_gradient(problem.norm, given, target), names)
    if "dweight" in views:
        left, out = Given("dy", dy, across=True), ("dweight", views["dweight"])

        def weight_step(right: Given) -> Step:
            return product_step("linear_weight_backward", problem.dtype, left, right, out, target)

        rows = replace(_rows(problem), across=True)
        step = weight_step(rows)
        if normalises_before(target, step.config.blocks, problem.features):
            steps += [_normalise_step(problem, views, rows, target), *_packed(step, target, workspace)]
            workspace |= _room(rows)
        else:
            steps.append(statistics_step(problem.norm, x, target))
            steps.append(weight_step(Given("x", x, across=True, norm=_affine(views))))
            workspace["statistics"] = 3 * problem.rows
    if "dbias" in views:
        # The gradient of any normalisation's bias is the sum over rows, which is all that is asked for.
        sums = {"dy": dy, "x": dy, "dbias": views["dbias"]}
        add(plan_norm_gradient(NormProblem(dy.dtype, dy.shape, problem.eps, False), sums, target), {"x": "dy"})
    return StepPlan(tuple(steps), workspace, zeroed)


# -- products ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Given:
    """A factor of a product by its buffer's name; the rest as in `FactorConfig`. ``norm`` are weight and bias."""

    name: str
    view: TensorView
    across: bool = False
    norm: tuple[TensorView | None, TensorView | None] | None = None


def product_step(
    name: str,
    dtype: str,
    left: Given,
    right: Given,
    out: tuple[str, TensorView],
    target: Target,
    bias: TensorView | None = None,
) -> Step:
    """The launch of ``out[i, j] = sum over k of left[i, k] * right[j, k] + bias[j]``."""
    (rows, cols), (outer, inner) = _sizes(left.view), _sizes(right.view)
    m, k = (cols, rows) if left.across else (rows, cols)
    n = inner if right.across else outer
    if max(m, n, k) >= 1 << 30:
        raise InvalidShapeError(f"[{name}] expected matrices of fewer than 2**30 rows, got {max(m, n, k)}; split them")
    aligned = min(view_width(left.view), view_width(right.view)) >= RUN
    plain = left.norm is None and right.norm is None
    if target.backend == "vulkan":  # where kernels for plain factors step from row to row
        plain = plain and max(_row_axes(left.view), _row_axes(right.view)) <= 1
    packed = packs(target, m) and right.norm is None  # normalised rows do not go to memory
    blocks = choose_blocks(target, dtype, (m, n, k), left.across, right.across, aligned, plain, packed)
    width = RUN if isinstance(blocks, FragmentBlocks | WarpgroupBlocks) else QUAD
    loose = isinstance(blocks, VectorBlocks)
    scalars: dict[str, int | float] = {"m": m, "n": n, "k": k}

    def told(name: str, view: TensorView, width: int, vector: bool = False) -> StoredConfig:
        axes = 0
        scalars[f"{name}_offset"], scalars[f"{name}_col_stride"] = view.offset, view.strides[-1]
        if not vector:  # a single row may have no axis beside its own
            layout = lay_out(view.shape[:-1], {name: view.strides[:-1]})
            axes = len(layout.sizes)
            scalars.update({f"{name}_axis{i}": size for i, size in enumerate(layout.sizes)})
            scalars.update({f"{name}_stride{i}": step for i, step in enumerate(layout.strides[name])})
        unit = view.strides[-1] == 1 or view.shape[-1] == 1
        aligned = view_width(view) >= min(width, 16 // view.itemsize)
        return StoredConfig(name, view.dtype, axes, unit, aligned, loose and unit)

    def factor(given: Given) -> FactorConfig:
        norm = None
        if given.norm is not None:
            names = ("weight_norm", "bias_norm")
            both = zip(names, given.norm, strict=True)
            norm = Affine(*(None if x is None else told(n, x, width, vector=True) for n, x in both))
        return FactorConfig(told(given.name, given.view, width), given.across, norm)

    if bias is not None:
        told("bias", bias, 1, vector=True)
    tile_rows, tile_cols, depth = _tile(blocks)
    used = [left.view, right.view, out[1]]
    config = ProductConfig(
        name=name,
        work="f64" if dtype == "f64" else "f32",
        left=factor(left),
        right=factor(right),
        out=told(*out, 2 if isinstance(blocks, FragmentBlocks) else width),
        bias=None if bias is None else bias.dtype,
        blocks=blocks,
        whole=k % depth == 0,
        packed=packed,
        runs=isinstance(blocks, DirectBlocks) and n % RUN == 0 and out[1].itemsize == 2 and view_width(out[1]) >= RUN,
        index64=max(*(extent(view) for view in used), 3 * max(m, k)) + 2 * (tile_rows + tile_cols) > 2**31 - 1,
    )
    count = -(-m // tile_rows) * -(-n // tile_cols)
    if isinstance(blocks, WarpgroupBlocks):  # as few workgroups as take no more rounds over the device
        count = -(-count // -(-count // max(target.compute_units, 1)))
    return Step(config, build_product, grid_of(name, count, target), scalars)


def _packed(product: Step, target: Target, workspace: dict[str, int], source: Step | None = None) -> tuple[Step, ...]:
    """A product, and before it, where one of its factors is to be packed for all tasks, the launch that does so; a left
    factor from that of another product, where ``source`` is one."""
    config: ProductConfig = product.config
    blocks = config.blocks
    if isinstance(blocks, DirectBlocks):
        return _in_fragments(product, source or product, blocks.rows, target, workspace)
    if not config.packed:
        return (product,)
    assert isinstance(blocks, VectorBlocks)
    tiles, parts = -(-int(product.scalars["n"]) // blocks.cols), -(-int(product.scalars["k"]) // blocks.depth)
    size = tiles * parts * panel_numbers(blocks, config.work, config.right.stored.dtype, target)
    workspace["packed"] = max(workspace.get("packed", 0), size)
    pack = PackConfig(config.work, config.right, blocks)
    return Step(pack, build_pack, (tiles, parts, 1), product.scalars), product


def _in_fragments(
    product: Step, source: Step, tile: int, target: Target, workspace: dict[str, int]
) -> tuple[Step, Step]:
    """A product in tiles of so many rows whose left factor is in the order of fragments, and the launch before it that
    brings the one of ``source`` there."""
    config: ProductConfig = product.config
    factor: FactorConfig = source.config.left
    panels, parts = -(-int(product.scalars["m"]) // tile) * (tile // PANEL), int(product.scalars["k"]) // PANEL
    size = panels * parts * PANEL**2
    workspace["fragments"] = max(workspace.get("fragments", 0), size // 2)  # two in 32 bits
    index64 = config.index64 or source.config.index64 or size > 2**31 - 1
    pack = FragmentsConfig(f"{config.name}_fragments", config.work, factor, index64)
    packed = FactorConfig(StoredConfig("fragments", factor.stored.dtype, 0, True, True), across=False)
    return (
        Step(pack, build_pack_fragments, grid_of(pack.name, panels * parts, target), source.scalars),
        replace(product, config=replace(config, left=packed, index64=index64)),
    )


def _rows(problem: LayerNormLinearProblem) -> Given:
    """The normalised rows, in a workspace. On the way into a product each row would be normalised once for every tile
    along the other side, beside matrix units that leave little room for it."""
    view = TensorView(problem.dtype, problem.shape, contiguous_strides(problem.shape), "device", None)
    return Given("normalised", view)


def _normalise_step(
    problem: LayerNormLinearProblem, views: Mapping[str, TensorView], rows: Given, target: Target
) -> Step:
    """The launch that makes them."""
    inner = {"weight": "weight_norm", "bias": "bias_norm"}
    given = {"x": views["x"], "y": rows.view} | {ours: views[name] for ours, name in inner.items() if name in views}
    (step,) = plan_norm(problem.norm, given, target).steps
    return replace(step, renamed=inner | {"y": rows.name})


def _room(rows: Given) -> dict[str, int]:
    """Their workspace, in numbers of 32 bits."""
    return {rows.name: -(-math.prod(rows.view.shape) * rows.view.itemsize // 4)}


def build_product(config: ProductConfig, target: Target) -> KernelIR:
    """Trace a product."""
    if isinstance(config.blocks, WarpgroupBlocks):
        return build_product_warpgroup(config, target)
    if isinstance(config.blocks, DirectBlocks):
        return build_product_direct(config, target)
    if isinstance(config.blocks, FragmentBlocks):
        return (build_product_lines if config.blocks.stages == 1 else build_product_fragment)(config, target)
    return (build_product_vector if isinstance(config.blocks, VectorBlocks) else build_product_simt)(config, target)


def _tile(blocks: Blocks) -> tuple[int, int, int]:
    """Rows, columns and depth of a step."""
    if not isinstance(blocks, SimtShape):
        return blocks.rows, blocks.cols, blocks.depth
    return blocks.block_q, blocks.block_kv, blocks.chunk_k


def _row_axes(view: TensorView) -> int:
    """By how many strides a row is found."""
    return len(lay_out(view.shape[:-1], {"rows": view.strides[:-1]}).sizes)


def _sizes(view: TensorView) -> tuple[int, int]:
    return math.prod(view.shape[:-1]), view.shape[-1]


def _affine(views: Mapping[str, TensorView]) -> tuple[TensorView | None, TensorView | None]:
    return views.get("weight_norm"), views.get("bias_norm")
