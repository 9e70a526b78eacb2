"""`tools/check_models.py` on a sample of models, most of which were wrong without an error once."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
from repository import ROOT

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("llvmlite", reason="gradients need the CPU engine")

REFUSED = (
    "bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "longformer", "mpt", "roformer", "xglm",
)  # fmt: skip
SERVED = ("deepseek_v3", "gpt_oss", "modernbert", "nllb-moe", "pegasus_x", "t5")
"""Multi-head latent attention; sinks; windows of encoders; only additive masks, twice; a position bias."""


@pytest.fixture(scope="module")
def tools() -> Any:
    sys.path.insert(0, str(ROOT / "tools"))
    yield
    sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def checks(tools: None) -> Any:
    return importlib.import_module("model_checks")


@pytest.fixture(scope="module")
def tool(tools: None) -> Any:
    return importlib.import_module("check_models")


@pytest.fixture(scope="module")
def diffusers(tools: None) -> Any:
    pytest.importorskip("diffusers", minversion="0.42")
    return importlib.import_module("diffusers_checks")


@pytest.mark.parametrize("family", REFUSED)
def test_attention_of_its_own_is_refused(family: str, checks: Any) -> None:
    found = checks.check(family)
    assert found["aule"]["verdict"] == "refused", found
    message = found["aule"]["message"]
    assert found["class"] in message and "aule.install()" in message and "attn_implementation='eager'" in message
    assert found["install"]["verdict"] in ("served", "handed on"), found


@pytest.mark.parametrize("family", SERVED)
def test_the_interface_is_served(family: str, checks: Any) -> None:
    found = checks.check(family)
    assert found["aule"]["verdict"] == "served" and found["aule"]["calls"] > 1, found
    assert {"outputs", "gradients"} <= set(found["compared"]), found
    assert found["install"]["verdict"] != "wrong" and found["cache"].get("verdict") != "wrong", found


def test_the_check_can_fail(checks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_mask(*args: Any, **kwargs: Any) -> Any:
        return original(*args[:4], None, **{**kwargs, "is_causal": False})

    original = checks.integration.attention_forward
    with monkeypatch.context() as patch:
        patch.setattr(checks.integration, "attention_forward", without_mask)
        found = checks.check("llama")
    checks.integration.register()
    assert found["aule"]["verdict"] == "wrong" and found["aule"]["error"] > 0.1, found


DIFFUSERS = {
    "AutoencoderKL": ("handed on", "served"),
    "CogVideoXTransformer3DModel": ("handed on", "refused"),
    "FluxTransformer2DModel": ("served", "refused"),
    "HunyuanVideoTransformer3DModel": ("served", "refused"),
    "PixArtTransformer2DModel": ("handed on", "served"),
    "SanaTransformer2DModel": ("handed on", "refused"),
    "ZImageTransformer2DModel": ("served", None),
}
"""Classes of diffusers, and what their own attention backend and `AuleAttnProcessor` come to."""


@pytest.mark.parametrize("name", DIFFUSERS)
def test_models_of_diffusers(name: str, diffusers: Any) -> None:
    found = diffusers.check(name)
    assert found["compared"] == ["outputs", "gradients"], found
    assert (found["backend"]["verdict"], found["processor"].get("verdict")) == DIFFUSERS[name], found
    assert found["install"]["verdict"] == "served" and found["install"]["calls"] > 1, found
    if found["processor"].get("verdict") == "refused":
        assert "aule.install()" in found["processor"]["message"]
    if name == "HunyuanVideoTransformer3DModel":  # the refiner of its text does not use the dispatcher
        assert found["backend"]["others"] == 2, found


def test_the_check_of_diffusers_can_fail(diffusers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        return original(q * 1.1, k, v, *args, **kwargs)

    original = diffusers.integration.attempt
    monkeypatch.setattr(diffusers.integration, "attempt", scaled)
    monkeypatch.setattr(diffusers.integration, "_warn_if_unreached", lambda *given: None)
    assert diffusers.check("FluxTransformer2DModel")["backend"]["verdict"] == "wrong"
    found = diffusers.check("AutoencoderKL")
    assert found["processor"]["verdict"] == "wrong" and found["processor"]["error"] > 1e-3, found
    assert found["backend"]["verdict"] == "wrong" and "without a warning" in found["backend"]["message"], found


def test_attention_that_does_not_matter_is_not_checked(diffusers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers, "TOLERANCE", 1e3)
    assert diffusers.check("SanaTransformer2DModel")["not made"] == "its attention hardly changes its results"


def test_the_table_counts_what_is_wrong(tool: Any) -> None:
    right = {"class": "A", "compared": ["outputs"], "aule": {"verdict": "served", "reference": "sdpa"}}
    results = {"a": right, "b": {"class": "B", "aule": {"verdict": "wrong"}}, "c": {"class": "C", "not made": "no"}}
    parts = {"D": {"class": "D", "backend": {"verdict": "served", "others": 1}, "install": {"verdict": "served"}}}
    data = {"date": "2026-11-18", "versions": {"torch": "2"}, "results": {"transformers": results, "diffusers": parts}}
    assert tool.wrong(data) == ["b"]
    page = tool.table(data)
    assert "2 checked, 1 not made" in page and "1 served, 0 handed on, 0 refused, 1 wrong" in page
    assert "| a | A | served (*) |" in page and "| c | no |" in page and "| D | served in part |  | served |" in page


def test_the_published_table_has_nothing_wrong(tool: Any) -> None:
    data = tool._read()
    assert tool.wrong(data) == [] and len(data["results"]["transformers"]) > 500
    assert len(data["results"]["diffusers"]) > 100
    assert tool.TABLE.read_text() == tool.table(data), "run tools/check_models.py --table"
