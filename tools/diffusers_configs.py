"""Tiny models of diffusers, by rules on the names of their arguments, and inputs by the names of `forward`'s.

All widths become the same, so that those that must agree do: two heads of 16 columns, 32 for every other width, four
channels. What the rules get wrong stands in ``diffusers_overrides.json``, by class: its arguments (``config``), inputs
to add (``inputs``) and to leave out (``without``). An input is the shape of random numbers, ``{"integers": shape,
"below": n}``, ``{"tensor": numbers}``, ``{"tensors": inputs}`` for a list, ``{"named": inputs}`` for a dict, or
``{"value": x}``.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HEADS, HEAD_DIM, WIDTH, CHANNELS, GROUPS = 2, 16, 32, 4, 4
TEXT, SIDE, FRAMES = 7, 8, 2
OVERRIDES = json.loads((Path(__file__).parent / "diffusers_overrides.json").read_text())

NUMBERS: tuple[tuple[str, int], ...] = (
    (r"layers_per_block|_layers?$|num_layers|depth$|num_\w*blocks$|n_layers|nlayers|num_res_blocks", 2),
    (r"heads$|head$|num_heads", HEADS),
    (r"head_dim|dim_heads?$|d_kv$", HEAD_DIM),
    (r"norm_num_groups|^groups$|max_norm_num_groups", GROUPS),
    (r"^(in|out|latent|conditioning|audio_in|audio_out)_channels$|^(z|in_visual|out_visual|in_audio|out_audio)_dim$"
     r"|^z_channels$|^(io|num)_channels$", CHANNELS),
    (r"sample_(size|height|width)$|^resolution$", SIDE),
    (r"vocab_size|codebook_size|num_vq_embeddings|num_embeds", 64),
    (r"max_(text_)?seq(uence)?_len|pos_embed_max_size|max_position", 64),
    (r"experts$", 4),
    (r"_dim$|^dim$|_dims$|hidden_size|_width$|channels?$|_size$|d_model|d_ff|_dim_a$|intermediate|_dim_(in|out|t5)$"
     r"|^dim_|^ch$", WIDTH),
)  # fmt: skip
"""Largest values of numbers, by their names."""
MAIN = ("in_channels", "input_channels", "audio_channels", "num_channels", "in_visual_dim", "io_channels", "latent_dim")
"""Names of the number of channels of the main input."""
UNCHANGED = re.compile(r"patch_size|compression|kernel_size|conditioning_channel_order|channels_per|hop|scale_factor")


def tiny(kind: Any) -> Any:
    """Return a small model of a class."""
    given = OVERRIDES.get(kind.__name__, {}).get("config", {})
    arguments = _arguments(kind)
    fields = {n: small for n, p in arguments.items() if (small := _small(n, p.default)) is not None}
    return kind(**fields | {n: x if isinstance(arguments[n].default, list) else _tuple(x) for n, x in given.items()})


def _arguments(kind: Any) -> dict[str, inspect.Parameter]:
    given = dict(inspect.signature(kind.__init__).parameters)
    given.pop("self")
    return given


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def _small(name: str, value: Any) -> Any:
    """Return a smaller default, None to leave it."""
    if UNCHANGED.search(name):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        limit = next((limit for pattern, limit in NUMBERS if re.search(pattern, name)), None)
        return None if limit is None or limit >= value else limit
    if isinstance(value, list | tuple) and value and all(type(x) is int for x in value):
        return _small_list(name, value)
    return None


def _small_list(name: str, values: Any) -> Any:
    count = len(values)
    if re.search(r"axes_dim|rope_dim|axes_dims", name):  # which add up to a head
        last = HEAD_DIM // count // 2 * 2
        return (HEAD_DIM - last * (count - 1), *[last] * (count - 1))
    if re.search(r"channels", name):
        return (WIDTH // 2, *[WIDTH] * (count - 1))
    if re.search(r"layers|depths|num_\w*blocks", name):
        return (1,) * count
    if re.search(r"heads", name):
        return (HEADS,) * count
    return None


# -- inputs ------------------------------------------------------------------------------------------------------------


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    """Give inputs that a model may accept, the likeliest first."""
    kind = type(model).__name__
    override = OVERRIDES.get(kind, {})
    parameters = inspect.signature(model.forward).parameters
    required = {n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    generator = torch.Generator().manual_seed(0)
    added = {name: _made(what, generator) for name, what in override.get("inputs", {}).items()}
    config = dict(model.config)
    for shape in _shapes(kind, next((config[n] for n in MAIN if isinstance(config.get(n), int)), CHANNELS)):
        known = _known(shape, config, generator)
        for names in (parameters.keys(), required | {"encoder_hidden_states", "timestep"}):
            found = {n: x for n, x in known.items() if n in names and n in parameters}
            found = {n: x for n, x in {**found, **added}.items() if n not in override.get("without", ())}
            yield found
            if "timestep" in found and "timestep" not in added:
                yield {**found, "timestep": torch.tensor([3, 700])}


def _made(what: Any, generator: Any) -> Any:
    """Return an input from its description in the file of overrides."""
    if isinstance(what, list):
        return torch.randn(what, generator=generator)
    if "tensors" in what:
        return [_made(one, generator) for one in what["tensors"]]
    if "named" in what:
        return {name: _made(one, generator) for name, one in what["named"].items()}
    if "integers" in what:
        return torch.randint(0, what["below"], what["integers"], generator=generator)
    if "tensor" in what:
        return torch.tensor(what["tensor"])
    return what["value"]


def _shapes(kind: str, channels: int) -> list[tuple[int, ...]]:
    """Return shapes of the main input of a class, the likeliest first."""
    flat, image = (2, 2 * SIDE, channels), (2, channels, SIDE, SIDE)
    video, picture = (2, channels, FRAMES, SIDE, SIDE), (2, channels, 4 * SIDE, 4 * SIDE)
    clip, sound = (2, channels, 5, 4 * SIDE, 4 * SIDE), (2, channels, 2 * SIDE)
    frames = (2, FRAMES, channels, SIDE, SIDE)
    if kind.startswith(("Auto", "Asym", "VQ", "Consistency")) or kind.endswith(("VAE", "Vae", "Tokenizer")):
        return [picture, clip, (2, channels, 2048), image]
    if re.search("3D|Video|Motion|Temporal", kind):
        return [video, frames, clip, flat, image, sound]
    if re.search("Audio|1D", kind):
        return [sound, flat, (2, channels, 2048), image]
    return [image, flat, video, sound]


def _known(shape: tuple[int, ...], config: dict[str, Any], generator: Any) -> dict[str, Any]:
    """Return inputs by the names that many classes share, for a main input of a shape."""
    axes = next((len(x) for n, x in config.items() if "axes_dim" in n and isinstance(x, list | tuple)), 3)

    def random(*sizes: int) -> Any:
        return torch.randn(sizes, generator=generator)

    mask = torch.ones(2, TEXT, dtype=torch.bool)
    mask[1, TEXT - 2 :] = False
    rows = shape[1] if len(shape) == 3 else 16
    places = torch.stack([torch.arange(rows).float() // 4 ** (axes - 1 - i) % 4 for i in range(axes)], -1)
    main = random(*shape)
    guidance = {"guidance": torch.tensor([3.0, 4.0])} if config.get("guidance_embeds") else {}
    return guidance | {
        "hidden_states": main,
        "sample": main,
        "encoder_hidden_states": random(2, TEXT, WIDTH),
        "encoder_attention_mask": mask,
        "encoder_hidden_states_mask": mask,
        "pooled_projections": random(2, WIDTH),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": places,
        "txt_ids": torch.zeros(TEXT, axes),
        "controlnet_cond": main if len(shape) != 4 else random(2, 3, 8 * SIDE, 8 * SIDE),
        "img_shapes": [[(1, 4, 4)]] * 2,
    }
