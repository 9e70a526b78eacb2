"""Renderer for LLVM IR text (LLVM 20 or later), which a JIT compiles for the CPU it runs on.

The entry point is ``void entry(ptr args, ptr next, i64 total, i64 chunk, i32 nx, i32 ny, i32 nz)``. ``args`` has an
8-byte cell for each parameter, in order: a buffer's address, or a scalar in its low bytes. ``next`` is a counter of
workgroups shared by all CPU threads of a launch: each thread takes ``chunk`` of the ``total`` until none are left.
Workgroup x + nx * (y + ny * z) is the one at (x, y, z).

A CPU thread runs the threads of a workgroup one after the other; where they wait for each other, the pass
`threads_in_turn` has made one thread of them before. Fast kernels have workgroups of one thread and use vectors. There,
shared memory is private, a barrier does nothing, and a subgroup is the thread.

The text names no machine: the caller sets data layout and triple, and compiles with the features of the Target.
``floor`` without SSE4.1, ``log2``, ``sin`` and ``cos`` call libm; nothing else is called.

An intrinsic of "llvm" is an instruction, ``{0} = fadd float {1}, {2}``, or several lines of them; operands come without
types. LLVM declares its own intrinsics.
"""

from __future__ import annotations

from collections.abc import Callable

from aule.artifact import Artifact
from aule.errors import KernelError
from aule.ir.kernel import KernelIR, Op, walk
from aule.ir.ops import OPS
from aule.ir.passes import soft_half, threads_in_turn
from aule.ir.types import Fragment, Ref, Scalar, bf16, element, f16, lanes_of
from aule.render import _llvm_math
from aule.render._llvm_emitter import Emitter, literal, llvm_type, refuse
from aule.render._llvm_memory import Memory
from aule.target import Target

_ARCHITECTURES = ("x86_64", "aarch64")
_AXES = "xyz"
_IDS = ", ".join([*(f"i32 %group.{a}" for a in _AXES), *(f"i32 %count.{a}" for a in _AXES), "i32 %thread"])
"""Last parameters of a body: workgroup index, workgroup count and thread index."""
_CACHE_LINE = 64
_UNROLL_LIMIT = 4096
"""Maximum operations of an unrolled loop: well below LLVM's own limit."""
_ATTRIBUTES = [
    # Keep loops from becoming calls of memset and memcpy: they are short, and the JIT does not link libc.
    'attributes #0 = { nounwind "no-builtins" }',
    'attributes #1 = { alwaysinline nounwind "no-builtins" }',
]


def render(kernel: KernelIR, target: Target, checked: bool = False) -> Artifact:
    """Write a verified kernel as LLVM IR for ``target.arch`` ("x86_64" or "aarch64").

    If ``checked``, which is for tests, an index outside of one of the kernel's own arrays traps.

    ``extensions`` of target and artifact are LLVM feature names: those of the CPU, and those that the code requires.
    A KernelError rejects kernels with clusters, matrix fragments, asynchronous copies or another language's intrinsics.
    """
    if target.arch not in _ARCHITECTURES:
        raise KernelError(f"[llvm] expected a target for {' or '.join(_ARCHITECTURES)}, got arch {target.arch!r}")
    if kernel.cluster > 1:
        raise KernelError(
            f"[llvm] kernel {kernel.name}: expected no cluster, got one of {kernel.cluster}; PTX has them"
        )
    if _cooperates(kernel):
        kernel = threads_in_turn(kernel)
    processor = _llvm_math.Processor(target.arch, frozenset(target.extensions))
    soft = {bf16} if processor.halves else {bf16, f16}
    lowered = kernel
    if soft & kernel.elements():
        narrow = _llvm_math.float_to_bfloat if processor.bfloats else None
        lowered = soft_half(kernel, soft, float_to_bfloat=narrow)
    body = _Body(lowered, processor, checked)
    if processor.bfloats and bf16 in kernel.elements():
        body.emitter.needs.add("avx512bf16")
    body.run()
    lines = [f"; {kernel.name}, rendered by aule for {_ascii(target.name)}.", ""]
    for section in (_entry(kernel), body.function(), *body.emitter.helpers.values(), _ATTRIBUTES):
        lines += [*section, ""]
    return Artifact(
        language="llvm",
        code="\n".join([*lines, *body.emitter.metadata]).encode(),
        entry=kernel.name,
        params=kernel.params,
        workgroup=kernel.workgroup,
        shared_bytes=kernel.shared_bytes,
        extensions=tuple(sorted(body.emitter.needs)),
    )


