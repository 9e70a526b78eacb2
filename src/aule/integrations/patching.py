"""`patch_model`: the layers of a model of transformers in place of which there are ops of aule.

Layers are known by the names of their classes, so nothing of transformers is imported. A layer is replaced by one of
`aule.nn` that has the very same parameters under the same names: optimisers, state dictionaries and what else holds on
to them stay as they are. The rotary embedding is no layer in transformers but a function of a model's module, and is
replaced there.
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
from aule.fused import rope
from aule.ops.checked import checked_flag

__all__ = ["PatchReport", "patch_model"]

_PLAIN_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
_OFFSET_NORMS = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm")
_GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "GemmaMLP", "Gemma2MLP", "Gemma3MLP")
_LAYER_NORMS = ("gpt2",)
"""Types of models whose LayerNorms are replaced."""
_ATTENTIONS = tuple(name.replace("MLP", "Attention") for name in _GATED)
_ROTATES = "apply_rotary_pos_emb"


@dataclass(frozen=True)
class PatchReport:
    """What `patch_model` did.

    Attributes
    ----------
    model : str
        The model's class.
    swapped : dict
        How many layers were given to each op of aule.
    classes : dict
        The same by what was replaced.
    skipped : dict
        How many layers were left as they are, by the reason.
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
    """Llama's: the result has the wider of the dtypes of rows and weight."""

    def forward(self, x: Any) -> Any:
        return super().forward(x).to(torch.promote_types(x.dtype, self.weight.dtype))


def patch_model(
    model: Any, *, rms_norm: bool = True, layer_norm: bool = True, gated: bool = True, rope: bool = True
) -> PatchReport:
    """Give the normalisations, gated units and rotary embeddings of a model of transformers to aule.

    Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3 and GPT-2 (whose LayerNorms are all there is) are known. Nothing is
    copied: the new layers have the parameters of the old. The rotary embedding is replaced in the module of the
    model's architecture, and so for all models of it in this process. Attention is another matter:
    ``aule.integrations.transformers.register()`` and ``attn_implementation="aule"``.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place.
    rms_norm, layer_norm, gated, rope : bool
        What is replaced.

    Returns
    -------
    PatchReport
        ``print`` shows it. Calls of what was replaced are counted in `aule.dispatch_stats`.

    Raises
    ------
    InvalidArgumentError
        There is nothing in the model that is known.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(
            f"[patch_model] expected a torch.nn.Module, got {type(model).__name__}; pass the model"
        )
    given = {"rms_norm": rms_norm, "layer_norm": layer_norm, "gated": gated, "rope": rope}
    flags = {name: checked_flag("patch_model", name, flag) for name, flag in given.items()}
    wanted = {"rms_norm": flags["rms_norm"], "layer_norm": flags["layer_norm"]}
    wanted |= {"swiglu": flags["gated"], "geglu": flags["gated"]}
    swapped: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    made: dict[int, Any] = {}
    known = False
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if id(layer) not in made:
                found = _replacement(layer, model)
                if found is None:
                    continue
                known = True
                op, make = found
                if not wanted[op]:
                    continue
                if _watched(layer):
                    skipped[f"{type(layer).__name__}, which has hooks"] += 1
                    continue
                made[id(layer)] = make().train(layer.training)
                swapped[op] += 1
                classes[type(layer).__name__] += 1
            setattr(parent, name, made[id(layer)])
    for layer in model.modules() if flags["rope"] else ():
        if _rotates(layer):
            layer._aule_rotates = True
            swapped["rope"] += 1
            classes[f"{_ROTATES} of {type(layer).__name__}"] += 1
    ours = any(type(layer).__module__ in (nn.__name__, __name__) for layer in model.modules())
    if not (swapped or known or ours):
        raise InvalidArgumentError(
            f"[patch_model] expected a model of Llama, Mistral, Qwen, Gemma or GPT-2, got {type(model).__name__} "
            "without a layer that is known; put layers of aule.nn into it"
        )
    return PatchReport(type(model).__name__, dict(swapped), dict(classes), dict(skipped))


def _replacement(layer: Any, model: Any) -> tuple[str, Callable[[], Any]] | None:
    """The op that a layer is given to, and what makes the new layer; None where it stays."""
    name = type(layer).__name__
    if name in _PLAIN_NORMS:
        return "rms_norm", lambda: _norm(_PromotingRMSNorm, layer, layer.variance_epsilon, {})
    if name in _OFFSET_NORMS:
        return "rms_norm", lambda: _norm(nn.RMSNorm, layer, layer.eps, {"weight_offset": 1.0})
    if name in _GATED:
        options = _activation(layer.act_fn)
        return None if options is None else ("geglu" if options else "swiglu", lambda: _gated(layer, options))
    if type(layer) is torch.nn.LayerNorm and getattr(_config(model), "model_type", None) in _LAYER_NORMS:
        return "layer_norm", lambda: _layer_norm(layer)
    return None


def _config(model: Any) -> Any:
    return getattr(model, "config", None)


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
    """Options of `aule.nn.GeGLU`, none of which stands for SwiGLU; None for what is neither. Known by what it
    computes: the same function has many names in transformers."""
    x = torch.linspace(-4, 4, 65, dtype=torch.float64, device="cpu")  # whatever device is the default
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


def _watched(layer: Any) -> bool:
    """Whether somebody has put hooks on a layer, which a new one would not have."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(layer, name) for name in names) or "forward" in vars(layer)


# -- rotary embedding --------------------------------------------------------------------------------------------------


def _rotates(layer: Any) -> bool:
    """Whether a layer's rotary embedding was given to aule just now, and so that of all layers of its class."""
    module = sys.modules[type(layer).__module__]
    if type(layer).__name__ not in _ATTENTIONS or not hasattr(module, _ROTATES) or hasattr(layer, "_aule_rotates"):
        return False
    if not hasattr(getattr(module, _ROTATES), "_aule_original"):
        setattr(module, _ROTATES, _rotating(getattr(module, _ROTATES)))
    return True


def _rotating(original: Callable[..., Any]) -> Callable[..., Any]:
    """`apply_rotary_pos_emb` of transformers by `aule.rope`."""

    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
        if unsqueeze_dim not in (1, 2) or q.dim() != 4 or cos.dim() != 3:
            result: tuple[Any, Any] = original(q, k, cos, sin, unsqueeze_dim)
            return result
        return _rotated(q, cos, sin, unsqueeze_dim), _rotated(k, cos, sin, unsqueeze_dim)

    apply_rotary_pos_emb._aule_original = original  # type: ignore[attr-defined]
    return apply_rotary_pos_emb


def _rotated(x: Any, cos: Any, sin: Any, unsqueeze_dim: int) -> Any:
    """Heads of ``[batch, heads, seq, dim]``, or with ``unsqueeze_dim`` 2 of ``[batch, seq, heads, dim]``."""
    nn.count("rope")
    heads_first = unsqueeze_dim == 1
    y = rope(x if heads_first else x.transpose(1, 2), cos, sin, rotary_dim=cos.shape[-1])
    return y if heads_first else y.transpose(1, 2)
