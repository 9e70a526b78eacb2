"""Compares a tiny random model of transformers with its eager attention: outputs, gradients and `generate`."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from model_configs import candidates, tiny
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import aule
from aule.errors import AuleError
from aule.integrations import transformers as integration
from aule.integrations.transformers_cache import AuleCache

TOLERANCE = 1e-3
"""Largest difference from eager, by the largest value: float32 through a few layers."""

MAPPINGS = (
    "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "MASKED_LM", "CAUSAL_LM",
    "PRETRAINING", "UNIVERSAL_SEGMENTATION", "OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION", "DEPTH_ESTIMATION",
    "CTC",
)  # fmt: skip
"""Kinds of classes, the fullest first; the base model is taken if a family has none of them."""


USUAL_WEIGHTS = ("mobilebert",)
"""Families without normalisation, where larger weights would make rounding errors grow from layer to layer."""


class NotMade(Exception):
    """No tiny model or no inputs for it could be made."""


def families() -> list[str]:
    """Return all model types with a model of their own."""
    names = set(modeling_auto.MODEL_MAPPING_NAMES)
    for kind in MAPPINGS:
        names |= set(_mapping(kind))
    return sorted(name for name in names if name in CONFIG_MAPPING)


def class_names(family: str) -> list[str]:
    """Return the names of a family's classes to try, in order."""
    found = []
    for mapping in [*map(_mapping, MAPPINGS), modeling_auto.MODEL_MAPPING_NAMES]:
        names = mapping.get(family, ())
        found += [names] if isinstance(names, str) else list(names)
    return list(dict.fromkeys(found))


def _mapping(kind: str) -> dict[str, Any]:
    for name in (f"MODEL_FOR_{kind}_MAPPING_NAMES", f"MODEL_FOR_{kind}_MAPPING", f"MODEL_{kind}_MAPPING_NAMES"):
        if hasattr(modeling_auto, name):
            return dict(getattr(modeling_auto, name))
    return {}


def check(family: str) -> dict[str, Any]:
    """Check one family with ``attn_implementation="aule"`` and with `aule.install`, and return what came out."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    reasons = []
    for name in class_names(family):
        if not hasattr(transformers, name):
            continue
        try:
            return {"class": name, **_check_class(getattr(transformers, name), family)}
        except NotMade as error:
            reasons.append(f"{name}: {error}")
    return {"class": class_names(family)[0], "not made": reasons[0] if reasons else "transformers exports no class"}


def _check_class(kind: Any, family: str) -> dict[str, Any]:
    try:
        config = tiny(CONFIG_MAPPING[family], family)
        torch.manual_seed(0)
        eager = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval().float()
    except Exception as error:
        raise NotMade(_line(error)) from error
    if family not in USUAL_WEIGHTS:
        _spread(eager)
    inputs = _fitting_inputs(eager, family)
    expected = _Results(eager, inputs)
    repeated = _Results(eager, inputs)
    if repeated.error(expected) > TOLERANCE:
        raise NotMade("two passes of eager attention differ")
    tried = {"inputs": sorted(inputs), "compared": expected.parts()}
    check = _Check(kind, config, eager, expected)
    return {**tried, "aule": check.aule(), "install": check.install(), "cache": check.cache()}


def _spread(model: Any) -> None:
    """Give weights the size at which attention matters; the usual start of 0.02 makes it nearly uniform."""
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and parameter.is_floating_point() and parameter.numel():
                parameter.normal_(std=parameter[0].numel() ** -0.5 if "embed" not in name else 1.0)
            elif parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model._aule_start = state


def _fitting_inputs(model: Any, family: str) -> dict[str, Any]:
    """Return the first candidate of inputs that a model accepts, with finite results."""
    reason = None
    for again in (False, True):
        if again and hasattr(model, "_aule_start"):  # weights of the usual size, where the spread ones overflow
            model.load_state_dict(model._aule_start)
        for inputs in candidates(model, family):
            try:
                tensors = _forward(model, inputs)
            except Exception as error:
                reason = reason or f"inputs {', '.join(sorted(inputs))}: {_line(error)}"
                continue
            if tensors and all(torch.isfinite(x).all() for x in tensors):
                return inputs
            reason = reason or "no finite output"
    raise NotMade(reason or "no inputs known for " + ", ".join(inspect.signature(model.forward).parameters))


def _forward(model: Any, inputs: dict[str, Any]) -> list[Any]:
    torch.manual_seed(1)
    with torch.no_grad():
        return _real(model(**inputs), inputs)


def _unmasked(model: Any, inputs: dict[str, Any]) -> list[Any]:
    try:
        return _forward(model, {**inputs, "attention_mask": None})
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
            if "past_key" not in name and "cache" not in name and "attentions" not in name:
                yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)


def loss(x: Any) -> Any:
    """Return a number whose gradient depends on every element; squares have none where rows are normalised."""
    return (x * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))).mean()


class _Results:
    """What a model computes from inputs: outputs, gradients, and generated tokens where it can."""

    def __init__(self, model: Any, inputs: dict[str, Any]) -> None:
        self.inputs = inputs
        self.outputs = _forward(model, inputs)
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
        if not model.can_generate():
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

    def error(self, right: _Results) -> float:
        """Return the largest difference from other results, by the largest value; infinite if a part is missing."""
        if self.parts() != right.parts() or len(self.outputs) != len(right.outputs):
            return float("inf")
        pairs = list(zip(self.outputs, right.outputs, strict=True))
        errors = [_error(a, b) for a, b in pairs]
        if right.gradients is not None:
            if right.gradients.keys() != self.gradients.keys():
                return float("inf")
            largest = max((g.abs().max().item() for g in right.gradients.values() if g.numel()), default=0.0)
            errors += [_error(g, right.gradients[n], 0.1 * largest) for n, g in self.gradients.items()]
        if right.generated is not None:
            errors.append(_error(self.generated, right.generated))
        return max(errors, default=0.0)


def _error(found: Any, right: Any, floor: float = 1e-6) -> float:
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


class _Calls:
    """Counts calls of aule's attention through transformers."""

    count = 0

    def __enter__(self) -> _Calls:
        from transformers import AttentionInterface

        self.original = integration.attention_forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return self.original(*args, **kwargs)

        AttentionInterface.register("aule", counted)
        return self

    def __exit__(self, *_: Any) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register("aule", self.original)


