"""aule as one of PyTorch's own flash-attention implementations, for CPU tensors.

PyTorch decides which calls of ``scaled_dot_product_attention`` go to its flash kernel; once activated, that kernel on
the CPU is aule's, forward and backward, also in compiled graphs. Calls that aule refuses go to PyTorch's kernel.

Only the CPU's two operators are replaced: those of CUDA pass the state of a random generator from forward to backward,
and callers may rely on their layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aule.backends import registry
from aule.errors import AuleError
from aule.frontends.torch.attention import Backward, Forward, Saved
from aule.frontends.torch.modes import called_by
from aule.frontends.torch.route import HOST
from aule.options import AttentionOptions

FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


def available() -> str | None:
    """The feature that this PyTorch lacks; None if it has all."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        return "torch.nn.attention.register_flash_attention_impl"
    return None if hasattr(torch.library, "get_kernel") else "torch.library.get_kernel"


def register(name: str, count: Callable[[str | None], None]) -> None:
    """Tell PyTorch of the implementation; nothing changes before it is activated."""
    torch.nn.attention.register_flash_attention_impl(name, register_fn=lambda: _Active(count))


class _Active:
    """The kernels while they are registered. PyTorch keeps this object, and calls ``remove`` to restore its own."""

    def __init__(self, count: Callable[[str | None], None]) -> None:
        self.count = count
        registry.find("cpu")  # raises here if there is none
        self.originals = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in (FORWARD, BACKWARD)}
        self.library = torch.library.Library("aten", "IMPL", "CPU")
        self.library.impl(FORWARD, self.forward, "CPU", with_keyset=True)
        self.library.impl(BACKWARD, self.backward, "CPU", with_keyset=True)

    def remove(self) -> None:
        self.library._destroy()

    @called_by("flash_attention_impl")
    def forward(
        self,
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        try:
            options = _options(is_causal, attn_mask, scale)
            options = options._replace(return_lse=True, out=torch.empty_like(query))
            out, lse = HOST.compute(Forward(query, key, value, options, training=True))
            assert out is not None and lse is not None
        except AuleError as error:
            self.count(error.code)
            original = self.originals[FORWARD]
            return original.call_boxed(  # type: ignore[no-any-return]
                keys, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
        self.count(None)
        # PyTorch promises this layout to graphs that it compiled.
        return out, lse.transpose(1, 2).contiguous().transpose(1, 2)

    @called_by("flash_attention_impl")
    def backward(
        self,
        keys: Any,
        *given: Any,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        grad_out, query, key, value, out, logsumexp, _, is_causal = given
        try:
            options = _options(is_causal, attn_mask, scale)
            saved = Saved(query, key, value, out, logsumexp.contiguous(), grad_out)
            grads = HOST.compute(Backward(saved, options, False))
        except AuleError:
            original = self.originals[BACKWARD]
            return original.call_boxed(keys, *given, attn_mask=attn_mask, scale=scale)  # type: ignore[no-any-return]
        return tuple(_laid_out(grad) for grad in grads if grad is not None)


def _options(is_causal: bool, mask: Tensor | None, scale: float | None) -> AttentionOptions:
    return AttentionOptions(causal=is_causal, scale=scale, mask=mask, causal_align="top-left", backend="cpu")


def _laid_out(grad: Tensor) -> Tensor:
    """A gradient ``[batch, heads, seq, dim]`` in the memory of ``[batch, seq, heads, dim]``, as PyTorch promises."""
    return torch.empty_permuted(grad.shape, (0, 2, 1, 3), dtype=grad.dtype, device=grad.device).copy_(grad)
