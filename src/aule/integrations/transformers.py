"""Hugging Face transformers: after ``register()``, models accept ``attn_implementation="aule"``.

`register` registers two functions, for attention and for masks. Without the second, transformers would build no masks
and padding would be lost silently. Masks are the boolean ones that transformers builds for PyTorch's attention: none if
the causal flag is enough, else ``[batch, 1, seq_q, seq_kv]``, broadcast over heads and never repeated.

Supported, with gradients: grouped heads without repeating them, sliding windows, softcap (Gemma 2), attention sinks
(gpt-oss), position biases (T5), additive masks, padding on either side, dynamic and static caches, and dropout in
training. Inside `aule.distributed.context_parallel` attention is computed over all ranks. Over an
`aule.integrations.transformers_cache.AuleCache`, attention reads its pages. Not supported (raises an error): models
that compute attention in their own code (BLOOM, MPT, Falcon ...), ``output_attentions``, and the paged cache of
transformers' own continuous batching. `docs/models.md` lists every family.
"""

from __future__ import annotations

from typing import Any

import torch

from aule.api.attention import flash_attention
from aule.distributed.context import current
from aule.errors import AuleError
from aule.frontends.torch.modes import called_by
from aule.frontends.torch.route import host_backend
from aule.integrations import _transformers_latent
from aule.integrations import _transformers_models as models

__all__ = ["attention_forward", "register"]


def register(name: str = "aule") -> None:
    """Register aule with transformers under a name for ``attn_implementation``.

    Calling it again is harmless. Only models that select this name use aule. A model that never calls the attention
    functions of transformers is refused with an error when it is created with this name.

    Parameters
    ----------
    name : str
        The name for ``attn_implementation``.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, models.mask)
    models.check_models_of(name)


@called_by("transformers")
def attention_forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Any = None,
    position_bias: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Compute attention for a layer of a transformers model. transformers calls this function.

    Parameters
    ----------
    module : nn.Module
        The layer; its ``is_causal`` is the default of ``is_causal``.
    query, key, value : Tensor
        ``[batch, heads, seq, head_dim]``; key and value may have fewer heads.
    attention_mask : Tensor, optional
        Boolean or additive, ``[batch, 1 or heads, seq_q, seq_kv]``. With a mask, ``is_causal`` and
        ``sliding_window`` are ignored.
    dropout : float
        Probability of dropping each weight.
    scaling : float, optional
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    sliding_window : int, optional
        Number of keys that a causal row attends to.
    softcap : float, optional
        Cap of the scores.
    is_causal : bool, optional
        Row i attends to keys 0..i.
    s_aux : Tensor, optional
        ``[heads]``: the logit of each head's sink.
    position_bias : Tensor, optional
        Added to the scores.
    **kwargs
        Other arguments of transformers, ignored except for a paged cache, which raises.

    Returns
    -------
    out : Tensor
        ``[batch, seq_q, heads, head_dim]``, contiguous.
    weights : None
        Probabilities are never stored.
    """
    if kwargs.get("cache") is not None:
        raise _unsupported("no paged cache", "continuous batching", "use 'sdpa' or 'flash_attention_2' for it")
    if kwargs.get("output_attentions"):
        raise models.no_weights(type(module).__name__)
    models.attention_called()
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    sinks = None if s_aux is None else s_aux.float()
    paged = getattr(key, "aule_pages", None)
    if paged is not None:
        if position_bias is not None or dropout or not is_causal:
            expected = "causal attention without dropout and position bias over an AuleCache"
            raise _unsupported(expected, "another", "use a DynamicCache")
        cache, layer = paged
        numbers = {"scale": scaling, "sliding_window": sliding_window, "softcap": softcap, "sinks": sinks}
        return cache.attend(layer, query, key, value, attention_mask, **numbers), None
    latents = _transformers_latent.take(module, query)
    if latents is not None:
        found = _transformers_latent.attend(latents, module, query, attention_mask, {"scale": scaling})
        if found is not None:
            return found, None
    context = current()
    if context is not None:
        if attention_mask is not None or position_bias is not None or (sliding_window is not None and not is_causal):
            expected = "causal attention, or full attention without mask, window and position bias, in context_parallel"
            raise _unsupported(expected, "another", "leave out padding, or use another model")
        window = None if sliding_window is None else (sliding_window - 1, 0)
        given = {"scale": scaling, "softcap": softcap, "sinks": sinks, "dropout_p": dropout, "window": window}
        out = context.attend(query, key, value, causal=bool(is_causal), causal_align="top-left", **given)
        return out.transpose(1, 2).contiguous(), None
    seq_q, window, causal = query.shape[2], None, False
    if attention_mask is None:
        # A single query is the last row and attends to all keys. Several queries without a mask start at the first key,
        # even if the rest of a static cache, still empty, follows.
        causal = seq_q > 1 and bool(is_causal) and models.causal_without_mask(module)
        if causal and sliding_window is not None:
            window = (sliding_window - 1, 0)
    options: dict[str, Any] = {
        "causal": causal,
        "causal_align": "top-left",
        "scale": scaling,
        "window": window,
        "softcap": softcap,
        "mask": attention_mask,
        "bias": position_bias,
        "sinks": sinks,
        "dropout_p": dropout,
        "backend": host_backend(query),
    }
    tensors = (query, key, value, attention_mask, s_aux, position_bias)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return flash_attention(query, key, value, **options).transpose(1, 2).contiguous(), None
    out = query.new_empty(query.shape[0], seq_q, query.shape[1], value.shape[3])
    flash_attention(query, key, value, **options, out=out.transpose(1, 2))
    return out, None


def _unsupported(expected: str, got: str, remedy: str) -> AuleError:
    return AuleError("AULE_ERROR_UNSUPPORTED", f"[transformers] expected {expected}, got {got}; {remedy}")
