"""What is fixed about a decoding kernel while it is traced; lengths, strides, pages and splits are parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

from aule.ops.attention.config import ScoreConfig
from aule.ops.decode.problem import QUANTISED
from aule.tile.arrangement import SIZE
from aule.tile.fragment_shape import row_stride
from aule.tile.matrix import padded

WIDEST = 128
"""Columns to a multiple of which rows are padded on matrix units, at most: 16 bytes for each of eight lanes."""


@dataclass(frozen=True)
class DecodeShape:
    """How a workgroup is laid over query rows and keys.

    A *team* of lanes holds one key, each lane a few of its elements. A subgroup has several teams, a workgroup several
    subgroups, and each step of a team takes several keys.

    Attributes
    ----------
    rows : int
        Query rows of a workgroup (all of one key head): a power of two.
    lanes : int
        Lanes of a team: a power of two, at most a subgroup.
    run : int
        Elements that a lane reads at once; 1 where rows are not aligned.
    keys : int
        Keys of a team in one step: a power of two.
    subgroup : int
        Lanes of a subgroup; 0 when the device has none, and teams exchange through shared memory.
    subgroups : int
        Subgroups of a workgroup, or teams where there are no subgroups.
    registers : int
        Registers a thread may use, for languages that can say so; 0 leaves it to the driver.
    """

    rows: int
    lanes: int
    run: int
    keys: int
    subgroup: int
    subgroups: int
    registers: int = 0

    @property
    def threads(self) -> int:
        return (self.subgroup or self.lanes) * self.subgroups

    @property
    def teams(self) -> int:
        """Teams of a subgroup; of the workgroup, where there are no subgroups."""
        return self.subgroup // self.lanes if self.subgroup else self.subgroups

    @property
    def stretch(self) -> int:
        """Consecutive keys of a subgroup's step; of the workgroup's, where there are no subgroups."""
        return self.teams * self.keys

    @property
    def step(self) -> int:
        """Keys of a workgroup's step."""
        return self.stretch * (self.subgroups if self.subgroup else 1)

    @property
    def parts(self) -> int:
        """Partial results of a workgroup that are added up in shared memory."""
        return self.subgroups

    def pieces(self, dim: int) -> int:
        """Runs of a lane that cover a row of ``dim`` elements."""
        return -(-dim // (self.lanes * self.run))

    def shared_bytes(self, value_dim: int) -> int:
        """Shared memory of a workgroup."""
        columns = self.pieces(value_dim) * self.lanes * self.run
        sums = 4 * self.parts * self.rows * (columns + 2) if self.parts > 1 else 0
        exchanged = 0 if self.subgroup or self.lanes == 1 else 4 * self.threads * self.rows * self.keys
        return sums + exchanged


@dataclass(frozen=True)
class FragmentDecodeShape:
    """How a workgroup of the kernel for matrix units is laid over query rows and keys.

    Attributes
    ----------
    rows : int
        Query rows of a workgroup: 8, where the rest of a fragment is left out, or 16.
    blocks : int
        Blocks of 16 keys that a subgroup takes in one step: a power of two.
    subgroups : int
        Subgroups of a workgroup, each with its own keys: a power of two, at most 16.
    registers : int
        Registers a thread may use, for languages that can say so; 0 leaves it to the driver.
    lanes : int
        Lanes of a subgroup.
    ahead : bool
        Values of a quantised cache are loaded a step ahead, as its keys are.
    """

    rows: int
    blocks: int
    subgroups: int
    registers: int = 0
    lanes: int = 32
    ahead: bool = True

    @property
    def threads(self) -> int:
        return self.subgroups * self.lanes

    @property
    def stretch(self) -> int:
        """Consecutive keys of a subgroup's step."""
        return self.blocks * SIZE

    @property
    def step(self) -> int:
        """Keys of a workgroup's step."""
        return self.stretch * self.subgroups

    def shared_bytes(self, head_dim: int, value_dim: int) -> int:
        """Shared memory of a workgroup, for head dimensions as padded as they can be: the subgroups' results, queries
        with a factor each, and weights on their way from one product to the next."""
        sums = 4 * self.subgroups * self.rows * (padded(value_dim, WIDEST) + 2)
        queries = 2 * SIZE * row_stride(padded(head_dim, WIDEST)) + 4 * SIZE
        return sums + queries + 2 * self.step * row_stride(SIZE)


@dataclass(frozen=True, kw_only=True)
class CacheConfig(ScoreConfig, ABC):
    """What kernels of a few query rows against a part of the cache, or all of it, have in common.

    Attributes
    ----------
    cache : str
        Element type of keys and values.
    split : bool
        The keys of a sequence are divided among workgroups, which leave partial results.
    gather : bool
        The last workgroup to finish adds those of its rows up; else another kernel does.
    waiters : int
        The last parts, so many of them, wait for those of their rows and add them up (`await_parts.py`).
    trailed : bool
        No parts do, but workgroups of a launch that goes with this one (`trail.py`).
    everyone : bool
        There are no more parts than that.
    at_one_go : bool
        A lane of them has no more than ``at_once`` parts to read.
    cluster : int
        Parts of a block of rows, if these are a cluster of workgroups, which add up their parts together; else 1.
    followed : bool
        A launch follows that waits for this one itself.
    flat : bool
        The grid is counted through; else its axes are heads and blocks of rows, parts (first, in clusters), sequences.
    tall : bool
        A key head may have several blocks of rows.
    single : bool
        Every sequence has one query token: which head a row is takes no division.
    fixed : int
        Query rows of every workgroup, where all have as many; else 0.
    at_once : int
        Parts that a thread loads before it uses any, where the last workgroup adds them up.
    once : bool
        Keys and values leave the caches first.
    whole : bool
        Keys that are looked up together lie in one page: those of a subgroup's step, or, on matrix units, of a block.
    unit : tuple of bool
        For q, k, v, o: the head dimension has stride 1.
    aligned : tuple of bool
        For q and o, rows can be read or written as vectors of four; for k and v, as runs.
    """

    cache: str
    split: bool = False
    gather: bool = False
    waiters: int = 0
    trailed: bool = False
    everyone: bool = False
    at_one_go: bool = False
    cluster: int = 1
    followed: bool = False
    flat: bool = False
    tall: bool = True
    single: bool = False
    fixed: int = 0
    at_once: int = 1
    once: bool = False
    whole: bool = False
    aligned: tuple[bool, ...] = (True, True, True, True)
    index64: bool = False

    @property
    def leaves_parts(self) -> bool:
        """Workgroups leave their results as parts in memory."""
        return self.split and self.cluster == 1 and not self.awaits

    @property
    def awaits(self) -> bool:
        """Some workgroups wait for the parts of others."""
        return self.waiters > 0 or self.trailed

    @property
    def makes_parts(self) -> bool:
        """Workgroups attend to keys, and do not only wait for those that do."""
        return True

    @property
    def quantised(self) -> bool:
        return self.cache in QUANTISED

    @property
    @abstractmethod
    def stored(self) -> str:
        """Element type of the cache's buffers."""


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(CacheConfig):
    """The kernel for plain arithmetic."""

    shape: DecodeShape

    @property
    def stored(self) -> str:
        if self.words:
            return "u32"
        return {"e4m3": "u8"}.get(self.cache, self.cache)

    @property
    def words(self) -> bool:
        """Bytes of a quantised cache are read as words of four, which take a quarter of the registers."""
        return self.quantised and self.shape.run % 4 == 0 and all(self.aligned[1:3])


@dataclass(frozen=True, kw_only=True)
class FragmentDecodeConfig(CacheConfig):
    """The kernel for matrix units.

    Attributes
    ----------
    held : int
        Rows that a workgroup can have, of those that the shape has room for, up to a power of two: no others are added
        up at the end.
    early : bool
        Queries do not wait for the sequence's length, nor do the first values of a quantised cache.
    brief : bool
        A part has one step at most, and nothing of it waits for the length.
    direct : bool
        Queries are read as they are multiplied, and not by way of shared memory.
    """

    shape: FragmentDecodeShape
    held: int
    early: bool = False
    brief: bool = False
    direct: bool = False

    @property
    def stored(self) -> str:
        return "u32"


@dataclass(frozen=True, kw_only=True)
class TrailConfig(CacheConfig):
    """The kernel that waits for the parts that workgroups of the other launch make, and adds them up.

    Attributes
    ----------
    shape : FragmentDecodeShape
        Of those workgroups.
    held : int
        Rows that each of them can have.
    columns : int
        Of a row, with those that it is padded by.
    threads : int
        Of its own workgroups.
    """

    shape: FragmentDecodeShape
    held: int
    columns: int
    threads: int

    @classmethod
    def beside(
        cls, first: FragmentDecodeConfig, columns: int, waiters: int, threads: int, at_once: int, at_one_go: bool
    ) -> TrailConfig:
        """Of the launch that goes with one that makes parts. What only those need who read keys makes no other
        kernel."""
        kept = {field.name: getattr(first, field.name) for field in fields(CacheConfig)}
        kept |= {"cache": "f16", "paging": "none", "softcap": False, "alibi": False, "once": False, "trailed": False}
        kept |= {"whole": False, "waiters": waiters, "at_once": at_once, "at_one_go": at_one_go}
        return cls(**kept, shape=first.shape, held=first.held, columns=columns, threads=threads)

    @property
    def stored(self) -> str:
        return "u32"

    @property
    def makes_parts(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class ReduceConfig(ScoreConfig):
    """The kernel that adds up what workgroups made of the parts of a sequence's keys.

    Attributes
    ----------
    threads : int
        Of a workgroup, which has one row.
    aligned : bool
        Rows of o can be written as vectors of four.
    single : bool
        Every sequence has one query token, and the grid's axes are heads and sequences; else it is counted through.
    awaits : bool
        The launch before may not be over yet.
    """

    single: bool = False
    awaits: bool = False
    threads: int
    aligned: bool
    index64: bool
