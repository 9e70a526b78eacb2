"""The ops beside attention. Add an op here: the engine and every front end serve each op of this list."""

from __future__ import annotations

from aule.ops.cross_entropy.spec import CROSS_ENTROPY
from aule.ops.glu.spec import GEGLU, SWIGLU
from aule.ops.linear.spec import LAYER_NORM_LINEAR
from aule.ops.norm.spec import LAYER_NORM, RESIDUAL_LAYER_NORM, RESIDUAL_RMS_NORM, RMS_NORM
from aule.ops.rope.spec import RMS_NORM_ROPE, ROPE
from aule.ops.shared.spec import OpSpec
from aule.ops.softmax_dropout.spec import SOFTMAX_DROPOUT

CATALOGUE: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        RMS_NORM,
        LAYER_NORM,
        RESIDUAL_RMS_NORM,
        RESIDUAL_LAYER_NORM,
        LAYER_NORM_LINEAR,
        CROSS_ENTROPY,
        SWIGLU,
        GEGLU,
        ROPE,
        RMS_NORM_ROPE,
        SOFTMAX_DROPOUT,
    )
}
"""Every op by its name, which is that of its public function."""
