"""Torch tensors in host memory: computed on where they lie by the CPU engine, or brought to another device and back."""

from __future__ import annotations

from typing import Any

import torch

from aule import settings
from aule.backends import registry
from aule.engine.attention import backward_on_host, forward_on_host, host_device, host_view
from aule.errors import AuleError, DeviceMismatchError
from aule.frontends.torch_views import checked_out, dtype_name, require_tensor
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands, attention_problem
from aule.options import AttentionOptions
from aule.view import TensorView


def on_host(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """CPU tensors are NumPy arrays over the same memory; bfloat16 goes by its bits."""
    problem, operands = host_problem(q, k, v, options)
    out = options.out
    if out is None:
        out = torch.empty(operands.out_shape, dtype=q.dtype)
    else:
        checked_out(out, operands.out_shape, q)
    target = host_view_of(out, "out").storage
    lifted = target[(None,) * (4 - target.ndim)]
    _, lse = forward_on_host(problem, operands, host_device(problem, options.backend), lifted)
    if not options.return_lse:
        return out
    assert lse is not None
    return out, torch.from_numpy(lse.reshape(operands.lse_shape))


def host_problem(q: Any, k: Any, v: Any, options: AttentionOptions) -> tuple[AttentionProblem, Operands]:
    tensors = {"q": q, "k": k, "v": v, **options.arrays()}
    views: dict[str, Any] = {name: host_view_of(tensor, name) for name, tensor in tensors.items()}
    return attention_problem(**views, **options.plain())


def host_view_of(tensor: Any, name: str) -> TensorView:
    require_tensor(tensor, name)
    if tensor.device.type != "cpu":
        raise DeviceMismatchError(
            f"[flash_attention] expected {name} on the CPU like q, got {tensor.device}; move it with .to"
        )
    dtype = dtype_name(tensor, name)
    plain = tensor.detach()
    array = (plain.view(torch.uint16) if dtype == "bf16" else plain).numpy()
    return TensorView(dtype, tuple(tensor.shape), tensor.stride(), "host", array)


def host_with_lse(
    q: Any, k: Any, v: Any, options: AttentionOptions, *, training: bool, foreign: bool = False
) -> tuple[Any, Any]:
    """Attention and its log-sum-exp in the type that is computed in; ``training`` and ``foreign`` as `_device` says."""
    problem, operands = host_problem(q, k, v, options)
    device = _device(problem, options.backend, training, foreign)
    out = torch.empty(operands.out_shape, dtype=q.dtype)
    target = host_view_of(out, "out").storage
    _, lse = forward_on_host(problem, operands, device, target[(None,) * (4 - target.ndim)], exact_lse=True)
    assert lse is not None
    return out, torch.from_numpy(lse).reshape(operands.lse_shape)


def host_gradients(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, options: AttentionOptions, want_scores: bool,
    foreign: bool = False,
) -> tuple[list[Any], Any]:  # fmt: skip
    """Gradients of q, k and v, and of what is added to the scores where it is wanted."""
    problem, operands = host_problem(q, k, v, options._replace(return_lse=True))
    device = _device(problem, options.backend, True, foreign)
    results = []
    for name, tensor in (("out", out), ("dout", dout)):
        array = host_view_of(tensor, name).storage
        results.append(array[(None,) * (4 - array.ndim)])
    rows = lse.numpy()
    ds = None
    if want_scores:
        ds = torch.zeros((problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv), dtype=lse.dtype)
    grads = backward_on_host(
        problem,
        operands,
        device,
        results[0],
        rows[(None,) * (3 - rows.ndim)],
        host_view(problem.dtype, results[1]),
        None if ds is None else ds.numpy(),
    )
    return [tensor_like(g, x) for g, x in zip(grads, (q, k, v), strict=True)], ds


def _device(problem: AttentionProblem, spec: str | None, training: bool, foreign: bool) -> Any:
    """The device for a call whose gradients may be asked for.

    CPU tensors stay on the CPU unless there is only another device or one is forced; ``foreign`` ones, which are copied
    anyway, go to the best. NumPy, as None, has no gradients: with ``training`` it is refused.
    """
    spec = spec or settings.backend()
    device: Any = None
    if spec is not None or foreign:
        device = host_device(problem, spec)
    else:
        try:
            device = registry.find("cpu")
        except AuleError:
            device = registry.choose(None)
    if device is None and training:
        raise no_gradient(
            "NumPy", 'NumPy alone computes none: pip install "aule-attention[cpu]", or choose a device with backend='
        )
    return device


def no_gradient(got: str, remedy: str) -> AuleError:
    """The error for a gradient that there is not."""
    return AuleError(
        "AULE_ERROR_NO_GRADIENT",
        f"[flash_attention] expected tensors that need no gradient, got requires_grad=True with {got}; {remedy}",
    )


def tensor_like(array: Any, like: Any) -> Any:
    """An array of stored elements as a tensor of another's dtype and shape."""
    return torch.from_numpy(array).view(like.dtype).reshape(like.shape)
