"""How tiles are spread over a subgroup on matrix units, chosen from a device's fragment layouts.

A result becomes the left factor of the next product (P in ``O = P V``), so what matters is how a result becomes a
factor. Three cases, from the best to the worst:

* The layouts agree but for the order of a lane's components.
* Lanes that hold copies of a factor lack each other's elements, and exchange them.
* Results pass through shared memory.

*Transposed* concerns fragments alone: they hold the transposes of a tile's blocks, S^T = K Q^T and O^T = V^T P^T, and
right factors take the place of left ones. Rows and columns of a tile stay what they are, so kernels are unchanged. On
devices that hold a column of an accumulator in a few lanes, that column then is a row of S, and softmax reduces over a
lane's own registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aule.ir import Builder, Value
from aule.ir.types import i32
from aule.target import FragmentLayout, Target

SIZE = 16
"""Depth of a product. Tiles and padded head dimensions are multiples of it."""


@dataclass(frozen=True)
class Exchange:
    """A bit of the lane number, ``mask``, that distinguishes copies of a factor, and adds ``row`` and ``col`` to the
    place of a result."""

    mask: int
    row: int
    col: int


@dataclass(frozen=True)
class Arrangement:
    """Which part of a tile a lane holds, in the tile's own rows and columns.

    Attributes
    ----------
    transposed : bool
        Fragments hold the transposes of a tile's blocks.
    height, width : int
        Rows and columns of a block that is one accumulator.
    results : FragmentLayout
        Layout of such a block.
    factors : FragmentLayout or None
        Layout of a left factor, ``height`` x `SIZE`; None if results pass through shared memory to become one.
    exchanges : tuple of Exchange
        Exchanges between lanes by which a result becomes a factor.
    """

    transposed: bool
    height: int
    width: int
    results: FragmentLayout
    factors: FragmentLayout | None
    exchanges: tuple[Exchange, ...] = ()

    @property
    def lanes(self) -> int:
        return self.results.lanes

    @property
    def across(self) -> list[int]:
        """The bits in which lanes differ that share their rows of a result."""
        return [1 << i for i, row in enumerate(self.results.lane_rows) if row == 0]


def arrange(target: Target) -> Arrangement:
    """The best arrangement that the layouts of a target's fragments allow."""
    results = target.matrix_layout
    assert results is not None
    rows, cols, _ = target.matrix_shape
    if target.matrix_factors is None:
        return _arrange(False, rows, cols, results, results)
    left, right = target.matrix_factors
    possible = (
        _arrange(False, rows, cols, results, left),
        _arrange(True, cols, rows, results.transposed, right.transposed if right else None),
    )
    return min(possible, key=lambda found: (found.factors is None, len(found.exchanges), len(found.across)))


def uniform(target: Target) -> bool:
    """Whether fragments are 16 x 16 and left factors lie as results do, as kernels need that use single components."""
    return target.matrix_factors is None and target.matrix_shape == (SIZE, SIZE, SIZE)


def _arrange(
    transposed: bool, height: int, width: int, results: FragmentLayout, factors: FragmentLayout | None
) -> Arrangement:
    through_memory = Arrangement(transposed, height, width, results, None)
    if factors is None:
        return through_memory
    held = list(results.part_bits)
    while 1 << len(held) < results.parts * SIZE // width:  # results side by side make one factor
        held.append((0, width << (len(held) - len(results.part_bits))))
    exchanges = []
    for i, (place, wanted) in enumerate(zip(results.lane_bits, factors.lane_bits, strict=True)):
        if wanted == (0, 0) and place != wanted:
            exchanges.append(Exchange(1 << i, *place))
            held.append(place)
        elif place != wanted:
            return through_memory
    if sorted(held) != sorted(factors.part_bits):
        return through_memory
    return Arrangement(transposed, height, width, results, factors, tuple(exchanges))


def weigh_bits(b: Builder, x: Value, weights: Sequence[int]) -> Value:
    """The sum of the weights of the bits that are set in ``x``."""
    total = b.const(0, i32)
    i = 0
    while i < len(weights):
        width = 1
        while i + width < len(weights) and weights[i] and weights[i + width] == weights[i] << width:
            width += 1
        if weights[i]:
            bits = x >> i
            if i + width < len(weights):
                bits = bits & ((1 << width) - 1)
            total = total + bits * weights[i]
        i += width
    return total


def added_together(target: Target) -> int:
    """Components of a lane that one atomic addition takes."""
    return target.atomic_f32_width


def place_in_block(b: Builder, arrangement: Arrangement, row: Value, col: Value, run: int = 1) -> Value:
    """Index of an element of a tile among the 256 of its 16 x 16, which lie accumulator by accumulator, component by
    component (or ``run`` of them together), with the lanes side by side."""
    places = []
    for rows, cols in (
        (arrangement.results.lane_rows, arrangement.results.lane_cols),
        (arrangement.results.part_rows, arrangement.results.part_cols),
    ):
        # Every bit of row and column within an accumulator is a bit of either lane or component.
        weights = [
            [1 << table.index(1 << bit) if 1 << bit in table else 0 for bit in range(4)] for table in (rows, cols)
        ]
        places.append(weigh_bits(b, row, weights[0]) + weigh_bits(b, col, weights[1]))
    at = places[1] * arrangement.lanes + places[0]
    if run > 1:
        at = (places[1] // run * arrangement.lanes + places[0]) * run + places[1] % run
    for place, size, step in ((row, arrangement.height, SIZE // arrangement.width), (col, arrangement.width, 1)):
        if size < SIZE:
            at = at + place // size * (step * arrangement.height * arrangement.width)
    return at


def number_in_block(arrangement: Arrangement, row: int, col: int, part: int) -> int:
    """The index as in `place_in_block` of lane 0's component ``part``, the first of its run, of an accumulator whose
    first element is at ``row``, ``col``. The next lane's is a run further."""
    block = row // arrangement.height * (SIZE // arrangement.width) + col // arrangement.width
    return block * arrangement.height * arrangement.width + part * arrangement.lanes
