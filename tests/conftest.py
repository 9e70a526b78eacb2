"""Makes helper modules importable from tests in every folder, and tests from each other.

``AULE_TEST_GUARD`` guards the memory of CPU kernels (`guarded.py`); ``AULE_TEST_SHARE=N`` runs one test in N.
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), *sorted({str(path.parent) for path in TESTS.rglob("*.py")} - {str(TESTS)})]
pytest.register_assert_rewrite("runtime_contract")

if os.environ.get("AULE_TEST_GUARD"):
    import guarded

    guarded.install(os.environ["AULE_TEST_GUARD"])


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    share = int(os.environ.get("AULE_TEST_SHARE", "1"))
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % share == 0]
