"""A linear layer after a normalisation, for the catalogue."""

from __future__ import annotations

from aule.ops.linear.numpy_linear import layer_norm_linear, layer_norm_linear_gradient
from aule.ops.linear.plan import plan_layer_norm_linear, plan_layer_norm_linear_gradient
from aule.ops.linear.problem import bind_layer_norm_linear
from aule.ops.shared.spec import Operand, OpSpec, Option

_OPERANDS = (
    Operand("x"),
    Operand("weight_norm", optional=True),
    Operand("bias_norm", optional=True),
    Operand("weight"),
    Operand("bias", optional=True),
)

LAYER_NORM_LINEAR = OpSpec(
    name="layer_norm_linear",
    operands=_OPERANDS,
    outputs=("y",),
    options=(Option("eps", "float", 1e-5),),
    bind=bind_layer_norm_linear,
    plan=plan_layer_norm_linear,
    compute=layer_norm_linear,
    products=True,
).with_gradient(
    (Operand("dy"), *_OPERANDS),
    layer_norm_linear_gradient,
    {operand.name: f"d{operand.name}" for operand in _OPERANDS},
    plan=plan_layer_norm_linear_gradient,
)
