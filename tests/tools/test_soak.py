"""The soak tool works, and finds what grows. The soak itself takes ten minutes and is run by hand."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from repository import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import soak

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
FIRST = soak.Sample(100, 1.0, 200.0, 10, 5, 20, 50)


def test_some_calls() -> None:
    curve = soak.soak("numpy", 40, samples=2)
    assert [one.calls for one in curve] == [20, 40] and curve[-1].rss_mib > 1 and curve[-1].descriptors > 2


@pytest.mark.parametrize(
    "changes, found",
    [
        ({}, []),
        ({"rss_mib": 220.0}, []),
        ({"rss_mib": 300.0}, ["memory: 200.0 -> 300.0 MiB, more than 26 MiB"]),
        ({"rss_mib": 240.0, "prepared": 1050}, []),
        ({"descriptors": 11}, ["descriptors: 10 -> 11"]),
        ({"programs": 26}, []),
        ({"threads": 6, "programs": 27}, ["threads: 5 -> 6", "programs: 20 -> 27"]),
    ],
)
def test_growth_is_found(changes: dict[str, float], found: list[str]) -> None:
    assert soak.growth([FIRST, FIRST, FIRST, replace(FIRST, calls=200, **changes)]) == found
