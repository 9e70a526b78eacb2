"""Hugging Face diffusers: a backend for its attention dispatcher, and a processor for UNets.

Transformers (Flux, Qwen-Image, Wan ...) use the dispatcher: after ``register()``, call
``model.set_attention_backend("aule")``. UNets, VAEs and PixArt do not use it; call
``unet.set_attn_processor(AuleAttnProcessor())`` instead. Others (SD3, CogVideoX, Lumina2, Sana ...) do neither;
`aule.install` serves their calls of PyTorch's attention. ``set_attention_backend`` warns about layers it does not
reach, and ``set_attn_processor`` refuses layers that compute something else, such as linear attention.

With diffusers' context parallelism, attention runs over all ranks by `aule.distributed`. Calls that aule does not
support (head dimensions above 576, context parallelism with masks or of uneven shards, tensors that it cannot use in
place) go to PyTorch's attention, and `aule.dispatch_stats` counts them by reason. Inside ``torch.compile`` all calls go
to PyTorch, uncounted.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from aule.api.sdpa import attempt, pass_on
from aule.backends import registry
from aule.distributed.entry import attention as distributed_attention
from aule.engine import observe
from aule.errors import AuleError, BackendUnavailableError, InvalidArgumentError

__all__ = ["AuleAttnProcessor", "register", "unregister"]

_lock = threading.Lock()
_active_before: dict[str, Any] = {}
"""For each registered name, the dispatcher's active backend at the time of registration."""

_REPLACEABLE = frozenset(
    {
        "AttnAddedKVProcessor",
        "AttnAddedKVProcessor2_0",
        "AttnProcessor",
        "AttnProcessor2_0",
        "AuleAttnProcessor",
        "SlicedAttnAddedKVProcessor",
        "SlicedAttnProcessor",
        "XFormersAttnAddedKVProcessor",
        "XFormersAttnProcessor",
    }
)
"""Processors of diffusers that compute what `AuleAttnProcessor` computes, without weights of their own."""


def register(name: str = "aule", backend: str | None = None) -> None:
    """Register aule with diffusers' attention dispatcher.

    It may be called again with another ``backend``. Models use it after ``model.set_attention_backend(name)`` or inside
    ``with diffusers.attention_backend(name)``.

    Parameters
    ----------
    name : str
        A lower-case name that diffusers does not use itself.
    backend : str, optional
        As in `aule.flash_attention`. Default: the CPU engine for CPU tensors, and CUDA tensors in place.

    Raises
    ------
    BackendUnavailableError
        diffusers or the backend is missing.
    InvalidArgumentError
        The name is not in lower case, or taken.
    """
    dispatch = _dispatcher()
    names, backends = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    if not name.isidentifier() or name != name.lower():
        raise InvalidArgumentError(f"[diffusers] expected a name in lower case, got {name!r}; 'aule' is the default")
    if backend is not None:
        registry.find(backend)
    with _lock:
        if name not in _active_before:
            if name.upper() in names.__members__ or name in {member.value for member in names}:
                expected = "expected a name that is not taken by a backend of diffusers"
                raise InvalidArgumentError(f"[diffusers] {expected}, got {name!r}; 'aule' is the default")
            _add_member(names, name)
            _active_before[name] = backends._active_backend
        backends.register(names(name), supports_context_parallel=True)(_backend_function(dispatch, backend))
        _warn_about_unreached_layers()


def unregister(name: str = "aule") -> None:
    """Remove aule from diffusers' dispatcher; does nothing if it is not registered.

    Models that use it need another backend (``model.reset_attention_backend()``). If it is the dispatcher's active
    backend, the one that was active before `register` becomes active again.

    Parameters
    ----------
    name : str
        As for `register`.
    """
    dispatch = _dispatcher()
    names, backends = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    with _lock:
        if name not in _active_before:
            return
        before = _active_before.pop(name)
        member = names(name)
        if backends._active_backend == member:
            backends.set_active_backend(before)
        for table in (backends._backends, backends._constraints, backends._supported_arg_names):
            del table[member]
        backends._supports_context_parallel.discard(member.value)
        _remove_member(names, member)


