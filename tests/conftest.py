"""Makes the helper modules beside this file (`grid`) importable from tests in every subfolder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("runtime_contract")
