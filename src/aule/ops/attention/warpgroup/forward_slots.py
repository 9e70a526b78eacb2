"""Shared memory of the forward kernel whose workgroups stay: slots of Q, K and V that one role fills and another reads.

Q has ``q_stages`` slots, K and V ``stages`` each. Every slot has two mbarriers: copiers arrive at one when it is full,
computing threads at the other when they have read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from aule.artifact import TensorMap
from aule.ir import Builder, Value
from aule.ir.types import PANEL, SCALARS, i32, i64, u32, u64
from aule.ops.attention.config import FragmentConfig
from aule.ops.scores.parameters import Parameters
from aule.ops.shared.parameters import workgroup_number
from aule.tile.fragment.engine import factor_elem

COPIERS = 4


def stays(config: FragmentConfig) -> bool:
    """Whether the kernel serves a configuration: nothing is added to scores, no weight is dropped, and operands are
    neither packed nor paged."""
    plain = config.packed is False and config.paging == "none" and not config.everywhere and not config.tiles_listed
    return plain and not config.dropout and config.value_dim <= config.head_dim


class Slots:
    """The slots of shared memory and their mbarriers, and the numbers of a role that goes through them in order."""

    def __init__(self, b: Builder, config: FragmentConfig) -> None:
        self.b, self.shape = b, config.shape
        self.parameters = Parameters(b, config, i64 if config.index64 else i32)
        shape, stages = config.shape, config.shape.stages
        assert shape.copiers == COPIERS and stages in (2, 4) and stays(config)
        q, k, v = shape.shared_elements(config.head_dim, config.value_dim)
        self.elem = factor_elem(config.factor or config.dtype)
        self.memory = b.shared("tiles", self.elem, shape.tile_elements(config.head_dim, config.value_dim))
        self.mbarriers = b.shared("mbarriers", u64, 2 * (shape.q_stages + 2 * stages))
        self.tensors: dict[str, TensorMap] = {}
        if shape.copies == "async":
            self.nonfinite = b.shared("nonfinite", u32, stages)
        self.sizes = {"q": q, "k": k, "v": v}
        self.counts = {"q": shape.q_stages, "k": stages, "v": stages}
        self.starts = {"q": 0, "k": shape.q_stages * q, "v": shape.q_stages * q + stages * k}
        self.first = {"q": 0, "k": 2 * shape.q_stages, "v": 2 * (shape.q_stages + stages)}
        for kind, count in self.counts.items():
            copying = shape.copiers * shape.lanes if kind == "q" else shape.lanes
            copying = 1 if shape.copies == "tma" else copying
            for slot in range(count):
                b.mbarrier_init(self.mbarriers, self.first[kind] + slot, threads=copying)
                b.mbarrier_init(self.mbarriers, self.first[kind] + count + slot, threads=shape.threads)
        if shape.copies == "tma":
            self._map(config)
            b.warpgroup_publish()  # copies arrive at mbarriers past this thread

    def _map(self, config: FragmentConfig) -> None:
        """Describe Q, K and V, whose boxes are panels of a block or a tile."""
        p, shape = self.parameters, self.shape
        for kind, heads, dim in (("q", "heads_q", config.head_dim), ("k", "heads_kv", config.head_dim),
                                 ("v", "heads_kv", config.value_dim)):  # fmt: skip
            buffer = p.buffer(kind, SCALARS[config.dtype])
            rows = p.number("seq_q" if kind == "q" else "seq_kv")
            offset, *strides = (
                p.number(f"{kind}_{name}", p.index) for name in ("offset", "row_stride", "stride1", "stride0")
            )
            box = PANEL, shape.block_q if kind == "q" else shape.block_kv, 1, 1
            sizes = dim, rows, p.number(heads), p.number("batches")
            self.tensors[kind] = self.b.tensor_map(f"{kind}_tensor", buffer, offset, sizes, strides, box)

    def blocks(self) -> tuple[Value, Value, Value]:
        """First, end and step of the blocks of this workgroup."""
        b = self.b
        return workgroup_number(b), self.parameters.number("blocks"), b.group_count(0) * b.group_count(1)


@dataclass(frozen=True)
class Place:
    """A slot of Q, K or V for the ``number``-th block or tile of a workgroup."""

    slots: Slots
    kind: str
    number: Value

    @property
    def slot(self) -> Value:
        return self.number & (self.slots.counts[self.kind] - 1)

    @property
    def start(self) -> Value:
        """Its first element."""
        return self.slot * self.slots.sizes[self.kind] + self.slots.starts[self.kind]

    @property
    def _parity(self) -> Value:
        return self.number >> self.slots.counts[self.kind].bit_length() - 1 & 1

    @property
    def full(self) -> Value:
        """The number of the mbarrier at which copiers arrive."""
        return self.slot + self.slots.first[self.kind]

    @property
    def _empty(self) -> Value:
        return self.slot + (self.slots.first[self.kind] + self.slots.counts[self.kind])

    def await_full(self) -> None:
        """Wait until its copies have arrived."""
        self.slots.b.mbarrier_wait(self.slots.mbarriers, self.full, self._parity)

    def await_empty(self) -> None:
        """Wait until nobody reads what it held before."""
        self.slots.b.mbarrier_wait(self.slots.mbarriers, self._empty, self._parity ^ 1)

    def filled(self) -> None:
        """Tell that this thread's copies have arrived."""
        self.slots.b.mbarrier_arrive(self.slots.mbarriers, self.full)

    def emptied(self) -> None:
        """Tell that this thread has read it."""
        self.slots.b.mbarrier_arrive(self.slots.mbarriers, self._empty)