def _cooperates(kernel: KernelIR) -> bool:
    """Whether threads of a workgroup share memory, wait for each other or exchange values."""
    if kernel.workgroup == 1:
        return False
    ops = kernel.walk()
    return bool(kernel.shared) or any(
        OPS[op.opcode].category in ("sync", "subgroup") or op.opcode in ("lane_id", "subgroup_id") for op in ops
    )


# -- the entry point ---------------------------------------------------------------------------------------------------


def _entry(kernel: KernelIR) -> list[str]:
    """The entry function: takes workgroups from the counter and calls the body for each of their threads."""
    lines = [
        f"define void @{kernel.name}(ptr %args, ptr %next, i64 %total, i64 %chunk, i32 %nx, i32 %ny, i32 %nz) #0 {{",
        "entry:",
    ]
    arguments = []
    for number, param in enumerate(kernel.params):
        type_ = llvm_type(kernel.values[param.name].type)
        lines += [
            f"  %cell.{param.name} = getelementptr inbounds i64, ptr %args, i64 {number}",
            f"  %arg.{param.name} = load {type_}, ptr %cell.{param.name}, align 8",
        ]
        arguments.append(f"{type_} %arg.{param.name}")
    arguments += [*(f"i32 %group.{a}" for a in _AXES), "i32 %nx", "i32 %ny", "i32 %nz"]
    call = f"call void @{kernel.name}.body({{}})"
    lines += [
        "  %wide.nx = zext i32 %nx to i64",
        "  %wide.ny = zext i32 %ny to i64",
        "  br label %take",
        "take:",
        "  %first = atomicrmw add ptr %next, i64 %chunk monotonic",
        "  %left = icmp slt i64 %first, %total",
        "  br i1 %left, label %enter, label %done",
        "enter:",
        "  %after = add i64 %first, %chunk",
        "  %whole = icmp slt i64 %after, %total",
        "  %last = select i1 %whole, i64 %after, i64 %total",
        "  br label %group",
        "group:",
        "  %number = phi i64 [ %first, %enter ], [ %following, %leave ]",
        "  %wide.x = urem i64 %number, %wide.nx",
        "  %row = udiv i64 %number, %wide.nx",
        "  %wide.y = urem i64 %row, %wide.ny",
        "  %wide.z = udiv i64 %row, %wide.ny",
        *(f"  %group.{a} = trunc i64 %wide.{a} to i32" for a in _AXES),
    ]
    if kernel.workgroup == 1:
        lines += ["  " + call.format(", ".join([*arguments, "i32 0"])), "  br label %leave"]
    else:
        lines += [
            "  br label %run",
            "run:",
            "  %thread = phi i32 [ 0, %group ], [ %thread.next, %run ]",
            "  " + call.format(", ".join([*arguments, "i32 %thread"])),
            "  %thread.next = add i32 %thread, 1",
            f"  %threads.left = icmp ult i32 %thread.next, {kernel.workgroup}",
            "  br i1 %threads.left, label %run, label %leave",
        ]
    return [
        *lines,
        "leave:",
        "  %following = add i64 %number, 1",
        "  %more = icmp slt i64 %following, %last",
        "  br i1 %more, label %group, label %take",
        "done:",
        "  ret void",
        "}",
    ]


# -- the body ----------------------------------------------------------------------------------------------------------


