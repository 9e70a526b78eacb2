"""Tiny configurations of transformers models, by rules on the names of their fields, and inputs that fit them.

A rule replaces a number of the default configuration by a small one, the same in every part of a model, so that widths
that must agree still do. What the rules get wrong stands in ``model_overrides.json``.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

WIDTH = 64
VOCABULARY = 128
IMAGE = 32
PATCH = 8
OVERRIDES = json.loads((Path(__file__).parent / "model_overrides.json").read_text())


def _at_most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


RULES: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"num_feat_extract_layers|type_vocab_size|num_labels|chunk_size_feed_forward|sampl(ing|e)_rate", int),
    (r"num_channels|in_channels|input_channels", int),
    (r"vocab_size|vocab_dim", lambda _: VOCABULARY),
    (r"num_nextn_predict_layers|num_kv_shared_layers|first_k_dense_replace|max_window_layers", lambda v: min(v, 1)),
    (r"num_experts_per_tok|experts_per_token|moe_topk|top_k_experts|moe_k|num_selected_experts", _at_most(2)),
    (r"n_group|topk_group|num_expert_group", lambda _: 1),
    (r"shared_experts", _at_most(1)),
    (r"experts$|num_experts|moe_num_experts", _at_most(4)),
    (r"(hidden|encoder|decoder|^num|_num|attention)_layers|^n_layers?$|_layers$|^layers$|depth$|num_blocks",
     _at_most(2)),
    (r"mamba_d_head|mamba_headdim|^qk_head_dim", _at_most(32)),
    (r"mamba_d_ssm", _at_most(128)),
    (r"^d_head$|dim_head", _at_most(16)),
    (r"key_value_heads|kv_heads|linear_num_key_heads", _at_most(2)),
    (r"heads?$|num_heads|n_heads", lambda v: v if v < 2 else 4),
    (r"^window_size$", _at_most(4)),
    (r"head_dim|d_kv$|dim_head|d_head$|kv_channels|attention_head_size", _at_most(16)),
    (r"lora_rank", _at_most(16)),
    (r"rotary_dim", _at_most(8)),
    (r"image_size|^img_size|input_size|pretrain_size", lambda v: IMAGE if v >= IMAGE else v),
    (r"(^|_)patch_size$", _at_most(PATCH)),
    (r"position|max_seq_len|context_length|seq_length", _at_most(256)),
    (r"sliding_window|attention_chunk_size|local_attention", lambda v: min(v, 4)),
    (r"num_queries|num_query|query_tokens|latents$|query_num", _at_most(8)),
    (r"mel_bins|feature_size", _at_most(16)),
    (r"(hidden|intermediate|inner|ffn|ff|mlp|proj\w*|embed\w*|emb|model|output|out|encoder|text|vision|audio|state)_?"
     r"(size|dim|units|channels)s?$|d_model|n_embd|d_ff$|d_inner|n_inner|dim$|_dims$|width|attention_hidden|ffn|mlp_dim"
     r"|intermediate|hidden_size|hidden_dim|channels$|feedforward|codevector|filters$|codebook_size", _at_most(WIDTH)),
)  # fmt: skip
ABSENT = {
    "head_dim": WIDTH // 4, "num_key_value_heads": 4, "num_experts_per_tok": 2, "n_routed_experts": 4,
    "n_shared_experts": 1, "vocab_size": VOCABULARY, "prediction_length": 4, "vocabulary_map": {"<image>": 5},
}  # fmt: skip
"""What a model needs although its default configuration has none."""
PER_LAYER = ("out_features", "out_indices", "stage_names", "per_layer_config")
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
TOKEN = re.compile(r"token_id$|token_index$|token_ids$|^(bo|eo)[a-z]_token")


def tiny(config_class: Any, model_type: str) -> Any:
    """Return a small configuration of a model type."""
    return config_class(**_fields(config_class(), model_type, _Tokens()))


class _Tokens:
    """Gives out token numbers below the vocabulary's size, the same for the same original."""

    def __init__(self) -> None:
        self.given: dict[int, int] = {}

    def __call__(self, token: int) -> int:
        if token < VOCABULARY:
            return token
        return self.given.setdefault(token, VOCABULARY - 1 - len(self.given))


