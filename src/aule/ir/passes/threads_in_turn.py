"""Rewrites a workgroup of many threads as one thread that runs them in turn, for processors such as a CPU's core.

The operations between two barriers become a loop over the threads. A value, a variable or a private array that is used
on both sides of a barrier gets an array with a place for each thread. An ``if`` or ``loop`` around a barrier is
uniform, so it runs once, with the operands of thread 0. Constants and indices of threads and workgroups are computed
again wherever they are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aule.errors import KernelError
from aule.ir._uniform import uniform_values
from aule.ir.kernel import KernelIR, Op, Value, walk
from aule.ir.ops import OPS
from aule.ir.passes.rewrite import Lowered, PassBuilder, Rewriter
from aule.ir.types import Pointer, Ref, bool_, element, i32, lanes_of, u8

_COMBINE: dict[str, str] = {"subgroup_any": "or", "subgroup_all": "and"}
_LANES = 32
"""Threads of a subgroup in kernels that run with any number."""
_ALIGN = 16
"""The most elements that an access can be aligned to: a thread's part of an array is a multiple of it."""


@dataclass(eq=False)
class _Run:
    """Operations of one block without a barrier between them."""

    ops: list[Op] = field(default_factory=list)
    uses: dict[Value, None] = field(default_factory=dict)
    """Operands that come from elsewhere, in the order of their first use."""


def threads_in_turn(kernel: KernelIR) -> KernelIR:
    """Return a kernel with a workgroup of one thread that does what all threads of ``kernel`` do.

    Raises KernelError for clusters, matrix units, asynchronous copies, and subgroup operations of which only some
    threads of the workgroup take part.
    """
    if kernel.workgroup == 1:
        return kernel
    return _InTurn(kernel).run()


