"""Compares tiny random models of diffusers with their own attention: outputs and gradients.

A model is made small by rules on the names of its constructor's arguments, and inputs are tried until the model takes
them, as ``model_configs.py`` does for transformers.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import warnings
from collections.abc import Iterator
from typing import Any

import diffusers
import torch

import aule
from aule.errors import AuleError
from aule.integrations import diffusers as integration

TOLERANCE = 1e-3
HEADS, HEAD_DIM = 2, 16
WIDTH = HEADS * HEAD_DIM

RULES: tuple[tuple[str, int], ...] = (
    (r"^num_(attention|single|refiner|kv|key_value)_heads$|^num_heads$|^heads$|n_heads|attention_heads$", HEADS),
    (r"head_dim$|dim_head$", HEAD_DIM),
    (r"num_.*layers$|num_layers|n_layers|depth$|layers_per_block|num_blocks|num_refiner|num_single|n_layer", 1),
    (r"sample_size|sample_(height|width)", 8),
    (r"^(in|out|latent|vae|num_latents?)_channels$", 4),
    (r"(dim|channels|size|width|features)$", WIDTH),
)  # fmt: skip
KEPT = (
    r"patch_size|window|kernel|stride|pos_embed|vocab|num_train|max_|norm_|rope|axes|frequency|attention_type|qk_norm"
)
OPTIONS: dict[str, dict[str, Any]] = {
    "SD3Transformer2DModel": {"pos_embed_max_size": 8, "sample_size": 8, "caption_projection_dim": WIDTH},
    "CogVideoXTransformer3DModel": {"sample_frames": 5, "max_text_seq_length": 7},
    "SanaTransformer2DModel": {"num_cross_attention_heads": HEADS, "patch_size": 1},
    "Lumina2Transformer2DModel": {
        "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_kv_heads": HEADS, "axes_dim_rope": (4, 4, 8),
        "axes_lens": (32, 16, 16), "cap_feat_dim": WIDTH,
    },
    "QwenImageTransformer2DModel": {"in_channels": 16},
    "UNet2DConditionModel": {
        "block_out_channels": (16, 32), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "norm_num_groups": 4, "attention_head_dim": 8,
    },
    "UNet2DModel": {
        "block_out_channels": (16, 32), "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "norm_num_groups": 4, "attention_head_dim": 8,
    },
    "AutoencoderKL": {"block_out_channels": (16,), "norm_num_groups": 4, "sample_size": 16},
    "PixArtTransformer2DModel": {"cross_attention_dim": WIDTH, "num_embeds_ada_norm": 10},
    "DiTTransformer2DModel": {"num_embeds_ada_norm": 10, "norm_type": "ada_norm_zero"},
}  # fmt: skip
"""What the rules get wrong."""


class NotMade(Exception):
    """No tiny model or no inputs for it could be made."""


def families() -> list[str]:
    """Return the names of all model classes."""
    found = []
    for name in dir(diffusers):
        kind = getattr(diffusers, name, None)
        if isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin) and kind is not diffusers.ModelMixin:
            found.append(name)
    return found


def check(name: str) -> dict[str, Any]:
    """Check one class in the three ways, and return what came out."""
    warnings.simplefilter("ignore")
    diffusers.utils.logging.set_verbosity_error()
    try:
        model = _tiny(getattr(diffusers, name), name)
        inputs = _fitting_inputs(model)
    except NotMade as error:
        return {"class": name, "not made": str(error)}
    expected = _results(model, inputs)
    if _error(_results(model, inputs), expected) > TOLERANCE:
        return {"class": name, "not made": "two passes differ"}
    ways = {"backend": _with_backend, "processor": _with_processor, "install": _installed}
    compared = ["outputs"] + (["gradients"] if expected[1] else [])
    found = {way: _verdict(function, copy.deepcopy(model), inputs, expected) for way, function in ways.items()}
    return {"class": name, "inputs": sorted(inputs), "compared": compared, **found}


def _tiny(kind: Any, name: str) -> Any:
    options: dict[str, Any] = {}
    for argument, parameter in inspect.signature(kind.__init__).parameters.items():
        value = parameter.default
        if isinstance(value, list | tuple) and "channels" in argument and all(isinstance(x, int) for x in value):
            options[argument] = tuple(min(x, WIDTH) for x in value)
        if isinstance(value, list | tuple) and re.search(r"axes_dims?_rope|rope_axes_dim|axes_dim$", argument):
            options[argument] = (4, 4, 8) if len(value) == 3 else (4,) * len(value)
        if not isinstance(value, int) or isinstance(value, bool) or re.search(KEPT, argument):
            continue
        small = next((number for pattern, number in RULES if re.search(pattern, argument)), value)
        options[argument] = min(small, value) if value else value
    options |= OPTIONS.get(name, {})
    torch.manual_seed(0)
    try:
        with torch.device("meta"):
            weights = sum(p.numel() for p in kind(**options).parameters())
        model = kind(**options).eval() if weights < 10_000_000 else None
    except Exception as error:
        raise NotMade(_line(error)) from error
    if model is None:
        raise NotMade(f"the rules leave {weights} weights")
    with torch.no_grad():
        for parameter in model.parameters():  # some layers start as zero
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def _fitting_inputs(model: Any) -> dict[str, Any]:
    reason = None
    for inputs in _candidates(model):
        try:
            outputs = _forward(model, inputs)
        except Exception as error:
            reason = reason or f"inputs {', '.join(sorted(inputs))}: {_line(error)}"
            continue
        if outputs and all(torch.isfinite(x).all() for x in outputs):
            return inputs
        reason = reason or "no finite output"
    raise NotMade(reason or "no inputs known")


def _candidates(model: Any) -> Iterator[dict[str, Any]]:
    parameters = inspect.signature(model.forward).parameters
    config = model.config

    def width(*names: str) -> int:
        return next((config[n] for n in names if isinstance(config.get(n), int)), WIDTH)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=torch.Generator().manual_seed(1))

    channels = width("in_channels", "latent_channels")
    text = width(
        "joint_attention_dim", "cross_attention_dim", "caption_channels", "text_embed_dim", "cap_feat_dim", "text_dim",
        "encoder_hid_dim", "caption_dim",
    )  # fmt: skip
    shapes = ((2, channels, 8, 8), (2, 16, channels), (2, channels, 2, 8, 8), (2, 2, channels, 8, 8), (2, 3, 16, 16),
              (2, 3, 5, 16, 16), (2, channels, 16))  # fmt: skip
    common = {
        "encoder_hidden_states": random(2, 7, text),
        "pooled_projections": random(2, width("pooled_projection_dim")),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(7, 3),
        "encoder_hidden_states_mask": torch.ones(2, 7).long(),
        "encoder_attention_mask": torch.ones(2, 7),
        "img_shapes": [[(1, 4, 4)]] * 2,
        "txt_seq_lens": [7, 7],
        "class_labels": torch.tensor([1, 2]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "guidance": torch.tensor([1.0, 2.0]),
        "num_frames": 2, "height": 8, "width": 8,
        "original_size": torch.tensor([[8.0, 8.0]] * 2), "target_size": torch.tensor([[8.0, 8.0]] * 2),
        "crop_coords": torch.zeros(2, 2), "r_timestep": torch.tensor([0.5, 1.0]),
    }  # fmt: skip
    main = next((n for n in ("hidden_states", "sample", "x", "latents") if n in parameters), None)
    if main is None:
        return
    needed = {n for n, p in parameters.items() if p.default is inspect.Parameter.empty}
    usual = needed | {"encoder_hidden_states", "class_labels", "added_cond_kwargs"}
    for shape, step, extra in itertools.product(
        shapes, (torch.tensor([1.0, 2.0]), torch.tensor([1, 2])), (usual, set(common), needed)
    ):
        given = {n: x for n, x in common.items() if n in extra and n in parameters}
        given |= {n: step for n in ("timestep", "timesteps", "t") if n in parameters}
        yield {main: random(*shape), **given}


def _forward(model: Any, inputs: dict[str, Any]) -> list[Any]:
    torch.manual_seed(1)
    with torch.no_grad():
        return list(_tensors(model(**inputs)))


def _tensors(output: Any) -> Iterator[Any]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        yield from itertools.chain.from_iterable(map(_tensors, output.values()))
    elif isinstance(output, list | tuple):
        yield from itertools.chain.from_iterable(map(_tensors, output))


def _results(model: Any, inputs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the outputs and the gradients of all parameters."""
    outputs = _forward(model, inputs)
    model.zero_grad()
    torch.manual_seed(1)
    try:
        sum(loss(x) for x in _tensors(model(**inputs)) if x.requires_grad).backward()
    except AuleError:
        raise
    except Exception:
        return outputs, {}
    return outputs, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def loss(x: Any) -> Any:
    """Return a number whose gradient depends on every element."""
    return (x * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))).mean()


