"""Gated units for the catalogue."""

from __future__ import annotations

from aule.ops.glu.numpy_glu import glu, glu_gradient
from aule.ops.glu.plan import plan_glu
from aule.ops.glu.problem import bind_glu
from aule.ops.shared.spec import Operand, OpSpec, Option


def _glu(name: str, options: tuple[Option, ...]) -> OpSpec:
    operands = (Operand("gate"), Operand("up", optional=True))
    forward = OpSpec(name, operands, ("y",), options, bind_glu, plan_glu, glu)
    return forward.with_gradient((Operand("dy"), *operands), glu_gradient, {"gate": "dgate", "up": "dup"})


SWIGLU = _glu("swiglu", ())
GEGLU = _glu("geglu", (Option("approximate", "str", "none"),))
