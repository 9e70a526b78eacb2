"""Cross entropy, as the catalogue has it."""

from __future__ import annotations

from aule.ops.cross_entropy.numpy_cross_entropy import cross_entropy, cross_entropy_gradient
from aule.ops.cross_entropy.plan import plan_cross_entropy, plan_cross_entropy_gradient
from aule.ops.cross_entropy.problem import bind_cross_entropy, check_targets
from aule.ops.spec import Operand, OpSpec, Option

_OPTIONS = (
    Option("ignore_index", "int", -100),
    Option("label_smoothing", "float", 0.0),
    Option("reduction", "str", "mean"),
    Option("wide", "bool", False),
)

CROSS_ENTROPY = OpSpec(
    name="cross_entropy",
    operands=(Operand("logits"), Operand("target")),
    outputs=("loss", "most", "above"),
    options=_OPTIONS,
    bind=bind_cross_entropy,
    plan=plan_cross_entropy,
    compute=cross_entropy,
    check=check_targets,
    gradient=OpSpec(
        name="cross_entropy_backward",
        operands=tuple(map(Operand, ("dloss", "logits", "target", "most", "above"))),
        outputs=("dlogits",),
        options=_OPTIONS,
        bind=bind_cross_entropy,
        plan=plan_cross_entropy_gradient,
        compute=cross_entropy_gradient,
    ),
    gradients={"logits": "dlogits"},
)
