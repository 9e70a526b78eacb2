"""Tensor copies: boxes, swizzled, with zeros outside of the tensor, that arrive at an mbarrier; mistakes with them."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_fragment_compiles import assemble
from test_fragment_compiles import target as nvidia

from aule.artifact import Swizzle
from aule.codegen import TARGETS, generate
from aule.errors import KernelError
from aule.ir import Builder, KernelIR
from aule.ir.interpret import SanitizerError, interpret
from aule.ir.types import PANEL, Panels, Role, f16, f32, i32, u64
from aule.ir.verify import verify

STAGES, ROWS = 2, 16
SIZE = ROWS * PANEL
FULL, EMPTY = 0, STAGES


def pipeline(
    *, box: int = PANEL, swizzle: Swizzle = 128, expect: bool = True, arrive: bool = False, bytes_: int = 0,
    late: bool = False, wait_full: bool = True, wait_empty: bool = True, phase: int = 0, shift: int = 0,
    unread: int = 0, everyone: bool = False, to: int = 0,
) -> KernelIR:  # fmt: skip
    """One subgroup copies boxes of 16 rows, which four subgroups write out as they lie in shared memory."""
    size = ROWS * box
    b = Builder("pipeline", 256, 32, 128)
    source, out = b.buffer("source", f16), b.buffer("out", f16, "write")
    offset, rows, row_stride, head_stride = (b.scalar(n, i32) for n in ("offset", "rows", "row_stride", "head_stride"))
    count = b.scalar("count", i32)
    tensor = b.tensor_map("tensor", source, offset, (72, rows, 2), (row_stride, head_stride), (box, ROWS, 1), swizzle)
    slots, barriers = b.shared("slots", f16, STAGES * size + 128), b.shared("barriers", u64, 2 * STAGES)
    for stage in range(STAGES):
        b.mbarrier_init(barriers, FULL + stage, threads=1)
        b.mbarrier_init(barriers, EMPTY + stage, threads=128)
    b.warpgroup_publish()
    b.barrier()
    with b.roles(Role(4, registers=200), Role(1, crews=4, registers=24)) as (read, copy):
        with read, b.loop(0, count - unread) as i:
            slot, parity = i % STAGES, i // STAGES % 2
            if wait_full:
                b.mbarrier_wait(barriers, slot + FULL, parity ^ phase)
            with b.loop(b.thread_id(), size, 128, name="at") as at:
                b.store(out, i * size + at, b.load(slots, (slot + shift) % STAGES * size + at))
            b.mbarrier_arrive(barriers, slot + EMPTY)
        with copy, b.if_(b.eq(b.subgroup_id(), 4) | everyone), b.loop(0, count) as i:
            slot, parity = i % STAGES, i // STAGES % 2
            if wait_empty:
                b.mbarrier_wait(barriers, slot + EMPTY, parity ^ 1)

            def announce(slot: Any) -> None:
                if expect:
                    b.mbarrier_expect(barriers, slot + FULL, bytes_ or 2 * size)
                elif arrive:
                    b.mbarrier_arrive(barriers, slot + FULL)

            if not late:
                announce(slot)
            b.tensor_copy(slots, slot * size + to, (barriers, slot + FULL), tensor, (i % 2 * box, i // 2 * ROWS - 3, 1))
            if late:
                announce(slot)
    return b.finish()


def run(kernel: KernelIR, count: int = 5) -> None:
    """Compare what was copied with a plain loop, by the swizzle that CUDA's documentation describes."""
    rng = np.random.default_rng(0)
    source = rng.standard_normal((2, 30, 80)).astype(np.float16)  # 72 of 80 columns belong to the tensor
    (tensor,) = kernel.maps
    box, elements = tensor.box[0], ROWS * tensor.box[0]
    out = np.zeros(count * elements, np.float16)
    interpret(kernel, (1, 1, 1), [source.reshape(-1), out, 0, 30, 80, 2400, count])
    padded = np.zeros((30 + 100, 512), np.float16)
    padded[3:33, :72] = source[1, :, :72]
    runs, period = tensor.swizzle // 16 or 1, 128 // max(tensor.swizzle, 16)
    for i in range(count):
        tile = padded[i // 2 * ROWS :][:ROWS, i % 2 * box :][:, :box]
        lies = out[i * elements :][:elements].reshape(ROWS, box // 8, 8)
        for row in range(ROWS):
            for place in range(box // 8):
                at = place ^ (row // period % runs)
                np.testing.assert_array_equal(lies[row, at], tile[row, place * 8 : place * 8 + 8])


@pytest.mark.parametrize(("box", "swizzle"), [(64, 128), (32, 64), (16, 32), (64, 0), (8, 0)])
@pytest.mark.parametrize("late", [False, True])
def test_boxes(box: int, swizzle: Swizzle, late: bool) -> None:
    """Coordinates before and past the tensor; bytes may come before they are announced."""
    kernel = pipeline(box=box, swizzle=swizzle, late=late)
    verify(kernel)
    run(kernel)


def test_boxes_are_panels() -> None:
    """A box of 64 columns lies as the products of warpgroups read it."""
    kernel = pipeline()
    source = np.arange(80 * 30 * 2, dtype=np.float32).astype(np.float16)
    out = np.zeros(2 * SIZE, np.float16)
    interpret(kernel, (1, 1, 1), [source, out, 0, 30, 80, 2400, 1])
    row, col = np.indices((ROWS, PANEL))
    inside = source.reshape(2, 30, 80)[1, : ROWS - 3, :PANEL]
    np.testing.assert_array_equal(out[Panels("row", SIZE).offset(row, col)][3:], inside)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"expect": False}, "no thread can go on: .*0 of 1 threads have arrived, and 2048 bytes are too many"),
        ({"bytes_": 4096}, "no thread can go on: .*1 of 1 threads have arrived, and 2048 bytes are missing"),
        ({"bytes_": 1024}, "no thread can go on: .*1 of 1 threads have arrived, and 1024 bytes are too many"),
        ({"expect": False, "arrive": True}, "more arrivals at an mbarrier than it has threads"),
        ({"wait_full": False}, "read of shared memory that was never written"),
        (
            {"wait_empty": False},
            r"race in shared memory on slots\[0\]: .* writes it in `tensor_copy .*and a tensor copy writes it",
        ),
        ({"phase": 1}, "read of shared memory that was never written"),
        ({"shift": 1}, "race in shared memory on .*reads it in .*and a tensor copy writes it"),
        ({"unread": 1}, "a workgroup ends before tensor copies for which nobody has waited"),
        ({"everyone": True}, "race in shared memory on .*thread 160 .*and a tensor copy writes it"),
        ({"to": 8}, "a box that does not start at a multiple of 128 bytes"),
        ({"to": 2048}, "out of bounds"),
    ],
)
def test_sanitizer_finds_mistakes(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SanitizerError, match=message):
        run(pipeline(**wrong))


