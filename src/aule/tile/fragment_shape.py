"""How a kernel on matrix units is cut up, and the shared memory that it then takes."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir.types import PANEL
from aule.tile.arrangement import SIZE
from aule.tile.matrix import padded

RUN = 8
"""Elements that travel together."""

_PASSAGE = 48 << 10
"""Bytes that may be taken for what only passes through shared memory."""


@dataclass(frozen=True)
class FragmentShape:
    """How a kernel on matrix units is cut up.

    Attributes
    ----------
    block_q, block_kv : int
        Rows and columns of the score tile.
    subgroups : int
        Subgroups of a workgroup; each has its own part of the rows.
    stages : int
        2: K and V of the next tile come in while this one is worked on, with one barrier a tile. 1: V comes in under
        the first product, the next K under the second, with two barriers and half the memory. 3, forward over
        warpgroups: what comes in has the time of a whole tile for it, and not only that of its scores.
    resident_q : bool
        Q stays in registers; otherwise it is read from shared memory again for every tile. In a backward kernel the
        second of the matrices that it owns.
    registers : int
        Registers a thread may use, where the language can say so.
    lanes : int
        Lanes of a subgroup.
    columns : int
        Subgroups that share their rows, in the kernel of dK and dV. Each makes some columns of the scores, which then
        pass through shared memory, and some columns of the results: more rows of its own, and fewer reads in all. With
        ``resident_q`` some rows of the scores instead, so that each matrix is in one subgroup's registers, as are its
        own rows of P and dS when they are multiplied.
    staged : bool
        Results pass through shared memory to become factors.
    warpgroups : bool
        Four subgroups multiply together, out of shared memory in panels (`aule.tile.warpgroup`).
    held : int
        The last columns of Q, a multiple of 16, that stay in registers where the others do not: what shared memory
        has no room for. In a backward kernel the first columns of the first of the matrices that it owns.
    ahead : bool
        Forward, with one stage: the scores of the next tile are made behind O's share of this one, so that a change of
        the maximum comes between O's products, where nothing else wants registers. Backward: the next rows are fetched
        when P and dS have become factors, and stored before dQ's product. Both for rows that wait in registers.
    paced : int
        Forward: after so many steps of 16 columns the product for scores waits for its subgroup, so that a compiler has
        fewer fragments under way; 0 for never.
    offset : bool
        Backward: sums of dP begin at -delta, which then is not subtracted.
    apart : bool
        Backward: under a causal mask, tiles of which nothing is dropped have a loop of their own.
    """

    block_q: int
    block_kv: int
    subgroups: int
    stages: int
    resident_q: bool
    registers: int = 255
    lanes: int = 32
    columns: int = 1
    staged: bool = False
    warpgroups: bool = False
    held: int = 0
    ahead: bool = False
    paced: int = 0
    offset: bool = False
    apart: bool = False

    @property
    def threads(self) -> int:
        return self.subgroups * self.lanes

    @property
    def rows(self) -> int:
        """Rows of one subgroup."""
        return self.block_q * self.columns // self.subgroups

    @property
    def score_cut(self) -> tuple[int, int]:
        """Of a backward kernel: in how many parts subgroups that share rows make their scores, by rows and columns."""
        return (self.columns, 1) if self.resident_q else (1, self.columns)

    def q_columns(self, head_dim: int) -> int:
        """Columns of Q that are read from shared memory for every tile."""
        return 0 if self.resident_q else max(padded(head_dim, SIZE) - self.held, 0)

    def shared_elements(self, head_dim: int, value_dim: int) -> tuple[int, int, int]:
        """Elements of Q that stay, and of one stage of K and of V."""
        stays = self.q_columns(head_dim)
        q_row, k_row, v_row = (
            padded(d, PANEL) if self.warpgroups else row_stride(d) for d in (stays, head_dim, value_dim)
        )
        return self.block_q * q_row if stays else 0, self.block_kv * k_row, self.block_kv * v_row

    def tile_elements(self, head_dim: int, value_dim: int) -> int:
        """Elements of Q, K and V of a forward kernel. What stays of Q in registers passes through the others' memory,
        and over warpgroups V has a stage more."""
        q, k, v = self.shared_elements(head_dim, value_dim)
        stages = self.stages * (k + v) + (v if self.warpgroups else 0)
        passing = SIZE if self.in_pieces(head_dim) else padded(head_dim, SIZE) - self.q_columns(head_dim)
        return q + max(stages, self.block_q * row_stride(passing) if passing else 0)

    def in_pieces(self, head_dim: int) -> bool:
        """Whether the columns of Q that stay in registers are too many to pass through shared memory at once."""
        passing = padded(head_dim, SIZE) - self.q_columns(head_dim)
        return 2 * self.block_q * row_stride(passing) > _PASSAGE

    def piece(self, head_dim: int, value_dim: int) -> int:
        """How many of them pass at a time."""
        room = self.tile_elements(head_dim, value_dim) - self.shared_elements(head_dim, value_dim)[0]
        return (room // self.block_q - RUN) // SIZE * SIZE

    def backward_elements(self, head_dim: int, value_dim: int, sums: bool = False) -> int:
        """Of a backward kernel: the rows that it owns and some of the others, of two matrices each; dS where it also
        adds up dQ; and dS and P where subgroups share rows. What it keeps in registers passes through the others'
        memory, 16 columns at a time if need be. Warpgroups have dS twice: the next is written while products read the
        last."""
        if self.warpgroups:
            widths = padded(head_dim, PANEL) + padded(value_dim, PANEL)
            return (self.block_q + self.stages * self.block_kv) * widths + 2 * self.block_q * padded(
                self.block_kv, PANEL
            )
        k_row, v_row = row_stride(head_dim), row_stride(value_dim)
        tiles = 2 if self.columns > 1 else int(sums)
        rest = self.stages * self.block_kv * (k_row + v_row) + tiles * self.block_q * row_stride(self.block_kv)
        passing = max(rest, self.block_q * row_stride(SIZE))
        return self.block_q * k_row + (passing if self.resident_q else rest + self.block_q * v_row)

    def shared_bytes(self, head_dim: int, value_dim: int, itemsize: int = 2) -> int:
        """Shared memory of a forward kernel, and over warpgroups of where they meet."""
        return itemsize * (self.tile_elements(head_dim, value_dim) + self.staged_elements) + 16 * self.warpgroups

    def backward_bytes(self, head_dim: int, value_dim: int, sums: bool = False) -> int:
        """Shared memory of a backward kernel."""
        return 2 * (self.backward_elements(head_dim, value_dim, sums) + self.staged_elements)

    @property
    def staged_elements(self) -> int:
        """Elements of shared memory in which results become factors: a tile of scores. Subgroups that share rows have
        such a place already."""
        return self.block_q * row_stride(self.block_kv) if self.staged and self.columns == 1 else 0


def row_stride(dim: int) -> int:
    """Elements from one row to the next in shared memory."""
    return padded(dim, SIZE) + RUN