class AuleAttnProcessor:
    """Attention processor of a UNet or a VAE: ``unet.set_attn_processor(AuleAttnProcessor())``.

    It replaces diffusers' ``AttnProcessor2_0``, and ``AttnAddedKVProcessor2_0`` for layers with added key and value
    projections. Setting it on a layer with another kind of processor raises an error, because that computes something
    else (linear attention, rotary embeddings, adapters). To undo it, save ``unet.attn_processors`` before and set it
    again.

    Parameters
    ----------
    backend : str, optional
        As in `register`.
    """

    def __init__(self, backend: str | None = None) -> None:
        if backend is not None:
            registry.find(backend)
        self._backend = backend
        _check_replaced_processors()

    def __call__(
        self,
        attn: Any,
        hidden_states: Any,
        encoder_hidden_states: Any = None,
        attention_mask: Any = None,
        temb: Any = None,
    ) -> Any:
        """Compute one attention layer.

        Parameters
        ----------
        attn : diffusers.models.attention_processor.Attention
            The layer, with its weights.
        hidden_states : Tensor
            ``[batch, seq, channels]`` or ``[batch, channels, height, width]``.
        encoder_hidden_states : Tensor, optional
            ``[batch, seq_kv, channels]``: what to attend to, instead of ``hidden_states`` or, with added projections,
            in addition to it.
        attention_mask : Tensor, optional
            Added to the scores, ``[batch, 1, seq_kv]``.
        temb : Tensor, optional
            For a spatial norm.

        Returns
        -------
        Tensor
            In the shape of ``hidden_states``.
        """
        added = _has_added_projections(attn)
        residual = hidden_states
        if not added and attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        image = added or hidden_states.dim() == 4
        if image:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        project = _project_with_added if added else _project
        query, key, value, mask = project(attn, hidden_states, encoder_hidden_states, attention_mask)

        out = self._attention(query, key, value, mask, attn.scale)
        out = out.transpose(1, 2).flatten(2)
        for layer in attn.to_out:  # a projection and a dropout
            out = layer(out)
        if image:
            out = out.transpose(1, 2).reshape(residual.shape)
        if added:
            return out + residual
        if attn.residual_connection:
            out = out + residual
        return out / attn.rescale_output_factor

    def _attention(self, query: Any, key: Any, value: Any, mask: Any, scale: float) -> Any:
        if not torch.compiler.is_compiling():
            out, reason = attempt(query, key, value, mask, scale=scale, backend=self._backend, caller="diffusers")
            if reason is None:
                return out
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


# -- the dispatcher ----------------------------------------------------------------------------------------------------


def _dispatcher() -> ModuleType:
    try:
        from diffusers.models import attention_dispatch
    except ImportError as error:
        raise BackendUnavailableError(
            "diffusers",
            f"[diffusers] expected diffusers with an attention dispatcher, got {error}; pip install -U diffusers",
        ) from error
    module: ModuleType = attention_dispatch
    return module


