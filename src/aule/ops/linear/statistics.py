"""The kernel of what normalises rows on their way into a product: mean, scale and shift of each."""

from __future__ import annotations

from collections.abc import Mapping

from aule.ir import KernelIR
from aule.ops.norm.kernels import NormConfig, normalise
from aule.ops.norm.plan import norm_step
from aule.ops.norm.problem import NormProblem
from aule.ops.rowwise import RowKernel
from aule.ops.step import Step
from aule.target import Target
from aule.view import TensorView


def statistics_step(problem: NormProblem, x: TensorView, target: Target) -> Step:
    """The launch over the rows of ``x``; it leaves three numbers for each in ``statistics``."""
    views: Mapping[str, TensorView] = {"x": x}
    return norm_step("row_statistics", problem, views, target, build_statistics)[0]


def build_statistics(config: NormConfig, target: Target) -> KernelIR:
    """Trace the kernel: all means, then all scales, then all shifts, by which a number becomes
    ``(x - mean) * scale + shift``."""
    k = RowKernel(config.name, config, target)
    rows = k.rows
    x_array = k.array("x")
    mean, scale, shift = (k.statistic(number, "write") for number in range(3))

    def body() -> None:
        x = rows.source(x_array)
        k.span.hold(x)
        found = normalise(k, x, center=True)
        assert found.mean is not None and found.shift is not None
        rows.put(mean, found.mean)
        rows.put(scale, found.scale)
        rows.put(shift, found.shift.map(lambda s, r: -s * r, found.scale))

    rows.run(body)
    return k.finish()
