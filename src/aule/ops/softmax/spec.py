"""Softmax with dropout, as the catalogue has it."""

from __future__ import annotations

from aule.ops.softmax.numpy_softmax import softmax, softmax_gradient
from aule.ops.softmax.plan import plan_softmax
from aule.ops.softmax.problem import bind_softmax
from aule.ops.spec import Operand, OpSpec, Option

_REST = (
    Operand("mask", optional=True),
    Operand("seed", optional=True),
)
_SPARED = (
    Operand("y", optional=True, spares="seed"),
    Operand("statistics", optional=True, spares="seed", small=True),
    Operand("weights", optional=True, spares="seed", stands_for="x"),
)
_OPTIONS = (Option("dropout_p", "float", 0.0), Option("causal", "bool", False), Option("scale", "float", 1.0))

SOFTMAX_DROPOUT = OpSpec(
    name="softmax_dropout",
    operands=(Operand("x"), *_REST),
    outputs=("y",),
    options=_OPTIONS,
    bind=bind_softmax,
    plan=plan_softmax,
    compute=softmax,
    gradient=OpSpec(
        name="softmax_dropout_backward",
        operands=(Operand("dy"), Operand("x"), *_REST, *_SPARED),
        outputs=("dx",),
        options=_OPTIONS,
        bind=bind_softmax,
        plan=plan_softmax,
        compute=softmax_gradient,
    ),
    gradients={"x": "dx"},
    kept=("statistics", "weights"),
)
