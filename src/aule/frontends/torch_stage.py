"""Torch tensors on devices that aule does not drive in place (ROCm, XPU): through the host, and back.

They are copied to host memory and computed there by the best device that aule has, which may be the very same GPU,
driven through Vulkan or OpenCL; where there is none, by the CPU engine. Nothing of this is quick, but it is right.
"""

from __future__ import annotations

from typing import Any

from aule.errors import DeviceMismatchError
from aule.frontends.torch_host import host_gradients, host_with_lse, on_host
from aule.frontends.torch_views import checked_out, require_tensor
from aule.options import AttentionOptions


def staged(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """Attention through the host."""
    moved, changed = _to_host(q, k, v, options)
    result = on_host(*moved, changed)
    out, lse = result if options.return_lse else (result, None)
    if options.out is not None:
        out = checked_out(options.out, tuple(out.shape), q).copy_(out)
    out = out.to(q.device)
    return out if lse is None else (out, lse.to(q.device))


def staged_with_lse(q: Any, k: Any, v: Any, options: AttentionOptions, *, training: bool) -> tuple[Any, Any]:
    """Attention and its log-sum-exp in the type that is computed in."""
    moved, changed = _to_host(q, k, v, options)
    out, lse = host_with_lse(*moved, changed, training=training, foreign=True)
    return out.to(q.device), lse.to(q.device)


def staged_gradients(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, options: AttentionOptions, want_scores: bool
) -> tuple[list[Any], Any]:
    """Gradients of q, k and v, and of what is added to the scores where it is wanted."""
    moved, changed = _to_host(q, k, v, options)
    results = (out.cpu(), lse.cpu(), dout.cpu())
    grads, ds = host_gradients(*moved, *results, changed, want_scores, foreign=True)
    return [grad.to(q.device) for grad in grads], None if ds is None else ds.to(q.device)


def _to_host(q: Any, k: Any, v: Any, options: AttentionOptions) -> tuple[tuple[Any, Any, Any], AttentionOptions]:
    for name, tensor in {"k": k, "v": v, **options.arrays()}.items():
        require_tensor(tensor, name)
        if tensor.device != q.device:
            raise DeviceMismatchError(
                f"[flash_attention] expected {name} on {q.device} like q, got {tensor.device}; move it with .to"
            )
    arrays = {name: array.cpu() for name, array in options.arrays().items()}
    return (q.cpu(), k.cpu(), v.cpu()), options._replace(out=None, **arrays)