def _fields(config: Any, model_type: str, tokens: _Tokens) -> dict[str, Any]:
    """Return the arguments that make a small configuration from a default one."""
    changed: dict[str, Any] = {}
    per_layer: dict[str, Any] = {}
    parts = {name for name in config.sub_configs if getattr(config, name, None) is not None}
    layers = next((v for n in LAYERS if isinstance(v := getattr(config, n, None), int)), 0)
    for name, value in vars(config).items():
        if name.startswith("_") or isinstance(getattr(type(config), name, None), property):
            continue
        if name in parts:
            part = getattr(config, name)
            given = {n: x for n, x in part.to_diff_dict().items() if n not in (*part.sub_configs, *PER_LAYER)}
            changed[name] = {**given, **_fields(part, part.model_type, tokens), "model_type": part.model_type}
        elif TOKEN.search(name):
            found = _token(value, tokens)
            if found != value:
                changed[name] = found
        elif isinstance(value, int) and not isinstance(value, bool):
            small = _small(name, value)
            if small != value:
                changed[name] = small
        elif isinstance(value, list | tuple) and len(value) == layers > 4:  # an entry for each layer
            per_layer[name] = value
        elif isinstance(value, list | tuple) and value and all(isinstance(x, int) for x in value):
            changed |= _small_list(name, value)
        elif value is None and name in ABSENT:
            changed[name] = ABSENT[name]
    own = vars(config)
    if own.get("num_key_value_heads") and own["num_key_value_heads"] == own.get("num_attention_heads"):
        changed["num_key_value_heads"] = changed.get("num_attention_heads", own["num_attention_heads"])
    changed |= _layer_kinds(config)
    count = next((changed[n] for n in LAYERS if n in changed), layers)
    changed |= {name: _shortened(name, value, count) for name, value in per_layer.items() if name not in changed}
    changed |= _rope(config, changed)
    for key in ("*", model_type):
        _merge(changed, OVERRIDES.get(key, {}))
    return changed


