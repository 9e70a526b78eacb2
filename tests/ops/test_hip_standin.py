"""A sample of all grids through the HIP backend, on libraries that stand in for AMD's (`hip_standin`).

Waves of 32 and 64 lanes, and each kind of matrix unit: RDNA 3 (gfx1100), RDNA 4 (gfx1201), CDNA (gfx908, gfx90a,
gfx942, gfx950); gfx1030 has none. With ``AULE_FULL_GRID=1`` the tests of every op run all their cases on two of them.
"""

from __future__ import annotations

import devices
import fused_cases
import kvcache_cases
import pytest
import test_backward
import test_cross_entropy_devices
import test_decode
import test_forward
import test_fused
import test_kvcache
import test_rope
import test_varlen
from rope_cases import judge as judge_rope

from aule.engine.probe import find_layout
from aule.runtime.base import Device

pytestmark = pytest.mark.device


def need(arch: str) -> Device:
    return devices.need(f"hip-{arch}")


@pytest.mark.parametrize("arch", ["gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_the_probe_finds_the_documented_layouts(arch: str) -> None:
    from aule.runtime._hip_chips import chip

    device, documented = need(arch), chip(arch)
    find_layout(device)
    found = device.target
    assert found.matrix_layout == documented.matrix_layout and found.matrix_right == documented.matrix_right
    left, right = documented.matrix_factors or (None, None)
    assert found.matrix_factors == (None if left == documented.matrix_layout else (left, right))


@pytest.mark.parametrize(
    ("arch", "number"),
    [
        ("gfx1030", 2), ("gfx1100", 13), ("gfx1100", 18), ("gfx942", 14), ("gfx942", 1), ("gfx90a", 106),
        ("gfx1201", 32), ("gfx950", 38), ("gfx908", 9),
    ],
)  # fmt: skip
def test_forward_grid(arch: str, number: int) -> None:
    test_forward.test_grid(need(arch), test_forward.CASES[number])


@pytest.mark.parametrize(
    ("arch", "number"), [("gfx1100", 64), ("gfx1100", 32), ("gfx942", 71), ("gfx1201", 63), ("gfx950", 17)]
)
def test_gradient_grid(arch: str, number: int) -> None:
    test_backward.judge(need(arch), test_backward.CASES[number])


@pytest.mark.parametrize(
    ("arch", "name"),
    [("gfx1100", "pages"), ("gfx1100", "fp8"), ("gfx942", "ragged-bf16"), ("gfx942", "parts"), ("gfx1201", "int8")],
)
def test_decoding(arch: str, name: str) -> None:
    case = next(case for case in test_decode.CASES if case.id == name)
    test_decode.test_cases(need(arch), case)


@pytest.mark.parametrize(("arch", "number"), [("gfx942", 3)])
def test_packed_batches(arch: str, number: int) -> None:
    test_varlen.test_cases(need(arch), test_varlen.CASES[number])


@pytest.mark.parametrize(("arch", "number"), [("gfx1100", 1)])
def test_rotated(arch: str, number: int) -> None:
    wrong = judge_rope(test_rope.CASES[number], need(arch))
    assert not wrong, wrong


@pytest.mark.parametrize(("arch", "number"), [("gfx1100", 1), ("gfx942", 3), ("gfx942", 6)])
def test_cache(arch: str, number: int) -> None:
    device = need(arch)
    test_kvcache.test_append(device, kvcache_cases.CASES[number])
    if number == 1:
        test_kvcache.test_copy(device)


@pytest.mark.parametrize(
    ("arch", "number"),
    [
        ("gfx1100", 0), ("gfx942", 5), ("gfx1100", 8), ("gfx942", 9), ("gfx1100", 12), ("gfx942", 15), ("gfx1100", 16),
        ("gfx942", 18),
    ],
)  # fmt: skip
def test_row_operations(arch: str, number: int) -> None:
    test_fused.check(fused_cases.CASES[number], need(arch))


def test_cross_entropy() -> None:
    test_cross_entropy_devices.test_loss_and_gradient("hip-gfx942", 0)
