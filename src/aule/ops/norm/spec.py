"""Normalisation ops for the catalogue."""

from __future__ import annotations

from functools import partial

from aule.ops.norm.numpy_norm import norm, norm_gradient
from aule.ops.norm.plan import plan_norm, plan_norm_gradient
from aule.ops.norm.problem import bind_norm, bind_norm_gradient
from aule.ops.shared.spec import Operand, OpSpec, Option


def _norm(name: str, center: bool, residual: bool, eps: float) -> OpSpec:
    vectors = tuple(Operand(vector, optional=True) for vector in (("weight", "bias") if center else ("weight",)))
    rows = ("x", "residual") if residual else ("x",)
    saved = (Operand("dh", optional=True), Operand("h")) if residual else (Operand("x"),)
    statistics = (Operand("statistics", optional=True, spares="x", small=True),) if center else ()
    forward = OpSpec(
        name=name,
        operands=(*map(Operand, rows), *vectors),
        outputs=("y", "h") if residual else ("y",),
        options=(Option("eps", "float", eps),),
        bind=partial(bind_norm, center=center),
        plan=plan_norm,
        compute=norm,
        saved_outputs=tuple(operand.name for operand in statistics),
    )
    return forward.with_gradient(
        (Operand("dy"), *saved, *vectors, *statistics),
        norm_gradient,
        {**dict.fromkeys(rows, "dx"), **{vector.name: f"d{vector.name}" for vector in vectors}},
        bind=partial(bind_norm_gradient, center=center),
        plan=plan_norm_gradient,
    )


RMS_NORM = _norm("rms_norm", center=False, residual=False, eps=1e-6)
LAYER_NORM = _norm("layer_norm", center=True, residual=False, eps=1e-5)
RESIDUAL_RMS_NORM = _norm("residual_rms_norm", center=False, residual=True, eps=1e-6)
RESIDUAL_LAYER_NORM = _norm("residual_layer_norm", center=True, residual=True, eps=1e-5)
