"""How a device's matrices (Vulkan's cooperative ones, Metal's simdgroup ones) lie over a subgroup, found out once.

The interface hides it, but a matrix whose elements are their own indices tells: each lane reads off its components.
What was found is used for one product whose factor is put together in registers; only then it is trusted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.engine.programs import program
from aule.errors import AuleError
from aule.ir import Builder, KernelIR
from aule.ir.types import Fragment, f16, f32, i32
from aule.runtime.base import Device
from aule.target import FragmentLayout
from aule.tile.fragment import SIZE, has_units, weigh_bits

Array = npt.NDArray[Any]
log = logging.getLogger("aule")
_ACCUMULATOR = Fragment(f32, SIZE, SIZE, "accumulator")
_LEFT, _RIGHT = Fragment(f16, SIZE, SIZE, "a"), Fragment(f16, SIZE, SIZE, "b")


def find_layout(device: Device) -> None:
    """Put the layout of 16 x 16 fragments into the device's Target, where it can be known."""
    target = device.target
    if target.matrix_layout is not None or not has_units(target, "f16") or "_probed" in vars(device):
        return
    vars(device)["_probed"] = True
    try:
        layout = _discover(device)
    except AuleError as error:
        log.debug("fragments of %s: %s", target.name, error)
        return
    if layout is not None:
        device.target = replace(target, matrix_layout=layout)


def _discover(device: Device) -> FragmentLayout | None:
    size = device.target.subgroup_size
    if size not in (32, 64):
        return None
    numbers = np.arange(SIZE * SIZE)
    found = _run(device, ("probe fragments", size), lambda: _probe_kernel(size), numbers)
    layout = decode(found[0])
    if layout is None or not np.array_equal(found[0], found[1]):
        log.debug("fragments of %s lie in a way that registers alone cannot follow", device.target.name)
        return None
    shift = np.roll(np.eye(SIZE), 1, axis=1)
    check = _run(device, ("check shifted fragments", size, layout), lambda: _check_kernel(size, layout), shift)
    if not np.array_equal(check[0], check[1]):
        log.warning("fragments of %s: the layout that was found gives wrong products; not used", device.target.name)
        return None
    return layout


def decode(elements: Array) -> FragmentLayout | None:
    """The layout in which lane i holds the elements ``elements[i]``; None when it is not a sum over bits."""
    places = elements.astype(np.int64)
    lanes, parts = places.shape
    rows, cols = places // SIZE, places % SIZE

    def weights(table: Array, count: int, along: int) -> tuple[int, ...]:
        at = (1 << i for i in range(count.bit_length() - 1))
        return tuple(int(table[i, 0] if along == 0 else table[0, i]) for i in at)

    layout = FragmentLayout(
        weights(rows, lanes, 0), weights(cols, lanes, 0), weights(rows, parts, 1), weights(cols, parts, 1)
    )

    def total(number: int, terms: tuple[int, ...]) -> int:
        return sum(term for i, term in enumerate(terms) if number >> i & 1)

    for lane in range(lanes):
        for part in range(parts):
            row = total(lane, layout.lane_rows) + total(part, layout.part_rows)
            col = total(lane, layout.lane_cols) + total(part, layout.part_cols)
            if (row, col) != (rows[lane, part], cols[lane, part]):
                return None
    # Rows are reduced over lanes: none may hold parts of different rows in one bit and columns in the same.
    mixed = any(r and c for r, c in zip(layout.lane_rows, layout.lane_cols, strict=True))
    return None if mixed or len(np.unique(places)) != SIZE * SIZE else layout


def _run(device: Device, key: object, build: Callable[[], KernelIR], matrix: Array) -> Array:
    """Launch a kernel with a matrix in fp32 and fp16; returns its two tables of components by lane."""
    size = device.target.subgroup_size
    loaded = program(device, key, build)
    out = np.full((2, size, SIZE * SIZE // size), -1, np.float32)
    arrays: list[Array] = [matrix.astype(np.float32), matrix.astype(np.float16), out]
    memory = []
    try:
        for array in arrays:
            memory.append(device.alloc(array.nbytes))
            device.upload(memory[-1], array)
        device.launch(loaded, (1, 1, 1), memory)
        device.download(memory[2], out)
    finally:
        for allocation in memory:
            device.free(allocation)
    return out


def _probe_kernel(size: int) -> KernelIR:
    """Components of an accumulator, and of a left factor, that hold their own indices."""
    b = Builder("fragment_probe", size, size)
    wide, narrow, out = b.buffer("wide", f32), b.buffer("narrow", f16), b.buffer("out", f32, "write")
    lane, parts = b.lane_id(), SIZE * SIZE // size
    for table, fragment in enumerate(
        (b.fragment_load(_ACCUMULATOR, wide, 0, SIZE), b.fragment_load(_LEFT, narrow, 0, SIZE))
    ):
        for part in range(parts):
            value = b.cast(b.fragment_get(fragment, part), f32)
            b.store(out, lane * parts + (table * SIZE * SIZE + part), value)
    return b.finish()


def _check_kernel(size: int, layout: FragmentLayout) -> KernelIR:
    """Components of a factor made in registers times the matrix that shifts columns by one, plus that matrix, which
    tells rows apart; and what they should be. The unit matrix would give back what was put in, in any layout."""
    b = Builder("fragment_check", size, size)
    wide, narrow, out = b.buffer("wide", f32), b.buffer("narrow", f16), b.buffer("out", f32, "write")
    lane, parts = b.lane_id(), SIZE * SIZE // size
    row, col = weigh_bits(b, lane, layout.lane_rows), weigh_bits(b, lane, layout.lane_cols)
    given, expected = [], []
    for part in range(parts):
        r = row + sum(x for i, x in enumerate(layout.part_rows) if part >> i & 1)
        c = col + sum(x for i, x in enumerate(layout.part_cols) if part >> i & 1)
        before = (c + (SIZE - 1)) % SIZE
        given.append(b.cast(r * 37 + c * 5, f16))  # whole numbers below 2048, exact in fp16
        expected.append(b.cast(r * 37 + before * 5 + b.select(b.eq(before, r), b.const(1, i32), b.const(0, i32)), f32))
    left, right = b.fragment_pack(_LEFT, given), b.fragment_load(_RIGHT, narrow, 0, SIZE)
    product = b.fragment_mma(left, right, b.fragment_load(_ACCUMULATOR, wide, 0, SIZE))
    for part in range(parts):
        b.store(out, lane * parts + part, b.fragment_get(product, part))
        b.store(out, lane * parts + (SIZE * SIZE + part), expected[part])
    return b.finish()
