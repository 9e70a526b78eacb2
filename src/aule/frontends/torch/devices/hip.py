"""AMD's GPUs: tensors of PyTorch for ROCm, which it calls cuda, used in place on the current stream.

PyTorch's own libraries are used, so a device's number, its memory and its streams are the same here. Without them
tensors are copied through the host. No AMD device has run this: tests run it on CPU tensors, with stand-ins for the
libraries.
"""

from __future__ import annotations

import functools
import logging

import torch

from aule.backends import registry
from aule.errors import BackendUnavailableError
from aule.frontends.torch.devices.streams import OnStream

BUILD = torch.version.hip is not None
"""Whether tensors that PyTorch calls cuda are AMD's."""
_log = logging.getLogger("aule")


class Hip(OnStream):
    """ROCm tensors."""

    backend = "hip"


def available() -> bool:
    """Whether tensors that PyTorch calls cuda are AMD's, and can be used in place."""
    return BUILD and _found()


@functools.cache
def _found() -> bool:
    try:
        registry.devices("hip")
    except BackendUnavailableError as error:
        _log.warning("ROCm tensors are copied through the host: %s", error.message)
        return False
    return True