def _merge(into: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def _token(value: Any, tokens: _Tokens) -> Any:
    if isinstance(value, list | tuple):
        return [tokens(x) if isinstance(x, int) else x for x in value]
    return tokens(value) if isinstance(value, int) else value


def _small(name: str, value: int) -> int:
    for pattern, rule in RULES:
        if re.search(pattern, name):
            return rule(value)
    return value


def _small_list(name: str, values: Any) -> dict[str, Any]:
    if re.search(r"depths|num_block_repeats|stage_num_blocks", name):
        return {name: [1] * len(values)}
    if re.search(r"hidden_sizes|neck_hidden|embed_dims?$|dims$|encoder_hidden", name):
        return {name: [max(16 * x // values[0], 16) for x in values]}
    if re.search(r"heads", name):
        return {name: [max(x // values[0], 1) for x in values]}
    if re.search(r"conv_dim|tdnn_dim|decoder_in_channels", name):
        return {name: [16 if "conv" in name else 32] * len(values)}
    if re.search(r"image_size", name):
        return {name: [IMAGE] * len(values)}
    if re.search(r"indexes$|indices$|_layers$", name) and name != "encode_proj_layers":
        return {name: [1]}
    return {}


def _shortened(name: str, values: Any, count: int) -> list[Any]:
    """Keep entries for the first layers of a list with one entry for each layer, made small by the list's name."""
    whole = all(isinstance(x, int) and not isinstance(x, bool) for x in values)
    return [_small(name.removesuffix("_per_layer"), x) if whole else x for x in values[:count]]


def _layer_kinds(config: Any) -> dict[str, Any]:
    """Keep one layer of each kind that a model mixes, and at least two layers."""
    out: dict[str, Any] = {}
    field = config.attribute_map.get("layer_types", "layer_types")
    field = field if field in vars(config) else "layers_block_type"
    kinds = vars(config).get(field)
    if isinstance(kinds, list | tuple) and kinds:
        chosen = list(dict.fromkeys(kinds))
        chosen = chosen if len(chosen) > 1 else chosen * 2
        out[field] = chosen
        for name in LAYERS:
            if hasattr(config, name):
                out[name] = len(chosen)
    for name in ("mlp_layer_types", "mlp_types"):
        mlps = getattr(config, name, None)
        if isinstance(mlps, list | tuple) and mlps:
            count = out.get("num_hidden_layers", 2)
            mixed = [*dict.fromkeys(mlps)]
            out[name] = [mixed[i % len(mixed)] for i in range(count)]
    return out


def _rope(config: Any, changed: dict[str, Any]) -> dict[str, Any]:
    """Fit the sections of a rotary embedding with several axes to the small head dimension."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return {}
    sections = rope["mrope_section"]
    dim = changed.get("head_dim", getattr(config, "head_dim", None) or 16)
    half = int(dim * rope.get("partial_rotary_factor", 1.0)) // 2
    small = [half // len(sections)] * len(sections)
    small[0] += half - sum(small)
    return {"rope_parameters": {**rope, "mrope_section": small}}


# -- inputs ------------------------------------------------------------------------------------------------------------


def candidates(model: Any, family: str) -> Iterator[dict[str, Any]]:
    """Give inputs that a model may accept, the likeliest first."""
    accepted = set(inspect.signature(model.forward).parameters)
    main = model.main_input_name
    main = main if isinstance(main, str) and main in accepted else None
    generator = torch.Generator().manual_seed(0)
    text = {"input_ids": torch.randint(3, 90, (2, 9), generator=generator), "attention_mask": torch.ones(2, 9).long()}
    text["attention_mask"][1, 6:] = 0
    decoder = {"decoder_input_ids": torch.randint(3, 90, (2, 5), generator=generator)}
    boxes = torch.randint(0, 50, (2, 9, 4), generator=generator)
    boxes[..., 2:] += boxes[..., :2]
    text |= {"bbox": boxes}
    images = _images(model.config, generator)
    sounds = _sounds(model.config, generator)

    def only(*groups: dict[str, Any]) -> dict[str, Any]:
        return {n: x for group in groups for n, x in group.items() if n in accepted}

    if "input_ids" in accepted:
        if model.config.is_encoder_decoder and "decoder_input_ids" in accepted:
            yield only(text, decoder)
        yield only(text)
        yield only({**text, "bbox": boxes / 128}, decoder)
        yield only({**text, "attention_mask": None})
        for image in images:
            yield only(text, image)
    for group in (*images, *sounds):
        yield only(group)
        yield only(group, decoder)
        yield only(group, text)
    if main is not None:
        for shape in ((2, 16, WIDTH), (2, 16), (2, 3, 16)):
            if main != "input_ids":
                yield {main: torch.randn(shape, generator=generator)}


def _number(config: Any, *names: str, default: int) -> int:
    """Return the first of some fields that a configuration or one of its parts has."""
    parts = [getattr(config, n) for n in getattr(config, "sub_configs", {}) if getattr(config, n, None) is not None]
    for name in names:
        for one in (config, *parts):
            value = getattr(one, name, None)
            value = value[0] if isinstance(value, list | tuple) and value else value
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return default


def _images(config: Any, generator: Any) -> list[dict[str, Any]]:
    size = _number(config, "image_size", "img_size", "input_size", default=IMAGE)
    channels = _number(config, "num_channels", "in_channels", "in_chans", default=3)
    frames = _number(config, "num_frames", "frames_per_clip", default=2)
    patch = _number(config, "patch_size", default=PATCH)
    times = _number(config, "temporal_patch_size", default=1)
    flat = channels * times * patch * patch

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    return [
        {"pixel_values": random(2, channels, size, size)},
        {"pixel_values": random(2, channels, 64, 64)},
        {"pixel_values": random(2, channels, 128, 128)},
        {"pixel_values": random(2, channels, 224, 224)},
        {"pixel_values": random(2, frames, channels, size, size)},
        {"pixel_values_videos": random(2, frames, channels, size, size)},
        {"pixel_values": random(32, flat), "grid_thw": grid, "image_grid_thw": grid},
        {"hidden_states": random(32, flat), "grid_thw": grid},
        {"pixel_values": random(2, 16, flat), "pixel_attention_mask": torch.ones(2, 16).long(),
         "spatial_shapes": torch.tensor([[4, 4], [4, 4]]), "pixel_position_ids": _positions()},
    ]  # fmt: skip


def _positions() -> Any:
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    return torch.stack([rows.flatten(), columns.flatten()], -1).expand(2, 16, 2)


def _sounds(config: Any, generator: Any) -> list[dict[str, Any]]:
    bins = _number(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", default=16)
    rows = 2 * _number(config, "max_source_positions", default=32)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    mask = torch.ones(2, 64).long()
    mask[1, 48:] = 0
    return [
        {"input_features": random(2, bins, rows)},
        {"input_features": random(2, 64, bins), "attention_mask": mask},
        {"input_features": random(2, bins, 64), "attention_mask": mask},
        {"input_values": random(2, 1600)},
        {"input_values": random(2, 64, bins)},
        {"input_values": random(2, bins, 64)},
        {"input_values": random(2, 1, 3200)},
        {"input_features": random(2, 1, 64, bins)},
        {"past_values": random(2, _number(config, "context_length", default=32))},
        {
            "past_values": random(
                2, _number(config, "context_length", default=32), _number(config, "num_input_channels", default=1)
            )
        },
    ]
