"""`tools/check_models.py` on a sample of families, most of which were wrong without an error once."""

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
def checks() -> Any:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield importlib.import_module("model_checks")
    finally:
        sys.path.remove(str(ROOT / "tools"))


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


def test_the_table_counts_what_is_wrong() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        tool = importlib.import_module("check_models")
    finally:
        sys.path.remove(str(ROOT / "tools"))
    right = {"class": "A", "compared": ["outputs"], "aule": {"verdict": "served", "reference": "sdpa"}}
    results = {"a": right, "b": {"class": "B", "aule": {"verdict": "wrong"}}, "c": {"class": "C", "not made": "no"}}
    data = {"date": "2026-11-18", "versions": {"torch": "2"}, "results": {"transformers": results}}
    assert tool.wrong(data) == ["b"]
    page = tool.table(data)
    assert "2 checked, 1 not made" in page and "1 served, 0 handed on, 0 refused, 1 wrong" in page
    assert "| a | A | served (*) |" in page and "| c | no |" in page


def test_the_published_table_has_nothing_wrong() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        tool = importlib.import_module("check_models")
    finally:
        sys.path.remove(str(ROOT / "tools"))
    data = tool._read()
    assert tool.wrong(data) == [] and len(data["results"]["transformers"]) > 500
    assert tool.TABLE.read_text() == tool.table(data), "run tools/check_models.py --table"
