"""Shared memory of the latent decoding kernel over warpgroups, and the mbarriers at which its crews meet."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Builder, Value
from aule.ir.types import SCALARS, f32, u64
from aule.ops.decode.config import LatentWarpgroupConfig
from aule.tile.warpgroup.engine import PanelShape


@dataclass(frozen=True)
class Turns:
    """A buffer of one or several stages that crews use in turn; its ``number``-th use is in stage ``number % stages``.

    Attributes
    ----------
    mbarriers, first : Value, int
        The mbarriers of the stages, from ``first`` on.
    stages : int
        A power of two.
    """

    b: Builder
    mbarriers: Value
    first: int
    stages: int

    def init(self, threads: int) -> None:
        """Initialise the mbarriers, at which so many threads arrive."""
        for stage in range(self.stages):
            self.b.mbarrier_init(self.mbarriers, self.first + stage, threads)

    def arrive(self, number: Value) -> None:
        """Tell that this thread is done with a use."""
        self.b.mbarrier_arrive(self.mbarriers, self._stage(number))

    def wait(self, number: Value) -> None:
        """Wait until all threads are done with a use."""
        self.b.mbarrier_wait(self.mbarriers, self._stage(number), self._phase(number) & 1)

    def wait_before(self, number: Value) -> None:
        """Wait until all threads are done with the use before this one in the same stage, if there is one."""
        self.b.mbarrier_wait(self.mbarriers, self._stage(number), (self._phase(number) & 1) ^ 1)

    def _stage(self, number: Value) -> Value:
        return (number & (self.stages - 1)) + self.first

    def _phase(self, number: Value) -> Value:
        return number >> (self.stages.bit_length() - 1)


class Memory:
    """Q, the stages of K, P, and a factor for each row.

    K has two halves, which are filled and emptied one after the other: the left half of the values' columns, with the
    columns that are not values, and the right half.

    Attributes
    ----------
    filled, emptied : tuple of Turns
        Of the left and the right half of a stage of K; the first use of K comes with Q.
    weighed, added : Turns
        P and the factors are there; they have been used.
    """

    def __init__(self, b: Builder, config: LatentWarpgroupConfig) -> None:
        shape = self.shape = config.shape
        self.b, self.config = b, config
        self.q_panels = PanelShape(shape.rows, config.head_dim)
        self.k_panels = PanelShape(shape.keys, config.head_dim)
        self.p_panels = PanelShape(shape.rows, shape.keys)
        self.k_start = self.q_panels.elements
        self.p_start = self.k_start + shape.stages * self.k_panels.elements
        # First in shared memory, where panels are aligned.
        self.tiles = b.shared("tiles", SCALARS[config.dtype], self.p_start + self.p_panels.elements)
        self.factors = b.shared("factors", f32, shape.rows)
        mbarriers = b.shared("mbarriers", u64, 4 * shape.stages + 2)
        halves = [Turns(b, mbarriers, i * shape.stages, shape.stages) for i in range(4)]
        self.filled, self.emptied = (halves[0], halves[1]), (halves[2], halves[3])
        self.weighed, self.added = (Turns(b, mbarriers, 4 * shape.stages + i, 1) for i in range(2))
        for turns in (*self.emptied, self.weighed, self.added):
            turns.init(shape.role_threads)
        for turns in self.filled:
            turns.init(shape.role_threads // 2)

    def keys_at(self, number: Value) -> Value:
        """First element of the stage of K for a step, by the number of the step."""
        return (number & (self.shape.stages - 1)) * self.k_panels.elements + self.k_start
