"""Kernels before the main kernel that classify the tiles of a mask (`build_tiles`) and list them (`build_order`).

Tiles of a user's mask function are classified by `function_tiles`, and listed here.

*Own* rows are those that a workgroup of the main kernel holds, *other* rows those that it passes over: query rows and
keys in the forward pass, keys and query rows in the kernel of dK and dV (``transposed``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, Scalar, Vector, f16, f32, i32, i64, u8, u32
from aule.ops.attention.prepass.tile_list import HEADER, LANES, WORD, bit_number, first_classified, words
from aule.ops.scores.band import Scores
from aule.ops.scores.config import ScoreConfig
from aule.ops.scores.parameters import Parameters
from aule.ops.shared.parameters import workgroup_number
from aule.target import Target
from aule.tile.common.math import NEG_INF
from aule.tile.common.matrix import divmod_const
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import Components

THREADS = 256
NONE, SOME, ALL = 0, 1, 2
"""How many of a tile's scores the mask keeps."""


class Tiles(Protocol):
    """Rows and columns of tiles, and whether the rows are keys."""

    @property
    def own(self) -> int: ...

    @property
    def other(self) -> int: ...

    @property
    def transposed(self) -> bool: ...


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
        As in `MaskTilesConfig`.
    left, right : bool
        The band of kept keys has this side.
    everywhere : bool
        No tile may run without code for dropped keys.
    subgroups : bool
        The device has subgroups of 32 lanes; otherwise threads exchange numbers through shared memory.
    """

    own: int
    other: int
    transposed: bool
    left: bool
    right: bool
    everywhere: bool
    index64: bool
    subgroups: bool = True


def build_tiles(config: MaskTilesConfig, target: Target) -> KernelIR:
    """Trace the kernel that classifies tiles, one workgroup to a tile."""
    b = Builder("attention_mask_tiles", THREADS, LANES)
    p = _parameters(b, config.index64)
    number = workgroup_number(b)
    with b.if_(number < p.number("looked_at")):
        _classify(b, p, config, target, number)
    return b.finish()


def _classify(b: Builder, p: Parameters, config: MaskTilesConfig, target: Target, number: Value) -> None:
    """Store how much of a tile the mask keeps and, for a boolean mask, which keys."""
    tiles, blocks, heads = p.number("map_tiles"), p.number("map_blocks"), p.number("map_heads")
    block, tile = (number // tiles) % blocks, number % tiles
    which = number // (tiles * blocks)
    batch, head = which // heads, which % heads
    query0, key0, queries, keys = rectangle(config, block, tile)
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
        with nullcontext() if first_run + THREADS <= runs else b.if_(run < runs):
            take(run)
    keeps = b.workgroup_any(b.ne(any_kept.value, 0))
    changes = b.workgroup_any(b.ne(any_changed.value, 0))
    with b.if_(b.eq(thread, 0)):
        found = b.select(keeps, b.select(changes, b.const(SOME, i32), b.const(ALL, i32)), b.const(NONE, i32))
        b.store(p.buffer("mask_tiles", i32, "write"), b.cast(number, p.index), found)
    if config.dtype == "bool":
        lanes = Components(b, target, f16)
        # Also if the mask drops nothing: the band or the end of the sequence may drop keys of such a tile, whose bits
        # are then read.
        with b.if_(keeps):
            _store_bits(p, config, lanes, number, halves, across)


def _store_bits(
    p: Parameters, config: MaskTilesConfig, lanes: Components, number: Value, halves: Value, across: int
) -> None:
    """Store the bits of a tile in the order in which lanes hold scores. ``halves`` has ``across`` words for each query
    row, each with the bits of 16 keys."""
    b = p.b
    count, rows = words(config.other), config.own // SIZE
    with b.loop(b.subgroup_id(), rows * count, THREADS // LANES, name="word") as at:
        row, word = divmod_const(b, at, count)
        bits = b.var(b.const(0, u32), "bits")
        for fragment in range(WORD // SIZE):
            col = word * WORD + fragment * SIZE
            with b.if_(col < config.other) if config.other % WORD else nullcontext():
                for r, y in enumerate(lanes.part_rows):
                    for c, x in enumerate(lanes.part_cols):
                        own, other = row * SIZE + lanes.lane_row + y, col + lanes.lane_col + x
                        query, key = (other, own) if config.transposed else (own, other)
                        half = b.load(halves, query * across + (key >> 4))
                        bit = (half >> b.cast(key & 15, u32)) & 1
                        bits.value = bits.value | (bit << bit_number(lanes, fragment, r, c))
        to = (b.cast(number, p.index) * (rows * count) + b.cast(at, p.index)) * LANES
        b.store(p.buffer("mask_bits", u32, "write"), to + b.cast(b.lane_id(), p.index), bits.value)


def rectangle(config: Tiles, block: Value, tile: Value) -> tuple[Value, Value, int, int]:
    """The first query row and key of a tile, and its numbers of rows and keys."""
    own, other = (block * config.own, config.own), (tile * config.other, config.other)
    (query0, queries), (key0, keys) = (other, own) if config.transposed else (own, other)
    return query0, key0, queries, keys


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
    """Trace the kernel that lists tiles, 32 threads to a block of rows."""
    b = Builder("attention_mask_order", LANES, LANES if config.subgroups else 0)
    p = _parameters(b, config.index64, config.left, config.right)
    number = workgroup_number(b)
    with b.if_(number < p.number("listed")):
        _list(b, p, config, number)
    return b.finish()


def _list(b: Builder, p: Parameters, config: TileOrderConfig, number: Value) -> None:
    blocks, tiles = p.number("own_blocks"), p.number("other_tiles")
    which, block = number // blocks, number % blocks
    scores, lane = Scores(p, b.const(0, i32)), b.lane_id() if config.subgroups else b.thread_id()
    order = p.buffer("mask_order", i32, "write")
    start = b.cast(number, p.index) * b.cast(tiles + HEADER, p.index)
    classified = first_classified(p, which, block)
    count = b.var(b.const(0, i32), "count")
    rank: Callable[[Builder, Value, Value], tuple[Value, Callable[[], Value]]] = _rank_in_subgroup
    if not config.subgroups:
        rank = partial(_rank_in_workgroup, b.shared("taken", i32, LANES))

    def kind(tile: Value) -> Value:
        at = classified + b.cast(tile * p.number("tile_step"), p.index)
        query0, key0, queries, keys = rectangle(config, block, tile)
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
            place, total = rank(b, taken, lane)
            with b.if_(taken):
                b.store(order, start + b.cast(count.value + place + (HEADER - 1), p.index), tile)
            count.value = count.value + total()
        with b.if_(b.eq(lane, wanted - SOME)):
            b.store(order, start + (wanted - SOME), count.value)


def _rank_in_subgroup(b: Builder, taken: Value, lane: Value) -> tuple[Value, Callable[[], Value]]:
    """How many lanes up to this one take their tile; and how many of all."""
    one, none = b.const(1, i32), b.const(0, i32)
    place = b.select(taken, one, none)
    for step in (1, 2, 4, 8, 16):  # prefix sum
        before = b.shuffle(place, b.max(lane - step, 0))
        place = place + b.select(lane >= step, before, none)
    return place, lambda: b.shuffle(place, LANES - 1)


def _rank_in_workgroup(flags: Value, b: Builder, taken: Value, thread: Value) -> tuple[Value, Callable[[], Value]]:
    """As `_rank_in_subgroup`, through ``flags`` in shared memory."""
    one, none = b.const(1, i32), b.const(0, i32)
    b.store(flags, thread, b.select(taken, one, none))
    b.barrier()
    place, total = b.var(none, "place"), b.var(none, "total")
    with b.loop(0, LANES, name="thread") as i:
        flag = b.load(flags, i)
        total.value = total.value + flag
        place.value = place.value + b.select(i <= thread, flag, none)
    b.barrier()  # everyone has read the flags
    return place.value, lambda: total.value


def _parameters(b: Builder, index64: bool, left: bool = False, right: bool = False) -> Parameters:
    index: Scalar = i64 if index64 else i32
    return Parameters(b, ScoreConfig(dtype="f16", head_dim=1, value_dim=1, left=left, right=right), index)
