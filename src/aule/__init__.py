"""FlashAttention for whatever hardware a person has.

>>> from aule import flash_attention
>>> out = flash_attention(q, k, v, causal=True)
"""

import importlib as _importlib
import logging as _logging
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from aule._version import __version__
from aule.api import (
    attention,
    aule_attention,
    cascade_attention,
    decode_attention,
    flash_attention,
    flash_attention_paged,
    flash_attention_rope,
    flash_attention_varlen,
    merge_states,
    precompute_rope_frequencies,
)
from aule.context import Aule, Tensor
from aule.errors import (
    AuleError,
    BackendUnavailableError,
    CacheFullError,
    ClosedError,
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
)
from aule.info import get_available_backends, get_backend_errors, get_backend_info, print_backend_info
from aule.install import (
    dispatch_stats,
    install,
    installed,
    register_flash_attention_impl,
    reset_dispatch_stats,
    scaled_dot_product_attention,
    uninstall,
)
from aule.kvcache import KVCache

if _TYPE_CHECKING:
    from aule import codegen, kernels

_logging.getLogger("aule").addHandler(_logging.NullHandler())

__all__ = [
    "Aule",
    "AuleError",
    "BackendUnavailableError",
    "CacheFullError",
    "ClosedError",
    "DeviceLostError",
    "DeviceMismatchError",
    "InvalidArgumentError",
    "InvalidDtypeError",
    "InvalidShapeError",
    "KVCache",
    "KernelError",
    "LaunchError",
    "NoComputeQueueError",
    "OutOfMemoryError",
    "ShaderCompileError",
    "Tensor",
    "__version__",
    "attention",
    "aule_attention",
    "cascade_attention",
    "codegen",
    "decode_attention",
    "dispatch_stats",
    "flash_attention",
    "flash_attention_paged",
    "flash_attention_rope",
    "flash_attention_varlen",
    "get_available_backends",
    "get_backend_errors",
    "get_backend_info",
    "install",
    "installed",
    "kernels",
    "merge_states",
    "precompute_rope_frequencies",
    "print_backend_info",
    "register_flash_attention_impl",
    "reset_dispatch_stats",
    "scaled_dot_product_attention",
    "uninstall",
]


def __getattr__(name: str) -> _Any:
    # Only those who generate kernels themselves need these, and they take as long to import as all the rest.
    if name in ("codegen", "kernels"):
        return _importlib.import_module(f"aule.{name}")
    raise AttributeError(f"module 'aule' has no attribute {name!r}")
