"""Makes helper modules importable from tests in every folder, and tests from each other."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), *sorted({str(path.parent) for path in TESTS.rglob("*.py")} - {str(TESTS)})]
pytest.register_assert_rewrite("runtime_contract")

if os.environ.get("AULE_TEST_GUARD"):
    import guarded

    guarded.install(os.environ["AULE_TEST_GUARD"])
