"""Where a torch tensor is computed on, and what PyTorch makes of a call before that is asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from aule import settings
from aule.errors import AuleError

CUDA_BUILD = torch.version.cuda is not None
"""Whether tensors that PyTorch calls cuda are NVIDIA's; ROCm calls its own so, too."""
_functorch: Any = torch._C._functorch
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


def route(q: Any, backend: str | None) -> str:
    """Where a tensor is computed on: in place as ``"cuda"``, ``"host"`` or ``"mps"``, or ``"staged"`` through the host.

    ``backend=`` may take a tensor of a GPU elsewhere.
    """
    if q.is_cuda:
        return "cuda" if CUDA_BUILD and (backend is None or backend.startswith("cuda")) else "staged"
    kind = q.device.type
    if kind == "cpu":
        return "host"
    wanted = backend or settings.backend() or "metal"
    return "mps" if kind == "mps" and wanted.startswith("metal") and mps().available() else "staged"


def in_place(q: Any) -> bool:
    """Whether a tensor is computed on where it lies, when nothing is forced."""
    return route(q, None) != "staged"


def mps() -> Any:
    """The route of Apple's GPUs, which is imported when there is such a tensor."""
    from aule.frontends import torch_mps

    return torch_mps


def dispatches(x: Any) -> bool:
    """Whether it is a tensor that handles operators itself."""
    return isinstance(x, torch.Tensor) and type(x).__torch_dispatch__ is not _PLAIN_DISPATCH


def wrapped(x: Any) -> bool:
    """Whether a tensor stands for others that are in memory: inside of functorch, and what is left of it when a
    function of ``torch.func.vjp`` is called, or mapped by autograd's ``is_grads_batched``."""
    return bool(_functorch.is_functorch_wrapped_tensor(x) or _functorch.is_legacy_batchedtensor(x))


def refuse_transforms(op: str, tensors: Iterable[Any], remedy: str) -> None:
    """Refuse tensors whose elements are not simply in memory, for what has no operator."""
    got = None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        got = "a functorch transform"
    elif torch.autograd.forward_ad._current_level >= 0:
        got = "forward-mode differentiation"
    else:
        given = [x for x in tensors if isinstance(x, torch.Tensor)]
        got = next((type(x).__name__ for x in given if dispatches(x)), None)
        if got is None and any(map(wrapped, given)):
            got = "a mapped one"
    if got is not None:
        raise AuleError(
            "AULE_ERROR_UNSUPPORTED", f"[{op}] expected plain tensors outside of transforms, got {got}; {remedy}"
        )


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """What autocast does to tensors, the first of which says where: floats but float64 become the chosen type."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )
