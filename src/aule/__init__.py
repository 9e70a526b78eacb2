"""FlashAttention for any hardware.

>>> import numpy as np
>>> from aule import flash_attention
>>> q = k = v = np.ones((1, 8, 128, 64), np.float32)
>>> out = flash_attention(q, k, v, causal=True)

Importing the package loads almost nothing; names are imported on first use.
"""

import importlib as _importlib
import logging as _logging
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from aule._version import __version__
from aule.api.exported import register_when_needed as _register_when_needed

if _TYPE_CHECKING:
    from aule import codegen, kernels
    from aule import distributed as distributed
    from aule import integrations as integrations
    from aule import ir as ir
    from aule import nn as nn
    from aule.api.attention import (
        aule_attention,
        flash_attention,
        flash_attention_rope,
        flash_attention_varlen,
    )
    from aule.api.context import Aule, Tensor
    from aule.api.decode import cascade_attention, decode_attention, flash_attention_paged, merge_states
    from aule.api.explain import explain
    from aule.api.flex import (
        AuxOutput,
        AuxRequest,
        and_masks,
        create_block_mask,
        flex_attention,
        noop_mask,
        or_masks,
    )
    from aule.api.info import get_available_backends, get_backend_errors, get_backend_info, print_backend_info
    from aule.api.kvcache import KVCache
    from aule.api.launch import Kernel, kernel, launch
    from aule.api.mla import mla_decode
    from aule.api.precision import attention
    from aule.api.rope import precompute_rope_frequencies
    from aule.api.row_ops import (
        cross_entropy,
        geglu,
        layer_norm,
        layer_norm_linear,
        residual_layer_norm,
        residual_rms_norm,
        rms_norm,
        rms_norm_rope,
        rope,
        softmax_dropout,
        swiglu,
    )
    from aule.api.sdpa import (
        dispatch_stats,
        install,
        installed,
        register_flash_attention_impl,
        reset_dispatch_stats,
        scaled_dot_product_attention,
        uninstall,
    )
    from aule.errors import (
        AuleError,
        BackendUnavailableError,
        CacheFullError,
        ClosedError,
        CommunicationError,
        DeviceLostError,
        DeviceMismatchError,
        InvalidArgumentError,
        InvalidDtypeError,
        InvalidShapeError,
        KernelError,
        LaunchError,
        NoComputeQueueError,
        OutOfMemoryError,
        ShaderCompileError,
        UnknownOptionError,
    )
    from aule.frontends.block_mask import BlockMask
    from aule.integrations.patching import PatchReport as PatchReport
    from aule.integrations.patching import patch_model as patch_model
    from aule.ops.attention.checks import MAX_HEAD_DIM

_logging.getLogger("aule").addHandler(_logging.NullHandler())
_register_when_needed()

__all__ = [
    "MAX_HEAD_DIM",
    "Aule",
    "AuleError",
    "AuxOutput",
    "AuxRequest",
    "BackendUnavailableError",
    "BlockMask",
    "CacheFullError",
    "ClosedError",
    "CommunicationError",
    "DeviceLostError",
    "DeviceMismatchError",
    "InvalidArgumentError",
    "InvalidDtypeError",
    "InvalidShapeError",
    "KVCache",
    "Kernel",
    "KernelError",
    "LaunchError",
    "NoComputeQueueError",
    "OutOfMemoryError",
    "ShaderCompileError",
    "Tensor",
    "UnknownOptionError",
    "__version__",
    "and_masks",
    "attention",
    "aule_attention",
    "cascade_attention",
    "codegen",
    "create_block_mask",
    "cross_entropy",
    "decode_attention",
    "dispatch_stats",
    "explain",
    "flash_attention",
    "flash_attention_paged",
    "flash_attention_rope",
    "flash_attention_varlen",
    "flex_attention",
    "geglu",
    "get_available_backends",
    "get_backend_errors",
    "get_backend_info",
    "install",
    "installed",
    "kernel",
    "kernels",
    "launch",
    "layer_norm",
    "layer_norm_linear",
    "merge_states",
    "mla_decode",
    "noop_mask",
    "or_masks",
    "precompute_rope_frequencies",
    "print_backend_info",
    "register_flash_attention_impl",
    "reset_dispatch_stats",
    "residual_layer_norm",
    "residual_rms_norm",
    "rms_norm",
    "rms_norm_rope",
    "rope",
    "scaled_dot_product_attention",
    "softmax_dropout",
    "swiglu",
    "uninstall",
]


_HOMES = (
    "errors",
    "api.attention",
    "api.decode",
    "api.flex",
    "api.precision",
    "api.rope",
    "api.row_ops",
    "api.context",
    "api.explain",
    "api.info",
    "api.sdpa",
    "api.kvcache",
    "api.launch",
    "api.mla",
    "ops.attention.checks",
)
"""Modules that define the names above."""


_NOT_STARRED = ("PatchReport", "distributed", "integrations", "ir", "nn", "patch_model")
"""Names that `from aule import *` leaves out: most need PyTorch."""


def __getattr__(name: str) -> _Any:
    if name in ("codegen", "distributed", "integrations", "ir", "kernels", "nn"):
        return _importlib.import_module(f"aule.{name}")
    if name in ("PatchReport", "patch_model"):
        return getattr(_importlib.import_module("aule.integrations.patching"), name)
    if name in __all__:
        for home in _HOMES:
            found = getattr(_importlib.import_module(f"aule.{home}"), name, None)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module 'aule' has no attribute {name!r}")


def __dir__() -> list[str]:
    special = {name for name in globals() if name.startswith("__")}
    return sorted({*special, *__all__, *_NOT_STARRED})  # without modules that happen to be loaded
