"""A launch that waits for the parts of the one it goes with, through Vulkan: by itself, where any device can run it,
and behind the kernel for matrix units where the plan has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import decode_cases
import devices
import numpy as np
import pytest

from aule.engine.decode import decode_on_host
from aule.engine.memory import zeroed
from aule.engine.probe import find_layout
from aule.engine.programs import launch_of, program
from aule.ir import Builder, KernelIR
from aule.ir.types import i32
from aule.ops.attention.reference import compare
from aule.ops.decode.config import TrailConfig
from aule.ops.decode.plan import decode_views, plan_decode
from aule.ops.decode.sequences import expect_decode
from aule.ops.step import Step
from aule.runtime.base import Device
from aule.target import NVIDIA_LAYOUT, Target

SPLITS = 21


@pytest.fixture(scope="module")
def device() -> Device:
    return devices.need("vulkan")


def with_matrix_units(target: Target) -> Target:
    """A device whose plan is one of matrix units, and which can compile what this one can."""
    return replace(
        target, vendor="nvidia", compute_units=132, subgroup_size=32, subgroup_sizes=(32,), f16=True,
        matrix_units=("m16n16k16:f16:f32",), matrix_layout=NVIDIA_LAYOUT,
    )  # fmt: skip


def build_post(count: int) -> KernelIR:
    """Leaves words that are not zero for those who wait."""
    b = Builder("leave", 64)
    given, words = b.buffer("given_ptr", i32), b.buffer("tickets_ptr", i32, "readwrite")
    at = b.group_id() * 64 + b.thread_id()
    with b.if_(at < count):
        word = b.load(given, at)
        with b.if_(b.ne(word, 0)):
            b.post(words, at, word)
    return b.finish()


def parts_of(step: Step, lens: tuple[int, ...]) -> list[int]:
    """Parts that sequences of some lengths have."""
    steps = [-(-n // step.config.shape.step) for n in lens]
    return [min(max(n >> int(step.scalars["least_shift"]), 1), SPLITS) for n in steps]


@pytest.mark.parametrize(("heads", "dim"), [((8, 2), 64), ((2, 2), 128), ((3, 1), 96)])
def test_parts_that_others_leave(device: Device, heads: tuple[int, int], dim: int) -> None:
    """Zeros and NaN among them, in calls one behind the other, each of which leaves the words as it found them."""
    lens, group = (4000, 0, 1, 700), heads[0] // heads[1]
    case = decode_cases.Case("x", lens, 1, heads, (dim, dim), "f16")
    problem, operands = decode_cases.problem_of(case, decode_cases.make(case))
    views = decode_views(operands, operands.q)
    plan = plan_decode(problem, views, with_matrix_units(device.target), splits=SPLITS, gather=False, trails=True)
    first, step = plan.steps
    config, words = step.config, plan.zeroed["tickets"]
    assert isinstance(config, TrailConfig) and step.together and not first.together
    blocks, columns = len(lens) * heads[1], config.columns
    room, parts = config.held * columns, parts_of(first, lens)
    assert max(parts) == SPLITS and min(parts) == 1 and words == blocks * SPLITS * room * 3 // 2
    second = program(device, config, lambda: step.build(config, device.target))
    post = program(device, ("leave", words), lambda: build_post(words))
    memory = {name: device.alloc(4 * words) for name in ("given",)}
    memory |= {"tickets": zeroed(device, words), "lens": device.alloc(4 * len(lens))}
    device.upload(memory["lens"], np.array(lens, np.int32))
    out = np.zeros(problem.out_shape, np.float16)
    lse = np.zeros(problem.out_shape[:3], np.float32)
    memory |= {"o": device.alloc(out.nbytes), "lse": device.alloc(lse.nbytes)}
    rng = np.random.default_rng(1)
    for turn in range(3):
        maxima, totals = rng.uniform(-30, 30, (2, len(lens), heads[1], SPLITS, group)).astype(np.float32)
        totals = np.abs(totals) + 1
        sums = rng.standard_normal((len(lens), heads[1], SPLITS, group, dim)).astype(np.float32)
        sums[rng.random(sums.shape) < 0.1] = 0
        if turn == 2:
            sums[0, 0, 5, 0, 3] = np.nan
        totals[1], sums[1] = 0, 0  # as of a sequence without keys
        given = np.zeros((len(lens), heads[1], SPLITS, room * 3 // 2), np.float32)
        pairs = np.stack([maxima, totals], -1)
        for n, count in enumerate(parts):
            quads = given[n, :, :count, :room].reshape(heads[1], count, config.held, columns)
            quads[:, :, :group, :dim] = np.where(sums[n, :, :count] == 0, np.float32(-0.0), sums[n, :, :count])
            quads[:, :, :group, dim:] = -0.0
            of_quads = given[n, :, :count, room:].reshape(heads[1], count, config.held, columns // 4, 2)
            of_quads[:, :, :group] = np.where(pairs == 0, np.float32(-0.0), pairs)[n, :, :count, :, None]
        device.upload(memory["given"], given.view(np.int32))
        leave: Any = (post, (-(-words // 64), 1, 1), [memory["given"], memory["tickets"]])
        device.launch_together([leave, launch_of(step, second, memory)])
        device.download(memory["o"], out)
        left = np.empty(words, np.int32)
        device.download(memory["tickets"], left)
        assert not left.any()
        for n, count in enumerate(parts):
            weights = np.exp2(maxima[n, :, :count] - maxima[n, :, :count].max(1, keepdims=True)).astype(np.float64)
            total = (weights * totals[n, :, :count]).sum(1)
            found = (weights[..., None] * sums[n, :, :count]).sum(1)
            wanted = found / np.where(total == 0, 1, total)[..., None]
            np.testing.assert_allclose(out[n, :, 0], wanted.reshape(heads[0], dim), rtol=2e-3, atol=1e-4)
        assert np.isnan(out).sum() == (turn == 2)


@pytest.mark.parametrize("cache", ["i8", "e4m3"])
def test_long_sequences_by_themselves(device: Device, cache: str) -> None:
    """Calls of several lengths in turn, and each of them again, to the last bit."""
    case = decode_cases.Case("long", (9000,), 1, (4, 1), (128, 128), "f16", cache, 16)
    given = decode_cases.make(case)
    find_layout(device)
    found: dict[int, list[Any]] = {}
    for length in (9000, 0, 1, 5000, 9000, 300, 0, 5000, 1, 300, 9000):
        given["context_lens"] = np.array([length], np.int32)
        problem, operands = decode_cases.problem_of(case, given)
        plan = plan_decode(problem, decode_views(operands, operands.q), device.target)
        if device.target.vendor == "nvidia" and device.target.matrix_units:
            assert plan.steps[1].together and isinstance(plan.steps[1].config, TrailConfig)
        out, lse = decode_on_host("flash_attention_paged", problem, operands, device)
        judged, expected = expect_decode(problem, operands)
        verdict = compare(judged, out, lse, expected)
        assert verdict, verdict.message
        found.setdefault(length, []).append((out, lse))
    for (out, lse), *others in found.values():
        for other_out, other_lse in others:
            np.testing.assert_array_equal(out, other_out)
            np.testing.assert_array_equal(lse, other_lse)
