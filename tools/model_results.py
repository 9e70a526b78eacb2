"""What a model computes (outputs and gradients), and how far that is from what another computes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from aule.errors import AuleError

TOLERANCE = 1e-3
"""Largest difference from eager, by the largest value: float32 through a few layers."""


class NotMade(Exception):
    """No tiny model or no inputs for it could be made."""


def spread(model: Any, embeddings: tuple[str, ...] = ("embed",)) -> None:
    """Give weights the size at which attention matters; the usual start of 0.02 makes it nearly uniform.

    ``embeddings`` are parts of the names of tables of vectors.
    """
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and parameter.is_floating_point() and parameter.numel():
                table = any(part in name for part in embeddings)
                parameter.normal_(std=1.0 if table else parameter[0].numel() ** -0.5)
            elif parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model._aule_start = state


def fitting_inputs(model: Any, candidates: Callable[[], Iterator[dict[str, Any]]]) -> dict[str, Any]:
    """Return the first candidate of inputs that a model accepts, with finite results."""
    reason = None
    for again in (False, True):
        if again and hasattr(model, "_aule_start"):  # weights of the usual size, where the spread ones overflow
            model.load_state_dict(model._aule_start)
        for inputs in candidates():
            try:
                tensors = forward(model, inputs)
            except Exception as error:
                reason = reason or f"inputs {', '.join(sorted(inputs))}: {line(error)}"
                continue
            if tensors and all(torch.isfinite(x).all() for x in tensors):
                return inputs
            reason = reason or "no finite output"
    raise NotMade(reason or "no inputs known for " + ", ".join(inspect.signature(model.forward).parameters))


def forward(model: Any, inputs: dict[str, Any]) -> list[Any]:
    """Return the tensors of a model's output."""
    torch.manual_seed(1)
    with torch.no_grad():
        return _real(model(**inputs), inputs)


def _unmasked(model: Any, inputs: dict[str, Any]) -> list[Any]:
    try:
        return forward(model, {**inputs, "attention_mask": None})
    except AuleError:
        raise
    except Exception:  # some need one
        return []


def _real(output: Any, inputs: dict[str, Any]) -> list[Any]:
    """Return the tensors of an output at positions that are no padding: there, an attention may do as it likes."""
    mask = inputs.get("attention_mask")
    tensors = list(_tensors(output))
    if mask is None:
        return tensors
    return [x[mask.bool()] if x.dim() > 2 and x.shape[:2] == mask.shape else x for x in tensors]


def _tensors(output: Any) -> Iterator[Any]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for name, value in output.items():
            if not isinstance(name, str) or not any(word in name for word in ("past_key", "cache", "attentions")):
                yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)


def loss(x: Any) -> Any:
    """Return a number whose gradient depends on every element; squares have none where rows are normalised."""
    return (x * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))).mean()


class Results:
    """What a model computes from inputs: outputs, gradients, and generated tokens where it can."""

    def __init__(self, model: Any, inputs: dict[str, Any]) -> None:
        self.inputs = inputs
        self.outputs = forward(model, inputs)
        if inputs.get("attention_mask") is not None:  # masks that transformers may leave out
            self.outputs += _unmasked(model, inputs)
        self.gradients = self._gradients(model)
        self.generated = self._generate(model)

    def _gradients(self, model: Any) -> dict[str, Any] | None:
        model.zero_grad()
        torch.manual_seed(1)
        try:
            tensors = [x for x in _real(model(**self._whole()), self.inputs) if x.requires_grad]
            sum(loss(x) for x in tensors).backward()
        except AuleError:
            raise
        except Exception:
            return None
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    def _whole(self) -> dict[str, Any]:
        """Return inputs without padding, if outputs are shorter and padding cannot be left out of them."""
        if not {"input_features", "input_values"} & self.inputs.keys() or "attention_mask" not in self.inputs:
            return self.inputs
        return {**self.inputs, "attention_mask": torch.ones_like(self.inputs["attention_mask"])}

    def _generate(self, model: Any) -> Any:
        try:
            return self.generate(model)
        except AuleError:
            raise
        except Exception:
            return None

    def generate(self, model: Any, **options: Any) -> Any:
        """Return the logits of some generated tokens, None if a model cannot generate."""
        if not hasattr(model, "can_generate") or not model.can_generate():
            return None
        inputs = {n: x for n, x in self.inputs.items() if not n.startswith("decoder_")}
        if not model.config.is_encoder_decoder and inputs.get("attention_mask") is not None:
            inputs["attention_mask"] = inputs["attention_mask"].flip(1)  # a decoder is padded on the left
        torch.manual_seed(1)
        options |= {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return torch.stack(model.generate(**inputs, **options).logits)

    def parts(self) -> list[str]:
        """Return what was computed."""
        parts = {"outputs": self.outputs, "gradients": self.gradients, "generate": self.generated}
        return [name for name, value in parts.items() if value is not None]

    def error(self, right: Results) -> float:
        """Return the largest difference from other results, by the largest value; infinite if a part is missing."""
        if self.parts() != right.parts() or len(self.outputs) != len(right.outputs):
            return float("inf")
        pairs = list(zip(self.outputs, right.outputs, strict=True))
        errors = [difference(a, b) for a, b in pairs]
        if right.gradients is not None:
            if right.gradients.keys() != self.gradients.keys():
                return float("inf")
            largest = max((g.abs().max().item() for g in right.gradients.values() if g.numel()), default=0.0)
            errors += [difference(g, right.gradients[n], 0.1 * largest) for n, g in self.gradients.items()]
        if right.generated is not None:
            errors.append(difference(self.generated, right.generated))
        return max(errors, default=0.0)


def difference(found: Any, right: Any, floor: float = 1e-6) -> float:
    """Return the largest difference of two tensors, by the largest value."""
    if found.shape != right.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    finite = torch.isfinite(right)
    if not torch.equal(finite, torch.isfinite(found)):
        return float("inf")
    if not finite.any():
        return 0.0
    found, right = found[finite], right[finite]
    return float((found - right).abs().max() / max(right.abs().max().item(), floor))


def line(error: BaseException) -> str:
    """Return an error in a line."""
    text = str(error).strip().split("\n")
    return f"{type(error).__name__}: {' '.join(text)[:160]}"