class _Check:
    """A model's class, its configuration, and what its eager attention computes."""

    def __init__(self, kind: Any, config: Any, eager: Any, expected: _Results) -> None:
        self.kind, self.config, self.eager, self.expected = kind, config, eager, expected

    def aule(self) -> dict[str, Any]:
        """Check ``attn_implementation="aule"``."""
        integration.register()
        with _Calls() as calls:
            return self._verdict("aule", lambda: calls.count)

    def install(self) -> dict[str, Any]:
        """Check `aule.install` with PyTorch's attention, or what the model takes without it."""
        aule.reset_dispatch_stats()
        aule.install()
        try:
            return self._verdict("sdpa", lambda: aule.dispatch_stats()["served"])
        finally:
            aule.uninstall()

    def cache(self) -> dict[str, Any]:
        """Check `generate` over an `AuleCache`, for decoders alone."""
        if self.expected.generated is None or self.config.is_encoder_decoder:
            return {}
        try:
            model = self._model("aule")
            pages = AuleCache(model.config, 64, page_size=4)
            found = self.expected.generate(model, past_key_values=pages)
        except AuleError as error:
            return {"verdict": "refused", "message": str(error)}
        except Exception as error:
            return {"verdict": "wrong", "message": _line(error)}
        error = _error(found, self.expected.generated)
        verdict = "wrong" if not error <= TOLERANCE else "served" if pages.pool is not None else "handed on"
        return {"verdict": verdict, "error": float(f"{error:.1e}")}

    def _verdict(self, name: str, calls: Any) -> dict[str, Any]:
        try:
            found = _Results(self._model(name), self.expected.inputs)
        except AuleError as error:
            return {"verdict": "refused", "message": str(error)}
        except Exception as error:
            return {"verdict": "wrong", "message": _line(error)}
        count = calls()
        error, reference = found.error(self.expected), "eager"
        if not error <= TOLERANCE and self.kind._supports_sdpa:  # which may differ from eager, where rows are empty
            plain = _Results(self._model("sdpa"), self.expected.inputs) if name == "aule" else self._plain()
            error, reference = found.error(plain), "sdpa"
        verdict = "wrong" if not error <= TOLERANCE else "served" if count else "handed on"
        return {"verdict": verdict, "calls": count, "error": float(f"{error:.1e}"), "reference": reference}

    def _plain(self) -> _Results:
        aule.uninstall()
        return _Results(self._model("sdpa"), self.expected.inputs)

    def _model(self, name: str) -> Any:
        options = {"attn_implementation": name}
        try:
            model = self.kind._from_config(copy.deepcopy(self.config), **options)
        except ValueError:
            if name != "sdpa":
                raise
            model = self.kind._from_config(copy.deepcopy(self.config))  # the model or a part of it has no sdpa
        model.load_state_dict(self.eager.state_dict())
        return model.eval().float()


def _line(error: BaseException) -> str:
    text = str(error).strip().split("\n")
    return f"{type(error).__name__}: {' '.join(text)[:160]}"
