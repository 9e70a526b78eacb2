"""The second kernel of a split sequence where it need not come after the first: it goes with it, and waits for parts.

Both are given to the device at once, with nothing between them, so that this one may begin while the first ends, or
before. No interface says which begins first, so there are fewer of its workgroups than multiprocessors: wherever all
of them are and wait, there is room for those that they wait for (`shapes.choose_trail`).
"""

from __future__ import annotations

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import Scalar, i32, i64
from aule.ops.attention.parameters import Parameters
from aule.ops.decode.await_parts import AwaitedParts
from aule.ops.decode.config import TrailConfig
from aule.ops.decode.place import Place
from aule.ops.decode.result import Result
from aule.target import Target
from aule.tile.matrix import divmod_const

KERNEL_NAME = "decode_trail"


def build_trail(config: TrailConfig, target: Target, name: str = KERNEL_NAME) -> KernelIR:
    """Trace the kernel: some workgroups for each block of rows, which share its columns."""
    shape = config.shape
    b = Builder(name, config.threads, arithmetic="quick")
    index: Scalar = i64 if config.index64 else i32
    place = Place(Parameters(b, config, index), config, shape.rows, shape.stretch, shape.step)
    result = Result(place)
    with b.if_(place.measure()):
        parts = AwaitedParts(result, config.held * config.columns, b.thread_id(), config.threads, across=True)

        def store(first: Value, highest: Value, total: Value, values: list[Value]) -> None:
            result.finish(*divmod_const(b, first, config.columns), highest, total, values, config.columns)

        parts.add_up(b.min(place.rows - place.row0, config.held) * config.columns, store)
    return b.finish()
