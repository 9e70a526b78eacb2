"""From a softmax to the launch that computes it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from aule import tuning
from aule.ir.types import SCALARS
from aule.ops.rows.checks import has_statistics
from aule.ops.rows.classes import row_class
from aule.ops.rows.hints import NO_SUMS, RowTuning
from aule.ops.rows.layout import choose_rows, evicts_last, overlaps_launch, row_grid, scratch_columns, streams
from aule.ops.rows.views import (
    RowOperand,
    divisor,
    needs_index64,
    row_layout,
    row_operands,
    view_scalars,
    view_width,
)
from aule.ops.shared.plan import Plan, Step
from aule.ops.softmax.dropout import OCTET, keep_scale, threshold
from aule.ops.softmax_dropout.kernels import (
    EarlyDraw,
    SoftmaxConfig,
    build_gradient_of_weights,
    build_softmax,
    build_softmax_gradient,
)
from aule.ops.softmax_dropout.problem import SoftmaxProblem
from aule.target import Target
from aule.tile.common.math import LOG2E, lowest
from aule.tile.vector.engine import work_type
from aule.view import TensorView

_ROUNDED = 96
"""Largest rounding error of an exponent, equal in all of a row: a million weights of 2**96 still have a finite sum."""


@dataclass(frozen=True)
class _Choice:
    """Hints for rows on a GPU, None for the usual ones, and fields of `SoftmaxConfig`."""

    hints: RowTuning | None = None
    one_exchange: bool = False
    early_draw: EarlyDraw = ""
    fetches: bool = False
    awaits: bool = False
    small: bool = False


def _choose(problem: SoftmaxProblem, columns: int, backward: bool, statistics: bool, target: Target) -> _Choice:
    """The choice for rows of 16-bit elements, of a class with so many columns."""
    facts = {
        "backward": backward,
        "statistics": statistics,
        "length": columns,
        "drops": problem.dropout_p > 0.0,
        "cluster": target.max_cluster,
    }
    use = dict(tuning.use(target, "softmax", **facts))
    rows = use.pop("rows", None)
    return _Choice(RowTuning(**rows) if rows is not None else None, **use)


def plan_softmax(problem: SoftmaxProblem, views: Mapping[str, TensorView], target: Target) -> Plan:
    """Plan a softmax (``x``, ``y``, and where present ``mask`` and ``seed``) or its gradient (``dy``, ``dx``).

    A gradient on a CPU that is given ``y`` sees there what was dropped, and does not draw again; with ``statistics`` it
    does not sum exponentials again; with ``weights`` it needs none of these.
    """
    if not problem.rows * problem.length:
        return Plan(())
    backward, cpu = "dy" in views, target.host
    weights = backward and cpu and "weights" in views and SCALARS[problem.dtype].bytes == 2
    statistics = has_statistics(views) and not weights and ("y" in views or not backward or not cpu)
    unused = {"statistics"}
    if weights:
        unused |= {"x", "y", "mask", "seed"}
    elif backward:
        unused |= {"weights", "seed" if "y" in views and cpu else "y"}
    views = {name: view for name, view in views.items() if name not in unused}
    rows = {name: view for name, view in views.items() if name not in ("mask", "seed")}
    arrays = {name: view for name, view in views.items() if name != "seed"}
    layout = row_layout(problem.shape, arrays)
    width = min(view_width(view) for view in rows.values())
    narrow = SCALARS[problem.dtype].bytes == 2
    columns = row_class(target, problem.dtype, problem.length, width).columns
    choice = _choose(problem, columns, backward, statistics, target) if narrow else _Choice(one_exchange=backward)
    shape, passes = choose_rows(target, problem.dtype, problem.length, width, problem.rows, NO_SUMS, choice.hints)
    passes = replace(passes, scratch=scratch_columns(target, problem.length))
    folded = problem.scale > 0 and problem.mask in (None, "bool")
    plain = folded and problem.mask is None and not problem.causal
    draws = problem.dropout_p > 0.0 and "weights" not in views
    operands = row_operands(arrays, passes.width, target)
    if statistics:
        operands = (*operands, ("statistics", RowOperand(problem.work)))
    config = SoftmaxConfig(
        name="softmax_dropout_backward" if backward else "softmax_dropout",
        mask=problem.mask,
        causal=problem.causal,
        dropout=problem.dropout_p > 0.0,
        folded=folded,
        one_exchange=choice.one_exchange or shape.cluster > 1,
        early_draw=choice.early_draw if draws and passes.parts > 0 and passes.width == OCTET else "",
        narrow=plain and narrow and not backward and passes.parts > 0 and passes.width > 1 and target.compares_pairs,
        small=choice.small and not backward,
        fetches=choice.fetches and passes.parts > 0 and dict(operands)["x"].unit and target.compute_units > 0,
        dtype=problem.dtype,
        shape=shape,
        passes=(passes,),
        axes=len(layout.sizes),
        index64=needs_index64(arrays.values()),
        operands=operands,
        stream=streams(rows, target),
        evict_last=backward and evicts_last(rows, target, NO_SUMS, passes.width),
        awaits=choice.awaits and overlaps_launch(target, shape),
    )
    # Fetched rows are those of the next wave of workgroups: nearer ones would arrive too late, further ones would be
    # evicted before use.
    later = target.compute_units * (tuning.number(target, "softmax.resident_threads") // shape.threads)
    scalars = layout.scalars | view_scalars(views) | _scalars(problem, folded) | {"later": later}
    build = build_gradient_of_weights if weights else build_softmax_gradient if backward else build_softmax
    return Plan((Step(config, build, row_grid(config.name, shape, problem.rows, target), scalars),))


def _scalars(problem: SoftmaxProblem, folded: bool) -> dict[str, int | float]:
    factor = problem.scale * LOG2E if folded else LOG2E
    work = work_type(SCALARS[problem.dtype])
    reach = -lowest(work) / max(factor, 2.0) / 2
    factor_of_rows, bits = divisor(problem.head_rows)
    return {
        "length": problem.length,
        "seq": problem.head_rows,
        "scale": problem.scale,
        "factor": factor,
        "power": 2.0 ** math.floor(math.log2(factor)) if factor > 0.0 else 1.0,
        # Bounds of scores: the product with the factor is rounded by at most `_ROUNDED`; it does not overflow.
        "near": min(_ROUNDED * 2.0 ** (53 if work.bits == 64 else 24) / factor, reach) if factor > 0.0 else reach,
        "reach": reach,
        "shift": problem.length - problem.head_rows,
        "seq_factor": factor_of_rows,
        "seq_bits": bits,
        "dropout_limit": threshold(problem.dropout_p),
        "keep_scale": keep_scale(problem.dropout_p),
    }
