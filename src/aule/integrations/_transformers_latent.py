"""Latent attention (DeepSeek) of transformers over an `AuleCache`.

These models cache a compressed vector per token and expand it into keys and values of all heads before they call
attention. Expanding a whole sequence for every new token is what a cache is to avoid, so `AuleCache` stores the
compressed vectors and decodes in the absorbed form: the expansion of keys is applied to the queries, that of values to
the result. A prompt is attended to in its expanded form, as the model passes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from aule.errors import AuleError
from aule.integrations import _transformers_models as models

if TYPE_CHECKING:
    from aule.integrations.transformers_cache import AuleCache


class Latents(NamedTuple):
    """The compressed vectors of a step that a layer passed to the cache, not yet taken by attention."""

    cache: AuleCache
    layer: int
    compressed: Any
    rotated: Any


def take(module: Any, query: Any) -> Latents | None:
    """Return the vectors that this layer passed to the cache just before, if any."""
    found: Latents | None = models.take_latents()
    if found is None or getattr(module, "layer_idx", None) != found.layer:
        return None
    batch, _, rows, _ = found.compressed.shape
    same = (batch, rows) == (query.shape[0], query.shape[2]) and hasattr(module, "expand_kv")
    return found if same else None


def attend(latents: Latents, module: Any, query: Any, mask: Any, options: dict[str, Any]) -> Any:
    """Append a step's vectors; then attend to all of them in the absorbed form.

    Returns
    -------
    Tensor or None
        ``[batch, seq, heads, value_dim]``; None for a prompt, whose expanded keys and values the caller has.
    """
    cache, layer = latents.cache, latents.layer
    expansion = module.kv_b_proj
    if not isinstance(expansion, torch.nn.Linear) or expansion.bias is not None:
        raise AuleError(
            "AULE_ERROR_UNSUPPORTED",
            f"[AuleCache] expected kv_b_proj of layer {layer} as a Linear without bias, got "
            f"{type(expansion).__name__}; use a DynamicCache",
        )
    if cache.append_latents(latents, mask):
        return None
    nope, rank = query.shape[3] - latents.rotated.shape[3], latents.compressed.shape[3]
    weight = expansion.weight.view(query.shape[1], -1, rank)
    absorbed = torch.cat((query[..., :nope] @ weight[:, :nope], query[..., nope:]), -1)
    found = cache.attend_latents(layer, absorbed, options)
    return (found @ weight[:, nope:].transpose(1, 2)).transpose(1, 2).contiguous()