def test_other_barriers_do_not_order_copies() -> None:
    """Copies of two boxes arrive at two mbarriers: who has waited for one has not waited for the other."""

    def kernel(waits: tuple[int, ...]) -> KernelIR:
        b = Builder("two", 256, 32, 128)
        source, out, n = b.buffer("source", f16), b.buffer("out", f16, "write"), b.scalar("n", i32)
        tensor = b.tensor_map("tensor", source, n, (64, 16), (n,), (64, 16))
        slots, barriers = b.shared("slots", f16, 2 * SIZE), b.shared("barriers", u64, 2)
        for i in range(2):
            b.mbarrier_init(barriers, i, threads=1)
        b.barrier()
        with b.roles(Role(4, registers=200), Role(4, registers=24)) as (read, copy):
            with read:
                for i in waits:
                    b.mbarrier_wait(barriers, i, b.const(0, i32))
                b.store(out, b.thread_id(), b.load(slots, b.thread_id()))
            with copy, b.if_(b.eq(b.subgroup_id(), 4)):
                for i in range(2):
                    b.tensor_copy(slots, i * SIZE, (barriers, i), tensor, (0, 0))
                for i in range(2):
                    b.mbarrier_expect(barriers, i, 2 * SIZE)
        return b.finish()

    def started(waits: tuple[int, ...]) -> np.ndarray:
        out = np.zeros(128, np.float16)
        interpret(kernel(waits), (1, 1, 1), [np.ones(64 * 17, np.float16), out, 0])
        return out

    assert started((1, 0)).all()
    with pytest.raises(SanitizerError, match=r"race in shared memory on slots.*a tensor copy writes it"):
        started((1,))


