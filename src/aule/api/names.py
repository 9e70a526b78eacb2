"""Other libraries' names of options, and the error for an option that a function does not have."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from aule.errors import UnknownOptionError

_OURS = {
    "is_causal": "causal", "use_causal_mask": "causal", "causal": "is_causal",
    "attn_mask": "mask", "attention_mask": "mask", "mask": "attn_mask", "bias": "attn_mask",
    "attn_bias": "bias", "attention_bias": "bias", "position_bias": "bias",
    "softmax_scale": "scale", "sm_scale": "scale", "scaling": "scale", "scale": "softmax_scale",
    "dropout": "dropout_p", "p": "dropout_p", "attention_dropout": "dropout_p", "p_dropout": "dropout_p",
    "window_size": "window", "sliding_window": "window", "local_window_size": "window",
    "logits_soft_cap": "softcap", "logit_cap": "softcap", "soft_cap": "softcap",
    "s_aux": "sinks", "sink": "sinks", "return_softmax_lse": "return_lse", "return_attn_probs": "return_lse",
    "rng_seed": "seed", "generator": "seed", "alibi": "alibi_slopes",
    "device": "backend", "provider": "backend",
    "cu_seqlens_kv": "cu_seqlens_k", "max_seqlen_kv": "max_seqlen_k", "block_table": "block_tables",
    "page_table": "block_tables", "cache_seqlens": "context_lens", "seq_lens": "context_lens",
    "seqlens_k": "context_lens", "kv_layout": "layout", "k_descale": "k_scale", "v_descale": "v_scale",
    "num_blocks": "num_pages", "block_size": "page_size", "num_kv_heads": "heads_kv", "num_heads": "heads_kv",
    "num_key_value_heads": "heads_kv", "head_size": "head_dim", "num_layers": "layers", "max_pages": "num_pages",
    "kv_cache_dtype": "dtype", "quantization": "quantize", "quantized": "quantize",
    "epsilon": "eps", "variance_epsilon": "eps", "norm_eps": "eps", "layer_norm_eps": "eps", "rms_norm_eps": "eps",
    "gamma": "weight", "beta": "bias", "rotary_interleaved": "interleaved", "interleave": "interleaved",
    "smoothing": "label_smoothing", "ignore_idx": "ignore_index", "approx": "approximate", "in_place": "inplace",
    "theta": "base", "rope_theta": "base",
    "kv_lora_rank": "value_dim", "head_dim_v": "value_dim", "v_head_dim": "value_dim", "topk_indices": "indices",
    "process_group": "group", "cp_group": "group", "group": "mesh", "mesh": "group", "device_mesh": "mesh",
    "seq_q": "Q_LEN", "seq_len": "Q_LEN", "seq_kv": "KV_LEN", "batch": "B", "heads": "H",
}  # fmt: skip
"""What our functions call an option that another library calls by the key."""

_ADVICE = {
    "key_padding_mask": "did you mean `mask`? True attends there: pass mask=~key_padding_mask[:, None, None, :]",
    "enable_gqa": "leave it out: k and v may always have fewer heads than q",
    "num_heads": "leave it out: the number of heads is the length of an axis",
    "num_kv_heads": "leave it out: the number of heads is the length of an axis",
    "heads": "leave it out: the number of heads is the length of an axis",
    "need_weights": "leave it out: the weights are never stored",
    "training": "leave it out, and pass dropout_p=0.0 for evaluation",
    "normalized_shape": "leave it out: rows are normalised along the last axis",
    "dim": "leave it out: the function works along the last axis",
    "axis": "leave it out: the function works along the last axis",
    "size_average": "pass reduction='mean' or 'sum'",
    "layout": "leave it out: arrays are [batch, heads, seq, head_dim]; swap axes 1 and 2 of others",
    "qkv_format": "leave it out: arrays are [batch, heads, seq, head_dim]; swap axes 1 and 2 of others",
    "block_mask": "call aule.flex_attention, which takes masks as functions",
    "score_mod": "call aule.flex_attention, which takes functions of scores",
    "mask_mod": "call aule.flex_attention with block_mask=aule.create_block_mask(mask_mod, ...)",
}  # fmt: skip
"""What to do about options that have no counterpart."""

_MASKS = ("causal", "is_causal", "mask", "attn_mask", "mask_mod", "window", "key_padding_mask")
_SCORES = ("bias", "attn_bias", "alibi_slopes", "softcap", "logits_soft_cap")
_FLEX = {
    **dict.fromkeys(
        _MASKS,
        "pass block_mask=aule.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN); causal is lambda b, h, q, k: q >= k",
    ),
    **dict.fromkeys(_SCORES, "compute it in score_mod(score, b, h, q_idx, kv_idx)"),
}
"""Remedies for options of functions that take masks and biases as functions."""

F = TypeVar("F", bound=Callable[..., Any])


def refuses_unknown(function: F) -> F:
    """Leave the last parameter, which collects unknown options, out of the signature that tools show.

    A wrapper that catches Python's TypeError would cost every call more, and PyTorch's compiler would trace it too.
    """
    signature = inspect.signature(function)
    known = list(signature.parameters.values())[:-1]
    function.__signature__ = signature.replace(parameters=known)  # type: ignore[attr-defined]
    return function


def unknown_option(
    function: Callable[..., Any] | Sequence[str], unknown: Mapping[str, object], op: str = ""
) -> UnknownOptionError:
    """Make the error for options that a function does not have, with the name that was probably meant.

    Parameters
    ----------
    function : callable or sequence of str
        The function, or the options that it has.
    unknown : mapping
        What it was given besides.
    op : str
        Its name for the message; default: ``function.__name__``.
    """
    given = next(iter(unknown))
    if callable(function):
        op = op or function.__name__
        function = [name for name in inspect.signature(function).parameters if name != "self"]
    known = list(function)
    guess = _OURS.get(given)
    remedy = _FLEX.get(given) if "block_mask" in known else None if guess in known else _ADVICE.get(given)
    if remedy is None:
        if guess not in known:
            lower = {name.lower(): name for name in known}
            guess = next((lower[name] for name in difflib.get_close_matches(given.lower(), lower, 1)), None)
        remedy = f"did you mean `{guess}`?" if guess else f"it has {', '.join(known)}"
    return UnknownOptionError(f"[{op}] expected one of its options, got `{given}`; {remedy}")