def _error(found: Any, right: Any) -> float:
    (outputs, gradients), (expected, wanted) = found, right
    if len(outputs) != len(expected) or gradients.keys() != wanted.keys():
        return float("inf")
    largest = max((g.abs().max().item() for g in wanted.values()), default=0.0)
    pairs = [(a, b, 1e-6) for a, b in zip(outputs, expected, strict=True)]
    pairs += [(g, wanted[n], 0.1 * largest) for n, g in gradients.items()]
    return max(float((a - b).abs().max() / max(b.abs().max().item(), floor)) for a, b, floor in pairs)


def _verdict(way: Any, model: Any, inputs: dict[str, Any], expected: Any) -> dict[str, Any]:
    aule.reset_dispatch_stats()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = way(model, inputs)
        except AuleError as error:
            return {"verdict": "refused", "message": str(error)}
        except Exception as error:
            return {"verdict": "wrong", "message": _line(error)}
    if found is None:
        return {}
    error, count = _error(found, expected), aule.dispatch_stats()["served"]
    verdict = "wrong" if not error <= TOLERANCE else "served" if count else "handed on"
    warned = any("[diffusers]" in str(warning.message) for warning in caught)
    return {"verdict": verdict, "calls": count, "error": float(f"{error:.1e}"), "warned": warned}


def _with_backend(model: Any, inputs: dict[str, Any]) -> Any:
    integration.register()
    try:
        model.set_attention_backend("aule")
        return _results(model, inputs)
    finally:
        integration.unregister()


def _with_processor(model: Any, inputs: dict[str, Any]) -> Any:
    if not hasattr(model, "set_attn_processor") or not model.attn_processors:
        return None
    model.set_attn_processor(integration.AuleAttnProcessor())
    return _results(model, inputs)


def _installed(model: Any, inputs: dict[str, Any]) -> Any:
    aule.install()
    try:
        return _results(model, inputs)
    finally:
        aule.uninstall()


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