def _backend_function(dispatch: ModuleType, backend: str | None) -> Callable[..., Any]:
    """Make the function for the dispatcher, which reads its supported arguments from the function's signature."""
    native = dispatch._AttentionBackendRegistry._backends[dispatch.AttentionBackendName.NATIVE]

    def aule_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        if return_lse:
            raise AuleError(
                "AULE_ERROR_UNSUPPORTED",
                "[diffusers] expected return_lse=False, got True; call aule.flash_attention for the log-sum-exp",
            )
        if torch.compiler.is_compiling():
            pass
        elif _parallel_config is not None:
            if attn_mask is None and _is_even(_parallel_config.context_parallel_config):
                mesh = _parallel_config.context_parallel_config._mesh["ring", "ulysses"]
                q, k, v = (x.transpose(1, 2) for x in (query, key, value))
                options: dict[str, Any] = {"causal": is_causal, "causal_align": "top-left", "scale": scale}
                options |= {"dropout_p": dropout_p, "backend": backend, "balance": "contiguous"}
                with observe.called_by("diffusers"):
                    return distributed_attention(q, k, v, mesh=mesh, **options).transpose(1, 2)
            pass_on("context parallelism")
        else:
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            mask = attn_mask
            if mask is not None and tuple(mask.shape) == (query.shape[0], key.shape[1]):  # marks padding keys
                mask = mask[:, None, None]
            given = (q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
            out, reason = attempt(*given, backend=backend, caller="diffusers")
            if reason is None:
                return out.transpose(1, 2)
        return native(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, _parallel_config=_parallel_config
        )

    return aule_attention


def _is_even(config: Any) -> bool:
    """Return whether all ranks have as many rows and heads."""
    return not any(getattr(config, name, False) for name in ("ulysses_anything", "ring_anything"))


def _add_member(names: Any, value: str) -> None:
    """Add a member to an enumeration of strings: the dispatcher identifies backends by enumeration members."""
    member = str.__new__(names, value)
    member._name_, member._value_, member.__objclass__ = value.upper(), value, names
    member._sort_order_ = len(names._member_names_)
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = member
    names._value2member_map_[value] = member
    _values(names).append(value)
    type.__setattr__(names, member._name_, member)


def _remove_member(names: Any, member: Any) -> None:
    names._member_names_.remove(member._name_)
    del names._member_map_[member._name_], names._value2member_map_[member._value_]
    if member._value_ in _values(names):
        _values(names).remove(member._value_)
    type.__delattr__(names, member._name_)


def _values(names: Any) -> list[str]:
    """Return the list of values that ``in`` uses in newer Python versions; older ones have none."""
    values: list[str] = getattr(names, "_hashable_values_", [])
    return values


# -- what diffusers would not say --------------------------------------------------------------------------------------


def _warn_about_unreached_layers() -> None:
    """Let ``set_attention_backend`` warn if layers of the model do not use the dispatcher."""
    from diffusers.models.modeling_utils import ModelMixin

    original = ModelMixin.set_attention_backend
    if hasattr(original, "_aule_original"):
        return

    def set_attention_backend(self: Any, backend: str) -> None:
        original(self, backend)
        if backend.lower() in _active_before:
            _warn_if_unreached(self, backend)

    set_attention_backend._aule_original = original  # type: ignore[attr-defined]
    ModelMixin.set_attention_backend = set_attention_backend


def _warn_if_unreached(model: Any, backend: str) -> None:
    found = [module.processor for module in model.modules() if hasattr(module, "set_processor")]
    missed = [type(processor).__name__ for processor in found if not hasattr(processor, "_attention_backend")]
    if found and not missed:
        return
    remedy = "aule.install(), which serves calls of PyTorch's scaled_dot_product_attention"
    if missed and set(missed) <= _REPLACEABLE and hasattr(model, "set_attn_processor"):
        remedy = "model.set_attn_processor(aule.integrations.diffusers.AuleAttnProcessor())"
    warnings.warn(
        f"[diffusers] expected layers that use the attention dispatcher, got {type(model).__name__} with {len(missed)} "
        f"of {len(found)} that do not ({', '.join(sorted(set(missed))) or 'no attention processor'}); "
        f"set_attention_backend({backend!r}) does not reach them: use {remedy}",
        stacklevel=3,
    )


def _check_replaced_processors() -> None:
    """Let layers refuse an `AuleAttnProcessor` in place of a processor that computes something else.

    A layer that was given the processor looks the same whatever it computed before: only ``set_processor`` can tell.
    """
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention

    for layer_class in (Attention, AttentionModuleMixin):
        original = layer_class.set_processor
        if not hasattr(original, "_aule_original"):
            layer_class.set_processor = _checking(original)


def _checking(original: Callable[..., None]) -> Callable[..., None]:
    def set_processor(self: Any, processor: Any) -> None:
        if isinstance(processor, AuleAttnProcessor):
            replaced = getattr(self, "processor", None)
            if replaced is not None and not _computes_the_same(self, type(replaced).__name__):
                raise _unsupported_layer(f"{type(self).__name__} with {type(replaced).__name__}")
            self._aule_may_serve = True
        original(self, processor)

    set_processor._aule_original = original  # type: ignore[attr-defined]
    return set_processor


def _computes_the_same(layer: Any, replaced: str) -> bool:
    """Return whether a processor computes what `AuleAttnProcessor` would; the older ones leave out norms of Q and K."""
    normed = getattr(layer, "norm_q", None) is not None
    return replaced in _REPLACEABLE and (not normed or replaced.endswith("2_0") or replaced == "AuleAttnProcessor")


def _unsupported_layer(got: str) -> AuleError:
    return AuleError(
        "AULE_ERROR_UNSUPPORTED",
        f"[diffusers] expected an attention layer of a UNet or a VAE with an AttnProcessor2_0, got {got}; use "
        "model.set_attention_backend('aule') after aule.integrations.diffusers.register(), or aule.install()",
    )


# -- layers of a UNet --------------------------------------------------------------------------------------------------


def _has_added_projections(attn: Any) -> bool:
    """Return whether a layer has extra key and value projections for the text. Refuses layers of other models."""
    from diffusers.models.attention_processor import Attention

    # Joint attention layers also have queries and results of the text.
    if not isinstance(attn, Attention) or getattr(attn, "add_q_proj", None) is not None or attn.to_out is None:
        raise _unsupported_layer(f"{type(attn).__name__} of another model")
    if not getattr(attn, "_aule_may_serve", False):
        raise _unsupported_layer(f"{type(attn).__name__} whose processor was not set by set_attn_processor")
    added: bool = attn.added_kv_proj_dim is not None
    return added


def _project(attn: Any, hidden: Any, encoder: Any, mask: Any) -> tuple[Any, Any, Any, Any]:
    """Compute q, k, v ``[batch, heads, seq, head_dim]`` and the mask ``[batch, heads, 1 or seq_q, seq_kv]``."""
    batch, seq_kv, _ = (hidden if encoder is None else encoder).shape
    mask = attn.prepare_attention_mask(mask, seq_kv, batch)
    if mask is not None:
        mask = mask.view(batch, attn.heads, -1, mask.shape[-1])
    hidden = _group_norm(attn, hidden)
    source = hidden if encoder is None else _cross_norm(attn, encoder)
    query, key, value = attn.to_q(hidden), attn.to_k(source), attn.to_v(source)
    query, key, value = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in (query, key, value))
    query = query if attn.norm_q is None else attn.norm_q(query)
    key = key if attn.norm_k is None else attn.norm_k(key)
    return query, key, value, mask


def _project_with_added(attn: Any, hidden: Any, encoder: Any, mask: Any) -> tuple[Any, Any, Any, Any]:
    """Compute q, k, v and the mask of a layer that adds the text's keys and values to the image's, or uses only them.

    Shapes are as for `_project`.
    """
    batch, seq_q, _ = hidden.shape
    mask = attn.prepare_attention_mask(mask, seq_q, batch, out_dim=4)
    encoder = hidden if encoder is None else _cross_norm(attn, encoder)
    hidden = _group_norm(attn, hidden)
    query, key, value = attn.to_q(hidden), attn.add_k_proj(encoder), attn.add_v_proj(encoder)
    if not attn.only_cross_attention:
        key = torch.cat([key, attn.to_k(hidden)], dim=1)
        value = torch.cat([value, attn.to_v(hidden)], dim=1)
    query, key, value = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in (query, key, value))
    return query, key, value, mask


def _cross_norm(attn: Any, encoder: Any) -> Any:
    return attn.norm_encoder_hidden_states(encoder) if attn.norm_cross else encoder


def _group_norm(attn: Any, hidden: Any) -> Any:
    return hidden if attn.group_norm is None else attn.group_norm(hidden.transpose(1, 2)).transpose(1, 2)
