"""ComfyUI: a node that makes a model use aule's attention, and a command that installs it into ``custom_nodes``.

    python -m aule.integrations.comfyui path/to/ComfyUI

ComfyUI calls ``model_options["transformer_options"]["optimized_attention_override"]`` for each attention of a diffusion
model; the node *Aule Attention* sets it on a clone of the model. Calls that aule does not support go to ComfyUI's own
function, or to the override that was set before. `aule.dispatch_stats` counts them by reason, and the first call of
each reason is logged. Inside ``torch.compile`` all calls go there, uncounted.

Untested with ComfyUI itself: the tests use a substitute for its interface.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aule.api.sdpa import attempt
from aule.backends import registry
from aule.errors import AuleError, InvalidArgumentError

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "AuleAttention", "attention_override", "write_node"]

log = logging.getLogger("aule")

_OPTION = "optimized_attention_override"
_AUTO = "auto"
_logged: set[str] = set()


def attention_override(backend: str | None = None, previous: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Make a function for ``transformer_options["optimized_attention_override"]``.

    Parameters
    ----------
    backend : str, optional
        As in `aule.flash_attention`. Default: the CPU engine for CPU tensors, and CUDA tensors in place; tensors of
        other devices are passed on.
    previous : callable, optional
        An override for unsupported calls, instead of ComfyUI's own function.

    Returns
    -------
    callable
        The override.

    Raises
    ------
    BackendUnavailableError
        The backend is missing.
    """
    if backend is not None:
        registry.find(backend)

    def override(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        import torch

        if not torch.compiler.is_compiling():
            out, reason = _attention(backend, *arguments, **options)
            if reason is None:
                return out
            if reason not in _logged:
                _logged.add(reason)
                log.warning("ComfyUI's own attention handles calls that aule does not support: %s", reason)
        return function(*arguments, **options) if previous is None else previous(function, *arguments, **options)

    override.aule_previous = previous  # type: ignore[attr-defined]
    return override


def _attention(
    backend: str | None,
    q: Any,
    k: Any,
    v: Any,
    heads: int,
    mask: Any = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **others: Any,
) -> tuple[Any, str | None]:
    """Compute ComfyUI's attention; return the result and None, or None and the reason why it is not supported.

    Tensors are ``[batch, seq, heads * head_dim]``, or ``[batch, heads, seq, head_dim]`` with ``skip_reshape``; the
    result likewise with ``skip_output_reshape``. A mask has the last two, three (with batch) or all four axes of the
    scores. Scores are always float32, whatever ``attn_precision`` is. ComfyUI's own attention with PyTorch ignores the
    other options too.
    """
    if not skip_reshape:
        head_dim = q.shape[-1] // heads
        q = q.unflatten(-1, (heads, -1))
        k, v = (x.unflatten(-1, (-1, head_dim) if enable_gqa else (heads, -1)) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.dim() in (2, 3):
        mask = mask[None, None] if mask.dim() == 2 else mask[:, None]
    out, reason = attempt(q, k, v, mask, scale=scale, enable_gqa=enable_gqa, backend=backend, caller="comfyui")
    if reason is None and not skip_output_reshape:
        out = out.transpose(1, 2).flatten(2)
    return out, reason


# -- the node ----------------------------------------------------------------------------------------------------------


class AuleAttention:
    """The node *Aule Attention*: takes a model and returns it with aule's attention."""

    CATEGORY = "advanced/model"
    DESCRIPTION = "Computes a diffusion model's attention with aule. ComfyUI's own handles what aule does not support."
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return the node's inputs in ComfyUI's format."""
        return {
            "required": {
                "model": ("MODEL",),
                "enabled": ("BOOLEAN", {"default": True}),
                "backend": ([_AUTO, *registry.NAMES], {"default": _AUTO, "tooltip": "auto: where the tensors are"}),
            }
        }

    def patch(self, model: Any, enabled: bool, backend: str) -> tuple[Any]:
        """Clone the model and set its override; without ``enabled``, return the model unchanged.

        A ``backend`` that is missing raises an error.
        """
        if not enabled:
            return (model,)
        patched = model.clone()
        # Versions differ in what a clone copies and what it shares, so the dictionaries are replaced.
        options = dict(patched.model_options.get("transformer_options", {}))
        before = options.get(_OPTION)
        options[_OPTION] = attention_override(
            None if backend == _AUTO else backend,
            getattr(before, "aule_previous", before),  # if this node is used twice, the later one counts
        )
        patched.model_options = {**patched.model_options, "transformer_options": options}
        return (patched,)


NODE_CLASS_MAPPINGS = {"AuleAttention": AuleAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"AuleAttention": "Aule Attention"}


# -- python -m aule.integrations.comfyui -------------------------------------------------------------------------------

_PACKAGE = """\
\"\"\"The node Aule Attention. Written by: python -m aule.integrations.comfyui\"\"\"

from aule.integrations.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
"""


def write_node(comfyui: str | Path) -> Path:
    """Write ``custom_nodes/aule_attention/__init__.py``, which imports the node from the installed aule.

    Parameters
    ----------
    comfyui : str or Path
        ComfyUI's folder.

    Returns
    -------
    Path
        The file. An identical file is left alone.

    Raises
    ------
    InvalidArgumentError
        The folder is not ComfyUI's, or has another file of this name.
    AuleError
        This ComfyUI has no attention override.
    """
    folder = Path(comfyui)
    attention = folder / "comfy" / "ldm" / "modules" / "attention.py"
    nodes = folder / "custom_nodes"
    if not attention.is_file() or not nodes.is_dir():
        missing = attention if nodes.is_dir() else nodes
        raise InvalidArgumentError(
            f"[comfyui] expected the folder of ComfyUI, got {folder} without {missing.relative_to(folder)}; "
            "give the one that holds main.py"
        )
    if _OPTION not in attention.read_text(encoding="utf-8"):
        raise AuleError(
            "AULE_ERROR_UNSUPPORTED",
            f"[comfyui] expected a ComfyUI with {_OPTION}, got {folder} without; update ComfyUI",
        )
    target = nodes / "aule_attention" / "__init__.py"
    if target.exists():
        if target.read_text(encoding="utf-8") != _PACKAGE:
            raise InvalidArgumentError(
                f"[comfyui] expected no other {target.relative_to(folder)}, got one that differs; remove it first"
            )
        return target
    target.parent.mkdir(exist_ok=True)
    target.write_text(_PACKAGE, encoding="utf-8")
    return target


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 if the folder is refused."""
    parser = argparse.ArgumentParser(
        prog="python -m aule.integrations.comfyui",
        description="Put the node Aule Attention into ComfyUI. Run it with ComfyUI's own Python.",
    )
    parser.add_argument("folder", type=Path, help="ComfyUI's folder")
    try:
        print(f"{write_node(parser.parse_args(argv).folder)}: restart ComfyUI to see the node Aule Attention")
    except (AuleError, OSError) as error:
        print(f"aule: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
