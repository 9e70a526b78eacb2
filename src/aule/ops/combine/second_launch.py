"""The kernel that combines partial results in a second launch."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Builder, KernelIR
from aule.ir.types import Scalar, i32, i64
from aule.ops.combine.partials import Row, RowCombiner
from aule.ops.scores.band import Extent
from aule.ops.scores.config import ScoreConfig
from aule.ops.scores.parameters import Parameters
from aule.target import Target

KERNEL_NAME = "decode_reduce"


@dataclass(frozen=True, kw_only=True)
class CombineConfig(ScoreConfig):
    """The kernel that combines the partial results of split sequences.

    Attributes
    ----------
    one_token : bool
        Every sequence has one query token, and the grid's axes are heads and sequences; else it is one-dimensional.
    overlaps_previous : bool
        The launch starts before the previous one has ended, and waits for it.
    threads : int
        Threads of a workgroup, which has one row.
    at_once : int
        Partial results that a thread loads before it uses any.
    aligned : bool
        Rows of o can be written as vectors of four.
    """

    one_token: bool = False
    overlaps_previous: bool = False
    threads: int
    at_once: int
    aligned: bool
    index64: bool


def build_combine(config: CombineConfig, target: Target, name: str = KERNEL_NAME) -> KernelIR:
    """Trace the kernel: one workgroup for each query row."""
    b = Builder(name, config.threads, arithmetic="quick")
    index: Scalar = i64 if config.index64 else i32
    if config.overlaps_previous:
        # The previous launch on the stream makes the partial results and is an ordinary one: when it has ended, so has
        # everything before it.
        b.launch_await()
    p = Parameters(b, config, index)
    number = b.group_id(0) + b.group_id(1) * b.group_count(0)
    exists = number < p.number("blocks")
    if config.one_token:
        head, batch, token = b.group_id(0), b.group_id(1), b.const(0, i32)
    else:
        tokens, heads = p.number("tokens"), p.number("heads_q")
        head_number = number // tokens
        token = number - head_number * tokens
        batch = b.min(head_number // heads, p.number("batches") - 1)
        head = head_number - head_number // heads * heads
    extent = Extent.of(p, batch)
    if config.packed:  # sequences with more tokens have no partial results
        exists = exists & (token < extent.seq_q) & (extent.seq_q <= tokens)
    row = Row(number, batch, head, token, extent)
    with b.if_(exists):
        combiner = RowCombiner(p, config.aligned, config.at_once, "read")
        combiner.combine_row(row, p.number("splits"))
    return b.finish()
