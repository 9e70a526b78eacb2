"""A linear layer behind a normalisation, as the catalogue has it."""

from __future__ import annotations

from aule.ops.linear.numpy_linear import layer_norm_linear, layer_norm_linear_gradient
from aule.ops.linear.plan import plan_layer_norm_linear, plan_layer_norm_linear_gradient
from aule.ops.linear.problem import bind_layer_norm_linear
from aule.ops.spec import Operand, OpSpec, Option

_OPTIONS = (Option("eps", "float", 1e-5),)
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
    options=_OPTIONS,
    bind=bind_layer_norm_linear,
    plan=plan_layer_norm_linear,
    compute=layer_norm_linear,
    products=True,
    gradient=OpSpec(
        name="layer_norm_linear_backward",
        operands=(Operand("dy"), *_OPERANDS),
        outputs=tuple(f"d{operand.name}" for operand in _OPERANDS),
        options=_OPTIONS,
        bind=bind_layer_norm_linear,
        plan=plan_layer_norm_linear_gradient,
        compute=layer_norm_linear_gradient,
        products=True,
    ),
    gradients={operand.name: f"d{operand.name}" for operand in _OPERANDS},
)
