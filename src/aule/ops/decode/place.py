"""Where a workgroup of decoding stands: its query rows, and its part of the keys that they may keep."""

from __future__ import annotations

from aule.ir import Value
from aule.ir.types import SCALARS, f32, i32
from aule.ops.attention import modifiers as mod
from aule.ops.attention.pages import Pages
from aule.ops.attention.parameters import Parameters
from aule.ops.attention.scores import Extent, Reach
from aule.ops.decode.config import CacheConfig
from aule.tile.math import LOG2E, fold
from aule.tile.matrix import Matrix, divmod_const


class Place:
    """The place of one workgroup: what is known of it at once, and, from `measure` on, what the sequence's length says.

    Rows are the query heads of a key head, and the query tokens: row ``token * group + head`` of them. The workgroup
    has those from ``row0`` on, and a step of keys at ``first`` and at every ``stride`` behind it, up to ``end``; every
    row keeps all of ``full_first .. full_end - 1``, and none keeps any before ``kept``.

    Parts of a sequence take its steps in turns: none has more than one step more than another, parts that run at a time
    read neighbouring memory, and without a window it is known where a part begins before the length is.

    Parameters
    ----------
    rows : int
        Query rows of a workgroup.
    stretch : int
        Keys to a multiple of which a workgroup's first one is brought; a power of two.
    step : int
        Keys that a workgroup takes at a time: parts of a sequence are whole steps.

    Attributes
    ----------
    begin : Value
        Where the part begins, if there is no window and the sequence is as long.
    """

    def __init__(self, parameters: Parameters, config: CacheConfig, rows: int, stretch: int, step: int) -> None:
        self.p, self.b, self.config, self.index = parameters, parameters.b, config, parameters.index
        b, number = self.b, parameters.number
        # Blocks of rows that read the same keys come one after the other, then heads, whose keys may be neighbours.
        self._exists = []
        self.part = b.const(0, i32)
        if config.flat:
            block = b.group_id(0) + b.group_id(1) * b.group_count(0)
            self._exists.append(block < number("blocks"))  # there may be more workgroups than work
            rest, row_block = self._split(block, "row_blocks")
            rest, self.kv_head = self._split(rest, "heads_kv")
            if config.split:
                rest, self.part = self._split(rest, "splits")
            self.batch = b.min(rest, number("batches") - 1)
        else:
            heads, parts, self.batch = (b.group_id(axis) for axis in (0, 1, 2))
            if config.cluster > 1:  # whose workgroups are neighbours
                heads, parts = parts, heads
            if config.split:
                self.part = parts
            self.kv_head, row_block = self._split(heads, "row_blocks") if config.tall else (heads, b.const(0, i32))
        self.block_of_rows = (self.batch * number("heads_kv") + self.kv_head) * number("row_blocks") + row_block
        """Number of the workgroup's rows among all blocks of rows."""
        self.group = number("group")
        if config.makes_parts:
            self.q, self.k, self.v = (self.matrix(name) for name in "qkv")
        self.pages = None if config.paging == "none" else Pages(parameters, self.batch)
        self.row0 = row_block * rows
        self.left = number("left") if config.left else None
        self.right = number("right") if config.right else None
        self.begin = self.part * step
        self._block, self._stretch, self._step = rows, stretch, step

    def expect_rows(self) -> None:
        """Have query rows found before `measure`, which can be where they are not packed."""
        assert not self.config.packed
        self.first_q, self.rows = self.b.const(0, i32), self.p.number("seq_q") * self.group

    def measure(self) -> Value:
        """Find out how long the sequence is, and what follows from it; returns whether there is work here."""
        b, config, number = self.b, self.config, self.p.number
        self.extent = Extent.of(self.p, self.batch)
        self.first_q = b.const(0, i32) if self.extent.first_q is None else self.extent.first_q
        self.rows = self.extent.seq_q * self.group
        """Of the sequence."""
        exists = [*self._exists, self.row0 < self.rows]
        if config.packed:  # sequences of many rows are left to the kernel for matrix units
            exists.append(self.extent.seq_q <= number("tokens"))
        self.parts = b.const(1, i32)
        """Parts of the keys that these rows may keep."""
        self._reach(b.min(self.row0 + self._block, self.rows) - 1)
        if config.makes_parts and (config.gather or config.awaits):  # who adds up asks for parts that there are
            exists.append(self.part < self.parts)
        return fold(b, "and", exists)

    def _split(self, value: Value, name: str) -> tuple[Value, Value]:
        """Quotient and remainder by a parameter."""
        by = self.p.number(name)
        quotient = value // by
        return quotient, value - quotient * by

    def _reach(self, last_row: Value) -> None:
        b, number, shift, step = self.b, self.p.number, self.extent.shift, self._step
        nearest, furthest = (shift + self.token(row)[0] for row in (self.row0, last_row))
        reach = Reach.of(b, self.extent.seq_kv, self.left, self.right, nearest, furthest)
        self.kept = reach.first
        self.first = reach.first - (reach.first & (self._stretch - 1)) if self.config.left else reach.first
        self.end = b.max(reach.end, self.first)
        self.stride = b.const(step, i32)
        if self.config.split:  # a sequence that is short has fewer parts, and the others are empty
            steps, _ = divmod_const(b, self.end - self.first + (step - 1), step)
            self.parts = b.min(b.max(steps >> number("least_shift"), 1), number("splits"))
            self.stride = self.parts * step
            self.first = b.select(self.part < self.parts, self.first + self.begin, self.end)
        self.full_first, self.full_end = reach.full_first, b.min(reach.full_end, self.end)

    def matrix(self, name: str) -> Matrix:
        """An operand: of q and o all heads of the sequence, of k and v this workgroup's; of pages, from page 0."""
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
            once=name in "kv" and config.once,
        )

    def token(self, row: Value) -> tuple[Value, Value]:
        """The query token of a row, and its head."""
        if self.config.single:
            return self.b.const(0, i32), self.kv_head * self.group + row
        token = row // self.group
        return token, self.kv_head * self.group + (row - token * self.group)

    def existing(self, row: Value) -> tuple[Value, Value]:
        """The same of the ``row``-th of this workgroup, or of the sequence's last one where there is none."""
        return self.token(self.b.min(self.row0 + row, self.rows - 1))

    def row_start(self, name: str, whole: Matrix, token: Value, head: Value) -> Value:
        """Where a query row begins in q or o."""
        b, index = self.b, self.index
        start = whole.base + b.cast(head, index) * self.p.number(f"{name}_stride1", index)
        return start + b.cast(self.first_q + token, index) * whole.row_stride

    def key_starts(self, name: str, keys: list[Value], pages: list[Value]) -> list[Value]:
        """Where rows of keys begin in an operand, from its base; ``pages`` are the numbers of each one's page, or of
        the one that they all lie in."""
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
        """Of the pages that hold keys; none where there are no pages."""
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
        """What happens to the scores of a query head."""
        b, p, config = self.b, self.p, self.config
        found = []
        if config.softcap:
            found.append(mod.softcap(p.number("softcap", f32)))
        if config.alibi:
            slope = b.load(p.buffer("alibi", f32), p.strided("alibi", self.batch, head))
            found.append(mod.alibi(slope * LOG2E))
        return [*found, mod.band(self.end, self.left, self.right)]
