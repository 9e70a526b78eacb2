"""Which transformers models aule can serve, and the masks they get.

transformers builds masks for the chosen attention, and a layer then calls it through an `AttentionInterface`. Many
older models have attention code of their own that never does: it would add our boolean masks to scores, which loses
causality and padding without an error. So `check_models_of` lets transformers ask us when a model is created or its
attention is changed, and models without such a call are refused. The rest is watched: a forward pass that built masks
and called no attention raises an error.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

from aule.errors import AuleError

_names: set[str] = set()
"""The names under which aule is registered."""


class _CheckedName(str):
    """The value of ``config._attn_implementation`` of a model that was checked; equal to the registered name."""


class _Pass(threading.local):
    """What a thread's forward pass has done so far."""

    unused_masks = 0
    """Masks that were built since attention was last called."""


_pass = _Pass()


def check_models_of(name: str) -> None:
    """Refuse unsuitable models from now on when they are created with this name for ``attn_implementation``."""
    from transformers import PreTrainedModel

    _names.add(name)
    original = PreTrainedModel.get_correct_attn_implementation
    if hasattr(original, "_aule_original"):
        return

    def get_correct_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = original(self, *args, **kwargs)
        return _checked(self, chosen) if chosen in _names else chosen

    get_correct_attn_implementation._aule_original = original  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def _checked(model: Any, name: str) -> str:
    """Return the name to store in a model's configuration, or raise an error if aule cannot serve the model."""
    if _has_own_attention(type(model)):
        raise _unsupported(
            "a model whose layers call the attention functions of transformers",
            f"{type(model).__name__}, which computes attention in code of its own",
            "use attn_implementation='eager', or aule.install() with the model's default, which serves calls of "
            f"PyTorch's scaled_dot_product_attention; parts of a model are chosen by {{'text_config': {str(name)!r}}}",
        )
    if _before_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_before_forward, with_kwargs=True)
        model.register_forward_hook(_after_forward)
    return _CheckedName(name)


def _has_own_attention(model_class: type) -> bool:
    """Return whether a model's module defines attention layers and has no `AttentionInterface` that they could call.

    A module without attention layers (a composition of other models, a subclass in a user's file) does not tell; then
    the modules of the base classes do.
    """
    from transformers import AttentionInterface, PreTrainedModel

    for base in model_class.__mro__:
        if not issubclass(base, PreTrainedModel) or base is PreTrainedModel:
            continue
        module = sys.modules.get(base.__module__)
        members = [] if module is None else list(vars(module).values())
        if any(isinstance(member, AttentionInterface) for member in members):
            return False
        if any(_is_attention_layer(member, base.__module__) for member in members):
            return True
    return False


def _is_attention_layer(member: Any, module: str) -> bool:
    """Return whether a member of a module is a class of attention layers that is defined there from scratch."""
    if not isinstance(member, type) or member.__module__ != module:
        return False
    return "Attention" in member.__name__ and torch.nn.Module in member.__bases__


def _before_forward(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions") and model.config._attn_implementation in _names:
        raise no_weights(type(model).__name__)
    if not torch.compiler.is_compiling():
        _pass.unused_masks = 0


def _after_forward(model: Any, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling() or not _pass.unused_masks:
        return
    _pass.unused_masks = 0
    if model.config._attn_implementation in _names:
        raise _unsupported(
            "a model whose layers call the attention functions of transformers",
            f"{type(model).__name__}, which built masks and called none of them",
            "use attn_implementation='eager'",
        )


def mask(*args: Any, config: Any = None, **kwargs: Any) -> Any:
    """Build a mask for a model; transformers calls this function with the arguments of its own `sdpa_mask`.

    A model whose configuration was changed behind transformers' back was not checked, and gets the additive masks of
    eager attention, which are right for every kind of attention but take memory.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    if not isinstance(getattr(config, "_attn_implementation", None), _CheckedName):
        return eager_mask(*args, config=config, **kwargs)
    if not torch.compiler.is_compiling():
        _pass.unused_masks += 1
    return sdpa_mask(*args, config=config, **kwargs)


def attention_called() -> None:
    """Note that attention was called in this thread's forward pass."""
    if not torch.compiler.is_compiling():
        _pass.unused_masks = 0


def no_weights(name: str) -> AuleError:
    """Return the error for a model or layer that is asked for attention weights."""
    return _unsupported(
        "output_attentions=False",
        f"True in {name}",
        "aule stores no attention weights; call model.set_attn_implementation('eager') for them",
    )


def _unsupported(expected: str, got: str, remedy: str) -> AuleError:
    return AuleError("AULE_ERROR_UNSUPPORTED", f"[transformers] expected {expected}, got {got}; {remedy}")
