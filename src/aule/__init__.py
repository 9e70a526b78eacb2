"""FlashAttention for whatever hardware a person has.

>>> from aule import flash_attention
>>> out = flash_attention(q, k, v, causal=True)
"""

import logging as _logging

from aule import codegen, kernels
from aule._version import __version__
from aule.api import attention, flash_attention
from aule.context import Aule, Tensor
from aule.errors import (
    AuleError,
    BackendUnavailableError,
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

_logging.getLogger("aule").addHandler(_logging.NullHandler())

__all__ = [
    "Aule",
    "AuleError",
    "BackendUnavailableError",
    "ClosedError",
    "DeviceLostError",
    "DeviceMismatchError",
    "InvalidArgumentError",
    "InvalidDtypeError",
    "InvalidShapeError",
    "KernelError",
    "LaunchError",
    "NoComputeQueueError",
    "OutOfMemoryError",
    "ShaderCompileError",
    "Tensor",
    "__version__",
    "attention",
    "codegen",
    "flash_attention",
    "get_available_backends",
    "get_backend_errors",
    "get_backend_info",
    "kernels",
    "print_backend_info",
]
