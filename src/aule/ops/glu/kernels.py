"""The kernels of gated units, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value
from aule.ops.glu.problem import Activation
from aule.ops.rows.kernel import RowConfig, RowKernel
from aule.target import Target
from aule.tile.common.math import ROOT_TWO_PI_INVERSE, normal, sigmoid
from aule.tile.rows.parts import Part

TANH_FACTOR = 0.7978845608028654  # sqrt(2 / pi)
TANH_CUBE = 0.044715
TANH_SATURATED = 1000.0
"""Squares are capped here: larger ones would overflow, and the derivative's other factor is zero even in float64."""


@dataclass(frozen=True, kw_only=True)
class GluConfig(RowConfig):
    """Configuration of a gated unit's kernel; with ``packed``, ``gate`` and its gradient hold both gate and up."""

    activation: Activation
    packed: bool


def build_glu(config: GluConfig, target: Target) -> KernelIR:
    """Trace the forward kernel."""
    k = RowKernel(config, target)
    b, passes, rows = k.b, k.passes, k.rows
    gates, y_array = k.array("gate"), k.array("y", "write")
    ups = gates if config.packed else k.array("up")

    def body() -> None:
        gate, up = rows.source(gates), rows.source(ups, passes.length if config.packed else 0)
        y = rows.source(y_array)
        passes.preload(gate, up)

        def write(p: Part) -> None:
            p.store(y, activated(b, config.activation, p[gate]) * p[up])

        passes.each(write)

    return k.trace(body)


def build_glu_gradient(config: GluConfig, target: Target) -> KernelIR:
    """Trace the backward kernel."""
    k = RowKernel(config, target)
    b, passes, rows = k.b, k.passes, k.rows
    dys, gates = k.array("dy"), k.array("gate")
    ups = gates if config.packed else k.array("up")
    dgates = k.array("dgate", "write") if config.has("dgate") else None
    dups = dgates if config.packed else (k.array("dup", "write") if config.has("dup") else None)

    def body() -> None:
        shift = passes.length if config.packed else 0
        dy, gate, up = rows.source(dys), rows.source(gates), rows.source(ups, shift)
        dgate = None if dgates is None else rows.source(dgates)
        dup = None if dups is None else rows.source(dups, shift)
        passes.preload(dy, gate, up)

        def write(p: Part) -> None:
            value, slope = derived(b, config.activation, p[gate])
            if dgate is not None:
                p.store(dgate, p[dy] * p[up] * slope)
            if dup is not None:
                p.store(dup, p[dy] * value)

        passes.each(write)

    return k.trace(body)


def activated(b: Builder, activation: Activation, x: Value) -> Value:
    """The activation of ``x``."""
    if activation == "silu":
        return x * sigmoid(b, x)
    if activation == "gelu":
        return x * normal(b, x)[0]
    return x * sigmoid(b, _tanh_argument(x))


def derived(b: Builder, activation: Activation, x: Value) -> tuple[Value, Value]:
    """The activation of ``x``, and its derivative."""
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
    """Twice GELU's argument u of tanh: ``(1 + tanh(u)) / 2`` is the sigmoid of ``2u``."""
    return x * (x * x * (2.0 * TANH_FACTOR * TANH_CUBE) + 2.0 * TANH_FACTOR)
