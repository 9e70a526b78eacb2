"""Barriers, shuffles, reductions and votes in PTX. All lanes of the warp take part, so masks are full."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir.kernel import Op
from aule.ir.types import Scalar
from aule.render._ptx_emitter import Emitter, refuse, register_class

_ALL = "0xFFFFFFFF"
_CLAMP = "0x1F"
"""Shuffle over the full warp: segment mask 0, highest lane 31."""
_PLAIN = {
    "subgroup_barrier": f"bar.warp.sync {_ALL};",
    "async_commit": "cp.async.commit_group;",
}


@dataclass(frozen=True)
class Crew:
    """The threads that wait at a barrier: the workgroup, or a crew of it with a hardware barrier of its own."""

    barrier: int
    threads: int = 0

    @property
    def operands(self) -> str:
        """Number of the barrier and, for a part of the workgroup, the number of threads."""
        return f"{self.barrier}, {self.threads}" if self.threads else str(self.barrier)


WORKGROUP = Crew(0)


def cluster_barrier(e: Emitter, op: Op, last: bool) -> None:
    """Emit a cluster barrier; relaxed if it is the ``last`` operation of the kernel.

    Then no memory is read after it, so stores need not be visible. It only keeps a workgroup from ending while others
    read its shared memory.
    """
    if e.arch.number < 90:
        raise refuse(op, "sm_90 or newer", e.arch.name, "leave clusters out")
    e.line(f"barrier.cluster.arrive{'.relaxed' * last}.aligned;")  # default: arrive releases, wait acquires
    e.line("barrier.cluster.wait.aligned;")


def render(e: Emitter, op: Op, crew: Crew) -> None:
    """Emit any other operation of the categories ``sync`` and ``subgroup``."""
    if op.opcode == "barrier":
        e.line(f"bar.sync {crew.operands};")  # orders shared and global memory for its threads
    elif op.opcode in _PLAIN:
        e.line(_PLAIN[op.opcode])
    elif op.opcode == "device_fence":
        e.device_fence()
    elif op.opcode == "async_wait":
        e.line(f"cp.async.wait_group {op.attrs['pending']};")
    elif op.opcode in ("launch_next", "launch_await"):
        if e.arch.number >= 90:
            e.line("griddepcontrol.launch_dependents;" if op.opcode == "launch_next" else "griddepcontrol.wait;")
    else:
        e.bind(op.output, (_result(e, op, crew),))


def _result(e: Emitter, op: Op, crew: Crew) -> str:
    elem = op.output.type
    if op.opcode == "workgroup_any":
        return e.emit("bar.red.or.pred", "p", crew.operands, e.operands(op.args[0])[0])
    if op.opcode in ("subgroup_any", "subgroup_all"):
        return e.emit(f"vote.sync.{op.opcode[-3:]}.pred", "p", e.operands(op.args[0])[0], _ALL)
    if not isinstance(elem, Scalar) or elem.bits != 32:
        raise refuse(op, "a scalar of 32 bits", elem, "bitcast or cast it first")
    x = e.registers(op.args[0])[0]
    if op.opcode == "shuffle":
        return e.emit("shfl.sync.idx.b32", register_class(elem), x, e.operands(op.args[1])[0], _CLAMP, _ALL)
    if op.opcode == "shuffle_xor":
        return _butterfly(e, elem, x, op.attrs["mask"])
    return _reduce(e, op, elem, x)


def _butterfly(e: Emitter, elem: Scalar, x: str, mask: int) -> str:
    return e.emit("shfl.sync.bfly.b32", register_class(elem), x, str(mask), _CLAMP, _ALL)


def _reduce(e: Emitter, op: Op, elem: Scalar, x: str) -> str:
    kind = op.attrs["kind"]
    if kind not in ("add", "min", "max"):
        raise refuse(op, "add, min or max", kind, "build it from shuffle_xor")
    cls = register_class(elem)
    type_ = "f32" if elem.is_float else f"{'s' if elem.is_signed else 'u'}32"
    if elem.is_int and e.arch.number >= 80:
        return e.emit(f"redux.sync.{kind}.{type_}", cls, x, _ALL)
    instruction = "add.rn.f32" if elem.is_float and kind == "add" else f"{kind}.{type_}"
    for mask in (16, 8, 4, 2, 1):
        x = e.emit(instruction, cls, x, _butterfly(e, elem, x, mask))
    return x
