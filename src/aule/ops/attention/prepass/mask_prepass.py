"""Launches before the warpgroup kernels that classify the tiles of a mask, once for all heads that share it.

A tile in which everything is dropped is skipped, and one in which nothing is dropped runs without mask code. For the
others a boolean mask becomes bits in the order in which lanes hold scores, an eighth of its memory. The first kernel
classifies each tile (`build_tiles`). The second lists the remaining tiles of each block of rows, partly dropped ones
first, and takes the band into account (`build_order`).

*Own* rows are those that a workgroup holds, *other* rows those that it passes over: query rows and keys in the forward
pass, keys and query rows in the kernel of dK and dV (``transposed``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, Scalar, Vector, f16, f32, i32, i64, u8, u32
from aule.ops.attention.problem import AttentionProblem
from aule.ops.scores.band import Scores
from aule.ops.scores.config import ScoreConfig
from aule.ops.scores.parameters import Parameters
from aule.ops.shared.plan import Step, grid_of
from aule.target import Target
from aule.tile.common.math import NEG_INF
from aule.tile.common.matrix import divmod_const
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import Components, FragmentTile
from aule.tile.fragment.shape import FragmentShape
from aule.view import ITEMSIZE, TensorView

LANES = 32
THREADS = 256
NONE, SOME, ALL = 0, 1, 2
"""How many of a tile's scores the mask keeps."""
HEADER = 2
"""Numbers at the start of a list: its partly dropped tiles, and all its tiles."""
WORD = 64
"""Columns whose bits of 16 rows fill one word of a lane."""


@dataclass(frozen=True)
class MaskTilesConfig:
    """The kernel that classifies each tile of a mask.

    Attributes
    ----------
    dtype : str
        Type of the mask; "bool" gives bits.
    own, other : int
        Rows and columns of a tile.
    vectors : bool
        Rows of the mask consist of full runs of 16 keys and can be read 16 bytes at a time.
    """

    dtype: str
    own: int
    other: int
    transposed: bool
    vectors: bool
    index64: bool


@dataclass(frozen=True)
class TileOrderConfig:
    """The kernel that lists the tiles of each block.

    Attributes
    ----------
    own, other, transposed
        As above.
    left, right : bool
        The band of kept keys has this side.
    everywhere : bool
        No tile may run without code for dropped keys.
    """

    own: int
    other: int
    transposed: bool
    left: bool
    right: bool
    everywhere: bool
    index64: bool


