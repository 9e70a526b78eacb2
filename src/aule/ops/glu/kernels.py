"""The kernels of gated units, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value
from aule.ops.glu.problem import Activation
from aule.ops.rowwise import RowConfig, RowKernel
from aule.target import Target
from aule.tile.math import ROOT_TWO_PI_INVERSE, normal, sigmoid
from aule.tile.spans import Part

TANH_FACTOR = 0.7978845608028654  # sqrt(2 / pi)
TANH_CUBE = 0.044715
TANH_SATURATED = 1000.0
"""A square from which on the derivative's other factor is zero in float64, too; beyond it this one would overflow."""


@dataclass(frozen=True, kw_only=True)
class GluConfig(RowConfig):
    """A kernel of a gated unit; with ``packed`` both halves are columns of ``gate``, and so of its gradient."""

    name: str
    activation: Activation
    packed: bool


def build_glu(config: GluConfig, target: Target) -> KernelIR:
    """Trace the forward kernel."""
    k = RowKernel(config.name, config, target)
    b, span, rows = k.b, k.span, k.rows
    gates, y_array = k.array("gate"), k.array("y", "write")
    ups = gates if config.packed else k.array("up")

    def body() -> None:
        gate, up = rows.source(gates), rows.source(ups, span.length if config.packed else 0)
        y = rows.source(y_array)
        span.hold(gate, up)

        def write(p: Part) -> None:
            p.store(y, activated(b, config.activation, p[gate]) * p[up])

        span.each(write)

    rows.run(body)
    return k.finish()


def build_glu_gradient(config: GluConfig, target: Target) -> KernelIR:
    """Trace the backward kernel."""
    k = RowKernel(config.name, config, target)
    b, span, rows = k.b, k.span, k.rows
    dys, gates = k.array("dy"), k.array("gate")
    ups = gates if config.packed else k.array("up")
    dgates = k.array("dgate", "write") if config.has("dgate") else None
    dups = dgates if config.packed else (k.array("dup", "write") if config.has("dup") else None)

    def body() -> None:
        shift = span.length if config.packed else 0
        dy, gate, up = rows.source(dys), rows.source(gates), rows.source(ups, shift)
        dgate = None if dgates is None else rows.source(dgates)
        dup = None if dups is None else rows.source(dups, shift)
        span.hold(dy, gate, up)

        def write(p: Part) -> None:
            value, slope = derived(b, config.activation, p[gate])
            if dgate is not None:
                p.store(dgate, p[dy] * p[up] * slope)
            if dup is not None:
                p.store(dup, p[dy] * value)

        span.each(write)

    rows.run(body)
    return k.finish()


def activated(b: Builder, activation: Activation, x: Value) -> Value:
    """The activation of a number."""
    if activation == "silu":
        return x * sigmoid(b, x)
    if activation == "gelu":
        return x * normal(b, x)[0]
    return x * sigmoid(b, _tanh_argument(x))


def derived(b: Builder, activation: Activation, x: Value) -> tuple[Value, Value]:
    """The activation of a number, and its derivative."""
    if activation == "gelu":
        below, bell = normal(b, x)
        return x * below, b.fma(x * ROOT_TWO_PI_INVERSE, bell, below)
    if activation == "silu":
        s = sigmoid(b, x)
        return x * s, s * b.fma(x, 1.0 - s, 1.0)
    s = sigmoid(b, _tanh_argument(x))
    value = x * s
    inner = b.fma(b.min(x * x, TANH_SATURATED), 6.0 * TANH_FACTOR * TANH_CUBE, 2.0 * TANH_FACTOR)
    return value, b.fma(value * (1.0 - s), inner, s)


def _tanh_argument(x: Value) -> Value:
    """Twice what GELU takes the hyperbolic tangent of: ``(1 + tanh(u)) / 2`` is the sigmoid of ``2u``."""
    return x * (x * x * (2.0 * TANH_FACTOR * TANH_CUBE) + 2.0 * TANH_FACTOR)
