"""Chooses the forward kernel for a configuration."""

from __future__ import annotations

from aule.ir import KernelIR
from aule.ops.attention.config import ForwardConfig, FragmentConfig
from aule.ops.attention.fragment.forward import build_forward_fragment
from aule.ops.attention.fragment.forward_full_tiles import build_forward_full_tiles
from aule.ops.attention.simt.forward import build_forward_simt
from aule.ops.attention.warpgroup.forward import build_forward_warpgroup
from aule.ops.attention.warpgroup.forward_roles import build_forward_roles
from aule.target import Target

KERNEL_NAME = "flash_attention"


def build_forward(config: ForwardConfig | FragmentConfig, target: Target, name: str = KERNEL_NAME) -> KernelIR:
    """Trace the forward kernel of a configuration for a target."""
    if isinstance(config, ForwardConfig):
        return build_forward_simt(config, target, name)
    if config.full_tiles:
        return build_forward_full_tiles(config, target, name)
    if config.shape.copiers:
        return build_forward_roles(config, target, name)
    if config.shape.warpgroups:
        return build_forward_warpgroup(config, target, name)
    return build_forward_fragment(config, target, name)
