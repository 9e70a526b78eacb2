"""The second kernel of a split sequence, where the first cannot add up the parts that its workgroups made."""

from __future__ import annotations

from aule.ir import Builder, KernelIR
from aule.ir.types import Scalar, i32, i64
from aule.ops.attention.parameters import Parameters
from aule.ops.attention.scores import Extent
from aule.ops.decode.config import ReduceConfig
from aule.ops.decode.gather import Gather, Row
from aule.target import Target

KERNEL_NAME = "decode_reduce"

_AT_ONCE = 4
"""Parts that a thread loads before it uses any."""


def build_reduce(config: ReduceConfig, target: Target, name: str = KERNEL_NAME) -> KernelIR:
    """Trace the kernel: one workgroup for each query row."""
    b = Builder(name, config.threads, arithmetic="quick")
    index: Scalar = i64 if config.index64 else i32
    if config.awaits:
        # The launch that makes the parts is an ordinary one, right before this on the same stream: when it is over, so
        # is all that came before it.
        b.launch_await()
    p = Parameters(b, config, index)
    number = b.group_id(0) + b.group_id(1) * b.group_count(0)
    exists = number < p.number("blocks")
    if config.single:
        head, batch, token = b.group_id(0), b.group_id(1), b.const(0, i32)
    else:
        tokens, heads = p.number("tokens"), p.number("heads_q")
        head_number = number // tokens
        token = number - head_number * tokens
        batch = b.min(head_number // heads, p.number("batches") - 1)
        head = head_number - head_number // heads * heads
    extent = Extent.of(p, batch)
    if config.packed:  # sequences of more rows than that have no parts
        exists = exists & (token < extent.seq_q) & (extent.seq_q <= tokens)
    row = Row(number, batch, head, token, extent)
    with b.if_(exists):
        Gather(p, config, config.aligned, config.threads, _AT_ONCE, "read").add_row(row, p.number("splits"))
    return b.finish()
