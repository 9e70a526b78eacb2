"""Integrations with other packages, one file each (ADD AN INTEGRATION HERE).

A file is imported when the user names it, never by aule itself.
"""

import importlib as _importlib
from typing import Any as _Any

_FILES = ("comfyui", "diffusers", "flash_attn", "patching", "transformers", "transformers_cache", "vllm")


def __getattr__(name: str) -> _Any:
    if name in _FILES:
        return _importlib.import_module(f"aule.integrations.{name}")
    raise AttributeError(f"module 'aule.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FILES})
