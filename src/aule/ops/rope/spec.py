"""Rotary position embedding, as the catalogue has it."""

from __future__ import annotations

from aule.ops.rope.numpy_rope import norm_rope, norm_rope_gradient, rope
from aule.ops.rope.plan import plan_rope
from aule.ops.rope.problem import bind_rope
from aule.ops.spec import Operand, OpSpec, Option

_TABLES = (
    Operand("cos"),
    Operand("sin"),
    Operand("position_ids", optional=True),
)
_OPTIONS = (Option("interleaved", "bool", False), Option("rotary_dim", "int?", None))
_ROPE_OPTIONS = (*_OPTIONS, Option("inplace", "bool", False))
_NORM_OPTIONS = (*_OPTIONS, Option("eps", "float", 1e-6))

ROPE = OpSpec(
    name="rope",
    operands=(Operand("x"), *_TABLES),
    outputs=("y",),
    options=_ROPE_OPTIONS,
    bind=bind_rope,
    plan=plan_rope,
    compute=rope,
    gradient=OpSpec(
        name="rope_backward",
        operands=(Operand("dy"), *_TABLES),
        outputs=("dx",),
        options=_ROPE_OPTIONS,
        bind=bind_rope,
        plan=plan_rope,
        compute=rope,
    ),
    gradients={"x": "dx"},
)
RMS_NORM_ROPE = OpSpec(
    name="rms_norm_rope",
    operands=(Operand("x"), Operand("weight", optional=True), *_TABLES),
    outputs=("y",),
    options=_NORM_OPTIONS,
    bind=bind_rope,
    plan=plan_rope,
    compute=norm_rope,
    gradient=OpSpec(
        name="rms_norm_rope_backward",
        operands=(Operand("dy"), Operand("x"), Operand("weight", optional=True), *_TABLES),
        outputs=("dx", "dweight"),
        options=_NORM_OPTIONS,
        bind=bind_rope,
        plan=plan_rope,
        compute=norm_rope_gradient,
    ),
    gradients={"x": "dx", "weight": "dweight"},
)
