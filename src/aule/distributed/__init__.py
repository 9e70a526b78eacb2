"""Attention over several processes: context parallelism on `torch.distributed`.

Every rank of a process group holds some rows of a sequence (`shard`) and calls `ring_attention`, `ulysses_attention`
or, on a mesh of both, `attention`; inside `context_parallel` models do so by themselves. `decode_attention` attends to
a cache that is spread over ranks.
"""

from aule.distributed.context import context_parallel
from aule.distributed.counting import Counters, counters, reset_counters
from aule.distributed.decode import decode_attention, merge_states
from aule.distributed.entry import attention, ring_attention, ulysses_attention
from aule.distributed.sharding import shard, shard_positions, unshard

__all__ = [
    "Counters",
    "attention",
    "context_parallel",
    "counters",
    "decode_attention",
    "merge_states",
    "reset_counters",
    "ring_attention",
    "shard",
    "shard_positions",
    "ulysses_attention",
    "unshard",
]
