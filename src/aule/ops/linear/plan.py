"""From a linear layer after a normalisation to the launches that compute it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from aule.ops.linear.blocks import normalises_before
from aule.ops.linear.config import DirectBlocks, FactorConfig, ProductConfig, StoredConfig, VectorBlocks
from aule.ops.linear.pack_fragments import PANEL, FragmentsConfig, build_pack_fragments
from aule.ops.linear.pack_vector import PackConfig, build_pack, panel_numbers
from aule.ops.linear.problem import LayerNormLinearProblem
from aule.ops.linear.product import FactorView, product_step
from aule.ops.linear.statistics import statistics_step
from aule.ops.norm.plan import plan_norm, plan_norm_gradient
from aule.ops.norm.problem import NormProblem
from aule.ops.shared.plan import Plan, Step, grid_of
from aule.target import Target
from aule.view import TensorView, contiguous_strides


def plan_layer_norm_linear(problem: LayerNormLinearProblem, views: Mapping[str, TensorView], target: Target) -> Plan:
    """Plan the forward pass: ``x``, ``weight``, ``y`` and, where present, ``weight_norm``, ``bias_norm``, ``bias``."""
    if not problem.rows:
        return Plan(())
    weight, out, bias = FactorView("weight", views["weight"]), ("y", views["y"]), views.get("bias")

    def product(left: FactorView) -> Step:
        return product_step("layer_norm_linear", problem.dtype, left, weight, out, target, bias)

    rows = _normalised_rows(problem)
    step = product(rows)
    direct = isinstance(step.config.blocks, DirectBlocks)
    if not direct and normalises_before(target, step.config.blocks, problem.features):
        return Plan((_normalise_step(problem, views, rows, target), step), _workspace_of(rows))
    normalising = product(FactorView("x", views["x"], norm=_affine(views)))
    statistics, workspace = statistics_step(problem.norm, views["x"], target), {"statistics": 3 * problem.rows}
    # A left factor that is packed first is normalised by that launch.
    steps = _packed(step, target, workspace, normalising) if direct else _packed(normalising, target, workspace)
    return Plan((statistics, *steps), workspace)


def plan_layer_norm_linear_gradient(
    problem: LayerNormLinearProblem, views: Mapping[str, TensorView], target: Target
) -> Plan:
    """Plan the gradient: ``dy``, the operands of the forward pass, and the wanted gradients.

    Only the gradient of the normalised rows, ``dy @ weight``, is stored at their size; the gradient of the
    normalisation computes the rest from it.
    """
    if not problem.rows:
        return Plan(())
    steps: list[Step] = []
    workspace: dict[str, int] = {}

    def add(plan: Plan, names: Mapping[str, str]) -> None:
        steps.extend(replace(step, renamed=names) for step in plan.steps)
        for name, count in plan.workspace.items():
            workspace[name] = max(workspace.get(name, 0), count)

    x, dy = views["x"], views["dy"]
    inner = {"weight_norm": "weight", "bias_norm": "bias"}
    wanted = {"dx": "dx", **{f"d{ours}": f"d{theirs}" for ours, theirs in inner.items()}}
    if any(name in views for name in wanted):
        normal = TensorView(problem.work, problem.shape, contiguous_strides(problem.shape), "device", None)
        left, right = FactorView("dy", dy), FactorView("weight", views["weight"], depth_major=True)
        product = product_step("linear_backward", problem.dtype, left, right, ("dnormal", normal), target)
        steps += _packed(product, target, workspace)
        workspace["dnormal"] = math.prod(problem.shape)
        given = {"dy": normal, "x": x}
        given |= {theirs: views[ours] for ours, theirs in (inner | wanted).items() if ours in views}
        names = {"dy": "dnormal"} | {theirs: ours for ours, theirs in (inner | wanted).items()}
        add(plan_norm_gradient(problem.norm, given, target), names)
    if "dweight" in views:
        left, out = FactorView("dy", dy, depth_major=True), ("dweight", views["dweight"])

        def weight_step(right: FactorView) -> Step:
            return product_step("linear_weight_backward", problem.dtype, left, right, out, target)

        rows = replace(_normalised_rows(problem), depth_major=True)
        step = weight_step(rows)
        if normalises_before(target, step.config.blocks, problem.features):
            steps += [_normalise_step(problem, views, rows, target), *_packed(step, target, workspace)]
            workspace |= _workspace_of(rows)
        else:
            steps.append(statistics_step(problem.norm, x, target))
            steps.append(weight_step(FactorView("x", x, depth_major=True, norm=_affine(views))))
            workspace["statistics"] = 3 * problem.rows
    if "dbias" in views:
        # The gradient of any normalisation's bias is the sum over rows.
        sums = {"dy": dy, "x": dy, "dbias": views["dbias"]}
        add(plan_norm_gradient(NormProblem(dy.dtype, dy.shape, problem.eps, False), sums, target), {"x": "dy"})
    return Plan(tuple(steps), workspace)


# -- packing -----------------------------------------------------------------------------------------------------------


def _packed(product: Step, target: Target, workspace: dict[str, int], source: Step | None = None) -> tuple[Step, ...]:
    """A product, after the launch that packs one of its factors, if it needs one. ``source`` is the product whose left
    factor is packed, by default this one."""
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
    """A product in tiles of ``tile`` rows whose left factor is in the order of fragments, after the launch that puts
    the left factor of ``source`` in that order."""
    config: ProductConfig = product.config
    factor: FactorConfig = source.config.left
    panels, parts = -(-int(product.scalars["m"]) // tile) * (tile // PANEL), int(product.scalars["k"]) // PANEL
    size = panels * parts * PANEL**2
    workspace["fragments"] = max(workspace.get("fragments", 0), size // 2)  # two in 32 bits
    index64 = config.index64 or source.config.index64 or size > 2**31 - 1
    pack = FragmentsConfig(f"{config.name}_fragments", config.work, factor, index64)
    packed = FactorConfig(StoredConfig("fragments", factor.stored.dtype, 0, True, True), depth_major=False)
    return (
        Step(pack, build_pack_fragments, grid_of(pack.name, panels * parts, target), source.scalars),
        replace(product, config=replace(config, left=packed, index64=index64)),
    )


# -- normalised rows in a workspace ------------------------------------------------------------------------------------


def _normalised_rows(problem: LayerNormLinearProblem) -> FactorView:
    """The normalised rows, in a workspace (`normalises_before`)."""
    view = TensorView(problem.dtype, problem.shape, contiguous_strides(problem.shape), "device", None)
    return FactorView("normalised", view)


def _normalise_step(
    problem: LayerNormLinearProblem, views: Mapping[str, TensorView], rows: FactorView, target: Target
) -> Step:
    """The launch that normalises rows into the workspace."""
    inner = {"weight": "weight_norm", "bias": "bias_norm"}
    given = {"x": views["x"], "y": rows.view} | {ours: views[name] for ours, name in inner.items() if name in views}
    (step,) = plan_norm(problem.norm, given, target).steps
    return replace(step, renamed=inner | {"y": rows.name})


def _workspace_of(rows: FactorView) -> dict[str, int]:
    """Workspace for the rows, in 32-bit words."""
    return {rows.name: -(-math.prod(rows.view.shape) * rows.view.itemsize // 4)}


def _affine(views: Mapping[str, TensorView]) -> tuple[TensorView | None, TensorView | None]:
    return views.get("weight_norm"), views.get("bias_norm")
