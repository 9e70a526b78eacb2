"""The gated units, as the catalogue has them."""

from __future__ import annotations

from aule.ops.glu.numpy_glu import glu, glu_gradient
from aule.ops.glu.plan import plan_glu
from aule.ops.glu.problem import bind_glu
from aule.ops.spec import Operand, OpSpec, Option


def _glu(name: str, options: tuple[Option, ...]) -> OpSpec:
    operands = (Operand("gate"), Operand("up", optional=True))
    gradient = OpSpec(
        name=f"{name}_backward",
        operands=(Operand("dy"), *operands),
        outputs=("dgate", "dup"),
        options=options,
        bind=bind_glu,
        plan=plan_glu,
        compute=glu_gradient,
    )
    return OpSpec(
        name=name,
        operands=operands,
        outputs=("y",),
        options=options,
        bind=bind_glu,
        plan=plan_glu,
        compute=glu,
        gradient=gradient,
        gradients={"gate": "dgate", "up": "dup"},
    )


SWIGLU = _glu("swiglu", ())
GEGLU = _glu("geglu", (Option("approximate", "str", "none"),))
