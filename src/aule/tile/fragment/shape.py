"""The tile sizes of a kernel on matrix units, and the shared memory they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aule.ir.types import PANEL
from aule.tile.common.matrix import padded
from aule.tile.fragment.arrangement import SIZE

RUN = 8
"""Elements that are moved together."""

_MOST_PASSING = 48 << 10
"""Bytes of shared memory that are too many for matrices that only pass through it."""


@dataclass(frozen=True)
class FragmentShape:
    """Tile sizes and schedule of a kernel on matrix units.

    Attributes
    ----------
    block_q, block_kv : int
        Rows and columns of the score tile.
    subgroups : int
        Subgroups of a workgroup; each has its own part of the rows.
    stages : int
        2: K and V of the next tile are fetched while this one is worked on, with one barrier a tile. 1: V is fetched
        during the first product, the next K during the second, with two barriers and half the memory. 3, forward over
        warpgroups: fetches have the time of an entire tile, and not only of its scores.
    resident_q : bool
        Q stays in registers; otherwise it is read from shared memory again for every tile. In a backward kernel, the
        second matrix that the workgroup owns.
    registers : int
        Registers a thread may use, where the language can limit them.
    lanes : int
        Lanes of a subgroup.
    columns : int
        Subgroups that share rows in the kernel of dK and dV. Each computes some columns of the scores, which then pass
        through shared memory, and some columns of the results: more rows to a subgroup, and fewer reads in all. With
        ``resident_q``, some rows of the scores instead, so that each matrix is in one subgroup's registers, as are its
        own rows of P and dS when they are multiplied. Forward, with as many ``depth_parts``: they divide the columns of
        Q, which stay in registers, and of O.
    depth_parts : int
        Of the subgroups that share rows, so many compute the same scores, each over its part of the depth of the
        products, and add their parts up in shared memory. A power of two that divides ``columns``. With
        ``resident_q``, both matrices that the workgroup of a backward kernel owns stay in registers; all subgroups then
        share rows and divide the depth, so that each needs nothing but its own columns.
    staged : bool
        Results pass through shared memory to become factors.
    warpgroups : bool
        Four subgroups multiply together, out of shared memory in panels (`aule.tile.warpgroup`).
    register_columns : int
        The last columns of Q, a multiple of 16, that stay in registers while the others are in shared memory, which
        has no room for them. In a backward kernel, the first columns of the first matrix that the workgroup owns.
    prefetch_scores : bool
        Forward, with one stage: the scores of the next tile are computed after O's share of this one, so that rescaling
        O falls between O's products, where nothing else needs registers. For rows that are prefetched in registers.
    late_fetch : bool
        Backward: the next rows are fetched when P and dS have become factors, and stored before dQ's product. For rows
        that are prefetched in registers.
    sync_every : int
        Forward: a subgroup barrier after so many steps of 16 columns of the scores' product, so that a compiler loads
        fewer fragments ahead; 0 for none.
    start_at_delta : bool
        Backward: sums of dP start at -delta, which then is not subtracted.
    edge_loop : bool
        Backward: under a causal mask, edge tiles and full tiles have separate loops.
    copiers : int
        Forward over warpgroups: further subgroups that do nothing but copy; 4, or 0 for none. Workgroups then stay for
        many blocks, and ``stages`` are 2 or 4.
    copies : {"async", "tma"}
        With copiers: they copy 16 bytes a thread at a time, or one of them starts copies of whole tiles, by the tensor
        memory accelerator of sm_90.
    q_stages : int
        With copiers: 2 if Q of the next block is copied while this one is worked on, otherwise 1.
    """

    block_q: int
    block_kv: int
    subgroups: int
    stages: int
    resident_q: bool
    registers: int = 255
    lanes: int = 32
    columns: int = 1
    depth_parts: int = 1
    staged: bool = False
    warpgroups: bool = False
    register_columns: int = 0
    prefetch_scores: bool = False
    sync_every: int = 0
    late_fetch: bool = False
    start_at_delta: bool = False
    edge_loop: bool = False
    copiers: int = 0
    copies: Literal["async", "tma"] = "async"
    q_stages: int = 1

    @property
    def engine(self) -> str:
        return "warpgroup" if self.warpgroups else "fragment"

    @property
    def threads(self) -> int:
        return self.subgroups * self.lanes

    @property
    def rows(self) -> int:
        """Rows of one subgroup."""
        return self.block_q * self.columns // self.subgroups

    @property
    def score_cut(self) -> tuple[int, int]:
        """Parts into which subgroups that share rows divide their scores in a backward kernel, by rows and columns."""
        parts = self.columns // self.depth_parts
        return (parts, 1) if self.resident_q else (1, parts)

    @property
    def owns_in_registers(self) -> bool:
        """Whether both matrices that a workgroup of a backward kernel owns stay in registers."""
        return self.resident_q and self.depth_parts > 1

    @property
    def partial_scores(self) -> int:
        """Numbers of shared memory through which parts of scores are added up."""
        return self.block_q * self.block_kv * self.depth_parts if self.depth_parts > 1 else 0

    def q_columns(self, head_dim: int) -> int:
        """Columns of Q that are read from shared memory for every tile."""
        return 0 if self.resident_q else max(padded(head_dim, SIZE) - self.register_columns, 0)

    def shared_elements(self, head_dim: int, value_dim: int) -> tuple[int, int, int]:
        """Elements of resident Q, and of one stage of K and of V."""
        stays = self.q_columns(head_dim)
        q_row, k_row, v_row = (
            padded(d, PANEL) if self.warpgroups else row_stride(d)
            for d in (stays, self.result_columns(head_dim), self.result_columns(value_dim))
        )
        return self.block_q * q_row if stays else 0, self.block_kv * k_row, self.block_kv * v_row

    def tile_elements(self, head_dim: int, value_dim: int) -> int:
        """Elements of Q, K and V of a forward kernel. Columns of Q that stay in registers pass through the memory of K
        and V. Over warpgroups V has one more stage."""
        q, k, v = self.shared_elements(head_dim, value_dim)
        if self.copiers:
            return self.q_stages * q + self.stages * (k + v)
        stages = self.stages * (k + v) + (v if self.warpgroups else 0)
        passing = SIZE if self.in_pieces(head_dim) else self._passing(head_dim)
        return q + max(stages, self.block_q * self.columns * row_stride(passing) if passing else 0)

    def _passing(self, head_dim: int) -> int:
        """Columns of Q that stay in registers, of one of the subgroups that share rows."""
        return self.result_columns(head_dim) // self.columns - self.q_columns(head_dim)

    def in_pieces(self, head_dim: int) -> bool:
        """Whether the columns of Q that stay in registers are too many to pass through shared memory at once."""
        passing = 2 * self.block_q * self.columns * row_stride(self._passing(head_dim))
        return passing + 4 * self.partial_scores >= _MOST_PASSING

    def piece(self, head_dim: int, value_dim: int) -> int:
        """Columns of Q that pass through shared memory at a time, for each of the subgroups that share rows."""
        room = self.tile_elements(head_dim, value_dim) - self.shared_elements(head_dim, value_dim)[0]
        return (room // (self.block_q * self.columns) - RUN) // SIZE * SIZE

    def result_columns(self, dim: int) -> int:
        """Columns of a matrix: as many for each of the subgroups that share rows, in fragments or, for warpgroups that
        share rows, in panels."""
        return padded(dim, self.columns * (PANEL if self.warpgroups and self.columns > 1 else SIZE))

    def backward_elements(self, head_dim: int, value_dim: int, sums: bool = False) -> int:
        """Elements of shared memory of a backward kernel: the rows that it owns and a tile of the others, of two
        matrices each; dS where it also sums dQ; and dS and P where subgroups share rows. Matrices that stay in
        registers pass through the others' memory, 16 columns at a time if need be. Warpgroups have dS twice: the next
        is written while products read the last."""
        if self.warpgroups:
            widths = sum(padded(self.result_columns(dim), PANEL) for dim in (head_dim, value_dim))
            tiles = 2 * self.block_q * padded(self.block_kv, PANEL)
            return (self.block_q + self.stages * self.block_kv) * widths + tiles
        k_row, v_row = (row_stride(self.result_columns(dim)) for dim in (head_dim, value_dim))
        tiles = 2 if self.columns > 1 else int(sums)
        rest = self.stages * self.block_kv * (k_row + v_row) + tiles * self.block_q * row_stride(self.block_kv)
        if self.owns_in_registers:
            return max(rest, self.block_q * max(k_row, v_row))
        passing = max(rest, self.block_q * row_stride(SIZE))
        return self.block_q * k_row + (passing if self.resident_q else rest + self.block_q * v_row)

    @property
    def row_numbers(self) -> int:
        """Log-sum-exps and deltas of rows in shared memory in the kernel of dK and dV."""
        return 2 * min(self.stages, 2) * self.block_kv

    def shared_bytes(self, head_dim: int, value_dim: int, itemsize: int = 2) -> int:
        """Bytes of shared memory of a forward kernel; over warpgroups with the barrier at which they meet."""
        barriers = 16 * (self.q_stages + 3 * self.stages) if self.copiers else 16 * self.warpgroups
        tiles = itemsize * (self.tile_elements(head_dim, value_dim) + self.staged_elements)
        return tiles + 4 * self.partial_scores + barriers

    def backward_bytes(self, head_dim: int, value_dim: int, sums: bool = False) -> int:
        """Bytes of shared memory of a backward kernel."""
        halves = self.backward_elements(head_dim, value_dim, sums) + self.staged_elements
        numbers = 0 if self.warpgroups else self.row_numbers
        return 2 * halves + 4 * (self.partial_scores + numbers)

    @property
    def staged_elements(self) -> int:
        """Elements of shared memory in which results become factors: a tile of scores. Subgroups that share rows have
        that memory already."""
        return self.block_q * row_stride(self.block_kv) if self.staged and self.columns == 1 else 0


def row_stride(dim: int) -> int:
    """Elements from one row to the next in shared memory."""
    return padded(dim, SIZE) + RUN
