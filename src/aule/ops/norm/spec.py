"""The ops of normalisation, as the catalogue has them."""

from __future__ import annotations

from functools import partial

from aule.ops.norm.numpy_norm import norm, norm_gradient
from aule.ops.norm.plan import plan_norm, plan_norm_gradient
from aule.ops.norm.problem import bind_norm, bind_norm_gradient
from aule.ops.spec import Operand, OpSpec, Option


def _norm(name: str, center: bool, residual: bool, eps: float) -> OpSpec:
    vectors = ["weight", "bias"] if center else ["weight"]
    options = (Option("eps", "float", eps),)
    saved = (Operand("dh", optional=True), Operand("h")) if residual else (Operand("x"),)
    statistics = (Operand("statistics", optional=True, spares="x", small=True),) if center else ()
    gradient = OpSpec(
        name=f"{name}_backward",
        operands=(Operand("dy"), *saved, *(Operand(vector, optional=True) for vector in vectors), *statistics),
        outputs=("dx", *(f"d{vector}" for vector in vectors)),
        options=options,
        bind=partial(bind_norm_gradient, center=center),
        plan=plan_norm_gradient,
        compute=norm_gradient,
    )
    rows = ("x", "residual") if residual else ("x",)
    return OpSpec(
        name=name,
        operands=(*(Operand(row) for row in rows), *(Operand(vector, optional=True) for vector in vectors)),
        outputs=("y", "h") if residual else ("y",),
        options=options,
        bind=partial(bind_norm, center=center),
        plan=plan_norm,
        compute=norm,
        gradient=gradient,
        gradients={**dict.fromkeys(rows, "dx"), **{vector: f"d{vector}" for vector in vectors}},
        kept=tuple(operand.name for operand in statistics),
    )


RMS_NORM = _norm("rms_norm", center=False, residual=False, eps=1e-6)
LAYER_NORM = _norm("layer_norm", center=True, residual=False, eps=1e-5)
RESIDUAL_RMS_NORM = _norm("residual_rms_norm", center=False, residual=True, eps=1e-6)
RESIDUAL_LAYER_NORM = _norm("residual_layer_norm", center=True, residual=True, eps=1e-5)
