"""Configurations of the decoding kernels; lengths, strides, pages and splits are run-time parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from aule.ops.decode.problem import QUANTISED
from aule.ops.scores.config import ScoreConfig
from aule.tile.common.matrix import padded
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.shape import row_stride

SCORE_PADDING = 8
"""Numbers after a row of scores in shared memory, so that eight rows start in different groups of banks."""
WIDEST = 128
"""Most columns to a multiple of which rows are padded on matrix units: 16 bytes for each of eight lanes."""


@dataclass(frozen=True)
class DecodeShape:
    """Layout of a simt workgroup over query rows and keys.

    A *team* of lanes holds one key, each lane a few of its elements. A subgroup has several teams, a workgroup several
    subgroups, and each step of a team takes several keys.

    Attributes
    ----------
    rows : int
        Query rows of a workgroup (all of one key head): a power of two.
    lanes : int
        Lanes of a team: a power of two, at most a subgroup.
    run : int
        Elements that a lane reads at once; 1 if rows are not aligned.
    keys : int
        Keys of a team in one step: a power of two.
    subgroup : int
        Lanes of a subgroup; 0 if the device has none, and teams exchange through shared memory.
    subgroups : int
        Subgroups of a workgroup; teams, if there are no subgroups.
    registers : int
        Most registers of a thread, for languages that can say so; 0 leaves it to the driver.
    """

    engine: ClassVar = "simt"

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
        """Teams of a subgroup; of the workgroup, if there are no subgroups."""
        return self.subgroup // self.lanes if self.subgroup else self.subgroups

    @property
    def subgroup_step(self) -> int:
        """Consecutive keys of a subgroup's step; of the workgroup's, if there are no subgroups."""
        return self.teams * self.keys

    @property
    def step(self) -> int:
        """Keys of a workgroup's step."""
        return self.subgroup_step * (self.subgroups if self.subgroup else 1)

    def pieces(self, dim: int) -> int:
        """Runs of a lane that cover a row of ``dim`` elements."""
        return -(-dim // (self.lanes * self.run))

    def padded(self, dim: int) -> int:
        """Elements of a row of ``dim`` elements, padded to full runs of all lanes."""
        return self.pieces(dim) * self.lanes * self.run

    def shared_bytes(self, value_dim: int) -> int:
        """Shared memory of a workgroup."""
        sums = 4 * self.subgroups * self.rows * (self.padded(value_dim) + 2) if self.subgroups > 1 else 0
        exchanged = 0 if self.subgroup or self.lanes == 1 else 4 * self.threads * self.rows * self.keys
        return sums + exchanged


@dataclass(frozen=True)
class FragmentDecodeShape:
    """Layout of a workgroup over query rows and keys, for the kernel on matrix units.

    Attributes
    ----------
    rows : int
        Query rows of a workgroup: 8, which uses half of each fragment, or 16.
    blocks : int
        Blocks of 16 keys of a subgroup's step: a power of two.
    subgroups : int
        Subgroups of a workgroup, each with its own keys: a power of two, at most 16.
    registers : int
        Most registers of a thread, for languages that can say so; 0 leaves it to the driver.
    lanes : int
        Lanes of a subgroup.
    ahead : bool
        Values of a quantised cache are prefetched a step ahead, like its keys.
    """

    engine: ClassVar = "fragment"

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
    def subgroup_step(self) -> int:
        """Consecutive keys of a subgroup's step."""
        return self.blocks * SIZE

    @property
    def step(self) -> int:
        """Keys of a workgroup's step."""
        return self.subgroup_step * self.subgroups

    def shared_bytes(self, head_dim: int, value_dim: int) -> int:
        """Most shared memory of a workgroup: partial results of the subgroups, queries with a factor each, and P."""
        sums = 4 * self.subgroups * self.rows * (padded(value_dim, WIDEST) + 2)
        queries = 2 * SIZE * row_stride(padded(head_dim, WIDEST)) + 4 * SIZE
        return sums + queries + 2 * self.step * row_stride(SIZE)


class _SharedTile:
    """A workgroup whose subgroups all work on the same tile of ``keys``."""

    keys: int

    @property
    def step(self) -> int:
        """Keys of a workgroup's step."""
        return self.keys

    @property
    def subgroup_step(self) -> int:
        """Consecutive keys of a step: all of them."""
        return self.keys


@dataclass(frozen=True)
class LatentShape(_SharedTile):
    """Layout of a workgroup that decodes latents on matrix units (`aule.ops.decode.fragment.latent`).

    Attributes
    ----------
    rows : int
        Query rows of a workgroup: a multiple of 16.
    keys : int
        Keys of a tile: a power of two, at least 16.
    subgroups : int
        Subgroups of a workgroup: a power of two. Each computes its share of the scores, and its columns of O.
    depth_parts : int
        Subgroups among which the columns of the scores' product are divided: a power of two.
    stages : int
        2: the next tile is copied while this one is worked on. 1: it waits in registers meanwhile.
    registers : int
        Most registers of a thread, for languages that can say so; 0 leaves it to the driver.
    lanes : int
        Lanes of a subgroup.
    """

    engine: ClassVar = "fragment"

    rows: int
    keys: int
    subgroups: int
    depth_parts: int
    stages: int = 2
    registers: int = 0
    lanes: int = 32

    @property
    def threads(self) -> int:
        return self.subgroups * self.lanes

    @property
    def row_parts(self) -> int:
        """Parts into which the rows of the scores are divided."""
        return min(self.subgroups // self.depth_parts, self.rows // SIZE)

    @property
    def key_parts(self) -> int:
        """Parts into which the keys of the scores are divided."""
        return self.subgroups // (self.depth_parts * self.row_parts)

    @property
    def row_lanes(self) -> int:
        """Neighbouring lanes that share a row's softmax."""
        return self.threads // self.rows

    @property
    def possible(self) -> bool:
        """Whether everything is divided evenly."""
        even = self.rows * self.row_lanes == self.threads and self.key_parts * SIZE <= self.keys
        return even and 0 < self.row_lanes <= min(self.lanes, self.keys // 2) and self.keys <= self.threads

    @property
    def score_stride(self) -> int:
        """Numbers from one row of scores to the next in shared memory."""
        return self.keys + SCORE_PADDING

    def width(self, head_dim: int, value_dim: int) -> int:
        """Columns of a key in shared memory: full fragments for each part of either product."""
        return max(padded(head_dim, SIZE * self.depth_parts), padded(value_dim, SIZE * self.subgroups))

    def tile_elements(self, head_dim: int, value_dim: int) -> int:
        """Elements of the keys' tiles, through whose memory the queries pass."""
        return max(self.stages * self.keys, self.rows) * row_stride(self.width(head_dim, value_dim))

    def shared_bytes(self, head_dim: int, value_dim: int) -> int:
        """Most shared memory of a workgroup: tiles, P, scores, two numbers for each row, and the places of two tiles'
        keys."""
        halves = self.tile_elements(head_dim, value_dim) + self.rows * row_stride(self.keys)
        scores = self.depth_parts * self.rows * self.score_stride
        return 2 * halves + 4 * scores + 8 * self.rows + 2 * 8 * self.keys


@dataclass(frozen=True)
class LatentWarpgroupShape(_SharedTile):
    """Layout of a workgroup that decodes latents with products of warpgroups (`aule.ops.decode.warpgroup.latent`): 64
    query rows, tiles of 64 keys, and four subgroups for each of three roles.

    Attributes
    ----------
    stages : int
        Tiles in shared memory: a power of two.
    score_registers, value_registers, copy_registers : int
        Registers of a thread that computes scores, that only adds values, and that copies.
    """

    engine: ClassVar = "warpgroup"
    rows: ClassVar = 64
    keys = 64
    lanes: ClassVar = 32
    role_threads: ClassVar = 128

    stages: int = 2
    score_registers: int = 240
    value_registers: int = 208
    copy_registers: int = 56

    @property
    def threads(self) -> int:
        return 3 * self.role_threads

    @property
    def registers(self) -> int:
        """Registers of each thread at first."""
        return (self.score_registers + self.value_registers + self.copy_registers) // 3

    def shared_bytes(self, head_dim: int, value_dim: int) -> int:
        """Shared memory of a workgroup: queries, tiles, P, a number for each row, and mbarriers."""
        halves = (self.rows + self.stages * self.keys) * head_dim + self.rows * self.keys
        return 2 * halves + 4 * self.rows + 8 * (4 * self.stages + 2)


AnyLatentShape = LatentShape | LatentWarpgroupShape
"""Shapes of the kernels of latents on matrix units."""
AnyShape = DecodeShape | FragmentDecodeShape | AnyLatentShape


@dataclass(frozen=True, kw_only=True)
class CacheConfig(ScoreConfig, ABC):
    """Fields that all decoding kernels on GPUs share.

    Attributes
    ----------
    cache : str
        Element type of keys and values.
    split : bool
        The keys of a sequence are divided among workgroups, each with a partial result.
    last_workgroup_combines : bool
        The last workgroup of a block of rows combines the partial results; else, a second launch or the cluster.
    cluster : int
        Workgroups of a cluster, which are the splits of a block of rows and combine their results; else 1.
    next_launch_overlaps : bool
        The next launch starts before this one has ended, and waits for it.
    flat_grid : bool
        The grid is one-dimensional; else its axes are row blocks of heads, splits, and sequences, or splits first in
        clusters.
    several_row_blocks : bool
        A key head may have several blocks of rows.
    one_token : bool
        Every sequence has one query token, so that a row's head takes no division.
    fixed_rows : int
        Query rows of every workgroup, if all have as many; else 0.
    partials_at_once : int
        Partial results that a thread of the last workgroup loads before it uses any.
    evict_first : bool
        Keys and values are the first to leave the caches.
    page_shared : bool
        Keys that are looked up together lie in one page: those of a subgroup's step, or, on matrix units, of a block.
    unit : tuple of bool
        For q, k, v, o: the head dimension has stride 1.
    aligned : tuple of bool
        For q and o: rows can be read or written as vectors of four; for k and v, as runs.
    """

    cache: str
    shape: AnyShape
    split: bool = False
    last_workgroup_combines: bool = False
    cluster: int = 1
    next_launch_overlaps: bool = False
    flat_grid: bool = False
    several_row_blocks: bool = True
    one_token: bool = False
    fixed_rows: int = 0
    partials_at_once: int = 1
    evict_first: bool = False
    page_shared: bool = False
    aligned: tuple[bool, ...] = (True, True, True, True)
    index64: bool = False

    @property
    def stores_partials(self) -> bool:
        """Workgroups store partial results in global memory."""
        return self.split and self.cluster == 1

    @property
    def quantised(self) -> bool:
        """Whether keys and values have scales."""
        return self.cache in QUANTISED

    @property
    @abstractmethod
    def stored(self) -> str:
        """Element type of the cache's buffers."""


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(CacheConfig):
    """The simt kernel.

    Attributes
    ----------
    latent : bool
        The values are the first columns of the keys, which are read once.
    """

    shape: DecodeShape
    latent: bool = False

    @property
    def stored(self) -> str:
        if self.words:
            return "u32"
        return {"e4m3": "u8"}.get(self.cache, self.cache)

    @property
    def words(self) -> bool:
        """Whether a quantised cache is read as words of four bytes, which take a quarter of the registers."""
        return self.quantised and self.shape.run % 4 == 0 and all(self.aligned[1:3])


@dataclass(frozen=True, kw_only=True)
class FragmentDecodeConfig(CacheConfig):
    """The kernel on matrix units.

    Attributes
    ----------
    most_rows : int
        Most rows of a workgroup, rounded up to a power of two; only these are combined and stored.
    early_queries : bool
        Queries, and the first values of a quantised cache, are loaded before the sequence's length is known.
    direct_queries : bool
        Lanes load queries as right factors, not through shared memory.
    """

    shape: FragmentDecodeShape
    most_rows: int
    early_queries: bool = False
    direct_queries: bool = False

    @property
    def stored(self) -> str:
        return "u32"


@dataclass(frozen=True, kw_only=True)
class LatentConfig(CacheConfig):
    """The kernel of latents on matrix units: the values are the first columns of the keys, which are read once. Here
    ``aligned`` concerns runs of eight for q, too."""

    shape: LatentShape

    @property
    def stored(self) -> str:
        return {"e4m3": "u8"}.get(self.cache, self.cache)


@dataclass(frozen=True, kw_only=True)
class LatentWarpgroupConfig(CacheConfig):
    """The kernel of latents over warpgroups; ``aligned`` as in `LatentConfig`."""

    shape: LatentWarpgroupShape

    @property
    def stored(self) -> str:
        return self.cache
