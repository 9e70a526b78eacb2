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
from aule.engine.attention import backward_on_host, forward_on_host, host_view
from aule.errors import AuleError
from aule.frontends.torch_host import host_problem, host_view_of, tensor_like
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
        self.device: Any = registry.find("cpu")
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
            problem, operands = host_problem(query, key, value, _options(is_causal, attn_mask, scale))
            out = torch.empty_like(query)
            target = host_view_of(out, "out").storage
            _, lse = forward_on_host(problem, operands, self.device, target, exact_lse=True)
        except AuleError as error:
            self.count(error.code)
            original = self.originals[FORWARD]
            return original.call_boxed(
                keys, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )  # fmt: skip
        self.count(None)
        # PyTorch promises this layout to graphs that it compiled.
        kept = torch.from_numpy(lse).transpose(1, 2).contiguous().transpose(1, 2)
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
            problem, operands = host_problem(query, key, value, _options(is_causal, attn_mask, scale))
            results = [host_view_of(x, name).storage for name, x in (("out", out), ("dout", grad_out))]
            dout = host_view(problem.dtype, results[1])
            lse = logsumexp.contiguous().numpy()
            grads = backward_on_host(problem, operands, self.device, results[0], lse, dout)
        except AuleError:
            original = self.originals[BACKWARD]
            return original.call_boxed(
                keys, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal,
                attn_mask=attn_mask, scale=scale,
            )  # fmt: skip
        return tuple(_laid_out(tensor_like(g, x)) for g, x in zip(grads, (query, key, value), strict=True))


def _options(is_causal: bool, mask: Any, scale: float | None) -> AttentionOptions:
    return AttentionOptions(causal=is_causal, scale=scale, mask=mask, causal_align="top-left", return_lse=True)


def _laid_out(grad: Any) -> Any:
    """``[batch, heads, seq, dim]`` in the memory of ``[batch, seq, heads, dim]``, which PyTorch promises."""
    return torch.empty_permuted(grad.shape, (0, 2, 1, 3), dtype=grad.dtype).copy_(grad)
