"""Rotary position embedding for the catalogue."""

from __future__ import annotations

from aule.ops.rope.numpy_rope import norm_rope, norm_rope_gradient, rope
from aule.ops.rope.plan import plan_rope
from aule.ops.rope.problem import bind_rope, check_positions
from aule.ops.shared.spec import Operand, OpSpec, Option

_X, _DY, _WEIGHT = Operand("x"), Operand("dy"), Operand("weight", optional=True)
_TABLES = (Operand("cos"), Operand("sin"), Operand("position_ids", optional=True))
_OPTIONS = (Option("interleaved", "bool", False), Option("rotary_dim", "int?", None))
_ROPE_OPTIONS = (*_OPTIONS, Option("inplace", "bool", False))
_NORM_OPTIONS = (*_OPTIONS, Option("eps", "float", 1e-6))

ROPE = OpSpec("rope", (_X, *_TABLES), ("y",), _ROPE_OPTIONS, bind_rope, plan_rope, rope, check_positions).with_gradient(
    (_DY, *_TABLES), rope, {"x": "dx"}
)
RMS_NORM_ROPE = OpSpec(
    "rms_norm_rope", (_X, _WEIGHT, *_TABLES), ("y",), _NORM_OPTIONS, bind_rope, plan_rope, norm_rope, check_positions
).with_gradient((_DY, _X, _WEIGHT, *_TABLES), norm_rope_gradient, {"x": "dx", "weight": "dweight"})
