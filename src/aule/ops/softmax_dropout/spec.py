"""Softmax with dropout for the catalogue."""

from __future__ import annotations

from aule.ops.shared.spec import Operand, OpSpec, Option
from aule.ops.softmax_dropout.numpy_softmax import softmax, softmax_gradient
from aule.ops.softmax_dropout.plan import plan_softmax
from aule.ops.softmax_dropout.problem import bind_softmax

_OPERANDS = (Operand("x"), Operand("mask", optional=True), Operand("seed", optional=True))
_SAVED = (
    Operand("y", optional=True, spares="seed"),
    Operand("statistics", optional=True, spares="seed", small=True),
    Operand("weights", optional=True, spares="seed", stands_for="x"),
)

SOFTMAX_DROPOUT = OpSpec(
    name="softmax_dropout",
    operands=_OPERANDS,
    outputs=("y",),
    options=(Option("dropout_p", "float", 0.0), Option("causal", "bool", False), Option("scale", "float", 1.0)),
    bind=bind_softmax,
    plan=plan_softmax,
    compute=softmax,
    saved_outputs=("statistics", "weights"),
).with_gradient((Operand("dy"), *_OPERANDS, *_SAVED), softmax_gradient, {"x": "dx"})
