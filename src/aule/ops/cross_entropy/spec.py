"""Cross entropy for the catalogue."""

from __future__ import annotations

from aule.ops.cross_entropy.numpy_cross_entropy import cross_entropy, cross_entropy_gradient
from aule.ops.cross_entropy.plan import plan_cross_entropy, plan_cross_entropy_gradient
from aule.ops.cross_entropy.problem import bind_cross_entropy, check_targets
from aule.ops.shared.spec import Operand, OpSpec, Option

CROSS_ENTROPY = OpSpec(
    name="cross_entropy",
    operands=(Operand("logits"), Operand("target")),
    outputs=("loss", "most", "above"),
    options=(
        Option("ignore_index", "int", -100),
        Option("label_smoothing", "float", 0.0),
        Option("reduction", "str", "mean"),
        Option("wide", "bool", False),
    ),
    bind=bind_cross_entropy,
    plan=plan_cross_entropy,
    compute=cross_entropy,
    check=check_targets,
).with_gradient(
    tuple(map(Operand, ("dloss", "logits", "target", "most", "above"))),
    cross_entropy_gradient,
    {"logits": "dlogits"},
    plan=plan_cross_entropy_gradient,
)
