"""Tests of missing devices are skipped, so this file checks that a device is missing for a known reason, and that those
named by `AULE_TEST_REQUIRE` ("vulkan,opencl") are found."""

from __future__ import annotations

import os

import pytest

from aule.backends import registry
from aule.errors import BackendUnavailableError

pytestmark = pytest.mark.device

REQUIRED = set(filter(None, os.environ.get("AULE_TEST_REQUIRE", "").split(",")))


@pytest.mark.parametrize("name", [backend.name for backend in registry.BACKENDS])
def test_is_there_or_says_why_not(name: str) -> None:
    try:
        found = registry.devices(name)
    except BackendUnavailableError as error:
        assert name not in REQUIRED, error.message
        # What a probe did not expect: an exception that is not ours.
        assert "expected a working driver, got" not in error.message, error.message
        assert error.message.startswith(f"[{name}] ") and "; " in error.message, "a reason and a remedy"
    else:
        assert [d.index for d in found] == list(range(len(found))) and found
        assert all(d.target.backend == name and d.target.name for d in found)


def test_only_backends_are_required() -> None:
    assert not REQUIRED - {backend.name for backend in registry.BACKENDS}
