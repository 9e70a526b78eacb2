"""A sample of all grids through the HIP backend, on libraries that stand in for AMD's (`hip_standin`).

Waves of 32 and 64 lanes, and each kind of matrix unit: RDNA 3 (gfx1100), RDNA 4 (gfx1201), CDNA (gfx908, gfx90a,
gfx942, gfx950); gfx1030 has none. With ``AULE_FULL_GRID=1`` the tests of every op run all their cases on two of them.
"""

from __future__ import annotations

import devices
import fused_cases
import grid
import kvcache_cases
import numpy as np
import pytest
import test_backward
import test_cross_entropy_devices
import test_decode
import test_forward
import test_fused
import test_kvcache
import test_rope
import test_score_functions
import test_varlen
from rope_cases import judge as judge_rope

from aule.engine.attention import forward_on_host
from aule.engine.probe import find_layout
from aule.ir import Builder
from aule.ir.types import f16, f32, u32
from aule.ops.attention.plan.tiles import choose_fragments
from aule.ops.attention.reference import compare
from aule.ops.decode.sequences import E4M3
from aule.render import hip
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


@pytest.mark.parametrize("arch", ["gfx950", "gfx1201"])
def test_instructions_that_some_chips_have(arch: str) -> None:
    """Conversions of fp8 and products of pairs: in the language, though no kernel of HIP's takes them yet."""
    device = need(arch)
    b = Builder("special", 64)
    words, sums, halves = b.buffer("words", u32), b.buffer("sums", f32, "write"), b.buffer("halves", f16, "write")
    word = b.load(words, b.thread_id())
    b.store(sums, b.thread_id(), b.dot_pairs(word, word, b.const(0.5, f32)))
    b.store(halves, b.thread_id() * 4, b.e4m3_halves(word))
    every = np.arange(256, dtype=np.uint8)
    held = [every.view(np.uint32), np.zeros(64, np.float32), np.zeros(256, np.float16)]
    memory = [device.alloc(x.nbytes) for x in held]
    device.upload(memory[0], held[0])
    device.launch(device.load(hip.render(b.finish(), device.target)), (1, 1, 1), memory)
    for allocation, array in zip(memory, held, strict=True):
        device.download(allocation, array)
        device.free(allocation)
    assert np.array_equal(held[2], E4M3.astype(np.float16), equal_nan=True)
    pairs = (held[0].view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64).reshape(64, 2)
    with np.errstate(over="ignore"):
        expected = (0.5 + (pairs**2).sum(1)).astype(np.float32)
    np.testing.assert_allclose(held[1], expected, rtol=1e-6)


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


WIDE = grid.forward_grid("wide")


@pytest.mark.parametrize(("arch", "number"), [("gfx942", 16), ("gfx1100", 22)])
def test_wide_heads(arch: str, number: int) -> None:
    """Subgroups of 64 and of 32 lanes that share rows."""
    device, case = need(arch), WIDE[number]
    inputs = grid.make_inputs(case, seed=1)
    problem, operands = grid.case_problem(case, inputs)
    out, lse = forward_on_host(problem, operands, device)
    verdict = compare(problem, out, lse, grid.expected(case, inputs))
    assert verdict, verdict.message
    shape = choose_fragments(device.target, case.dtype, case.head_dim, case.value_dim, masked=True, strided=True)
    assert shape is not None and shape.depth_parts > 1


@pytest.mark.parametrize(("arch", "number"), [("gfx942", 22)])
def test_gradients_of_wide_heads(arch: str, number: int) -> None:
    test_backward.judge(need(arch), WIDE[number])


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("gfx1100", "pages"), ("gfx1100", "fp8"), ("gfx942", "ragged-bf16"), ("gfx942", "parts"), ("gfx1201", "int8"),
        ("gfx950", "fp8-odd"),
    ],
)  # fmt: skip
def test_decoding(arch: str, name: str) -> None:
    case = next(case for case in test_decode.CASES if case.id == name)
    test_decode.test_cases(need(arch), case)


@pytest.mark.parametrize(("arch", "seed"), [("gfx942", 5)])
def test_functions_of_scores(arch: str, seed: int) -> None:
    test_score_functions.check(need(arch), seed)


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
