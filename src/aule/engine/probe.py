"""Finds the layout of matrix fragments (Vulkan's cooperative, Metal's simdgroup matrices) once per device.

The interface hides the layout. Loading matrices whose elements are their own indices reveals it: each lane reads its
components of accumulators, left and right factors. The layout is used only after one correct product, computed as
kernels compute theirs (`aule.tile.fragment.arrangement`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.engine.programs import program
from aule.errors import AuleError
from aule.ir import Builder, KernelIR
from aule.ir.types import Fragment, f16, f32, i32
from aule.runtime.base import Device
from aule.target import FragmentLayout, Target
from aule.tile.fragment.arrangement import SIZE, arrange, uniform, weigh_bits
from aule.tile.fragment.engine import Fragments, fitted, has_units
from aule.tile.fragment.shape import FragmentShape

Array = npt.NDArray[Any]
log = logging.getLogger("aule")

_SHAPES = ((16, 16, 16), (8, 16, 16), (8, 8, 16))
"""Shapes of products that tiles can be composed of, in order of preference."""
_STORED = {f32: np.float32, f16: np.float16}


def find_layout(device: Device) -> None:
    """Put the layouts of fragments into the device's Target, if they can be found."""
    target = device.target
    if target.matrix_layout is not None or "_probed" in vars(device):
        return
    vars(device)["_probed"] = True
    for candidate, lanes in _candidates(target):
        try:
            found = _discover(device, candidate, lanes)
        except AuleError as error:
            log.debug("fragments of %s: %s", target.name, error)
            continue
        if found is not None:
            device.target = found
            return


def _candidates(target: Target) -> Iterator[tuple[Target, int]]:
    """Yield Targets with a fragment shape, and the lanes of a subgroup, in order of preference."""
    shaped = (replace(target, matrix_shape=shape) for shape in _SHAPES)
    candidate = next((t for t in shaped if has_units(t, "f16") or has_units(t, "bf16")), None)
    if candidate is None:
        return
    # With 64 lanes, RDNA 3 holds four copies of a factor instead of two. Intel's units have a lane for each column.
    wanted = candidate.matrix_shape[1] if target.vendor == "intel" else 32
    sizes = (wanted, target.subgroup_size) if wanted in target.subgroup_sizes else (target.subgroup_size,)
    for lanes in dict.fromkeys(sizes):
        if lanes in (8, 16, 32, 64):
            yield candidate, lanes


def _discover(device: Device, candidate: Target, lanes: int) -> Target | None:
    """Return the candidate with the layouts found on the device; None if kernels cannot use them."""
    rows, cols, _ = candidate.matrix_shape
    fragments = (
        Fragment(f32, rows, cols, "accumulator"),
        Fragment(f16, rows, SIZE, "a"),
        Fragment(f16, SIZE, cols, "b"),
    )
    about = (lanes, candidate.matrix_shape)
    lengths = _run(device, ("lengths", *about), lambda: _length_kernel(lanes, fragments), (), (3, lanes))
    if (lengths < 1).any() or (lengths != lengths[:, :1]).any():
        log.debug("fragments of %s have other lengths in other lanes", candidate.name)
        return None
    counts = [int(n) for n in lengths[:, 0]]
    numbers = [np.arange(f.rows * f.cols).astype(_STORED[f.elem]) for f in fragments]
    tables = _run(
        device, ("places", *about, *counts), lambda: _places_kernel(lanes, fragments, counts), numbers,
        (lanes, sum(counts)),
    )  # fmt: skip
    parts = np.split(tables, np.cumsum(counts)[:-1], axis=1)
    results, left, right = (decode(part, f.rows, f.cols, f.use) for part, f in zip(parts, fragments, strict=True))
    if results is None:
        log.debug("the accumulator layout of %s is not a sum over bits", candidate.name)
        return None
    factors = None if left == results else (left, right)
    found = replace(candidate, matrix_layout=results, matrix_factors=factors, matrix_right=right)
    shift = np.roll(np.eye(SIZE), 1, axis=1)
    size = arrange(found).height * SIZE
    check = _run(
        device, ("check", found), lambda: _check_kernel(found), (shift.astype(np.float32), shift.astype(np.float16)),
        (2, size),
    )  # fmt: skip
    if not np.array_equal(check[0], check[1]):
        log.warning("fragments of %s: the layout that was found gives wrong products; not used", candidate.name)
        return None
    return found


