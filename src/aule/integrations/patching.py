"""`patch_model`: replaces layers of a transformers model by ops of aule.

Layers are recognised by their class names, so transformers is not imported. The new layer, from `aule.nn`, has the same
parameter objects under the same names, so optimisers and state dictionaries stay valid. The rotary embedding is not a
layer in transformers but a function in the model's module, and is replaced there.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from aule import nn
from aule.errors import InvalidArgumentError
from aule.ops.shared.checks import checked_flag

__all__ = ["PatchReport", "patch_model"]

_PLAIN_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
_OFFSET_NORMS = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm")
_GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "GemmaMLP", "Gemma2MLP", "Gemma3MLP")
_LAYER_NORMS = ("gpt2",)
"""Model types whose LayerNorms are replaced."""
_ATTENTIONS = tuple(name.replace("MLP", "Attention") for name in _GATED)
_ROTATES = "apply_rotary_pos_emb"


@dataclass(frozen=True)
class PatchReport:
    """The changes that `patch_model` made.

    Attributes
    ----------
    model : str
        The model's class.
    swapped : dict
        Number of replaced layers by op of aule.
    classes : dict
        Number of replaced layers by their former class.
    skipped : dict
        Number of layers left unchanged, by reason.
    """

    model: str
    swapped: dict[str, int]
    classes: dict[str, int]
    skipped: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        swapped = ", ".join(f"{count} {op}" for op, count in self.swapped.items()) or "nothing"
        lines = [f"aule.patch_model: {self.model}: {swapped}"]
        lines += [f"  {count} x {name}" for name, count in self.classes.items()]
        lines += [f"  left as they are: {count} x {reason}" for reason, count in self.skipped.items()]
        return "\n".join(lines)


class _PromotingRMSNorm(nn.RMSNorm):
    """Llama's RMSNorm, whose result has the wider dtype of input and weight."""

    def forward(self, x: Any) -> Any:
        return super().forward(x).to(torch.promote_types(x.dtype, self.weight.dtype))


