"""How tiles lie over a subgroup on matrix units: chosen from a device's layouts of fragments.

A result becomes the left factor of the next product (P in ``O = P V``), so what matters is how the one turns into the
other. Three ways, from the best to the worst:

* It lies where it must already, but for the order of a lane's components (NVIDIA; Intel, transposed).
* Lanes that hold copies of a factor lack each other's elements: they exchange them (RDNA 3, transposed).
* It goes through shared memory.

*Transposed* is a matter of the fragments alone: they hold the transposes of a tile's blocks, S^T = K Q^T and
O^T = V^T P^T, and right factors take the place of left ones. Rows and columns of a tile remain what they are, so
kernels do not know. RDNA 3 and Intel hold a column of an accumulator in a few lanes, which then is a row of S: softmax
reduces over a lane's own registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aule.ir import Builder, Value
from aule.ir.types import i32
from aule.target import FragmentLayout, Target

SIZE = 16
"""Depth of a product; what tiles and padded head dimensions are multiples of."""


@dataclass(frozen=True)
class Exchange:
    """A bit of the lane that tells elements of a result apart, and copies of a factor.

    Attributes
    ----------
    mask : int
        The bit.
    row, col : int
        What it adds to the place of a result.
    """

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
        Of such a block.
    factors : FragmentLayout or None
        Of a left factor, ``height`` x `SIZE`; None when results pass through shared memory to become one.
    exchanges : tuple of Exchange
        What lanes exchange before.
    """

    transposed: bool
    height: int
    width: int
    results: FragmentLayout
    factors: FragmentLayout | None
    exchanges: tuple[Exchange, ...] = ()

    @property
    def lanes(self) -> int:
        """Lanes of a subgroup."""
        return self.results.lanes

    @property
    def across(self) -> list[int]:
        """Lanes that share their rows of a result differ in these bits."""
        return [1 << i for i, row in enumerate(self.results.lane_rows) if row == 0]


def arrange(target: Target) -> Arrangement:
    """The best arrangement that the layouts of a target's fragments allow."""
    results = target.matrix_layout
    assert results is not None
    rows, cols, _ = target.matrix_shape
    if target.matrix_factors is None:
        return _arrange(False, rows, cols, results, results)
    left, right = target.matrix_factors
    ways = (
        _arrange(False, rows, cols, results, left),
        _arrange(True, cols, rows, results.transposed, right.transposed if right else None),
    )
    return min(ways, key=lambda way: (way.factors is None, len(way.exchanges), len(way.across)))


def uniform(target: Target) -> bool:
    """Whether fragments are 16 x 16 and left factors lie as results do: what kernels ask for that take them apart."""
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
    """How many components of a lane one atomic addition takes."""
    return 4 if target.backend == "cuda" and int(target.arch.removeprefix("sm_").rstrip("af") or 0) >= 90 else 1


def place_in_block(b: Builder, way: Arrangement, row: Value, col: Value, run: int = 1) -> Value:
    """Where an element of a tile lies among the 256 of its 16 x 16: these are kept accumulator by accumulator,
    component by component (or ``run`` of them together), the lanes side by side."""
    places = []
    for rows, cols in ((way.results.lane_rows, way.results.lane_cols), (way.results.part_rows, way.results.part_cols)):
        # Every bit of row and column within an accumulator is a bit of either lane or component.
        weights = [
            [1 << table.index(1 << bit) if 1 << bit in table else 0 for bit in range(4)] for table in (rows, cols)
        ]
        places.append(weigh_bits(b, row, weights[0]) + weigh_bits(b, col, weights[1]))
    at = places[1] * way.lanes + places[0]
    if run > 1:
        at = (places[1] // run * way.lanes + places[0]) * run + places[1] % run
    for place, size, step in ((row, way.height, SIZE // way.width), (col, way.width, 1)):
        if size < SIZE:
            at = at + place // size * (step * way.height * way.width)
    return at


def number_in_block(way: Arrangement, row: int, col: int, part: int) -> int:
    """The same for lane 0: of component ``part``, the first of its run, of an accumulator whose first element is at
    ``row``, ``col``. The next lane's is a run further."""
    block = row // way.height * (SIZE // way.width) + col // way.width
    return block * way.height * way.width + part * way.lanes
