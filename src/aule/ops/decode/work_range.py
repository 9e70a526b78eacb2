"""The query rows of a decoding workgroup, and its split of the keys that they may keep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from aule.ir import Builder, Value
from aule.ir.types import SCALARS, f32, i32, i64
from aule.ops.decode.config import CacheConfig
from aule.ops.scores import modifiers as mod
from aule.ops.scores.band import Extent, Reach, mask_function, score_function
from aule.ops.scores.pages import Pages
from aule.ops.scores.parameters import Parameters
from aule.ops.softmax.online_softmax import Maximum, SoftmaxState
from aule.tile.common.math import LOG2E, LOWEST, fold
from aule.tile.common.matrix import Matrix, divmod_const


@dataclass(frozen=True)
class QueryRow:
    """A query row whose scores a lane has: its place, the modifiers of its scores, and its softmax state."""

    batch: Value
    head: Value
    token: Value
    position: Value
    modifiers: list[mod.Modifier]
    softmax: SoftmaxState

    def site(self, key: Value) -> mod.Site:
        """The place of the row's score with a key."""
        return mod.Site(self.batch, self.head, self.token, key, self.position)


class WorkRange:
    """The rows and keys of one workgroup; `find_length` sets those attributes that depend on the sequence's length.

    Rows are the query heads of a key head for all query tokens: row ``token * group + head``. The workgroup has rows
    from ``row0`` on. It takes a step of keys at ``first`` and at every ``stride`` after it, up to ``end``. Every row
    keeps all keys of ``full_first .. full_end - 1``, and none keeps any before ``first_kept``.

    Splits of a sequence take its steps in turn. So their numbers of steps differ by one at most, splits that run at the
    same time read neighbouring memory, and without a window a split's first key does not depend on the length.

    Attributes
    ----------
    split : Value
        Number of the workgroup's split.
    splits : Value
        Splits of these rows' keys that are not empty.
    expected_first : Value
        First key of the split if there is no window and the sequence is long enough.
    row_block : Value
        Number of the workgroup's rows among all blocks of rows.
    """

    def __init__(self, b: Builder, config: CacheConfig) -> None:
        self.b, self.config, self.index = b, config, i64 if config.index64 else i32
        self.p = Parameters(b, config, self.index)
        number = self.p.number
        # Blocks of rows that read the same keys are neighbours; then come heads, whose keys may be neighbours.
        self._exists = []
        self.split = b.const(0, i32)
        if config.flat_grid:
            block = b.group_id(0) + b.group_id(1) * b.group_count(0)
            self._exists.append(block < number("blocks"))  # there may be more workgroups than work
            rest, block_of_head = self._divmod(block, "row_blocks")
            rest, self.kv_head = self._divmod(rest, "heads_kv")
            if config.split:
                rest, self.split = self._divmod(rest, "splits")
            self.batch = b.min(rest, number("batches") - 1)
        else:
            heads, splits, self.batch = (b.group_id(axis) for axis in (0, 1, 2))
            if config.cluster > 1:  # workgroups of a cluster are neighbours along the first axis
                heads, splits = splits, heads
            if config.split:
                self.split = splits
            several = config.several_row_blocks
            self.kv_head, block_of_head = self._divmod(heads, "row_blocks") if several else (heads, b.const(0, i32))
        self.row_block = (self.batch * number("heads_kv") + self.kv_head) * number("row_blocks") + block_of_head
        self.group = number("group")
        self.q, self.k, self.v = (self.matrix(name) for name in "qkv")
        self.pages = None if config.paging == "none" else Pages(self.p, self.batch)
        self.row0 = block_of_head * config.shape.rows
        self.left = number("left") if config.left else None
        self.right = number("right") if config.right else None
        self.expected_first = self.split * config.shape.step

    def find_rows(self) -> None:
        """Set the number of query rows before `find_length`; for sequences that are not packed."""
        assert not self.config.packed
        self.first_q, self.rows = self.b.const(0, i32), self.p.number("seq_q") * self.group

    def find_length(self) -> Value:
        """Load the sequence's length and find rows and keys; returns whether this workgroup has work."""
        b, config, number = self.b, self.config, self.p.number
        self.extent = Extent.of(self.p, self.batch)
        self.first_q = b.const(0, i32) if self.extent.first_q is None else self.extent.first_q
        self.rows = self.extent.seq_q * self.group
        """Rows of the sequence."""
        exists = [*self._exists, self.row0 < self.rows]
        if config.packed:  # longer sequences are left to the prefill kernel
            exists.append(self.extent.seq_q <= number("tokens"))
        self.splits = b.const(1, i32)
        self._find_keys(b.min(self.row0 + config.shape.rows, self.rows) - 1)
        if config.last_workgroup_combines:  # tickets are drawn by splits that are not empty
            exists.append(self.split < self.splits)
        return fold(b, "and", exists)

    def _divmod(self, value: Value, name: str) -> tuple[Value, Value]:
        by = self.p.number(name)
        quotient = value // by
        return quotient, value - quotient * by

    def _find_keys(self, last_row: Value) -> None:
        b, number, shift, shape = self.b, self.p.number, self.extent.shift, self.config.shape
        nearest, furthest = (shift + self.query(row)[0] for row in (self.row0, last_row))
        reach = Reach.of(b, self.extent.seq_kv, self.left, self.right, nearest, furthest)
        self.first_kept = self.first = reach.first
        if self.config.left:
            # Steps begin at multiples of a subgroup's keys, so that these lie in one page if pages are multiples of it.
            self.first = reach.first - (reach.first & (shape.subgroup_step - 1))
        self.end = b.max(reach.end, self.first)
        self.stride = b.const(shape.step, i32)
        if self.config.split:  # a short sequence has fewer splits; the others are empty
            steps, _ = divmod_const(b, self.end - self.first + (shape.step - 1), shape.step)
            self.splits = b.min(b.max(steps >> number("least_shift"), 1), number("splits"))
            self.stride = self.splits * shape.step
            self.first = b.select(self.split < self.splits, self.first + self.expected_first, self.end)
        self.full_first, self.full_end = reach.full_first, b.min(reach.full_end, self.end)

    def matrix(self, name: str) -> Matrix:
        """An operand: q and o with all heads of the sequence, k and v of this workgroup's head; pages from page 0."""
        b, p, config = self.b, self.p, self.config
        column, zero = "qkvo".index(name), b.const(0, i32)
        if name in "qo":
            elem, base = config.dtype, p.strided(name, zero if config.packed else self.batch)
        else:
            elem, base = config.stored, p.strided(name, zero if config.paging != "none" else self.batch, self.kv_head)
        return Matrix(
            p.buffer(name, SCALARS[elem], "write" if name == "o" else "read"),
            base,
            zero,
            config.head_dim if name in "qk" else config.value_dim,
            p.number(f"{name}_row_stride", self.index),
            None if config.unit[column] else p.number(f"{name}_col_stride", self.index),
            config.aligned[column],
            once=name in "kv" and config.evict_first,
        )

    def query(self, row: Value) -> tuple[Value, Value]:
        """Query token and query head of a row."""
        if self.config.one_token:
            return self.b.const(0, i32), self.kv_head * self.group + row
        token = row // self.group
        return token, self.kv_head * self.group + (row - token * self.group)

    def own_query(self, row: Value) -> tuple[Value, Value]:
        """Query token and query head of this workgroup's row; rows past the last repeat it."""
        return self.query(self.b.min(self.row0 + row, self.rows - 1))

    def query_row(self, row: Value) -> QueryRow:
        """This workgroup's row, as in `own_query`, with the softmax state of no keys."""
        b = self.b
        token, head = self.own_query(row)
        m, l = b.var(b.const(LOWEST, f32), "m"), b.var(b.const(0.0, f32), "l")
        modifiers, position = self.modifiers(head), self.extent.shift + token
        return QueryRow(self.batch, head, token, position, modifiers, SoftmaxState(Maximum(b), m, l))

    def at_edge(self, key: Value) -> Value:
        """Whether some row may drop some of a subgroup's keys in the step that starts at ``key``."""
        if self.config.everywhere:
            return self.b.eq(key, key)
        return (key < self.full_first) | (key + self.config.shape.subgroup_step > self.full_end)

    def row_start(self, name: str, matrix: Matrix, token: Value, head: Value) -> Value:
        """Index of a query row in q or o."""
        b, index = self.b, self.index
        start = matrix.base + b.cast(head, index) * self.p.number(f"{name}_stride1", index)
        return start + b.cast(self.first_q + token, index) * matrix.row_stride

    def key_starts(self, name: str, keys: list[Value], pages: list[Value]) -> list[Value]:
        """Offsets of keys from an operand's base; ``pages`` are the numbers of their pages, or of one for all."""
        b, p, index = self.b, self.p, self.index
        row_stride = p.number(f"{name}_row_stride", index)
        if self.pages is None:
            return [b.cast(key, index) * row_stride for key in keys]
        stride = p.number(f"{name}_stride0", index)
        pages = pages * len(keys) if len(pages) == 1 else pages
        return [
            b.cast(page, index) * stride + b.cast(self.pages.split(key)[1], index) * row_stride
            for key, page in zip(keys, pages, strict=True)
        ]

    def page_numbers(self, keys: list[Value]) -> list[Value]:
        """Numbers of the pages that hold keys; none if the cache is contiguous."""
        return [] if self.pages is None else [self.pages.number(self.pages.split(key)[0]) for key in keys]

    def scales(self, keys: list[Value], pages: list[Value]) -> list[tuple[Value, Value]]:
        """Scales of quantised keys and of their values; ``pages`` as for `key_starts`."""
        b, p = self.b, self.p
        found = []
        for name in ("k_scale", "v_scale"):
            base = p.strided(name, b.const(0, i32) if pages else self.batch, self.kv_head)
            starts = self.key_starts(name, keys, pages)
            found.append([b.load(p.buffer(name, f32), base + start) for start in starts])
        return list(zip(*found, strict=True))

    def modifiers(self, head: Value) -> list[mod.Modifier]:
        """Modifiers of a query head's scores."""
        b, p, config = self.b, self.p, self.config
        found = []
        if config.softcap:
            found.append(mod.softcap(p.number("softcap", f32)))
        if config.alibi:
            slope = b.load(p.buffer("alibi", f32), p.strided("alibi", self.batch, head))
            found.append(mod.alibi(slope * LOG2E))
        return [*found, *self._functions, mod.band(self.end, self.left, self.right)]

    @cached_property
    def _functions(self) -> list[mod.Modifier]:
        """The user's functions, one for all rows, which share what they have in common."""
        config = self.config
        found = [] if config.score_function is None else [score_function(self.p)]
        return found if config.mask_function is None else [*found, mask_function(self.p)]