def patch_model(
    model: Any, *, rms_norm: bool = True, layer_norm: bool = True, gated: bool = True, rope: bool = True
) -> PatchReport:
    """Replace the normalisations, gated units and rotary embeddings of a transformers model by aule's.

    Supported are Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, and the LayerNorms of GPT-2. Nothing is copied: the new
    layers use the parameters of the old ones. The rotary embedding is replaced in the module of the model's
    architecture, and so for all such models in this process. For attention use
    ``aule.integrations.transformers.register()`` and ``attn_implementation="aule"``.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place.
    rms_norm, layer_norm, gated, rope : bool
        What to replace.

    Returns
    -------
    PatchReport
        Prints as a summary. `aule.dispatch_stats` counts the calls of replaced layers.

    Raises
    ------
    InvalidArgumentError
        The model has no supported layer.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(
            f"[patch_model] expected a torch.nn.Module, got {type(model).__name__}; pass the model"
        )
    given = {"rms_norm": rms_norm, "layer_norm": layer_norm, "gated": gated, "rope": rope}
    flags = {name: checked_flag("patch_model", name, flag) for name, flag in given.items()}
    wanted = {"rms_norm": flags["rms_norm"], "layer_norm": flags["layer_norm"]}
    wanted |= {"swiglu": flags["gated"], "geglu": flags["gated"]}
    patch = _Patch()
    patch.replace_layers(model, wanted)
    if flags["rope"]:
        patch.replace_rope(model)
    ours = any(type(layer).__module__ in (nn.__name__, __name__) for layer in model.modules())
    if not (patch.swapped or patch.known or ours):
        raise InvalidArgumentError(
            f"[patch_model] expected a model of Llama, Mistral, Qwen, Gemma or GPT-2, got {type(model).__name__} "
            "without a layer that is known; put layers of aule.nn into it"
        )
    return PatchReport(type(model).__name__, dict(patch.swapped), dict(patch.classes), dict(patch.skipped))


class _Patch:
    def __init__(self) -> None:
        self.swapped: Counter[str] = Counter()
        self.classes: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.known = False
        self._made: dict[int, Any] = {}  # new layers by the id of the old ones, which may have several parents

    def replace_layers(self, model: Any, wanted: dict[str, bool]) -> None:
        for parent in list(model.modules()):
            for name, layer in parent.named_children():
                if id(layer) not in self._made:
                    self._make(layer, model, wanted)
                if id(layer) in self._made:
                    setattr(parent, name, self._made[id(layer)])

    def _make(self, layer: Any, model: Any, wanted: dict[str, bool]) -> None:
        found = _replacement(layer, model)
        if found is None:
            return
        self.known = True
        op, make = found
        if not wanted[op]:
            return
        if _has_hooks(layer):
            self.skipped[f"{type(layer).__name__}, which has hooks"] += 1
            return
        self._made[id(layer)] = make().train(layer.training)
        self.swapped[op] += 1
        self.classes[type(layer).__name__] += 1

    def replace_rope(self, model: Any) -> None:
        for layer in model.modules():
            if _replace_rope_of(layer):
                layer._aule_rotates = True
                self.swapped["rope"] += 1
                self.classes[f"{_ROTATES} of {type(layer).__name__}"] += 1


def _replacement(layer: Any, model: Any) -> tuple[str, Callable[[], Any]] | None:
    """Return the op that replaces a layer and a function that makes the new layer; None if there is none."""
    name = type(layer).__name__
    if name in _PLAIN_NORMS:
        return "rms_norm", lambda: _norm(_PromotingRMSNorm, layer, layer.variance_epsilon, {})
    if name in _OFFSET_NORMS:
        return "rms_norm", lambda: _norm(nn.RMSNorm, layer, layer.eps, {"weight_offset": 1.0})
    if name in _GATED:
        options = _activation(layer.act_fn)
        return None if options is None else ("geglu" if options else "swiglu", lambda: _gated(layer, options))
    config = getattr(model, "config", None)
    if type(layer) is torch.nn.LayerNorm and getattr(config, "model_type", None) in _LAYER_NORMS:
        return "layer_norm", lambda: _layer_norm(layer)
    return None


def _norm(kind: Any, layer: Any, eps: float, options: dict[str, Any]) -> Any:
    made = kind(layer.weight.shape[0], eps, device="meta", **options)
    made.weight = layer.weight
    return made


def _layer_norm(layer: Any) -> Any:
    affine = layer.weight is not None
    made = nn.LayerNorm(layer.normalized_shape, layer.eps, affine, layer.bias is not None, device="meta")
    made.weight, made.bias = layer.weight, layer.bias
    return made


def _gated(layer: Any, options: dict[str, Any]) -> Any:
    made = nn.GeGLU(1, 1, device="meta", **options) if options else nn.SwiGLU(1, 1, device="meta")
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(made, name, getattr(layer, name))
    return made


def _activation(function: Any) -> dict[str, Any] | None:
    """Return the options of `aule.nn.GeGLU`, an empty dict for SwiGLU, or None for another activation.

    The function is recognised by its values, because it has many names in transformers.
    """
    x = torch.linspace(-4, 4, 65, dtype=torch.float64, device="cpu")  # regardless of the default device
    with torch.no_grad():
        found = function(x)
        for peer, options in (
            (torch.nn.functional.silu(x), {}),
            (torch.nn.functional.gelu(x), {"approximate": "none"}),
            (torch.nn.functional.gelu(x, approximate="tanh"), {"approximate": "tanh"}),
        ):
            if found.shape == x.shape and torch.allclose(found.to(x), peer, rtol=1e-6, atol=1e-7):
                return options
    return None


def _has_hooks(layer: Any) -> bool:
    """Return whether a layer has hooks, which a new layer would lose."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(layer, name) for name in names) or "forward" in vars(layer)


# -- rotary embedding --------------------------------------------------------------------------------------------------


def _replace_rope_of(layer: Any) -> bool:
    """Replace the rotary embedding of a layer's class; return False if the layer has none or was counted before."""
    module = sys.modules[type(layer).__module__]
    if type(layer).__name__ not in _ATTENTIONS or not hasattr(module, _ROTATES) or hasattr(layer, "_aule_rotates"):
        return False
    if not hasattr(getattr(module, _ROTATES), "_aule_original"):
        setattr(module, _ROTATES, _rope_function(getattr(module, _ROTATES)))
    return True


def _rope_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make an `apply_rotary_pos_emb` of transformers that uses `aule.rope`."""

    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
        if unsqueeze_dim not in (1, 2) or q.dim() != 4 or cos.dim() != 3:
            result: tuple[Any, Any] = original(q, k, cos, sin, unsqueeze_dim)
            return result
        return _rotated(q, cos, sin, unsqueeze_dim), _rotated(k, cos, sin, unsqueeze_dim)

    apply_rotary_pos_emb._aule_original = original  # type: ignore[attr-defined]
    return apply_rotary_pos_emb


def _rotated(x: Any, cos: Any, sin: Any, unsqueeze_dim: int) -> Any:
    """Rotate ``[batch, heads, seq, dim]``, or with ``unsqueeze_dim`` 2 ``[batch, seq, heads, dim]``."""
    nn.count("rope")
    heads_first = unsqueeze_dim == 1
    y = nn.rope(x if heads_first else x.transpose(1, 2), cos, sin, rotary_dim=cos.shape[-1])
    return y if heads_first else y.transpose(1, 2)