def broken(**change: Any) -> KernelIR:
    kernel = pipeline()
    return replace(kernel, maps=(replace(kernel.maps[0], **change),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffer": "out"}, "tensor maps of buffers of f16 or bf16 that are only read"),
        ({"buffer": "rows"}, "tensor maps of buffers of f16 or bf16 that are only read"),
        ({"offset": "absent"}, "numbers or scalars of integers in a tensor map, got 'absent'"),
        ({"sizes": (72, "source", 2)}, "numbers or scalars of integers in a tensor map, got 'source'"),
        ({"strides": ("row_stride",)}, "one stride less"),
        ({"box": (64, 257, 1)}, "a box of 1 to 256 elements"),
        ({"box": (60, 16, 1)}, "in multiples of 16 bytes"),
        ({"swizzle": 64}, "a swizzle of 0, 32, 64 or 128 bytes, as wide as the box"),
        ({"name": "slots"}, "names that differ, got 'slots' twice"),
        ({"name": "other"}, "tensor_copy: expected a tensor map of the kernel, got 'tensor'"),
    ],
)
def test_rules_of_maps(change: dict[str, Any], message: str) -> None:
    verify(broken())
    with pytest.raises(KernelError, match=message):
        verify(broken(**change))


def test_rules_of_copies() -> None:
    def checked(elem: Any = f16, first: tuple[Any, ...] = (0, 0), bytes_: int = 8, roles: bool = True) -> None:
        b = Builder("k", 256, 32, 128)
        source, n = b.buffer("source", f16), b.scalar("n", i32)
        tensor = b.tensor_map("tensor", source, n, (64, n), (n,), (64, 16))
        tiles, barriers = b.shared("tiles", elem, SIZE), b.shared("barriers", u64, 1)
        b.mbarrier_expect(barriers, 0, bytes_)
        b.tensor_copy(tiles, 0, (barriers, 0), tensor, first)
        if roles:
            with b.roles(Role(4, registers=128), Role(4, registers=128)):
                pass
        verify(b.finish())

    checked()
    for wrong, message in (
        ({"elem": f32}, "memory of one element type"),
        ({"first": (0,)}, "expected 2 coordinates of i32"),
        ({"bytes_": 1 << 20}, "bytes to be a positive count below 1048576"),
        ({"roles": False}, "mbarrier_expect: expected a kernel with roles"),
    ):
        with pytest.raises(KernelError, match=message):
            checked(**wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
def test_ptx(tmp_path: Path) -> None:
    text, spilled = assemble(pipeline(), nvidia("sm_90"), tmp_path)
    assert spilled == 0 and re.search(r"\.param \.align 128 \.b8 tensor\[128\]\n\)", text)
    assert text.count("elect.sync") == 1 and text.count("cp.async.bulk.tensor.3d.shared::cluster.global") == 1


@pytest.mark.parametrize("language", sorted(TARGETS))
def test_other_languages_refuse(language: str) -> None:
    if language != "ptx":
        with pytest.raises(KernelError, match=r"mbarrier|roles|subgroup|matrices"):
            generate(pipeline(), TARGETS[language])
    else:
        with pytest.raises(KernelError, match="expected sm_90"):
            generate(pipeline(), replace(nvidia("sm_80"), arch="sm_100"))
