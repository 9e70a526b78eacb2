"""Compares a tiny random model of transformers with its eager attention: outputs, gradients and `generate`."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import transformers
from model_configs import candidates, tiny
from model_results import TOLERANCE, NotMade, Results, difference, fitting_inputs, line, spread
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import aule
from aule.errors import AuleError
from aule.integrations import transformers as integration
from aule.integrations.transformers_cache import AuleCache

MAPPINGS = (
    "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "MASKED_LM", "CAUSAL_LM",
    "PRETRAINING", "UNIVERSAL_SEGMENTATION", "OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION", "DEPTH_ESTIMATION",
    "CTC",
)  # fmt: skip
"""Kinds of classes, the fullest first; the base model is taken if a family has none of them."""


USUAL_WEIGHTS = ("mobilebert",)
"""Families without normalisation, where larger weights would make rounding errors grow from layer to layer."""


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
        raise NotMade(line(error)) from error
    if family not in USUAL_WEIGHTS:
        spread(eager)
    inputs = fitting_inputs(eager, lambda: candidates(eager, family))
    expected = Results(eager, inputs)
    repeated = Results(eager, inputs)
    if repeated.error(expected) > TOLERANCE:
        raise NotMade("two passes of eager attention differ")
    tried = {"inputs": sorted(inputs), "compared": expected.parts()}
    check = _Check(kind, config, eager, expected)
    return {**tried, "aule": check.aule(), "install": check.install(), "cache": check.cache()}


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

    def __init__(self, kind: Any, config: Any, eager: Any, expected: Results) -> None:
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
            return {"verdict": "wrong", "message": line(error)}
        error = difference(found, self.expected.generated)
        verdict = "wrong" if not error <= TOLERANCE else "served" if pages.pool is not None else "handed on"
        return {"verdict": verdict, "error": float(f"{error:.1e}")}

    def _verdict(self, name: str, calls: Any) -> dict[str, Any]:
        try:
            found = Results(self._model(name), self.expected.inputs)
        except AuleError as error:
            return {"verdict": "refused", "message": str(error)}
        except Exception as error:
            return {"verdict": "wrong", "message": line(error)}
        count = calls()
        error, reference = found.error(self.expected), "eager"
        if not error <= TOLERANCE and self.kind._supports_sdpa:  # which may differ from eager, where rows are empty
            plain = Results(self._model("sdpa"), self.expected.inputs) if name == "aule" else self._plain()
            error, reference = found.error(plain), "sdpa"
        verdict = "wrong" if not error <= TOLERANCE else "served" if count else "handed on"
        return {"verdict": verdict, "calls": count, "error": float(f"{error:.1e}"), "reference": reference}

    def _plain(self) -> Results:
        aule.uninstall()
        return Results(self._model("sdpa"), self.expected.inputs)

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
