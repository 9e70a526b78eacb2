"""Warpgroup products in PTX: wgmma of sm_90a. 64-bit descriptors describe factors in shared memory.

A descriptor holds the address, the bytes from one panel to the next, the bytes from eight rows to the next eight, and
the swizzle mode of 128-byte panels. The registers of accumulators and fragments are those of mma.sync.
"""

from __future__ import annotations

from aule.ir.kernel import Op, Value
from aule.ir.types import Panels, element
from aule.render._ptx_emitter import Emitter, refuse
from aule.render._ptx_memory import Addresses, at

_PLAIN = {
    "warpgroup_fence": "wgmma.fence.sync.aligned;",
    "warpgroup_commit": "wgmma.commit_group.sync.aligned;",
    "warpgroup_publish": "fence.proxy.async.shared::cta;",
}
MAP_BYTES = 128
"""Size and alignment of a tensor map."""
_SWIZZLE_128 = 1 << 62
_GROUP_BYTES = 1024
"""Bytes of eight rows of a panel; also the alignment of a panel."""


def render(e: Emitter, addresses: Addresses, op: Op, subgroups: int) -> None:
    """Emit an operation of a warpgroup; ``subgroups`` is the number of subgroups per workgroup."""
    if e.arch.number != 90:
        raise refuse(op, "sm_90", e.arch.name, "plan for its own matrix units")
    if op.opcode in _PLAIN:
        e.line(_PLAIN[op.opcode])
    elif op.opcode == "warpgroup_wait":
        e.line(f"wgmma.wait_group.sync.aligned {op.attrs['pending']};")
    elif op.opcode == "mbarrier_expect":
        place = _place(addresses, op, 0)
        e.line(f"@{_leader(e)} mbarrier.arrive.expect_tx.shared::cta.b64 _, {place}, {op.attrs['bytes']};")
    elif op.opcode == "tensor_copy":
        _tensor_copy(e, addresses, op)
    elif op.opcode != "warpgroup_mma":
        _mbarrier(e, addresses, op, subgroups)
    else:
        _mma(e, addresses, op)


def _mbarrier(e: Emitter, addresses: Addresses, op: Op, subgroups: int) -> None:
    """Emit an operation of an mbarrier, at which threads arrive one by one.

    One arrival per subgroup is no faster, and racecheck would not see the order of the other lanes.
    """
    place = _place(addresses, op, 0)
    if op.opcode == "mbarrier_wait":
        number, parity = e.label(), e.operands(op.args[2])[0]
        e.lines.append(f"$await_{number}:")
        reached = e.emit("mbarrier.try_wait.parity.shared::cta.b64", "p", place, parity)
        e.line(f"@!{reached} bra $await_{number};")
        return
    if op.opcode == "mbarrier_init":
        thread = e.once("%tid", "mov.u32", "r", "%tid.x")
        first = e.once("first thread", "setp.eq.u32", "p", thread, "0")
        e.line(f"@{first} mbarrier.init.shared::cta.b64 {place}, {op.attrs['threads'] or 32 * subgroups};")
        return
    e.line(f"mbarrier.arrive.shared::cta.b64 _, {place};")


def _place(addresses: Addresses, op: Op, i: int) -> str:
    """The address that operands ``i`` and ``i + 1`` give, a pointer and an index."""
    return at(*addresses.locate(addresses.memory(op.args[i]), op.args[i + 1]))


def _leader(e: Emitter) -> str:
    """A predicate that is true in one lane of the subgroup."""
    return e.once("leader", "elect.sync _|", "p", "0xffffffff")


def _tensor_copy(e: Emitter, addresses: Addresses, op: Op) -> None:
    name, coordinates = op.attrs["map"], [e.registers(x)[0] for x in op.args[4:]]
    parameter = e.once(("map", name), "mov.b64", "rd", name)
    address = e.once(("generic", name), "cvta.param.u64", "rd", parameter)
    kind = f"{len(coordinates)}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    e.line(
        f"@{_leader(e)} cp.async.bulk.tensor.{kind} {_place(addresses, op, 0)}, "
        f"[{address}, {{{', '.join(coordinates)}}}], {_place(addresses, op, 2)};"
    )


def _mma(e: Emitter, addresses: Addresses, op: Op) -> None:
    kind = element(op.args[0].type).name
    right, left = op.attrs["right"], op.attrs["left"]
    b = _descriptor(e, addresses, op, op.args[0], op.args[1], right, right.layout == "row")
    if left is None:
        a, variables = "{" + ", ".join(e.registers(op.args[2])) + "}", op.args[3:]
    else:
        a = _descriptor(e, addresses, op, op.args[2], op.args[3], left, left.layout == "column")
        variables = op.args[4:]
    registers = [register for variable in variables for register in e.operands(variable)]
    adds = e.once(("predicate", not op.attrs["fresh"]), "setp.ne.b32", "p", str(int(not op.attrs["fresh"])), "0")
    flags = ["1", "1"]
    if left is not None:
        flags.append(str(int(left.layout == "column")))
    flags.append(str(int(right.layout == "row")))
    shape = f"m64n{16 * len(variables)}k16.f32.{kind}.{kind}"
    e.line(f"wgmma.mma_async.sync.aligned.{shape} {{{', '.join(registers)}}}, {a}, {b}, {adds}, {', '.join(flags)};")


def _descriptor(
    e: Emitter, addresses: Addresses, op: Op, pointer: Value, index: Value, panels: Panels, across: bool
) -> str:
    """The descriptor of a factor.

    ``across``: its panels are neighbours along the rows or columns of the product, not along the sum.
    """
    memory = addresses.memory(pointer)
    if memory.offset % _GROUP_BYTES:
        raise refuse(op, f"factors in memory that starts at a multiple of {_GROUP_BYTES} bytes", memory.offset,
                     "declare that shared array first")  # fmt: skip
    base, offset = addresses.locate_register(memory, index)
    panel_bytes = 2 * panels.stride
    stride = panel_bytes if across else 16  # unused if a product stays within a panel along the sum
    fixed = _SWIZZLE_128 | (_GROUP_BYTES >> 4) << 32 | (stride >> 4) << 16
    short = e.once(("descriptor address", base), "shr.u32", "r", base, "4")
    wide = e.once(("descriptor wide", base), "cvt.u64.u32", "rd", short)
    start = e.once(("descriptor", base, stride), "or.b64", "rd", wide, str(fixed))
    further = offset + panels.col // 64 * panel_bytes + panels.row * 128 + panels.col % 64 * 2
    return start if further == 0 else e.once(("at", start, further), "add.s64", "rd", start, str(further >> 4))