class _Body:
    """Emits the operations of a kernel as a function."""

    def __init__(self, kernel: KernelIR, processor: _llvm_math.Processor, checked: bool) -> None:
        self.kernel = kernel
        self.emitter = e = Emitter()
        self.arch = processor.arch
        self.memory = memory = Memory(e, kernel, checked)
        self._handlers: dict[str, Callable[[Op], None]] = {
            "const": self._const,
            "thread_id": lambda op: self._bind(op, "%thread"),
            "lane_id": lambda op: self._bind(op, "0"),
            "subgroup_id": lambda op: self._bind(op, "0"),
            "group_id": lambda op: self._bind(op, f"%group.{_AXES[op.attrs['axis']]}"),
            "group_count": lambda op: self._bind(op, f"%count.{_AXES[op.attrs['axis']]}"),
            "unary": lambda op: _llvm_math.arithmetic(e, op, processor),
            "binary": lambda op: _llvm_math.arithmetic(e, op, processor),
            "compare": lambda op: _llvm_math.arithmetic(e, op, processor),
            "fma": lambda op: _llvm_math.arithmetic(e, op, processor),
            "dot_pairs": lambda op: _llvm_math.dot_pairs(e, op, processor),
            "e4m3_halves": self._e4m3_halves,
            "select": lambda op: _llvm_math.select(e, op),
            "cast": lambda op: _llvm_math.cast_op(e, op, processor),
            "bitcast": lambda op: _llvm_math.bitcast(e, op),
            "make_vector": self._make_vector,
            "splat": self._splat,
            "extract": self._extract,
            "permute": self._permute,
            "private": lambda op: memory.array(op.output, op.attrs["name"]),
            "load": memory.load,
            "load_streaming": memory.load,
            "prefetch": memory.prefetch,
            "store": memory.store,
            "store_streaming": memory.store_streaming,
            "atomic": memory.atomic,
            "var": self._var,
            "get": self._get,
            "set": self._set,
            "loop": self._loop,
            "if": self._if,
            # In a workgroup of one thread, barriers do nothing and subgroup operations return their operand.
            "sync": lambda op: None,
            "workgroup_any": lambda op: self._bind(op, e.operand(op.args[0])),
            "device_fence": lambda op: e.line("fence acq_rel"),
            "subgroup": lambda op: self._bind(op, e.operand(op.args[0])),
            "fragment": self._fragment,
            "intrinsic": self._intrinsic,
            "comment": self._comment,
        }

    def run(self) -> None:
        """Bind the parameters, then emit the operations."""
        e = self.emitter
        for param in self.kernel.params:
            e.bind(self.kernel.values[param.name], f"%arg.{param.name}")
        for array in self.kernel.shared:
            self.memory.array(array, array.hint)
        self._block(self.kernel.body)
        if self.memory.streams and self.arch == "x86_64":
            e.line("call void @llvm.x86.sse.sfence()")  # nontemporal stores are not ordered with later stores
        e.line("ret void")

    def function(self) -> list[str]:
        """The lines of the function. Buffers never overlap, in all languages."""
        parameters = []
        for param in self.kernel.params:
            access = "" if param.kind == "scalar" else " noalias readonly" if param.access == "read" else " noalias"
            parameters.append(f"{llvm_type(self.kernel.values[param.name].type)}{access} %arg.{param.name}")
        head = f"define internal void @{self.kernel.name}.body({', '.join([*parameters, _IDS])}) #0 {{"
        return [head, "entry:", *self.emitter.allocas, *self.emitter.lines, "}"]

    def _block(self, block: list[Op]) -> None:
        handlers = self._handlers
        for op in block:
            handler = handlers.get(op.opcode) or handlers[OPS[op.opcode].category]
            handler(op)

    def _bind(self, op: Op, text: str) -> None:
        self.emitter.bind(op.output, text)

    def _e4m3_halves(self, op: Op) -> None:
        raise refuse(op, "no conversion of e4m3", op.opcode, "shift the bits into place")

    # -- leaves and vectors ----------------------------------------------------------------------------------------

    def _const(self, op: Op) -> None:
        self._bind(op, literal(op.attrs["value"], element(op.output.type)))

    def _make_vector(self, op: Op) -> None:
        e = self.emitter
        type_ = llvm_type(op.output.type)
        if all(x.constant is not None for x in op.args):
            self._bind(op, f"<{', '.join(e.typed(x) for x in op.args)}>")
            return
        vector = "poison"
        for lane, x in enumerate(op.args):
            vector = e.emit(f"insertelement {type_} {vector}, {e.typed(x)}, i32 {lane}")
        self._bind(op, vector)

    def _splat(self, op: Op) -> None:
        e, (value,) = self.emitter, op.args
        if value.constant is not None:
            self._bind(op, f"splat ({e.typed(value)})")
            return
        type_, lanes = llvm_type(op.output.type), lanes_of(op.output.type)
        one = e.emit(f"insertelement {type_} poison, {e.typed(value)}, i32 0")
        self._bind(op, e.emit(f"shufflevector {type_} {one}, {type_} poison, <{lanes} x i32> zeroinitializer"))

    def _extract(self, op: Op) -> None:
        self._bind(op, self.emitter.emit(f"extractelement {self.emitter.typed(op.args[0])}, i32 {op.attrs['lane']}"))

    def _permute(self, op: Op) -> None:
        e, lanes = self.emitter, op.attrs["lanes"]
        first, second = op.args[0], op.args[-1]
        width = lanes_of(first.type)
        if len(lanes) == 1:
            vector = e.typed(first if lanes[0] < width else second)
            self._bind(op, e.emit(f"extractelement {vector}, i32 {lanes[0] % width}"))
            return
        other = e.typed(second) if len(op.args) == 2 else f"{llvm_type(first.type)} poison"
        order = ", ".join(f"i32 {lane}" for lane in lanes)
        self._bind(op, e.emit(f"shufflevector {e.typed(first)}, {other}, <{len(lanes)} x i32> <{order}>"))

    # -- variables: stack memory that LLVM promotes to registers ---------------------------------------------------

    def _var(self, op: Op) -> None:
        assert isinstance(op.output.type, Ref)
        target = op.output.type.target
        assert not isinstance(target, Fragment)
        place = self.emitter.alloca(llvm_type(target), target.bytes, op.output.hint or "var")
        self._bind(op, place)
        self.emitter.line(f"store {self.emitter.typed(op.args[0])}, ptr {place}")

    def _get(self, op: Op) -> None:
        self._bind(op, self.emitter.emit(f"load {llvm_type(op.output.type)}, ptr {self.emitter.operand(op.args[0])}"))

    def _set(self, op: Op) -> None:
        self.emitter.line(f"store {self.emitter.typed(op.args[1])}, ptr {self.emitter.operand(op.args[0])}")

    # -- control ---------------------------------------------------------------------------------------------------

    def _if(self, op: Op) -> None:
        e, (then, otherwise) = self.emitter, op.blocks
        yes, no, end = e.labels("then", "else", "endif")
        e.line(f"br i1 {e.operand(op.args[0])}, label %{yes}, label %{no if otherwise else end}")
        for label, block in ((yes, then), (no, otherwise)):
            if block or label == yes:
                e.start(label)
                self._block(block)
                e.line(f"br label %{end}")
        e.start(end)

    def _loop(self, op: Op) -> None:
        e, index = self.emitter, op.attrs["index"]
        assert isinstance(index.type, Scalar)
        type_, signed = llvm_type(index.type), index.type.is_signed
        start, stop, step = (e.operand(x) for x in op.args)
        head, body, latch, end = e.labels("loop", "body", "latch", "endloop")
        counter, following, before = e.name(index.hint or "i"), e.name("next"), e.label
        e.bind(index, counter)
        e.line(f"br label %{head}")
        e.start(head)
        e.line(f"{counter} = phi {type_} [ {start}, %{before} ], [ {following}, %{latch} ]")
        more = e.emit(f"icmp {'slt' if signed else 'ult'} {type_} {counter}, {stop}")
        e.line(f"br i1 {more}, label %{body}, label %{end}")
        e.start(body)
        self._block(op.blocks[0])
        e.line(f"br label %{latch}")
        e.start(latch)
        # Overflow of the index is undefined.
        e.line(f"{following} = add {'nsw' if signed else 'nuw'} {type_} {counter}, {step}")
        e.line(f"br label %{head}{self._unroll(op)}")
        e.start(end)

    def _unroll(self, op: Op) -> str:
        """The unroll metadata of a loop's last branch.

        Hints that LLVM cannot follow are dropped, since it would print a warning: full unrolling of a loop whose trip
        count is unknown or large.
        """
        count, (start, stop, step) = op.attrs["unroll"], (x.constant for x in op.args)
        copies = count
        if count < 0:
            known = start is not None and stop is not None and step is not None
            copies = max(-((start - stop) // step), 0) if known else 0
        if copies == 0 or copies * sum(1 for _ in walk(op.blocks[0])) > _UNROLL_LIMIT:
            return ""
        metadata = self.emitter.metadata
        number = len(metadata)
        hint = '!"llvm.loop.unroll.full"' if count < 0 else f'!"llvm.loop.unroll.count", i32 {count}'
        metadata.append(f"!{number} = distinct !{{!{number}, !{{{hint}}}}}")
        return f", !llvm.loop !{number}"

    # -- intrinsics, comments and unsupported operations -----------------------------------------------------------

    def _intrinsic(self, op: Op) -> None:
        e = self.emitter
        if op.attrs["language"] != "llvm":
            raise refuse(op, "an intrinsic of llvm", op.attrs["language"], "choose the kernel by the target")
        result = "" if op.result is None else e.name()
        try:
            e.line(op.attrs["code"].format(result, *(e.operand(x) for x in op.args)))
        except (IndexError, KeyError, ValueError) as error:
            raise refuse(op, "{0}, {1} ... in the code", op.attrs["code"], f"{error}; double literal braces") from error
        if op.result is not None:
            e.bind(op.result, result)

    def _fragment(self, op: Op) -> None:
        raise refuse(op, "no matrix fragments", op.opcode, "CPUs have vectors: use the vector operations")

    def _comment(self, op: Op) -> None:
        for text in str(op.attrs["text"]).splitlines():
            self.emitter.line(f"; {_ascii(text)}")


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()
