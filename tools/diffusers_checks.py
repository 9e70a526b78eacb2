"""Compares a tiny random model of diffusers with its own attention: outputs and gradients."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import diffusers
import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers_configs import candidates, tiny
from model_results import TOLERANCE, NotMade, Results, fitting_inputs, line, spread

import aule
from aule.errors import AuleError
from aule.integrations import diffusers as integration

NOISE = 1e-7
"""Relative changes of weights, as rounding makes them, that may change results by a tenth of the tolerance."""


def families() -> list[str]:
    """Return the names of all classes of models."""
    found = {name: getattr(diffusers, name, None) for name in dir(diffusers)}
    kinds = {name: kind for name, kind in found.items() if inspect.isclass(kind) and issubclass(kind, ModelMixin)}
    home = "diffusers.models."
    return sorted(n for n, kind in kinds.items() if kind is not ModelMixin and kind.__module__.startswith(home))


def check(name: str) -> dict[str, Any]:
    """Check one class in each way, and return what came out."""
    warnings.simplefilter("ignore")
    diffusers.logging.set_verbosity_error()
    try:
        return {"class": name, **_check_class(getattr(diffusers, name))}
    except NotMade as error:
        return {"class": name, "not made": str(error)}


def _check_class(kind: Any) -> dict[str, Any]:
    try:
        torch.manual_seed(0)
        model = tiny(kind).eval().float()
    except Exception as error:
        raise NotMade(line(error)) from error
    usual = {name: weight.clone() for name, weight in model.state_dict().items()}
    spread(model, embeddings=())
    inputs = fitting_inputs(model, lambda: candidates(model))
    expected = Results(model, inputs)
    if _sensitive(model, expected):
        model.load_state_dict(usual)
        expected = Results(model, inputs)
        if _sensitive(model, expected):
            raise NotMade("its results are not the same after small changes of its weights")
    with _Others(roll=1) as attention:
        matters = Results(model, inputs).error(expected) > TOLERANCE
    if attention.count and not matters:
        raise NotMade("its attention hardly changes its results")
    check = _Check(kind, model.state_dict(), expected)
    tried = {"inputs": sorted(inputs), "compared": expected.parts()}
    return {**tried, "backend": check.backend(), "processor": check.processor(), "install": check.install()}


def _sensitive(model: Any, expected: Results) -> bool:
    """Return whether rounding decides what a model computes."""
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + NOISE * torch.randn_like(parameter))
    changed = Results(model, expected.inputs).error(expected)
    model.load_state_dict(weights)
    return not changed <= 0.1 * TOLERANCE


class _Others:
    """Counts attention that aule does not see: softmax over scores, and PyTorch's functions.

    With ``roll=1`` the columns of their results change places, to find out whether they matter.
    """

    PLACES = (
        (torch.nn.functional, "scaled_dot_product_attention"), (torch.nn.functional, "multi_head_attention_forward"),
        (torch.nn.functional, "softmax"), (torch, "softmax"), (torch.Tensor, "softmax"),
    )  # fmt: skip

    def __init__(self, roll: int = 0) -> None:
        self.count, self.roll = 0, roll

    def __enter__(self) -> _Others:
        patched = ((place, name, self._counted(getattr(place, name))) for place, name in self.PLACES)
        self.patches = [mock.patch.object(*one) for one in patched]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for patch in self.patches:
            patch.stop()

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else next(iter(kwargs.values()))
            out = original(*args, **kwargs)
            if first.dim() <= 2:  # a softmax over two axes chooses experts
                return out
            self.count += 1
            return out.roll(self.roll, -1) if isinstance(out, torch.Tensor) else (out[0].roll(self.roll, -1), *out[1:])

        return counted


class _Check:
    """A model's class and weights, and what its own attention computes."""

    def __init__(self, kind: Any, weights: dict[str, Any], expected: Results) -> None:
        self.kind, self.weights, self.expected = kind, weights, expected

    def _model(self) -> Any:
        model = tiny(self.kind).eval().float()
        model.load_state_dict(self.weights)
        return model

    def backend(self) -> dict[str, Any]:
        """Check ``set_attention_backend("aule")``: it must say that it does not reach some attention."""
        dispatch = integration._dispatcher()._AttentionBackendRegistry
        before = dispatch._active_backend
        integration.register()
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                model = self._model()
                found = self._verdict(model, lambda: model.set_attention_backend("aule"))
                others = self._others(model) if found["verdict"] in ("served", "handed on") else 0
        finally:
            dispatch.set_active_backend(before)
            integration.unregister()
        told = any("[diffusers]" in str(warning.message) for warning in said)
        if others and not told:
            return {**found, "verdict": "wrong", "message": "attention that is not served, without a warning"}
        return {**found, "others": others}

    def processor(self) -> dict[str, Any]:
        """Check `AuleAttnProcessor`, for models that take processors."""
        model = self._model()
        if not getattr(model, "attn_processors", None):
            return {}
        return self._verdict(model, lambda: model.set_attn_processor(integration.AuleAttnProcessor()))

    def install(self) -> dict[str, Any]:
        """Check `aule.install`."""
        try:
            return self._verdict(self._model(), aule.install)
        finally:
            aule.uninstall()

    def _verdict(self, model: Any, prepare: Callable[[], None]) -> dict[str, Any]:
        aule.reset_dispatch_stats()
        try:
            prepare()
            found = Results(model, self.expected.inputs)
        except AuleError as error:
            return {"verdict": "refused", "message": str(error)}
        except Exception as error:
            named = "aule" in str(error)  # diffusers refuses some backends by name
            return {"verdict": "refused" if named else "wrong", "message": line(error)}
        calls, error = aule.dispatch_stats()["served"], found.error(self.expected)
        verdict = "wrong" if not error <= TOLERANCE else "served" if calls else "handed on"
        return {"verdict": verdict, "calls": calls, "error": float(f"{error:.1e}")}

    def _others(self, model: Any) -> int:
        """Count calls of other attention in a forward pass; what aule hands on to PyTorch is counted by aule."""
        aule.reset_dispatch_stats()
        with _Others() as others, torch.no_grad():
            model(**self.expected.inputs)
        return max(0, others.count - aule.dispatch_stats()["passed_on"])
