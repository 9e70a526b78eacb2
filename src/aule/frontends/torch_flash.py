"""aule as one of PyTorch's own flash-attention implementations, for CPU tensors.

PyTorch decides which calls of ``scaled_dot_product_attention`` go to its flash kernel; once activated, that kernel on
the CPU is aule's, forward and backward, also in compiled graphs. What aule refuses goes to PyTorch's kernel.

Only the CPU's two operators are replaced: those of CUDA hand the state of a random generator from forward to backward
and promise layouts that a caller may rely on, and PyTorch's fused kernels are there in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aule.backends import registry
from aule.errors import AuleError
from aule.frontends.torch_host import host_gradients, host_with_lse
from aule.options import AttentionOptions

FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


def available() -> str | None:
    """None, or what this PyTorch lacks."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        return "torch.nn.attention.register_flash_attention_impl"
    return None if hasattr(torch.library, "get_kernel") else "torch.library.get_kernel"


def register(name: str, count: Callable[[str | None], None]) -> None:
    """Tell PyTorch of the implementation; nothing changes before it is activated."""
    torch.nn.attention.register_flash_attention_impl(name, register_fn=lambda: _Active(count))


class _Active:
    """The kernels in their place. PyTorch keeps this object, and calls ``remove`` to have its own ones back."""

    def __init__(self, count: Callable[[str | None], None]) -> None:
        self.count = count
        registry.find("cpu")  # refuses here where there is none
        self.originals = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in (FORWARD, BACKWARD)}
        self.library = torch.library.Library("aten", "IMPL", "CPU")
        self.library.impl(FORWARD, self.forward, "CPU", with_keyset=True)
        self.library.impl(BACKWARD, self.backward, "CPU", with_keyset=True)

    def remove(self) -> None:
        self.library._destroy()

    def forward(
        self,
        keys: Any,
        query: Any,
        key: Any,
        value: Any,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Any = None,
        scale: float | None = None,
    ) -> Any:
        try:
            options = _options(is_causal, attn_mask, scale)._replace(out=torch.empty_like(query))
            out, lse = host_with_lse(query, key, value, options, training=True)
        except AuleError as error:
            self.count(error.code)
            original = self.originals[FORWARD]
            return original.call_boxed(
                keys, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )  # fmt: skip
        self.count(None)
        # PyTorch promises this layout to graphs that it compiled.
        kept = lse.transpose(1, 2).contiguous().transpose(1, 2)
        return out, kept

    def backward(
        self,
        keys: Any,
        grad_out: Any,
        query: Any,
        key: Any,
        value: Any,
        out: Any,
        logsumexp: Any,
        dropout_p: float,
        is_causal: bool,
        *,
        attn_mask: Any = None,
        scale: float | None = None,
    ) -> Any:
        try:
            options = _options(is_causal, attn_mask, scale)
            lse = logsumexp.contiguous()
            grads, _ = host_gradients(query, key, value, out, lse, grad_out, options, False)
        except AuleError:
            original = self.originals[BACKWARD]
            return original.call_boxed(
                keys, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal,
                attn_mask=attn_mask, scale=scale,
            )  # fmt: skip
        return tuple(map(_laid_out, grads))


def _options(is_causal: bool, mask: Any, scale: float | None) -> AttentionOptions:
    return AttentionOptions(causal=is_causal, scale=scale, mask=mask, causal_align="top-left", backend="cpu")


def _laid_out(grad: Any) -> Any:
    """``[batch, heads, seq, dim]`` in the memory of ``[batch, seq, heads, dim]``, which PyTorch promises."""
    return torch.empty_permuted(grad.shape, (0, 2, 1, 3), dtype=grad.dtype, device=grad.device).copy_(grad)
