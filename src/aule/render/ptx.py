"""Renderer for PTX, for NVIDIA GPUs from sm_60 on. The driver assembles the text.

Conventions for intrinsics: operands and results are registers of the classes in `_ptx_emitter`; a vector is a list of
registers; a variable (if the verifier accepts one) is its registers, and the only operand that may be written, as wgmma
writes its accumulators; a pointer is a register with its address (32 bits in the ``.shared`` window, 64 bits for global
and local memory). Literal braces are doubled, as for `str.format`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aule.artifact import Artifact
from aule.errors import KernelError
from aule.ir.constants import float_bits, wrap
from aule.ir.kernel import KernelIR, Op, Value, walk
from aule.ir.ops import MATRIX_OPS, OPS, SUBGROUP_OPS
from aule.ir.types import Fragment, Pointer, Ref, Scalar, element, lanes_of, u16
from aule.render import _ptx_fragment, _ptx_math, _ptx_memory, _ptx_subgroup, _ptx_warpgroup
from aule.render._ptx_convert import bitcast, cast_lanes, e4m3_halves
from aule.render._ptx_emitter import (
    DECLARED,
    Arch,
    Emitter,
    f32_text,
    f64_text,
    move_type,
    refuse,
    register_class,
)
from aule.target import Target

_SUBGROUP_SIZE = 32
_UNROLL_LIMIT = 20_000
"""Maximum operations of a fully unrolled loop; a longer one stays a loop."""
_AXES = "xyz"


def _paired_words(op: Op) -> bool:
    return op.opcode in _ptx_math.WORD_PAIRS and element(op.args[0].type) == u16 and lanes_of(op.args[0].type) > 1


def _is_vector_atomic(op: Op) -> bool:
    return op.opcode == "atomic" and lanes_of(op.args[2].type) > 1


def render(kernel: KernelIR, target: Target) -> Artifact:
    """Write a verified kernel as PTX for ``target.arch`` (``sm_75``, ``sm_90a`` ...).

    A KernelError names what PTX lacks: fragments other than 16 x 16, intrinsics of another language, subgroups of a
    size other than 32, exp2, log2, sin or cos in f64.
    """
    if kernel.subgroup_size not in (0, _SUBGROUP_SIZE):
        raise KernelError(
            f"[ptx] expected subgroup_size 32 or 0, got {kernel.subgroup_size}; NVIDIA GPUs have subgroups of 32"
        )
    arch = Arch.parse(target.arch)
    if any(OPS[op.opcode].category == "warpgroup" for op in kernel.walk()) and arch.name == "sm_90":
        arch = Arch.parse("sm_90a")
    body = _Body(kernel, arch)
    body.run()
    dynamic = kernel.shared_bytes > _ptx_memory.STATIC_SHARED_BYTES
    lines = [f".version {_version(kernel, arch)}", f".target {arch.name}", ".address_size 64", ""]
    if dynamic:  # aligned for the panels of warpgroup products
        lines += [f".extern .shared .align 1024 .b8 {body.addresses.symbol}[];", ""]
    elif kernel.shared:
        align = 1024 if arch.name == "sm_90a" else 16
        lines += [f".shared .align {align} .b8 {body.addresses.symbol}[{kernel.shared_bytes}];", ""]
    lines += [f".visible .entry {kernel.name}(", ",\n".join(_parameters(kernel)), ")", *_directives(kernel), "{"]
    lines += [*body.emitter.declarations(), *body.addresses.local, "", *body.emitter.lines, "\tret;", "}", ""]
    return Artifact(
        language="ptx",
        code="\n".join(lines).encode(),
        entry=kernel.name,
        params=kernel.params,
        workgroup=kernel.workgroup,
        shared_bytes=kernel.shared_bytes,
        dynamic_shared=dynamic,
        subgroup_size=kernel.subgroup_size,
        uses_subgroups=not (SUBGROUP_OPS | MATRIX_OPS).isdisjoint(op.opcode for op in kernel.walk()),
        dependent_launch=arch.number >= 90 and any(op.opcode == "launch_await" for op in kernel.walk()),
        maps=kernel.maps,
    )


def _version(kernel: KernelIR, arch: Arch) -> str:
    """The PTX version to declare: the lowest that has all instructions of the kernel."""
    version = arch.version
    if version == "6.3" and any(op.opcode.startswith("fragment") for op in kernel.walk()):
        version = "6.5"  # ldmatrix and mma.sync of these shapes
    if version in ("7.0", "7.1") and any(p.evict_last for p in kernel.params):
        version = "7.4"  # cache policies
    if version in ("7.8", "8.0") and any(_is_vector_atomic(op) for op in kernel.walk()):
        version = "8.1"
    if version == "7.8" and (_ends_in_cluster_barrier(kernel) or any(_paired_words(op) for op in kernel.walk())):
        version = "8.0"  # arithmetic on pairs of 16-bit integers, and relaxed cluster barriers
    return version


def _ends_in_cluster_barrier(kernel: KernelIR, op: Op | None = None) -> bool:
    """True if the last operation of a kernel is a cluster barrier, and is ``op`` if given."""
    last = kernel.body[-1] if kernel.body else None
    return last is not None and last.opcode == "cluster_barrier" and (op is None or op is last)


def _directives(kernel: KernelIR) -> list[str]:
    """Performance directives between the parameters and the body."""
    registers = [f".maxnreg {kernel.max_registers}"] if kernel.max_registers else []
    cluster = [f".reqnctapercluster {kernel.cluster}, 1, 1"] if kernel.cluster > 1 else []
    return [f".reqntid {kernel.workgroup}, 1, 1", *cluster, *registers]


def _parameters(kernel: KernelIR) -> Iterator[str]:
    """Declarations of the parameters. A buffer declares the alignment that its widest access needs."""
    aligned = kernel.alignments()
    for p in kernel.params:
        if p.kind == "buffer":
            value = kernel.values[p.name]
            align = _ptx_memory.alignment(aligned.get(value, 1), element(value.type))
            yield f"\t.param .u64 .ptr .global .align {align} {p.name}"
        else:
            yield f"\t.param .{_parameter_type(p.dtype)} {p.name}"
    for tensor in kernel.maps:
        yield f"\t.param .align {_ptx_warpgroup.MAP_BYTES} .b8 {tensor.name}[{_ptx_warpgroup.MAP_BYTES}]"


def _parameter_type(dtype: str) -> str:
    return "s" + dtype[1:] if dtype[0] == "i" else dtype


class _Body:
    """Emits the operations of a kernel."""

    def __init__(self, kernel: KernelIR, arch: Arch) -> None:
        self.kernel = kernel
        self.emitter = Emitter(arch)
        self.addresses = _ptx_memory.Addresses(self.emitter, kernel)
        self._crew = _ptx_subgroup.WORKGROUP
        """The threads that barriers wait for."""
        e, subgroups = self.emitter, -(-kernel.workgroup // _SUBGROUP_SIZE)
        self._handlers: dict[str, Callable[[Op], None]] = {
            "const": self._const,
            "leaf": self._id,
            **dict.fromkeys(("unary", "binary", "compare", "fma"), lambda op: _ptx_math.lanewise(e, op)),
            "select": lambda op: _ptx_math.select(e, op),
            "cast": self._cast,
            "bitcast": lambda op: bitcast(e, op),
            "e4m3_halves": lambda op: e4m3_halves(e, op),
            "make_vector": self._make_vector,
            "splat": self._splat,
            "extract": self._extract,
            "permute": self._extract,
            "private": self.addresses.private,
            "load": lambda op: _ptx_memory.load(e, self.addresses, op),
            "load_streaming": lambda op: _ptx_memory.load(e, self.addresses, op),
            "store": lambda op: _ptx_memory.store(e, self.addresses, op),
            "store_streaming": lambda op: _ptx_memory.store(e, self.addresses, op),
            "atomic": lambda op: _ptx_memory.atomic(e, self.addresses, op),
            "cluster_barrier": lambda op: _ptx_subgroup.cluster_barrier(e, op, _ends_in_cluster_barrier(kernel, op)),
            "cluster_load": lambda op: _ptx_memory.cluster_load(e, self.addresses, op),
            "cluster_post": lambda op: _ptx_memory.cluster_post(e, self.addresses, op),
            "prefetch": lambda op: _ptx_memory.prefetch(e, self.addresses, op),
            "async_copy": lambda op: _ptx_memory.async_copy(e, self.addresses, op),
            "async_copy_or_zero": lambda op: _ptx_memory.async_copy(e, self.addresses, op),
            "var": self._var,
            "get": self._get,
            "set": self._set,
            "loop": self._loop,
            "repeat": self._repeat,
            "if": self._if,
            "roles": self._roles,
            **dict.fromkeys(("sync", "subgroup"), lambda op: _ptx_subgroup.render(e, op, self._crew)),
            "fragment": lambda op: _ptx_fragment.render(e, self.addresses, op),
            "warpgroup": lambda op: _ptx_warpgroup.render(e, self.addresses, op, subgroups),
            "dot_pairs": self._dot_pairs,
            "intrinsic": self._intrinsic,
            "comment": self._comment,
        }

    def run(self) -> None:
        """Load the parameters, then emit the body."""
        e = self.emitter
        for p in self.kernel.params:
            value = self.kernel.values[p.name]
            if p.kind == "buffer":
                address = e.emit("ld.param.u64", "rd", f"[{p.name}]")
                self.addresses.bind_global(value, e.emit("cvta.to.global.u64", "rd", address), p)
            else:
                assert isinstance(value.type, Scalar)
                register = e.new_for(value.type)
                e.line(f"ld.param.{_parameter_type(p.dtype)} {register}, [{p.name}];")
                e.bind(value, (register,))
        self._block(self.kernel.body)

    def _block(self, block: list[Op]) -> None:
        handlers = self._handlers
        for op in block:
            if op.opcode not in OPS:
                raise refuse(op, "an operation of ir.ops", op.opcode, "run ir.verify on the kernel")
            (handlers.get(op.opcode) or handlers[OPS[op.opcode].category])(op)

    @contextmanager
    def _scope(self) -> Iterator[None]:
        self.emitter.scopes.append({})
        yield
        self.emitter.scopes.pop()

    # -- leaves and vectors ----------------------------------------------------------------------------------------

    def _const(self, op: Op) -> None:
        e, value, result = self.emitter, op.attrs["value"], op.result
        assert result is not None and isinstance(result.type, Scalar)
        elem = result.type
        if elem.kind == "bool":
            e.bind_truth(result, bool(value))
        elif elem.is_int:
            e.bind_integer(result, int(value))
        elif elem.bits == 16:
            e.bind(result, (e.half(float_bits(value, elem)),))
        else:
            e.bind(result, (f32_text(value) if elem.bits == 32 else f64_text(value),))

    def _id(self, op: Op) -> None:
        e = self.emitter
        if op.opcode == "thread_id":
            register = e.once("%tid", "mov.u32", "r", "%tid.x")
        elif op.opcode == "lane_id":
            register = e.once("%laneid", "mov.u32", "r", "%laneid")
        elif op.opcode == "subgroup_id":  # not %warpid, which is the warp's hardware slot and may change
            register = e.once("%warp", "shr.u32", "r", e.once("%tid", "mov.u32", "r", "%tid.x"), "5")
        else:
            special = f"%{'ctaid' if op.opcode == 'group_id' else 'nctaid'}.{_AXES[op.attrs['axis']]}"
            register = e.once(special, "mov.u32", "r", special)
        e.bind(op.output, (register,))

    def _cast(self, op: Op) -> None:
        e, source, target = self.emitter, element(op.args[0].type), element(op.output.type)
        known = e.integer(op.args[0])
        if target.kind == "bool":
            raise refuse(op, "a number", target, "compare with 0 instead")
        if known is not None and target.is_int:
            e.bind_integer(op.output, known)
        elif source == target:
            e.bind_same(op.output, op.args[0])
        else:
            e.bind(op.output, cast_lanes(e, source, target, e.registers(op.args[0])))

    def _make_vector(self, op: Op) -> None:
        self.emitter.bind(op.output, tuple(self.emitter.operands(x)[0] for x in op.args))

    def _splat(self, op: Op) -> None:
        self.emitter.bind(op.output, self.emitter.operands(op.args[0]) * lanes_of(op.output.type))

    def _extract(self, op: Op) -> None:
        every = [lane for x in op.args for lane in self.emitter.operands(x)]
        lanes = tuple(every[i] for i in op.attrs.get("lanes") or (op.attrs["lane"],))
        if len(lanes) > 1 or lanes[0][0] == "%" or element(op.output.type).is_float:
            self.emitter.bind(op.output, lanes)
        else:
            self.emitter.bind_integer(op.output, int(lanes[0]))

    # -- variables -------------------------------------------------------------------------------------------------

    def _var(self, op: Op) -> None:
        kind, count = _variable_registers(op, op.output)
        registers = tuple(self.emitter.new(kind) for _ in range(count))
        self._move(kind, registers, self.emitter.operands(op.args[0]))
        self.emitter.bind(op.output, registers)

    def _get(self, op: Op) -> None:
        # A copy, since the variable may change while its old value is in use; ptxas removes unneeded ones.
        kind, _ = _variable_registers(op, op.args[0])
        source = self.emitter.operands(op.args[0])
        registers = tuple([self.emitter.new(kind) for _ in source])
        self._move(kind, registers, source)
        self.emitter.bind(op.output, registers)

    def _set(self, op: Op) -> None:
        kind, _ = _variable_registers(op, op.args[0])
        self._move(kind, self.emitter.operands(op.args[0]), self.emitter.operands(op.args[1]))

    def _move(self, register_class: str, targets: tuple[str, ...], sources: tuple[str, ...]) -> None:
        kind = DECLARED[register_class]
        self.emitter.lines += [f"\tmov.{kind} {t}, {s};" for t, s in zip(targets, sources, strict=True)]

    # -- control ---------------------------------------------------------------------------------------------------

    def _if(self, op: Op) -> None:
        e, (condition,), (then, otherwise) = self.emitter, op.args, op.blocks
        known = e.truth.get(condition)
        if known is not None:
            self._block(then if known else otherwise)
            return
        predicate, number = e.operands(condition)[0], e.label()
        e.line(f"@!{predicate} bra $else_{number};")
        with self._scope():
            self._block(then)
        if otherwise:
            e.line(f"bra $endif_{number};")
        e.lines.append(f"$else_{number}:")
        if otherwise:
            with self._scope():
                self._block(otherwise)
            e.lines.append(f"$endif_{number}:")

    def _loop(self, op: Op) -> None:
        e, index, unroll = self.emitter, op.attrs["index"], op.attrs["unroll"]
        start, stop, step = (e.integer(x) for x in op.args)
        if step is not None and step <= 0:
            raise refuse(op, "a positive step", step, "count upwards")
        trips = None
        if start is not None and stop is not None and step is not None:
            trips = max(-((start - stop) // step), 0)
        if trips == 0:
            return
        if trips is not None and (unroll == -1 or trips == 1 or (unroll > 1 and trips == unroll)):
            assert start is not None and step is not None
            if trips * sum(1 for _ in walk(op.blocks[0])) <= _UNROLL_LIMIT:
                for i in range(trips):
                    e.bind_integer(index, start + i * step)
                    self._block(op.blocks[0])
                return
        copies = unroll if unroll > 1 and trips is not None and trips % unroll == 0 else 1
        self._counted(op, copies, trips is not None)

    def _repeat(self, op: Op) -> None:
        e, number = self.emitter, self.emitter.label()
        e.lines.append(f"$loop_{number}:")
        with self._scope():
            self._block(op.blocks[0])
        e.line(f"@{e.emit('setp.eq.s32', 'p', e.operands(op.args[0])[0], '0')} bra $loop_{number};")

    def _counted(self, op: Op, copies: int, entered: bool) -> None:
        """Emit a loop with the test at its end; unless ``entered`` is known, a test before it may skip it."""
        e, index = self.emitter, op.attrs["index"]
        assert isinstance(index.type, Scalar)
        kind = ("s" if index.type.is_signed else "u") + str(index.type.bits)
        start, stop, step = (e.operands(x)[0] for x in op.args)
        stride = e.integer(op.args[2])
        counter, number = e.new_for(index.type), e.label()
        e.line(f"mov.{move_type(index.type)} {counter}, {start};")
        if not entered:
            e.line(f"@{e.emit(f'setp.ge.{kind}', 'p', counter, stop)} bra $end_{number};")
        e.lines.append(f"$loop_{number}:")
        if op.attrs["unroll"] == 1:
            e.line('.pragma "nounroll";')
        with self._scope():
            for i in range(copies):
                if i and stride is not None:
                    e.bind_sum(index, counter, i * stride)
                else:
                    e.bind(index, (counter,))
                self._block(op.blocks[0])
        if copies > 1 and stride is not None:
            step = str(wrap(copies * stride, index.type))
        e.line(f"add.s{index.type.bits} {counter}, {counter}, {step};")
        e.line(f"@{e.emit(f'setp.lt.{kind}', 'p', counter, stop)} bra $loop_{number};")
        e.lines.append(f"$end_{number}:")

    def _roles(self, op: Op) -> None:
        """Branch to the block of a subgroup's role, after warpgroups have exchanged registers."""
        e, roles, number = self.emitter, op.attrs["roles"], self.emitter.label()
        if e.arch.number < 90:
            raise refuse(op, "sm_90 or newer", e.arch.name, "leave roles out")
        subgroup = e.once("%warp", "shr.u32", "r", e.once("%tid", "mov.u32", "r", "%tid.x"), "5")
        first, before = 0, self._crew
        for i, (role, block) in enumerate(zip(roles, op.blocks, strict=True)):
            first += role.total
            if i + 1 < len(roles):
                e.line(f"@{e.emit('setp.ge.u32', 'p', subgroup, str(first))} bra $role_{number}_{i + 1};")
            self._crew = _ptx_subgroup.Crew(i + 1, role.subgroups * _SUBGROUP_SIZE)
            with self._scope():
                if role.registers != self.kernel.max_registers:
                    step = "inc" if role.registers > self.kernel.max_registers else "dec"
                    e.line(f"setmaxnreg.{step}.sync.aligned.u32 {role.registers};")
                self._block(block)
            if i + 1 < len(roles):
                e.line(f"bra $roles_end_{number};")
                e.lines.append(f"$role_{number}_{i + 1}:")
        e.lines.append(f"$roles_end_{number}:")
        self._crew = before

    # -- intrinsics, comments and unsupported operations -----------------------------------------------------------

    def _intrinsic(self, op: Op) -> None:
        e = self.emitter
        if op.attrs["language"] != "ptx":
            raise refuse(op, "an intrinsic of ptx", op.attrs["language"], "choose the kernel by the target")
        result: str | tuple[str, ...] = ""
        if op.result is not None:
            registers = tuple(e.new_for(element(op.result.type)) for _ in range(lanes_of(op.result.type)))
            e.bind(op.result, registers)
            result = registers if lanes_of(op.result.type) > 1 else registers[0]
        operands = [self._operand(x) for x in op.args]
        try:
            text = op.attrs["code"].format(result, *operands).strip()
        except (IndexError, KeyError, ValueError) as error:
            raise refuse(op, "{0}, {1} ... in the code", op.attrs["code"], f"{error}; double literal braces") from error
        e.line(text if text.endswith((";", "}")) else text + ";")

    def _operand(self, value: Value) -> str | tuple[str, ...]:
        if isinstance(value.type, Pointer):
            return self.addresses.pointer(value)
        lanes = self.emitter.registers(value)
        one = isinstance(value.type.target if isinstance(value.type, Ref) else value.type, Scalar)
        return lanes[0] if one else lanes

    def _dot_pairs(self, op: Op) -> None:
        raise refuse(op, "no products of packed pairs", op.opcode, "multiply in f32, or use the mma engine")

    def _comment(self, op: Op) -> None:
        for text in str(op.attrs["text"]).splitlines():
            self.emitter.line(f"// {text.encode('ascii', 'replace').decode()}")


def _variable_registers(op: Op, ref: Value) -> tuple[str, int]:
    """Class and number of the registers of a variable."""
    assert isinstance(ref.type, Ref)
    target = ref.type.target
    if isinstance(target, Fragment):
        count = _ptx_fragment.registers_of(op, target)
        return "r" if count == 4 else "f", count
    return register_class(element(target)), 1 if isinstance(target, Scalar) else target.lanes