def mask_steps(
    problem: AttentionProblem,
    view: TensorView,
    shape: FragmentShape,
    target: Target,
    transposed: bool,
    options: Mapping[str, Any],
    scalars: Mapping[str, int | float],
    base_aligned: bool,
) -> tuple[tuple[Step, ...], dict[str, int], dict[str, int]]:
    """Plan the launches before a kernel.

    Parameters
    ----------
    options, scalars : mapping
        Those of the problem and its views.
    base_aligned : bool
        The mask starts at a multiple of 16 bytes.

    Returns
    -------
    tuple
        The steps, the 32-bit words of memory for their results by name, and the scalars by which the kernel finds
        them.
    """
    lengths = (problem.seq_kv, problem.seq_q) if transposed else (problem.seq_q, problem.seq_kv)
    blocks, tiles = (-(-n // size) for n, size in zip(lengths, (shape.block_q, shape.block_kv), strict=True))
    differs = [n > 1 and stride != 0 for n, stride in zip(view.shape, view.strides, strict=True)]
    along = (differs[3], differs[2]) if transposed else (differs[2], differs[3])
    heads = problem.heads_q if differs[1] else 1
    maps = heads * (problem.batch if differs[0] else 1)
    map_blocks, map_tiles = (n if d else 1 for n, d in zip((blocks, tiles), along, strict=True))
    looked_at = maps * map_blocks * map_tiles
    workspace = {"mask_tiles": looked_at, "mask_order": maps * blocks * (tiles + HEADER)}
    if view.dtype == "bool":
        workspace["mask_bits"] = looked_at * (shape.block_q // SIZE) * words(shape.block_kv) * LANES
    found: dict[str, int] = {
        "map_batch": heads * differs[0], "map_head": int(differs[1]), "map_heads": heads,
        "map_blocks": map_blocks, "map_tiles": map_tiles, "block_step": int(along[0]), "tile_step": int(along[1]),
        "own_blocks": blocks, "other_tiles": tiles, "looked_at": looked_at, "listed": maps * blocks,
    }  # fmt: skip
    index64 = max(workspace.values()) > 2**31 - 1 or view.last_index > 2**31 - 1
    run = 16 // ITEMSIZE[view.dtype]
    steps = [s for n, s in zip(view.shape[:3], view.strides[:3], strict=True) if n > 1]
    full_runs = problem.seq_kv >= SIZE and problem.seq_kv % SIZE == 0
    vectors = base_aligned and full_runs and view.strides[3] == 1 and all(s % run == 0 for s in [*steps, view.offset])
    sizes = shape.block_q, shape.block_kv, transposed
    look = MaskTilesConfig(view.dtype, *sizes, vectors, index64)
    order = TileOrderConfig(*sizes, options["left"], options["right"], problem.bias is not None, index64)
    numbers = {**scalars, **found}
    launches = [
        Step(look, build_tiles, grid_of("flash_attention", looked_at, target), numbers),
        Step(order, build_order, grid_of("flash_attention", maps * blocks, target), numbers),
    ]
    return tuple(step for step in launches if step.grid[0]), workspace, found


def words(cols: int) -> int:
    """Words that a lane's bits of 16 rows and ``cols`` columns take."""
    return -(-cols // WORD)


def build_tiles(config: MaskTilesConfig, target: Target) -> KernelIR:
    """Trace the kernel that classifies tiles, one workgroup to a tile."""
    b = Builder("attention_mask_tiles", THREADS, LANES)
    p = _parameters(b, config.index64)
    number = b.group_id(0) + b.group_id(1) * b.group_count(0)
    with b.if_(number < p.number("looked_at")):
        _classify(b, p, config, target, number)
    return b.finish()


def _classify(b: Builder, p: Parameters, config: MaskTilesConfig, target: Target, number: Value) -> None:
    tiles, blocks, heads = p.number("map_tiles"), p.number("map_blocks"), p.number("map_heads")
    block, tile = (number // tiles) % blocks, number % tiles
    which = number // (tiles * blocks)
    batch, head = which // heads, which % heads
    first = block * config.own, tile * config.other
    query0, key0 = (first[1], first[0]) if config.transposed else first
    queries, keys = (config.other, config.own) if config.transposed else (config.own, config.other)
    across = keys // SIZE
    halves = b.shared("halves", u32, queries * across)
    any_kept, any_changed = (b.var(b.const(0, u32)) for _ in range(2))
    read = _reader(b, p, config, batch, head)
    thread, runs = b.thread_id(), queries * across

    def take(run: Value) -> None:
        row, half = divmod_const(b, run, across)
        kept, changed = read(query0 + row, key0 + half * SIZE)
        b.store(halves, run, kept)
        any_kept.value = any_kept.value | kept
        any_changed.value = any_changed.value | changed

    for first_run in range(0, runs, THREADS):  # unrolled, so that many loads are in flight
        run = thread + first_run
        if first_run + THREADS <= runs:
            take(run)
        else:
            with b.if_(run < runs):
                take(run)
    keeps = b.workgroup_any(b.ne(any_kept.value, 0))
    changes = b.workgroup_any(b.ne(any_changed.value, 0))
    with b.if_(b.eq(thread, 0)):
        found = b.select(keeps, b.select(changes, b.const(SOME, i32), b.const(ALL, i32)), b.const(NONE, i32))
        b.store(p.buffer("mask_tiles", i32, "write"), b.cast(number, p.index), found)
    if config.dtype != "bool":
        return
    parts = Components(b, target, f16)

    def place(own: Value, other: Value) -> tuple[Value, Value]:
        return (other, own) if config.transposed else (own, other)

    # Also if the mask drops nothing: the band or the end of the sequence may drop keys of such a tile, whose bits are
    # then read.
    with b.if_(keeps):
        count = words(config.other)
        rows = config.own // SIZE
        with b.loop(b.subgroup_id(), rows * count, THREADS // LANES, name="word") as at:
            row, word = divmod_const(b, at, count)
            bits = b.var(b.const(0, u32), "bits")
            for fragment in range(WORD // SIZE):
                col = word * WORD + fragment * SIZE

                def add(fragment: int = fragment, col: Value = col) -> None:
                    for r, y in enumerate(parts.part_rows):
                        for c, x in enumerate(parts.part_cols):
                            query, key = place(row * SIZE + parts.lane_row + y, col + parts.lane_col + x)
                            half = b.load(halves, query * across + (key >> 4))
                            bit = (half >> b.cast(key & 15, u32)) & 1
                            bits.value = bits.value | (bit << _bit(parts, fragment, r, c))

                if config.other % WORD:
                    with b.if_(col < config.other):
                        add()
                else:
                    add()
            to = (b.cast(number, p.index) * (rows * count) + b.cast(at, p.index)) * LANES
            b.store(p.buffer("mask_bits", u32, "write"), to + b.cast(b.lane_id(), p.index), bits.value)


def _bit(parts: Components, fragment: int, r: int, c: int) -> int:
    """The bit in a lane's word of its ``r``-th row and ``c``-th column of a fragment."""
    size = len(parts.part_rows) * len(parts.part_cols)
    assert size * WORD // SIZE == 32, "a lane has eight elements of a fragment"
    return fragment * size + r * len(parts.part_cols) + c


def _reader(
    b: Builder, p: Parameters, config: MaskTilesConfig, batch: Value, head: Value
) -> Callable[[Value, Value], tuple[Value, Value]]:
    """A function that reads 16 keys of a row: bits of those that are kept, and of those whose score the mask changes.
    Rows and keys past the end read the last."""
    seq_q, seq_kv = p.number("seq_q"), p.number("seq_kv")
    elem = u8 if config.dtype == "bool" else SCALARS[config.dtype]
    buffer, base = p.buffer("mask", elem), p.strided("mask", batch, head)
    row_stride, col_stride = (p.number(f"mask_{n}_stride", p.index) for n in ("row", "col"))

    def bits(values: list[Value]) -> tuple[Value, Value]:
        kept, changed = (b.var(b.const(0, u32)) for _ in range(2))
        for i, x in enumerate(values):
            keeps = b.ne(x, 0) if config.dtype == "bool" else b.ne(b.cast(x, f32), NEG_INF)
            same = keeps if config.dtype == "bool" else b.eq(b.cast(x, f32), 0.0)
            for variable, flag in ((kept, keeps), (changed, ~same)):
                variable.value = variable.value | b.select(flag, b.const(1 << i, u32), b.const(0, u32))
        return kept.value, changed.value

    def flags(words: list[Value]) -> tuple[Value, Value]:
        """Bits of booleans, four to a word, of which any bit may be set."""
        kept = b.const(0, u32)
        for i, word in enumerate(words):
            for step in (4, 2, 1):
                word = word | (word >> step)
            kept = kept | ((((word & 0x01010101) * 0x01020408) >> 24 & 15) << (4 * i))
        return kept, kept ^ 0xFFFF

    def read(row: Value, key: Value) -> tuple[Value, Value]:
        start = base + b.cast(b.min(row, seq_q - 1), p.index) * row_stride
        if not config.vectors:
            inside = [b.cast(b.min(key + i, seq_kv - 1), p.index) for i in range(SIZE)]
            return bits([b.load(buffer, start + i * col_stride) for i in inside])
        at, run = start + b.cast(b.min(key, seq_kv - SIZE), p.index), 128 // elem.bits
        found = [b.load(buffer, at + i, run) for i in range(0, SIZE, run)]
        if config.dtype == "bool":
            return flags(b.unpack(b.bitcast(found[0], Vector(u32, 4))))
        return bits([x for vector in found for x in b.unpack(vector)])

    return read


def build_order(config: TileOrderConfig, target: Target) -> KernelIR:
    """Trace the kernel that lists tiles, one subgroup to a block of rows."""
    b = Builder("attention_mask_order", LANES, LANES)
    p = _parameters(b, config.index64, config.left, config.right)
    number = b.group_id(0) + b.group_id(1) * b.group_count(0)
    with b.if_(number < p.number("listed")):
        _list(b, p, config, number)
    return b.finish()


def _list(b: Builder, p: Parameters, config: TileOrderConfig, number: Value) -> None:
    blocks, tiles = p.number("own_blocks"), p.number("other_tiles")
    which, block = number // blocks, number % blocks
    scores, lane = Scores(p, b.const(0, i32)), b.lane_id()
    order = p.buffer("mask_order", i32, "write")
    start = b.cast(number, p.index) * b.cast(tiles + HEADER, p.index)
    looked = b.cast(which * p.number("map_blocks") + block * p.number("block_step"), p.index)
    looked = looked * b.cast(p.number("map_tiles"), p.index)
    count = b.var(b.const(0, i32), "count")

    def kind(tile: Value) -> Value:
        at = looked + b.cast(tile * p.number("tile_step"), p.index)
        first = block * config.own, tile * config.other
        (query0, key0) = (first[1], first[0]) if config.transposed else first
        queries, keys = (config.other, config.own) if config.transposed else (config.own, config.other)
        reach = scores.reach_of_rows(query0, queries)
        within = (key0 + keys > reach.first) & (key0 < reach.end)
        full = (key0 >= reach.full_first) & (key0 + keys <= reach.full_end)
        found = b.load(p.buffer("mask_tiles", i32), at)
        if config.everywhere:
            found = b.min(found, SOME)
        return b.select(within, b.select(full, found, b.min(found, SOME)), b.const(NONE, i32))

    for wanted in (SOME, ALL):
        with b.loop(0, tiles, LANES, name="tile") as tile0:
            tile = tile0 + lane
            taken = (tile < tiles) & b.eq(kind(b.min(tile, tiles - 1)), wanted)
            one, none = b.const(1, i32), b.const(0, i32)
            place = b.select(taken, one, none)
            for step in (1, 2, 4, 8, 16):  # prefix sum: how many lanes up to this one take their tile
                before = b.shuffle(place, b.max(lane - step, 0))
                place = place + b.select(lane >= step, before, none)
            with b.if_(taken):
                b.store(order, start + b.cast(count.value + place + (HEADER - 1), p.index), tile)
            count.value = count.value + b.shuffle(place, LANES - 1)
        with b.if_(b.eq(lane, wanted - SOME)):
            b.store(order, start + (wanted - SOME), count.value)


def _parameters(b: Builder, index64: bool, left: bool = False, right: bool = False) -> Parameters:
    index: Scalar = i64 if index64 else i32
    return Parameters(b, ScoreConfig(dtype="f16", head_dim=1, value_dim=1, left=left, right=right), index)


class TileList:
    """The list of tiles of one block of one head, as the kernels above leave it."""

    def __init__(self, p: Parameters, batch: Value, head: Value, block: Value, shape: FragmentShape) -> None:
        self.p, self.b, self.shape = p, p.b, shape
        b = p.b
        which = batch * p.number("map_batch") + head * p.number("map_head")
        each = self._index(p.number("other_tiles") + HEADER)
        self.start = self._index(which * p.number("own_blocks") + block) * each
        order = p.buffer("mask_order", i32)
        self.partial, self.count = (b.load(order, self.start + i) for i in range(HEADER))
        """The number of partly dropped tiles, which come first, and of all tiles."""
        self.last = b.max(self.count, 1) - 1
        looked = self._index(which * p.number("map_blocks") + block * p.number("block_step"))
        self.looked = looked * self._index(p.number("map_tiles"))

    def tile(self, i: Value) -> Value:
        """The ``i``-th tile of the list; past its end the last one."""
        at = self.start + self._index(self.b.min(i, self.last) + HEADER)
        return self.b.load(self.p.buffer("mask_order", i32), at)

    def bits(self, tile: Value, row: Value) -> list[Value]:
        """Words of this lane's bits of 16 rows of a partly dropped tile, from ``16 row`` on."""
        b, each = self.b, words(self.shape.block_kv)
        place = (self.looked + self._index(tile * self.p.number("tile_step"))) * (self.shape.block_q // SIZE)
        start = (place + self._index(row)) * each * LANES + self._index(b.lane_id())
        buffer = self.p.buffer("mask_bits", u32)
        return [b.load(buffer, start + i * LANES) for i in range(each)]

    def _index(self, x: Value) -> Value:
        return self.b.cast(x, self.p.index)


def keep(tile: FragmentTile, bits: list[Value], dropped: float) -> None:
    """Replace elements whose bit is not set by ``dropped``."""
    parts = tile.engine
    b, width = parts.b, len(parts.part_cols)

    def each(x: Value, r: int, c: int) -> Value:
        word, fragment = divmod(c // width, WORD // SIZE)
        kept = b.ne(bits[word] & (1 << _bit(parts, fragment, r, c % width)), 0)
        return b.select(kept, x, b.const(dropped, f32))

    tile.map(each)
