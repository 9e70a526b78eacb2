"""Loads of keys and values by the simt decoding kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from aule.ir import Value, Var
from aule.ir.types import f32, i32
from aule.ops.decode.config import DecodeConfig
from aule.ops.decode.work_range import WorkRange
from aule.tile.common.lane_team import Team
from aule.tile.common.math import from_e4m3
from aule.tile.common.matrix import divmod_const
from aule.tile.common.quantised import E4M3_HALF, floats


class KeyLoads:
    """Loads of a thread: the keys of its team in each step, and its columns of them.

    Attributes
    ----------
    subgroup : Value
        Number of this thread's subgroup.
    member : Value
        Number of this thread's team in its subgroup.
    """

    def __init__(self, work: WorkRange, config: DecodeConfig, team: Team, f16: bool) -> None:
        self.work, self.b, self.team, self.shape, self.config = work, work.b, team, config.shape, config
        self._halves = config.cache == "e4m3" and config.words and f16  # e4m3 is converted through fp16
        b, shape = work.b, config.shape
        self.subgroup, in_group = b.const(0, i32), team.thread
        if shape.subgroup:
            self.subgroup, in_group = divmod_const(b, team.thread, shape.subgroup)
        self.member, _ = divmod_const(b, in_group, shape.lanes)
        self._width = shape.run // 4 if config.words else shape.run
        self._lookups = 0 if config.paging == "none" else 1 if config.page_shared else shape.keys

    def key_variables(self) -> list[Var]:
        """Variables for a step's runs of K."""
        b, empty = self.b, self.b.splat(self.b.const(0, self.work.k.elem), self._width)
        return [b.var(empty, "k") for _ in range(self.shape.keys * self.shape.pieces(self.config.head_dim))]

    def page_variables(self) -> list[Var]:
        """Variables for a step's page numbers; none if the cache is contiguous."""
        return [self.b.var(self.b.const(0, i32), "page") for _ in range(self._lookups)]

    def column(self, piece: int) -> Value:
        """First column of a lane's piece of a row."""
        return (self.team.lane + piece * self.shape.lanes) * self.shape.run

    def subgroup_start(self, start: Value) -> Value:
        """First key of this thread's subgroup in the step at ``start``."""
        return start + self.subgroup * self.shape.subgroup_step

    def first_key(self, start: Value) -> Value:
        """First key of this thread's team in the step at ``start``; the next ones follow at every ``shape.teams``."""
        return self.subgroup_start(start) + self.member

    def keys(self, start: Value) -> list[Value]:
        """Keys of this thread's team in the step at ``start``; those past the end are replaced by the last."""
        b, shape, first = self.b, self.shape, self.first_key(start)
        return [b.min(first + i * shape.teams, self.work.end - 1) for i in range(shape.keys)]

    def pages(self, start: Value) -> list[Value]:
        """Page numbers of a step's keys; one for all if they share a page."""
        if not self._lookups:
            return []
        keys = self.keys(start)
        if self.config.page_shared:
            keys = [self.b.min(self.subgroup_start(start), self.work.end - 1)]
        return self.work.page_numbers(keys)

    def load(self, name: str, keys: list[Value], pages: list[Value]) -> list[Value]:
        """Load this lane's runs of K or V, by key and piece."""
        b, shape = self.b, self.shape
        matrix = self.work.k if name == "k" else self.work.v
        pieces, padded = shape.pieces(matrix.cols), shape.padded(matrix.cols)
        starts = [matrix.base + offset for offset in self.work.key_starts(name, keys, pages)]
        if self.config.words:  # all counts are in words of four bytes
            matrix, padded = replace(matrix, cols=matrix.cols // 4), padded // 4
            starts = [start >> 2 for start in starts]
        columns = [(self.team.lane + piece * shape.lanes) * self._width for piece in range(pieces)]
        return [matrix.load_quad(b, start, column, padded, self._width) for start in starts for column in columns]

    def scales(self, pages: list[Value], own_keys: list[Value]) -> list[tuple[Value, Value]]:
        """Load the scales of K and V of some keys of a step."""
        keys = [self.b.min(key, self.work.end - 1) for key in own_keys]
        found = self.work.scales(keys, pages if self.config.page_shared else self.work.page_numbers(keys))
        return [(k * (1.0 / E4M3_HALF), v * (1.0 / E4M3_HALF)) for k, v in found] if self._halves else found

    def numbers_by_key(self, runs: list[Value], pieces: int) -> Iterator[list[Value]]:
        """Elements of each key of a step as fp32, unscaled; times `E4M3_HALF` if e4m3 is converted through fp16."""
        for i in range(self.shape.keys):
            yield [x for run in runs[i * pieces : (i + 1) * pieces] for x in self._floats(run)]

    def _floats(self, run: Value) -> list[Value]:
        b, cache = self.b, self.config.cache
        if self.config.words:
            return [x for word in b.unpack(run) for x in floats(b, word, cache, self._halves)]
        return b.unpack(from_e4m3(b, run) if cache == "e4m3" else b.cast(run, f32))
