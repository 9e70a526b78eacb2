"""The tile sizes of a simt kernel, and the shared memory they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from aule import tuning
from aule.target import Target
from aule.tile.common.matrix import QUAD, padded
from aule.tile.simt.bank_padding import BANKS, BankPadding

PAD = 4
LANES_PER_COLUMN = 2
"""Neighbouring lanes that share ``tx``; ``threads_y`` is a multiple of it."""


@dataclass(frozen=True)
class SimtShape:
    """Tile sizes and schedule of a simt kernel.

    Attributes
    ----------
    block_q, block_kv : int
        Rows and columns of the score tile.
    threads_x, threads_y : int
        Threads along a row and down the rows.
    chunk_k : int
        Columns of Q and K per step of the first product.
    chunk_v : int
        Rows of V per step of the second product.
    resident_q : bool
        Q stays in shared memory; otherwise it is read again with every chunk of K.
    block_p : int
        Columns of P that are in shared memory at a time, equally many of each thread; 0 means all.
    registers : int
        Registers a thread may use, where the language can limit them. Without a limit a compiler may aim at more
        resident workgroups than the shape was chosen for, and spill.
    late_values : bool
        V's first step is fetched after the scores, and not during their last step, where it would hold registers: for
        shapes with enough resident workgroups to hide the latency.
    edge_loop : bool
        Edge tiles have a loop over V of their own, so that the loop of full tiles has no guard against Inf and NaN.
    sums_in_shared : bool
        l lies in shared memory while the products run, instead of in registers.
    by_columns : bool
        Products go down their columns, instead of along their rows.
    prefetch_k, prefetch_v : int
        Positions of the summed dimension by which the operands of the first and second product are read ahead. The
        first of them are read before the next chunk is fetched, and arrive while its addresses are computed.
    full_tiles : bool
        If rows are dense in memory and fill all tiles, use a kernel that relies on it: a thread's part of a chunk lies
        at constant distances, and no row is past the end.
    """

    engine: ClassVar = "simt"

    block_q: int
    block_kv: int
    threads_x: int
    threads_y: int
    chunk_k: int
    chunk_v: int
    resident_q: bool
    block_p: int = 0
    registers: int = 255
    late_values: bool = False
    edge_loop: bool = False
    sums_in_shared: bool = True
    by_columns: bool = False
    prefetch_k: int = 0
    prefetch_v: int = 0
    full_tiles: bool = False

    @property
    def part(self) -> int:
        """Keys of one part of P, which passes through shared memory part by part."""
        return self.block_p or self.block_kv

    @property
    def part_cols(self) -> int:
        """Columns of a part that one thread holds."""
        return self.part // self.threads_x

    @property
    def threads(self) -> int:
        return self.threads_x * self.threads_y

    @property
    def rows(self) -> int:
        """Rows of a tile that one thread works on."""
        return self.block_q // self.threads_y

    @property
    def row_strip(self) -> int:
        """Consecutive rows that one thread holds."""
        return next(w for w in (4, 2, 1) if self.rows % w == 0)

    def strip(self, cols: int) -> int:
        """Consecutive columns that one thread holds: the widest strip that hardly adds padding."""
        least = padded(cols, self.threads_x)
        return next(w for w in (4, 2, 1) if w == 1 or padded(cols, self.threads_x * w) <= least * 1.07)

    def chunk_padding(self, rows: int) -> BankPadding:
        """Padding of a chunk of Q or K, which lies in columns of ``rows`` elements. 32 lanes store an element of each
        of the chunk's quads at a time, from as many rows as each quad is pushed by."""
        return BankPadding(rows, QUAD, max(BANKS * QUAD // self.chunk_k, QUAD))

    @property
    def resident_padding(self) -> BankPadding:
        """Padding of resident matrices. They are stored once, so that bank conflicts hardly matter."""
        return BankPadding(self.block_q + PAD)

    @property
    def p_padding(self) -> BankPadding:
        """Padding of P, whose columns threads store as vectors."""
        return BankPadding(self.block_q, max(min(self.part_cols, self.strip(self.block_kv)), 1), 2 * QUAD)

    @property
    def transposed_padding(self) -> BankPadding:
        """Padding of P row by row."""
        return BankPadding(self.block_kv + PAD)

    def value_cols(self, value_dim: int) -> int:
        """Columns of O, padded to spread evenly over threads."""
        return padded(max(padded(value_dim, self.threads_x * self.strip(value_dim)), QUAD), QUAD)

    def accumulators(self, value_dim: int) -> int:
        """Elements of S and O that one thread holds in registers."""
        return self.rows * (self.block_kv + self.value_cols(value_dim)) // self.threads_x

    def shared_elements(self, head_dim: int, value_dim: int, subgroups: bool) -> dict[str, int]:
        """Length of each shared array of a forward kernel, in fp32 elements."""
        scores = self.chunk_padding(self.block_kv).at(self.chunk_k)
        if not self.resident_q:
            scores += self.chunk_padding(self.block_q).at(self.chunk_k)
        values = self.chunk_v * self.value_cols(value_dim)
        sizes = {"stage": 2 * max(scores, values), "p": self.p_padding.at(self.part)}
        if self.resident_q:
            sizes["q"] = self.resident_padding.at(padded(head_dim, self.chunk_k))
        if not subgroups:
            sizes["rows"] = self.block_q * (self.threads_x + 1)
        return sizes

    def shared_bytes(self, head_dim: int, value_dim: int, subgroups: bool) -> int:
        """Bytes of shared memory of a forward kernel, with m, l and the flags for Inf and NaN in V."""
        row_state = {"m": self.block_q, "l": self.threads * self.rows if self.sums_in_shared else 0}
        return _bytes(self.shared_elements(head_dim, value_dim, subgroups) | row_state) + 16

    def backward_elements(self, dim: int, sums: bool) -> dict[str, int]:
        """Length of each shared array of a backward kernel, ``dim`` the wider of the head dimensions. No row is
        reduced, two matrices may be resident, and a kernel that also ``sums`` dQ stores dS transposed, too."""
        sizes = self.shared_elements(dim, dim, subgroups=True)
        if self.resident_q:
            sizes["own"] = sizes["q"]
        if sums:
            sizes["p"] = max(sizes["p"], self.transposed_padding.at(self.block_q))
        return sizes

    def backward_bytes(self, dim: int, sums: bool) -> int:
        """Bytes of shared memory of a backward kernel."""
        return _bytes(self.backward_elements(dim, sums))


def _bytes(sizes: dict[str, int]) -> int:
    return sum(-(-4 * n // 16) * 16 for n in sizes.values())


def uses_subgroups(target: Target, shape: SimtShape) -> bool:
    """Whether rows are reduced by shuffles: the lanes of a row fit into the device's smallest subgroup."""
    smallest = min(target.subgroup_sizes, default=target.subgroup_size)
    return 0 < shape.threads_x * LANES_PER_COLUMN <= smallest and shape.threads % smallest == 0


def wave_size(target: Target, shape: SimtShape) -> int:
    """The subgroup size a simt kernel asks for; 0 takes the driver's default."""
    size: int = tuning.number(target, "simt.subgroup_size")
    possible = size in target.subgroup_sizes and uses_subgroups(target, shape) and shape.threads % size == 0
    return size if possible else 0
