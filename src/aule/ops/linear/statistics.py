"""The kernel that computes mean, scale and shift of rows, which a product applies when it loads them."""

from __future__ import annotations

from aule.ir import KernelIR
from aule.ops.norm.kernels import NormConfig, normalise
from aule.ops.norm.plan import norm_step
from aule.ops.norm.problem import NormProblem
from aule.ops.rows.kernel import RowKernel
from aule.ops.shared.plan import Step
from aule.target import Target
from aule.view import TensorView


def statistics_step(problem: NormProblem, x: TensorView, target: Target) -> Step:
    """The launch over the rows of ``x``, which stores three values per row in ``statistics``."""
    return norm_step("row_statistics", problem, {"x": x}, target, build_statistics)


def build_statistics(config: NormConfig, target: Target) -> KernelIR:
    """Trace the kernel: all means, then all scales, then all shifts, for ``(x - mean) * scale + shift``."""
    k = RowKernel(config, target)
    rows = k.rows
    x_array = k.array("x")
    mean, scale, shift = (k.statistic(number, "write") for number in range(3))

    def body() -> None:
        x = rows.source(x_array)
        k.passes.preload(x)
        found = normalise(k, x, center=True)
        assert found.mean is not None and found.mean_rest is not None
        rows.put(mean, found.mean)
        rows.put(scale, found.scale)
        rows.put(shift, found.mean_rest.map(lambda s, r: -s * r, found.scale))

    return k.trace(body)