def decode(elements: Array, rows: int, cols: int, use: str) -> FragmentLayout | None:
    """Return the layout in which lane i holds the elements ``elements[i]`` of a matrix, numbered row by row.

    None if the layout is not a sum over bits, if a bit adds to both row and column, if an element is missing, or if an
    element of an accumulator occurs twice.
    """
    places = elements.astype(np.int64)
    lanes, parts = places.shape
    if lanes & (lanes - 1) or parts & (parts - 1) or not np.array_equal(np.unique(places), np.arange(rows * cols)):
        return None
    lane_bits = [divmod(int(places[1 << i, 0]), cols) for i in range(lanes.bit_length() - 1)]
    part_bits = [divmod(int(places[0, 1 << i]), cols) for i in range(parts.bit_length() - 1)]
    layout = FragmentLayout(
        tuple(row for row, _ in lane_bits), tuple(col for _, col in lane_bits),
        tuple(row for row, _ in part_bits), tuple(col for _, col in part_bits),
    )  # fmt: skip
    expected = [[layout.place(lane, part) for part in range(parts)] for lane in range(lanes)]
    if any(row and col for row, col in lane_bits + part_bits) or (use == "accumulator" and places.size > rows * cols):
        return None
    return layout if np.array_equal(np.array(expected), np.stack((places // cols, places % cols), axis=2)) else None


def _run(
    device: Device, key: object, build: Callable[[], KernelIR], inputs: Sequence[Array], shape: tuple[int, int]
) -> Array:
    """Launch a kernel of one workgroup and return its result."""
    loaded = program(device, ("fragment probe", key), build)
    out = np.full(shape, -1, np.float32)
    memory = []
    try:
        for array in (*inputs, out):
            memory.append(device.alloc(array.nbytes))
            device.upload(memory[-1], array)
        device.launch(loaded, (1, 1, 1), memory)
        device.download(memory[-1], out)
    finally:
        for allocation in memory:
            device.free(allocation)
    return out


def _length_kernel(lanes: int, fragments: Sequence[Fragment]) -> KernelIR:
    """Build a kernel that stores the number of components per lane of each fragment."""
    b = Builder("fragment_lengths", lanes, lanes)
    out = b.buffer("out", f32, "write")
    for i, fragment in enumerate(fragments):
        length = b.fragment_length(b.fragment_fill(fragment, 0.0))
        b.store(out, b.lane_id() + i * lanes, b.cast(length, f32))
    return b.finish()


def _places_kernel(lanes: int, fragments: Sequence[Fragment], counts: Sequence[int]) -> KernelIR:
    """Build a kernel that stores the components of fragments whose elements are their own indices."""
    b = Builder("fragment_places", lanes, lanes)
    numbers = [b.buffer(fragment.use, fragment.elem) for fragment in fragments]
    out = b.buffer("out", f32, "write")
    at = b.lane_id() * sum(counts)
    for fragment, count, source in zip(fragments, counts, numbers, strict=True):
        loaded = b.fragment_load(fragment, source, 0, fragment.cols)
        for part in range(count):
            b.store(out, at + part, b.cast(b.fragment_get(loaded, part), f32))
        at = at + count
    return b.finish()


def _check_kernel(target: Target) -> KernelIR:
    """Build a kernel that stores each lane's elements of A S + S, and the expected values.

    S shifts columns by one, and adding it distinguishes rows. The unit matrix would return its factor in any layout.
    """
    shape = fitted(FragmentShape(arrange(target).height, SIZE, 1, 1, False), target)
    b = Builder("fragment_check", shape.lanes, shape.lanes)
    wide, narrow, out = b.buffer("wide", f32), b.buffer("narrow", f16), b.buffer("out", f32, "write")
    engine = Fragments(b, target, shape, "f16")
    tile, width, zero = engine.tile(shape.block_q, SIZE), engine.arrangement.width, b.const(0, i32)
    given, expected = [], []
    for r in range(engine.rows_held):
        row = tile.row(r)
        cols = [tile.col(c) for c in range(engine.factor_cols)]
        before = [(col + (SIZE - 1)) % SIZE for col in cols]
        given.append([b.cast(row * 37 + col * 5, f32) for col in cols])  # whole numbers below 2048, exact in fp16
        ones = [b.select(b.eq(col, row), b.const(1, i32), zero) for col in before]
        expected.append([b.cast(row * 37 + col * 5 + one, f32) for col, one in zip(before, ones, strict=True)])
    ((factor,),) = engine.pack(given, engine.left)
    for j, variable in enumerate(tile.vars[0]):
        layout = "column" if engine.arrangement.transposed else "row"
        variable.value = b.fragment_load(engine.accumulator, wide, j * width, SIZE, layout)
    right = target.matrix_right if uniform(target) else None
    if right is not None:  # right factors can be packed from single elements: check that too
        row, col = weigh_bits(b, b.lane_id(), right.lane_rows), weigh_bits(b, b.lane_id(), right.lane_cols)
        places = [right.place(0, part) for part in range(right.parts)]
        other = b.fragment_pack(engine.right, [b.load(narrow, (row + r) * SIZE + (col + c)) for r, c in places])
        engine.multiply(tile, lambda k: [factor], lambda k, j: other, 1)
    else:
        engine.multiply(tile, lambda k: [factor], lambda k, j: engine.load_right(narrow, zero, SIZE, 0, j * width), 1)
    at = b.lane_id()
    for got, wanted in zip(tile.values(), expected, strict=True):
        for x, y in zip(got, wanted, strict=True):
            b.store(out, at, x)
            b.store(out, at + shape.block_q * SIZE, y)
            at = at + shape.lanes
    return b.finish()
