"""How a simt kernel is cut up, and what that takes."""

from __future__ import annotations

from dataclasses import dataclass

from aule.target import Target
from aule.tile.matrix import QUAD, padded
from aule.tile.pitch import BANKS, Pitch

PAD = 4
LANES_PER_COLUMN = 2
"""Neighbouring lanes that share ``tx``; ``threads_y`` is a multiple of it."""


@dataclass(frozen=True)
class SimtShape:
    """How a simt kernel is cut up.

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
        Columns of P that are in shared memory at a time, the same number of each thread's; 0 means all.
    registers : int
        Registers a thread may use, where the language can say so. Left to itself, ptxas may aim at more resident
        workgroups than the shape was chosen for, and spill.
    late : bool
        V's first step is fetched when the scores are there, and not under their last step, where it holds registers
        all along: for shapes of which enough workgroups reside to hide the latency.
    apart : bool
        Tiles with dropped keys have a loop over V of their own, and the others' is free of its guard: less to do in
        each step, for a third more code.
    sums_kept : bool
        l waits in shared memory while the products run, and otherwise in registers.
    down : bool
        Products go down their columns, instead of along their rows.
    ahead_k, ahead_v : int
        How many positions of the summed dimension the first product's operands, and the second's, are read ahead. The
        first of them are read before the next chunk is fetched, and come while its addresses are computed.
    steady : bool
        Where rows follow each other in memory and are whole tiles, there is a kernel that relies on it: a thread's part
        of a chunk lies at constant distances, and no row is past the end.
    """

    block_q: int
    block_kv: int
    threads_x: int
    threads_y: int
    chunk_k: int
    chunk_v: int
    resident_q: bool
    block_p: int = 0
    registers: int = 255
    late: bool = False
    apart: bool = False
    sums_kept: bool = True
    down: bool = False
    ahead_k: int = 0
    ahead_v: int = 0
    steady: bool = False

    @property
    def part(self) -> int:
        """Keys of one part: S is made for the whole tile, P goes through shared memory part by part."""
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
        """Consecutive columns that one thread holds: the widest that wastes no more columns than a single one."""
        least = padded(cols, self.threads_x)
        return next(w for w in (4, 2, 1) if w == 1 or padded(cols, self.threads_x * w) <= least * 1.07)

    def chunk_pitch(self, rows: int) -> Pitch:
        """Of a chunk of Q or K: columns of ``rows`` elements. On the way in 32 lanes write an element of each of the
        chunk's quads at a time, of as many rows as the quads are pushed apart."""
        return Pitch(rows, QUAD, max(BANKS * QUAD // self.chunk_k, QUAD))

    @property
    def resident_pitch(self) -> Pitch:
        """Of Q where it stays, and of another matrix beside it. Brought in once, so that little is lost on the way."""
        return Pitch(self.block_q + PAD)

    @property
    def p_pitch(self) -> Pitch:
        """Of P, whose columns threads write as vectors, each those of its keys that follow each other."""
        return Pitch(self.block_q, max(min(self.part_cols, self.strip(self.block_kv)), 1), 2 * QUAD)

    @property
    def turned_pitch(self) -> Pitch:
        """Of P row by row."""
        return Pitch(self.block_kv + PAD)

    def value_cols(self, value_dim: int) -> int:
        """Columns of O with the padding that spreads them evenly over threads."""
        return padded(max(padded(value_dim, self.threads_x * self.strip(value_dim)), QUAD), QUAD)

    def accumulators(self, value_dim: int) -> int:
        """Elements of S and O that one thread holds in registers."""
        return self.rows * (self.block_kv + self.value_cols(value_dim)) // self.threads_x

    def shared_elements(self, head_dim: int, value_dim: int, subgroups: bool) -> dict[str, int]:
        """Length of each shared array, in fp32 elements."""
        scores = self.chunk_pitch(self.block_kv).at(self.chunk_k)
        if not self.resident_q:
            scores += self.chunk_pitch(self.block_q).at(self.chunk_k)
        values = self.chunk_v * self.value_cols(value_dim)
        sizes = {"stage": 2 * max(scores, values), "p": self.p_pitch.at(self.part)}
        if self.resident_q:
            sizes["q"] = self.resident_pitch.at(padded(head_dim, self.chunk_k))
        if not subgroups:
            sizes["rows"] = self.block_q * (self.threads_x + 1)
        return sizes

    def shared_bytes(self, head_dim: int, value_dim: int, subgroups: bool) -> int:
        """Shared memory of a forward kernel with this shape, m and l of its rows and the flags of the value guard
        included."""
        kept = {"m": self.block_q, "l": self.threads * self.rows if self.sums_kept else 0}
        return _bytes(self.shared_elements(head_dim, value_dim, subgroups) | kept) + 16

    def backward_elements(self, dim: int, sums: bool) -> dict[str, int]:
        """The same for a kernel of gradients, ``dim`` the wider of the head dimensions: no row is reduced, two matrices
        may be resident, and a kernel that also ``sums`` up puts the scores' gradient there transposed, too."""
        sizes = self.shared_elements(dim, dim, subgroups=True)
        if self.resident_q:
            sizes["own"] = sizes["q"]
        if sums:
            sizes["p"] = max(sizes["p"], self.turned_pitch.at(self.block_q))
        return sizes

    def backward_bytes(self, dim: int, sums: bool) -> int:
        """Shared memory of a kernel of gradients."""
        return _bytes(self.backward_elements(dim, sums))


def _bytes(sizes: dict[str, int]) -> int:
    return sum(-(-4 * n // 16) * 16 for n in sizes.values())


def uses_subgroups(target: Target, shape: SimtShape) -> bool:
    """Rows are reduced by shuffles: the device has them and the lanes of a row fit into its smallest subgroup."""
    smallest = min(target.subgroup_sizes, default=target.subgroup_size)
    return 0 < shape.threads_x * LANES_PER_COLUMN <= smallest and shape.threads % smallest == 0


def wave_size(target: Target, shape: SimtShape) -> int:
    """The subgroup size a simt kernel asks for; 0 takes what the driver gives. 64 lanes on AMD is the literature's
    advice for kernels bound by plain arithmetic; it is not measured here."""
    wide = target.vendor == "amd" and 64 in target.subgroup_sizes
    return 64 if wide and uses_subgroups(target, shape) and shape.threads % 64 == 0 else 0
