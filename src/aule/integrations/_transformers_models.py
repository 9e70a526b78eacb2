"""Which transformers models aule can serve, and the masks they get.

transformers builds masks for the chosen attention, and a layer then calls it through an `AttentionInterface`. Many
older models have their own attention code that never does: it would add our boolean masks to scores, which loses
causality and padding without an error. So `check_models_of` lets transformers ask us when a model is created or its
attention is changed, and models without such a call are refused. The rest is watched: a forward pass that built masks
and called no attention raises an error.
"""

from __future__ import annotations

import inspect
import sys
import threading
from typing import Any

import torch

from aule.distributed.context import current
from aule.errors import AuleError

_names: set[str] = set()
"""The names under which aule is registered."""


_KNOWN_ARGUMENTS = frozenset(
    "module query key value attention_mask dropout scaling sliding_window softcap is_causal s_aux position_bias".split()
)


class _CheckedName(str):
    """The value of ``config._attn_implementation`` of a model that was checked; equal to the registered name."""


class _AdditiveName(_CheckedName):
    """The name for a model which does not support PyTorch's attention: its code may change masks, additive ones."""


class _EagerName(_AdditiveName):
    """The name for a model which knows eager attention only: a mask is never left out, and none means no causality."""


class _Counts(threading.local):
    """What the models of a thread have done so far."""

    def __init__(self) -> None:
        self.masks = self.calls = 0
        self.latents: Any = None  # of a layer that called its cache and not yet attention
        self.before: dict[int, tuple[int, int]] = {}  # masks and calls at the start of the pass of a model, by its id


_counts = _Counts()


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
    reason = _reason_against(type(model))
    if reason is not None:
        raise _unsupported(
            "a model whose layers call the attention functions of transformers",
            f"{type(model).__name__}, {reason}",
            "use attn_implementation='eager', or aule.install() with the model's default, which serves calls of "
            f"PyTorch's scaled_dot_product_attention; parts of a model are chosen by {{'text_config': {str(name)!r}}}",
        )
    if _before_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_before_forward, with_kwargs=True)
        model.register_forward_hook(_after_forward)
    if model._supports_sdpa:
        return _CheckedName(name)
    # With flash attention a mask may be left out too, but a decoder's layers need not say that they are causal.
    skips = model._supports_flash_attn and not model.config.is_encoder_decoder
    return _AdditiveName(name) if skips else _EagerName(name)


def _reason_against(model_class: type) -> str | None:
    """Return why aule cannot serve a class of models, or None if it can.

    A module without attention layers (a composition of other models, a subclass in a user's file) does not tell; then
    the modules of the base classes do.
    """
    from transformers import AttentionInterface, PreTrainedModel

    for base in model_class.__mro__:
        module = sys.modules.get(base.__module__)
        if not issubclass(base, PreTrainedModel) or base is PreTrainedModel or module is None:
            continue
        members = vars(module)
        if any(isinstance(member, dict) and _are_layers(member.get("eager")) for member in members.values()):
            return "which has a class of layers for each kind of attention"
        eager = members.get("eager_attention_forward")
        unknown = (
            [] if eager is None else sorted({*inspect.signature(eager).parameters} - _KNOWN_ARGUMENTS - {"kwargs"})
        )
        if unknown:
            return f"whose attention has an argument {unknown[0]!r}"
        if any(isinstance(member, AttentionInterface) for member in members.values()):
            return None
        if any(_is_attention_layer(member, base.__module__) for member in members.values()):
            return "which computes attention in code of its own"
    return None


def _are_layers(member: Any) -> bool:
    return isinstance(member, type) and issubclass(member, torch.nn.Module)


def _is_attention_layer(member: Any, module: str) -> bool:
    """Return whether a member of a module is a class of attention layers that is defined there from scratch."""
    if not _are_layers(member) or member.__module__ != module:
        return False
    return "Attention" in member.__name__ and torch.nn.Module in member.__bases__


def _before_forward(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions") and model.config._attn_implementation in _names:
        raise no_weights(type(model).__name__)
    if not torch.compiler.is_compiling():
        _counts.latents = None
        _counts.before[id(model)] = _counts.masks, _counts.calls


def _after_forward(model: Any, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    masks, calls = _counts.before.pop(id(model), (_counts.masks, _counts.calls))
    if _counts.masks > masks and _counts.calls == calls and model.config._attn_implementation in _names:
        raise _unsupported(
            "a model whose layers call the attention functions of transformers",
            f"{type(model).__name__}, which built masks and called none of them",
            "use attn_implementation='eager'",
        )


def mask(*args: Any, config: Any = None, **kwargs: Any) -> Any:
    """Build a mask for a model; transformers calls this function with the arguments of its own `sdpa_mask`.

    A model that does not support PyTorch's attention gets additive masks. So does one whose configuration was changed
    behind transformers' back, because it was not checked: they are right for every kind of attention, but take memory.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    if not torch.compiler.is_compiling():
        _counts.masks += 1
    name = getattr(config, "_attn_implementation", None)
    if current() is not None:
        _check_distributed(config, name, kwargs.get("attention_mask"))
        return None
    if isinstance(name, _EagerName) or not isinstance(name, _CheckedName):
        return eager_mask(*args, config=config, **kwargs)
    made = sdpa_mask(*args, config=config, **kwargs)
    if made is None or not isinstance(name, _AdditiveName):
        return made
    dtype = kwargs.get("dtype", torch.float32)
    return torch.zeros_like(made, dtype=dtype).masked_fill_(~made, torch.finfo(dtype).min)


def _check_distributed(config: Any, name: object, padding: Any) -> None:
    """Refuse what the causal flag and the window of a layer do not say. Positions with gaps are no packed sequences."""
    got = None
    if padding is not None and not bool(padding.all()):
        got = "an attention mask with padding"
    elif isinstance(name, _EagerName) or getattr(config, "attention_chunk_size", None) is not None:
        got = "a model with other masks"
    if got is not None:
        raise _unsupported(
            "causal or full attention, with or without a window, in context_parallel", got, "leave it out"
        )


def attention_called() -> None:
    """Note that attention was called in this thread's forward pass."""
    if not torch.compiler.is_compiling():
        _counts.calls += 1


def calls() -> int:
    """Return how often attention was called in this thread."""
    return _counts.calls


def causal_without_mask(module: Any) -> bool:
    """Return whether a layer that is given no mask may be causal; in models with eager attention only it is not."""
    config = getattr(module, "config", None)
    return not isinstance(getattr(config, "_attn_implementation", None), _EagerName)


def no_weights(name: str) -> AuleError:
    """Return the error for a model or layer that is asked for attention weights."""
    return _unsupported(
        "output_attentions=False",
        f"True in {name}",
        "aule stores no attention weights; call model.set_attn_implementation('eager') for them",
    )


def _unsupported(expected: str, got: str, remedy: str) -> AuleError:
    return AuleError("AULE_ERROR_UNSUPPORTED", f"[transformers] expected {expected}, got {got}; {remedy}")


def expect_latents(latents: Any) -> None:
    """Keep what a layer passed to its cache, for the attention that the layer calls next."""
    _counts.latents = latents


def take_latents() -> Any:
    """Return what `expect_latents` kept, once; None if nothing."""
    found, _counts.latents = _counts.latents, None
    return found