class _InTurn(Rewriter):
    def __init__(self, kernel: KernelIR) -> None:
        super().__init__(kernel)
        self.b = PassBuilder(kernel.name, 1, arithmetic=kernel.arithmetic)
        self._threads, self._lanes = kernel.workgroup, kernel.subgroup_size or _LANES
        self._thread: Value | None = None  # index of the thread whose operations are emitted; None between runs
        self._arrays: dict[Value, Value] = {}
        self._items: dict[int, list[_Run | Op]] = {}
        self._check()
        self._kept = self._across_barriers()
        self.hooks |= {
            "thread_id": lambda op: self._index(),
            "lane_id": lambda op: self._index() % self._lanes,
            "subgroup_id": lambda op: self._index() // self._lanes,
            "var": self._var,
            "get": self._get,
            "set": self._set,
            "private": self._private,
            "load": self._load,
            "store": self._store,
        }
        for opcode in ("launch_next", "launch_await"):
            self.hooks[opcode] = lambda op: None

    # -- analysis ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        uniform = uniform_values(self.kernel)
        for op in self.kernel.walk():
            if OPS[op.opcode].category in ("fragment", "warpgroup") or op.opcode.startswith(("async_", "cluster_")):
                raise KernelError(
                    f"{op.opcode}: expected an operation that a workgroup of one thread can do, got one of matrix "
                    f"units, copies or clusters; use a device that has them ({op.where})"
                )
            if op.blocks and self._meets(op) and not all(arg in uniform for arg in op.args):
                raise KernelError(
                    f"{op.opcode}: expected subgroup operations that all threads of the workgroup reach, got a "
                    f"condition that differs between threads; use shared memory and a barrier ({op.where})"
                )

    def _meets(self, op: Op) -> bool:
        """Whether threads wait for each other in an operation or in its blocks."""
        if op.opcode in ("barrier", "workgroup_any", "subgroup_barrier") or OPS[op.opcode].category == "subgroup":
            return True
        return any(self._meets(inner) for block in op.blocks for inner in block)

    def _across_barriers(self) -> set[Value]:
        """Values that are used in another run than the one that defines them."""
        home: dict[Value, _Run | Op] = {}
        uses: list[tuple[_Run | Op, Value]] = []
        self._split(self.kernel.body, home, uses)
        return {value for place, value in uses if value in home and home[value] is not place}

    def _split(self, block: list[Op], home: dict[Value, _Run | Op], uses: list[tuple[_Run | Op, Value]]) -> None:
        items = self._items[id(block)] = []
        for op in block:
            if _recomputed(op):
                continue
            if self._meets(op):
                items.append(op)
                uses += [(op, arg) for arg in op.args]
                if op.result is not None and op.opcode != "workgroup_any":
                    home[op.result] = op
                for inner in op.blocks:
                    self._split(inner, home, uses)
                continue
            if not items or isinstance(items[-1], Op):
                items.append(_Run())
            run = items[-1]
            assert isinstance(run, _Run)
            run.ops.append(op)
            for inner_op in walk([op]):
                run.uses |= dict.fromkeys(arg for arg in inner_op.args if home.get(arg) is not run)
                uses += [(run, arg) for arg in inner_op.args]
                if inner_op.result is not None:
                    home[inner_op.result] = run

    # -- emission ------------------------------------------------------------------------------------------------------

    def block(self, ops: list[Op]) -> None:
        """Rewrite a block: inside a run for the current thread, else run by run."""
        if self._thread is not None:
            super().block(ops)
            return
        items = self._items[id(ops)]
        for op in _top_level(items):
            if op.result in self._kept:
                self._declare(op.output)
        for item in items:
            if isinstance(item, _Run):
                self._run_threads(item)
            else:
                self.b.where = item.where
                self._meet(item)

    def _run_threads(self, run: _Run) -> None:
        with self._each_thread():
            for old in run.uses:
                self._bring(old)
            for op in run.ops:
                super().block([op])
                if op.result in self._arrays and not isinstance(op.output.type, Pointer | Ref):
                    self._write(self._arrays[op.output], self.value(op.output))

    @contextmanager
    def _each_thread(self) -> Iterator[None]:
        with self.b.loop(0, self._threads, name="thread") as thread:
            self._thread = thread
            yield
        self._thread = None

    def _index(self) -> Value:
        return self.b.const(0, i32) if self._thread is None else self._thread

    def _bring(self, old: Value) -> None:
        """Make an operand from outside of the run available to the current thread."""
        if old.op is not None and _recomputed(old.op):
            self.b.where = old.op.where
            new = self.hooks.get(old.op.opcode, self.clone)(old.op)
            assert new is not None
            self.values[old] = new
        elif old in self._arrays:
            array = self._arrays[old]
            self.values[old] = array if isinstance(old.type, Pointer | Ref) else self._read(array, old, self._index())

    def value(self, old: Value) -> Value:
        """The new value of an old one; between runs, that of thread 0."""
        if self._thread is None:
            self._bring(old)
        return super().value(old)

    # -- operations in which threads meet ------------------------------------------------------------------------------

    def _meet(self, op: Op) -> None:
        if op.blocks:
            self.clone(op)
        elif op.opcode == "workgroup_any":
            self.values[op.output] = self._any(op.args[0])
        elif op.opcode in ("shuffle", "shuffle_xor"):
            self._exchange(op)
        elif op.result is not None:
            self._reduce(op)

    def _any(self, old: Value) -> Value:
        b = self.b
        found = b.var(b.const(0, u8), "any")
        with self._each_thread():
            self._bring(old)
            found.value = found.value | b.cast(self.value(old), u8)
        return b.ne(found.value, 0)

    def _exchange(self, op: Op) -> None:
        with self._each_thread():
            thread = self._index()
            if op.opcode == "shuffle_xor":
                other = thread ^ op.attrs["mask"]
            else:
                self._bring(op.args[1])
                other = thread - thread % self._lanes + self.b.cast(self.value(op.args[1]), i32)
            self._keep(op, self._of_thread(op.args[0], other))

    def _reduce(self, op: Op) -> None:
        kind = _COMBINE.get(op.opcode) or op.attrs["kind"]
        with self._each_thread():
            thread = self._index()
            first = thread - thread % self._lanes
            total = self.b.var(self._of_thread(op.args[0], first), "total")
            last = self.b.min(first + self._lanes, self._threads)
            with self.b.loop(first + 1, last) as other:
                total.value = self.b.binary(kind, total.value, self._of_thread(op.args[0], other))
            self._keep(op, total.value)

    def _of_thread(self, old: Value, thread: Value) -> Value:
        """The value of any thread."""
        if old in self._arrays:
            return self._read(self._arrays[old], old, thread)
        mine, self._thread = self._thread, thread
        self._bring(old)
        self._thread = mine
        return super().value(old)

    def _keep(self, op: Op, new: Value) -> None:
        if op.output in self._arrays:
            self._write(self._arrays[op.output], new)

    # -- arrays with a place for each thread ---------------------------------------------------------------------------

    def _declare(self, old: Value) -> None:
        type_ = old.type.target if isinstance(old.type, Ref) else old.type
        elem = u8 if element(type_) == bool_ else element(type_)
        name = f"of_threads_{len(self._arrays)}"
        self._arrays[old] = self.b.private(name, elem, self._threads * _length(old))

    def _read(self, array: Value, old: Value, thread: Value) -> Value:
        type_ = old.type.target if isinstance(old.type, Ref) else old.type
        word = self.b.load(array, thread * _length(old), lanes_of(type_))
        return self.b.ne(word, 0) if element(type_) == bool_ else word

    def _write(self, array: Value, new: Value) -> None:
        word = self.b.cast(new, u8) if element(new.type) == bool_ else new
        self.b.store(array, self._index() * lanes_of(new.type), word)

    def _var(self, op: Op) -> Lowered | None:
        if op.output not in self._arrays:
            return self.clone(op)
        self._write(self._arrays[op.output], self.value(op.args[0]))
        return self._arrays[op.output]

    def _get(self, op: Op) -> Lowered | None:
        ref = op.args[0]
        return self._read(self._arrays[ref], ref, self._index()) if ref in self._arrays else self.clone(op)

    def _set(self, op: Op) -> None:
        ref = op.args[0]
        if ref in self._arrays:
            self._write(self._arrays[ref], self.value(op.args[1]))
        else:
            self.clone(op)

    def _private(self, op: Op) -> Lowered | None:
        return self._arrays[op.output] if op.output in self._arrays else self.clone(op)

    def _place(self, op: Op) -> Value:
        """The index of an access, moved to the thread's part if the array has one for each thread."""
        index = self.value(op.args[1])
        if op.args[0] not in self._arrays:
            return index
        return self.b.cast(self._index() * _length(op.args[0]), element(index.type)) + index

    def _load(self, op: Op) -> Lowered | None:
        align, lanes = op.attrs["align"], lanes_of(op.output.type)
        return self.b.load(self.value(op.args[0]), self._place(op), lanes, align)

    def _store(self, op: Op) -> None:
        self.b.store(self.value(op.args[0]), self._place(op), self.value(op.args[2]), op.attrs["align"])


def _recomputed(op: Op) -> bool:
    return OPS[op.opcode].category == "leaf"


def _top_level(items: list[_Run | Op]) -> Iterator[Op]:
    for item in items:
        yield from item.ops if isinstance(item, _Run) else [item]


def _length(old: Value) -> int:
    """Elements of a thread's place in the array of a value, a variable or a private array."""
    if isinstance(old.type, Pointer):
        assert old.type.length is not None
        return -(-old.type.length // _ALIGN) * _ALIGN
    return lanes_of(old.type.target if isinstance(old.type, Ref) else old.type)
