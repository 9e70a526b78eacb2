"""Tests that need vLLM. `scripts/test --serving` makes an environment with it and runs them there."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

HAS_VLLM = find_spec("vllm") is not None
if HAS_VLLM:  # read when vLLM is imported: an engine starts faster without processes of its own
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def pytest_ignore_collect() -> bool | None:
    """Without vLLM nothing of this folder is collected: the usual test run has another environment."""
    return None if HAS_VLLM else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "serving" in item.path.parts:
            item.add_marker(pytest.mark.serving)
