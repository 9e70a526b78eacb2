"""Every rule of the specification: a kernel that breaks it is refused, with the operation, the types and the line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aule.artifact import Param
from aule.errors import KernelError
from aule.ir import Builder, KernelIR, Op, Value, Var
from aule.ir.kernel import walk
from aule.ir.ops import OPS
from aule.ir.passes import soft_half
from aule.ir.types import (
    Fragment,
    Panels,
    Pointer,
    Ref,
    Role,
    Scalar,
    Vector,
    bf16,
    bool_,
    f16,
    f32,
    f64,
    i8,
    i32,
    i64,
    u8,
    u32,
    u64,
)
from aule.ir.verify import verify, verify_structure


class Kit:
    """A builder with one of everything, so that each broken kernel is a line."""

    def __init__(self) -> None:
        self.b = b = Builder("broken", workgroup=64, subgroup_size=32)
        self.read, self.write = b.buffer("read", f32), b.buffer("write", f32, "write")
        self.both, self.count = b.buffer("both", i32, "readwrite"), b.buffer("count", f32, "readwrite")
        self.n, self.scale = b.scalar("n", i32), b.scalar("scale", f32)
        self.tile = b.shared("tile", f32, 64)
        self.t = b.thread_id()
        self.x, self.h = b.const(1.5, f32), b.const(1.5, f16)
        self.p = b.eq(self.n, 0)
        self.long, self.byte = b.cast(self.n, i64), b.cast(self.n, u8)
        self.v = b.vector([self.x] * 4)
        self.ref = b.var(self.x).ref
        self.a = b.fragment_fill(Fragment(f16, 16, 8, "a"), 0.0)
        self.bm = b.fragment_fill(Fragment(f16, 8, 16, "b"), 0.0)
        self.c = b.fragment_fill(Fragment(f32, 16, 16, "accumulator"), 0.0)

    def emit(self, opcode: str, *args: Any, type: Any = None, blocks: Any = (), **attrs: Any) -> Value:
        return self.b.emit(opcode, args, type, blocks, **attrs)


def refused(kernel: KernelIR, *parts: str) -> str:
    with pytest.raises(KernelError) as caught:
        verify(kernel)
    message = str(caught.value)
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"
    return message


BROKEN: list[tuple[str, Callable[[Kit], Any], str]] = [
    # Form.
    ("arity", lambda k: k.emit("add", k.n, type=i32), "add: expected 2 operands, got 1"),
    ("attribute missing", lambda k: k.emit("load", k.read, k.n, type=f32), "expected the attributes (align), got ()"),
    ("attribute unknown", lambda k: k.emit("neg", k.n, type=i32, fast=True), "expected the attributes (), got (fast)"),
    ("no result", lambda k: k.emit("neg", k.n), "neg: expected a result, got none"),
    ("result too much", lambda k: k.emit("barrier", type=i32, global_memory=False), "expected no result, got one"),
    ("block missing", lambda k: k.emit("if", k.p, blocks=([],)), "if: expected 2 blocks, got 1"),
    ("block too much", lambda k: k.emit("neg", k.n, type=i32, blocks=([],)), "neg: expected 0 blocks, got 1"),
    # Types as such.
    ("three lanes", lambda k: k.emit("splat", k.x, type=Vector(f32, 3)),
     "expected a vector of 2, 4, 8 or 16, got f32x3"),
    ("one lane", lambda k: k.b.var(k.emit("splat", k.x, type=Vector(f32, 1))), "got f32x1"),
    ("32 lanes", lambda k: k.b.load(k.read, 0, 32), "got f32x32"),
    ("unknown type", lambda k: k.emit("cast", k.x, type=Scalar("f8", "float", 8)),
     "expected a type of the language, got f8"),
    ("fragment use", lambda k: k.b.fragment_fill(Fragment(f32, 8, 8, "c"), 0.0),  # type: ignore[arg-type]
     "a fragment of numbers"),
    ("fragment rows", lambda k: k.b.fragment_fill(Fragment(f32, 0, 8, "a"), 0.0), "with rows, columns and a use"),
    # Leaves.
    ("const range", lambda k: k.b.const(1 << 31, i32), "const: expected a value of type i32, got 2147483648"),
    ("const unsigned", lambda k: k.b.const(-1, u8), "expected a value of type u8, got -1"),
    ("const float", lambda k: k.emit("const", type=f32, value=1), "expected a value of type f32, got 1"),
    ("const bool", lambda k: k.emit("const", type=bool_, value=1), "expected a value of type bool, got 1"),
    ("const vector", lambda k: k.emit("const", type=Vector(f32, 2), value=1.0), "expected a scalar"),
    ("thread id", lambda k: k.emit("thread_id", type=u32),
     "thread_id: expected i32 as the result, got no operands -> u32"),
    ("axis", lambda k: k.b.group_id(3), "expected axis to be 0, 1 or 2, got 3"),
    # Arithmetic.
    ("mixed", lambda k: k.n + k.long, "add: expected scalars or vectors of one type, got i32, i64 -> i32"),
    ("mixed floats", lambda k: k.x * k.h, "got f32, f16 -> f32"),
    ("result type", lambda k: k.emit("add", k.n, k.n, type=i64), "got i32, i32 -> i64"),
    ("bool add", lambda k: k.p + k.p, "expected elements of kind int, uint, float, got bool, bool -> bool"),
    ("float and", lambda k: k.x & k.x, "and: expected elements of kind bool, int, uint"),
    ("float not", lambda k: ~k.x, "not: expected elements of kind bool, int, uint"),
    ("float rem", lambda k: k.x % k.x, "rem: expected elements of kind int, uint"),
    ("signed mulhi", lambda k: k.b.mulhi(k.n, k.n), "mulhi: expected elements of kind uint, got i32, i32 -> i32"),
    ("wide mulhi", lambda k: k.b.mulhi(k.b.cast(k.n, u64), 3), "mulhi: expected elements of type u32, got u64, u64"),
    ("float shl", lambda k: k.x << k.x, "shl: expected elements of kind int, uint"),
    ("bool shr", lambda k: k.p >> k.p, "shr: expected elements of kind int, uint"),
    ("int exp2", lambda k: k.b.exp2(k.n), "exp2: expected elements of kind float, got i32 -> i32"),
    ("int fma", lambda k: k.b.fma(k.n, k.n, k.n), "fma: expected elements of kind float"),
    ("fma mixed", lambda k: k.b.fma(k.x, k.x, k.h), "got f32, f32, f16 -> f32"),
    ("pairs of floats", lambda k: k.b.dot_pairs(k.x, k.x, k.x),
     "expected two operands of u32 and one of f32, got f32, f32, f32 -> f32"),
    ("pairs to a half", lambda k: k.b.dot_pairs(k.n, k.n, k.h), "expected f32 or a vector of it as the result"),
    ("bytes of a float", lambda k: k.b.e4m3_halves(k.x), "e4m3_halves: expected u32, and f16x4 as the result"),
    ("vector lanes", lambda k: k.v + k.b.vector([k.x] * 2), "got f32x4, f32x2 -> f32x4"),
    ("compare mixed", lambda k: k.n < k.long, "lt: expected scalars or vectors of one type, got i32, i64 -> bool"),
    ("compare bools", lambda k: k.p < k.p, "lt: expected elements of kind int, uint, float"),
    ("compare result", lambda k: k.emit("lt", k.v, k.v, type=bool_), "expected boolx4 as the result"),
    ("select condition", lambda k: k.b.select(k.n, k.x, k.x),
     "expected bool or bool as the condition, got i32, f32, f32"),
    ("select shape", lambda k: k.b.select(k.v < 0.0, k.x, k.x), "got boolx4, f32, f32 -> f32"),
    ("select sides", lambda k: k.b.select(k.p, k.x, k.n), "two scalars or vectors of the result's type"),
    # Conversion.
    ("cast to bool", lambda k: k.emit("cast", k.n, type=bool_), "expected a result that is not bool"),
    ("cast shape", lambda k: k.emit("cast", k.v, type=f16), "expected a result of the operand's shape"),
    ("cast fragment", lambda k: k.emit("cast", k.a, type=Fragment(f32, 16, 8, "b")), "a result of the operand's shape"),
    ("bitcast size", lambda k: k.b.bitcast(k.x, i64), "bitcast: expected types of one size, got f32 -> i64"),
    ("bitcast bool", lambda k: k.b.bitcast(k.p, i8), "expected scalars or vectors of numbers"),
    # Vectors.
    ("make_vector", lambda k: k.emit("make_vector", k.x, k.n, type=Vector(f32, 2)),
     "as many scalars as the vector has"),
    ("make_vector count", lambda k: k.emit("make_vector", k.x, type=Vector(f32, 2)), "got f32 -> f32x2"),
    ("splat", lambda k: k.emit("splat", k.n, type=Vector(f32, 2)), "a vector of it as the result, got i32 -> f32x2"),
    ("extract", lambda k: k.emit("extract", k.x, type=f32, lane=0), "expected a vector"),
    ("extract lane", lambda k: k.b.extract(k.v, 4), "expected a lane below 4, got 4"),
    ("extract negative", lambda k: k.b.extract(k.v, -1), "expected lane to be a lane of the vector, got -1"),
    ("permute scalar", lambda k: k.b.permute(k.x, None, (0, 0)), "permute: expected vectors of one type, got f32"),
    ("permute mixed", lambda k: k.b.permute(k.v, k.b.vector([k.x] * 2), (0, 1)),
     "vectors of one type, got f32x4, f32x2"),
    ("permute operands", lambda k: k.emit("permute", k.v, k.v, k.v, type=f32, lanes=(0,)),
     "expected 1 or 2 operands, got 3"),
    ("permute lane", lambda k: k.b.permute(k.v, k.v, (0, 8)), "expected lanes below 8, got 8"),
    ("permute lane of one", lambda k: k.b.permute(k.v, None, (4,)), "expected lanes below 4, got 4"),
    ("permute negative", lambda k: k.b.permute(k.v, None, (-1, 0)), "expected lanes to be a tuple of lanes"),
    ("permute three", lambda k: k.b.permute(k.v, None, (0, 1, 2)), "expected a vector of 2, 4, 8 or 16, got f32x3"),
    ("permute none", lambda k: k.emit("permute", k.v, type=f32, lanes=()), "f32x0 as the result of 0 lanes"),
    ("permute result", lambda k: k.emit("permute", k.v, type=Vector(f32, 4), lanes=(0, 1)),
     "expected f32x2 as the result of 2 lanes"),
    # Memory.
    ("no pointer", lambda k: k.emit("load", k.x, k.n, type=f32, align=1), "expected a pointer as the first operand"),
    ("float index", lambda k: k.b.load(k.read, k.x), "expected an index of type i32, i64, u32, got global<f32>, f32"),
    ("byte index", lambda k: k.b.load(k.read, k.byte), "got global<f32>, u8 -> f32"),
    ("load elem", lambda k: k.emit("load", k.read, k.n, type=f16, align=1),
     "expected f32, or a vector of it, as the result"),
    ("store elem", lambda k: k.b.store(k.write, 0, k.h), "expected f32, or a vector of it, as the value"),
    ("store to read", lambda k: k.b.store(k.read, 0, k.x), 'may be written, got read with access "read"'),
    ("load from write", lambda k: k.b.load(k.write, 0), 'may be read, got write with access "write"'),
    ("align", lambda k: k.b.load(k.read, 0, align=3), "expected align to be a power of two, got 3"),
    ("align zero", lambda k: k.b.store(k.write, 0, k.x, align=0), "expected align to be a power of two, got 0"),
    ("private length", lambda k: k.b.private("p", f32, 0), "private: expected an array with a length"),
    ("private bool", lambda k: k.b.private("p", bool_, 4), "expected a private array of numbers"),
    ("private space", lambda k: k.emit("private", type=Pointer(f32, "shared", 4), name="p"),
     "a private array of numbers"),
    ("private name", lambda k: k.b.private("a-b", f32, 4), "expected name to be an identifier, got 'a-b'"),
    ("atomic kind", lambda k: k.b.atomic("sub", k.both, 0, 1),
     "expected one of add, min, max, and, or, xor, exchange on i32"),
    ("atomic float", lambda k: k.b.atomic("max", k.count, 0, 1.0), "expected one of add on f32, got 'max'"),
    ("atomic access", lambda k: k.b.atomic("add", k.write, 0, 1.0), 'got write with access "write"'),
    ("atomic private", lambda k: k.b.atomic("add", k.b.private("p", i32, 4), 0, 1), "global or shared memory"),
    ("atomic type", lambda k: k.b.atomic("add", k.b.shared("bytes", u8, 4), 0, 1), "i32, u32 or f32 in memory"),
    ("atomic value", lambda k: k.b.atomic("add", k.both, 0, k.x), "expected i32, or two or four f32 of global memory"),
    # Variables, and that they and pointers are nothing else.
    ("var of pointer", lambda k: k.emit("var", k.tile, type=Ref(f32)), "var: expected an initial value"),
    ("var type", lambda k: k.emit("var", k.x, type=Ref(f16)),
     "a variable of its type as the result, got f32 -> var<f16>"),
    ("get", lambda k: k.emit("get", k.x, type=f32), "get: expected a variable"),
    ("set", lambda k: k.b.set(k.ref, k.h), "set: expected a variable and a value of its type, got var<f32>, f16"),
    ("ref arithmetic", lambda k: k.emit("neg", k.ref, type=Ref(f32)), "expected scalars or vectors of one type"),
    ("pointer arithmetic", lambda k: k.emit("add", k.tile, k.tile, type=k.tile.type), "scalars or vectors of one type"),
    ("pointer stored", lambda k: k.emit("store", k.tile, k.n, k.tile, align=1), "f32, or a vector of it, as the value"),
    ("pointer compared", lambda k: k.emit("eq", k.tile, k.tile, type=bool_), "scalars or vectors of one type"),
    ("pointer selected", lambda k: k.emit("select", k.p, k.tile, k.tile, type=k.tile.type), "two scalars or vectors"),
    ("ref to intrinsic", lambda k: k.b.intrinsic("ptx", "x", [k.ref], None), "expected no variables as operands"),
    ("intrinsic pointer", lambda k: k.b.intrinsic("ptx", "x", [], k.tile.type),  # type: ignore[arg-type]
     "a value as the result"),
    ("intrinsic language", lambda k: k.b.intrinsic("", "x", [], None), "expected language to be a language's name"),
    # Control.
    ("if", lambda k: k.emit("if", k.n, blocks=([], [])), "if: expected a bool, got i32"),
    ("if vector", lambda k: k.emit("if", k.v < 0.0, blocks=([], [])), "if: expected a bool, got boolx4"),
    ("loop types", lambda k: _loop(k, k.n, k.long, k.n), "of one integer type of 32 or 64 bits, got i32, i64, i32"),
    ("loop float", lambda k: _loop(k, k.x, k.x, k.x), "got f32, f32, f32 and index f32"),
    ("loop byte", lambda k: _loop(k, k.byte, k.byte, k.byte), "got u8, u8, u8 and index u8"),
    ("loop step", lambda k: _loop(k, k.n, k.n, k.b.const(0, i32)), "loop: expected a positive step, got 0"),
    ("loop unroll", lambda k: _loop(k, k.n, k.n, k.n, unroll=-2), "expected unroll to be -1, 0 or a count, got -2"),
    ("loop index", lambda k: k.emit("loop", k.n, k.n, k.n, blocks=([],), index=3, unroll=0),
     "index to be a value, got 3"),
    ("barrier", lambda k: k.emit("barrier", global_memory=1), "expected global_memory to be a bool, got 1"),
    # Subgroups.
    ("shuffle wide", lambda k: k.b.shuffle(k.long, 0), "shuffle: expected a scalar of 32 bits"),
    ("shuffle half", lambda k: k.b.shuffle_xor(k.h, 1), "shuffle_xor: expected a scalar of 32 bits"),
    ("shuffle vector", lambda k: k.b.shuffle(k.v, 0), "got f32x4, i32 -> f32x4"),
    ("shuffle lane", lambda k: k.b.shuffle(k.x, k.long), "shuffle: expected an i32 as the lane"),
    ("shuffle mask", lambda k: k.b.shuffle_xor(k.x, 32), "expected a mask below the subgroup size 32, got 32"),
    ("shuffle mask zero", lambda k: k.b.shuffle_xor(k.x, 0), "expected mask to be a positive integer, got 0"),
    ("reduce bool", lambda k: k.b.subgroup_reduce("add", k.p), "expected a scalar of 32 bits"),
    ("reduce kind", lambda k: k.b.subgroup_reduce("mul", k.x), "expected one of add, min, max, got 'mul'"),
    ("workgroup vote", lambda k: k.b.workgroup_any(k.n), "workgroup_any: expected a bool, got i32 -> bool"),
    ("prefetch shared", lambda k: k.b.prefetch(k.tile, 0), "prefetch: expected global memory"),
    ("load_streaming shared", lambda k: k.b.load_streaming(k.tile, 0), "load_streaming: expected global memory"),
    ("store_stream shared", lambda k: k.b.store_streaming(k.tile, 0, 1.0), "store_streaming: expected global memory"),
    ("repeat", lambda k: k.emit("repeat", k.n, blocks=([],)), "repeat: expected a variable of i32, got i32"),
    ("repeat alone", lambda k: k.emit("repeat", k.b.var(k.n).ref, blocks=([],)), "repeat: expected a cluster, whose"),
    ("copy back", lambda k: k.b.async_copy(k.read, 0, k.tile, 0, 4), "expected shared memory"),
    ("copy type", lambda k: k.b.async_copy(k.b.shared("w", i32, 64), 0, k.read, 0, 4), "memory of one element type"),
    ("copy size", lambda k: k.b.async_copy(k.tile, 0, k.read, 0, 2), "expected 16 bytes, got 2 elements of f32"),
    ("copy written", lambda k: k.b.async_copy(k.tile, 0, k.count, 0, 4), "a buffer that the kernel only reads"),
    ("copy if", lambda k: k.b.async_copy(k.tile, 0, k.read, 0, 4, k.n), "a bool that says whether to copy"),
    ("copy index", lambda k: k.b.async_copy(k.tile, 0, k.read, k.x, 4), "expected an index of type"),
    ("await late", lambda k: k.b.launch_await(), "launch_await: expected the beginning of the kernel"),
    ("cluster space", lambda k: k.b.cluster_load(k.read, 0, k.n), "cluster_load: expected shared memory"),
    ("cluster post space", lambda k: k.b.cluster_post(k.read, 0, k.n, k.x), "cluster_post: expected shared memory"),
    ("cluster post bits", lambda k: k.b.cluster_post(k.b.shared("half", f16, 4), 0, k.n, 0.0), "elements of 32 bits"),
    ("cluster post number", lambda k: k.b.cluster_post(k.tile, 0, k.x, k.x), "f32 as the value, and an i32"),
    ("cluster number", lambda k: k.b.cluster_load(k.tile, 0, k.x), "expected an i32, and f32 or a vector of it"),
    ("copies pending", lambda k: k.b.async_wait(-1), "expected pending to be a count of groups, got -1"),
    ("vote", lambda k: k.b.subgroup_any(k.n), "subgroup_any: expected a bool, got i32 -> bool"),
    # Fragments.
    ("fill", lambda k: k.emit("fragment_fill", k.x, type=Fragment(f16, 8, 8, "a")),
     "and a fragment of it as the result"),
    ("pack", lambda k: k.b.fragment_pack(k.c.type, [k.x] * 4), "expected 8 components, got 4"),  # type: ignore[arg-type]
    ("pack type", lambda k: k.b.fragment_pack(k.c.type, [k.h] * 8),  # type: ignore[arg-type]
     "and a fragment of them as the result"),
    ("fragment load", lambda k: k.b.fragment_load(Fragment(f16, 8, 8, "a"), k.tile, 0, 8),
     "a fragment of f32 as the result"),
    ("fragment layout", lambda k: k.b.fragment_load(Fragment(f32, 8, 8, "a"), k.tile, 0, 8, "col"),
     '"row" or "column"'),
    ("fragment stride", lambda k: k.b.fragment_load(Fragment(f32, 8, 8, "a"), k.tile, 0, k.x),
     "expected a stride of type"),
    ("fragment private", lambda k: k.b.fragment_load(k.c.type, k.b.private("p", f32, 256), 0, 8),  # type: ignore[arg-type]
     "global or shared memory"),
    ("fragment store", lambda k: k.b.fragment_store(k.write, 0, 8, k.a), "expected a fragment of f32"),
    ("fragment store read", lambda k: k.b.fragment_store(k.read, 0, 16, k.c), 'got read with access "read"'),
    ("mma use", lambda k: k.b.fragment_mma(k.bm, k.a, k.c), "fragments of use a, b and accumulator"),
    ("mma shape", lambda k: k.b.fragment_mma(k.a, k.b.fragment_fill(Fragment(f16, 16, 16, "b"), 0.0), k.c),
     "m x k, k x n"),
    ("mma elem", lambda k: k.b.fragment_mma(k.a, k.b.fragment_fill(Fragment(f32, 8, 16, "b"), 0.0), k.c),
     "a and b of one"),
    ("mma scalar", lambda k: k.b.fragment_mma(k.x, k.bm, k.c), "expected three fragments"),
    ("mma narrow", lambda k: k.b.fragment_mma(k.b.cast(k.a, f64), k.b.cast(k.bm, f64), k.c), "at least its size"),
    ("length scalar", lambda k: k.emit("fragment_length", k.x, type=i32), "expected a fragment, and i32 as the result"),
    ("pack factor", lambda k: k.b.fragment_pack(k.a.type, [k.h] * 6), "expected 4 components, got 6"),  # type: ignore[arg-type]
    ("get scalar", lambda k: k.emit("fragment_get", k.x, type=f32, component=0), "expected a fragment"),
    ("get result", lambda k: k.emit("fragment_get", k.a, type=f32, component=0), "expected f16 as the result"),
    ("component", lambda k: k.b.fragment_get(k.c, 8), "expected a component below 8, got 8"),
    ("component set", lambda k: k.b.fragment_set(k.c, 0, k.h), "expected f32, and fragment<f32,16x16,accumulator> as"),
    # Warpgroups.
    ("warpgroup type", lambda k: _warpgroup(k, memory=k.tile), "expected factors of 16-bit floats"),
    ("warpgroup left", lambda k: _warpgroup(k, left=k.c), "16x16, of use a as the left factor"),
    ("warpgroup accumulators", lambda k: _warpgroup(k, variables=[k.b.var(k.x)]), "as accumulators"),
    ("warpgroup twice", lambda k: _warpgroup(k, variables=[k.b.var(k.c)] * 2), "accumulators that differ"),
    ("warpgroup threads", lambda k: _warpgroup(k), "expected workgroups of whole warpgroups, got 64 threads"),
    ("one role", lambda k: k.emit("roles", blocks=([],), roles=(Role(2, 32),)), "expected two roles or more"),
    ("mbarrier", lambda k: k.b.mbarrier_init(k.tile), "expected shared memory of u64"),
    ("arrive", lambda k: k.b.mbarrier_arrive(k.read), "expected shared memory"),
    ("wait", lambda k: k.b.mbarrier_wait(k.b.shared("mbarrier", u64, 1), 0, k.x), "an i32 as the parity"),
    ("expect", lambda k: k.b.mbarrier_expect(k.tile, 0, 16), "mbarrier_expect: expected shared memory of u64"),
    ("tensor", lambda k: k.emit("tensor_copy", k.tile, k.n, k.tile, k.n, map="none"),
     "tensor_copy: expected shared memory of u64 for the mbarrier"),
    ("warpgroup pending", lambda k: k.b.warpgroup_wait(-1), "expected pending to be a count of groups, got -1"),
    ("fragment add", lambda k: k.c + k.c, "add: expected scalars or vectors of one type, got fragment<f32"),
]  # fmt: skip


def _loop(k: Kit, start: Value, stop: Value, step: Value, unroll: int = 0) -> None:
    k.emit("loop", start, stop, step, blocks=([],), index=Value(start.type, None, "i"), unroll=unroll)


def _warpgroup(
    k: Kit, memory: Value | None = None, left: Value | None = None, variables: list[Var] | None = None
) -> None:
    half = k.b.shared("panels", f16, 8192)
    memory = half if memory is None else memory
    left = k.b.fragment_fill(Fragment(f16, 16, 16, "a"), 0.0) if left is None else left
    variables = [k.b.var(k.c)] if variables is None else variables
    k.b.warpgroup_mma(variables, left, (memory, 0, Panels("row", 1024)))


@pytest.mark.parametrize(("breaks", "expected"), [entry[1:] for entry in BROKEN], ids=[entry[0] for entry in BROKEN])
def test_rule(breaks: Callable[[Kit], Any], expected: str) -> None:
    kit = Kit()
    verify(kit.b.finish())
    breaks(kit)
    message = refused(kit.b.finish(), "kernel broken", expected)
    assert "test_ir_verify.py:" in message


def test_every_typed_operation_has_a_broken_kernel() -> None:
    unbreakable = {"comment", "lane_id", "subgroup_id", "group_count", "subgroup_barrier", "log2", "sqrt", "rsqrt",
                   "rcp", "floor", "small", "sin", "cos", "abs", "sub", "div", "min", "max", "or", "xor", "le", "gt",
                   "ge", "ne", "subgroup_all", "async_commit", "warpgroup_commit", "warpgroup_fence",
                   "warpgroup_publish", "device_fence", "cluster_barrier",
                   "launch_next"}  # fmt: skip
    seen: set[str] = set()
    for _, breaks, _ in BROKEN:
        kit = Kit()
        breaks(kit)
        seen.add(kit.b.finish().body[-1].opcode)
    assert set(OPS) - seen <= unbreakable  # which share the rule of an operation that is tested


def test_the_line_of_the_operation_is_named() -> None:
    b = Builder("named", workgroup=32)
    frame = inspect.currentframe()
    assert frame is not None
    b.thread_id() + b.const(1, i64)
    refused(b.finish(), f"test_ir_verify.py:{frame.f_lineno - 1} in test_the_line", "`%1 = add i32 %0, 1:i64`")


def test_unknown_operation() -> None:
    kit = Kit()
    kit.emit("frobnicate")
    refused(kit.b.finish(), "expected an operation of the language, got 'frobnicate'", "test_ir_verify.py:")


# -- scope ---------------------------------------------------------------------------------------------------------


def test_values_of_a_block_stay_in_it() -> None:
    for opened in ("if", "else", "loop"):
        kit = Kit()
        b = kit.b
        if opened == "loop":
            with b.loop(0, kit.n):
                inner = kit.t * kit.t
        else:
            with b.if_(kit.p):
                inner = kit.t * kit.t
            if opened == "else":
                with b.else_():
                    b.store(kit.both, 0, inner)
        b.store(kit.both, 0, inner)
        refused(b.finish(), "store: expected operands that are defined before", "one that is defined elsewhere")


def test_values_around_a_block_are_seen_in_it() -> None:
    kit = Kit()
    b = kit.b
    with b.loop(0, kit.n) as i, b.if_(kit.p), b.loop(0, i) as j:
        b.store(kit.both, i + j + kit.t, i)
    verify(b.finish())


def test_the_index_stays_in_its_loop() -> None:
    kit = Kit()
    with kit.b.loop(0, kit.n) as i:
        pass
    kit.b.store(kit.both, 0, i)
    refused(kit.b.finish(), "one that is defined elsewhere (Value(i: i32))")


def test_use_before_definition_and_foreign_values() -> None:
    kit = Kit()
    kernel = kit.b.finish()
    kernel.body.reverse()
    refused(kernel, "one that nothing defines")
    kit = Kit()
    kit.b.store(kit.both, 0, Kit().n)
    refused(kit.b.finish(), "one that nothing defines")


def test_values_are_defined_once() -> None:
    kit = Kit()
    kernel = kit.b.finish()
    kernel.body.append(kernel.body[-1])
    refused(kernel, "expected a value that is defined once")
    kit = Kit()
    with kit.b.loop(0, kit.n):
        pass
    kernel = kit.b.finish()
    kernel.body.append(kernel.body[-1])
    refused(kernel, "expected a value that is defined once")


# -- the kernel as a whole -----------------------------------------------------------------------------------------


def _without_body(**changes: Any) -> KernelIR:
    kernel = Kit().b.finish()
    kernel.body.clear()
    return replace(kernel, **changes)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (_without_body(name="my kernel"), "expected a name that is an identifier, got 'my kernel'"),
        (_without_body(workgroup=0), "expected a workgroup of at least 1 thread, got 0"),
        (_without_body(subgroup_size=24), "a subgroup size that is 0 or a power of two, got 24"),
        (_without_body(max_registers=-1), "max_registers of at least 0, got -1"),
        (_without_body(arithmetic="nearest"), "expected arithmetic of a kind there is, got 'nearest'"),
        (_without_body(values={}), "one value for each parameter"),
        (_without_body(shared=(Value(Pointer(f32, "shared"), None, "s"),)), "expected a length for shared s"),
        (_without_body(shared=(Value(Pointer(f32, "shared", 0), None, "s"),)), "expected a length for shared s"),
        (_without_body(shared=(Value(Pointer(bool_, "shared", 4), None, "s"),)), "expected shared arrays of numbers"),
        (_without_body(shared=(Value(Pointer(f32, "global", 4), None, "s"),)), "expected shared arrays of numbers"),
        (_without_body(shared=(Value(Pointer(f32, "shared", 4), None, "n"),)), "names that differ, got 'n' twice"),
        (_without_body(shared=(Value(Pointer(f32, "shared", 4), None, "9"),)), "names that are identifiers, got '9'"),
    ],
)  # fmt: skip
def test_header(kernel: KernelIR, expected: str) -> None:
    refused(kernel, expected)


@pytest.mark.parametrize(
    ("param", "type_", "expected"),
    [
        (Param("a b", "scalar", "i32"), i32, "names that are identifiers, got 'a b'"),
        (Param("__a", "scalar", "i32"), i32, "names that are identifiers, got '__a'"),
        (Param("ä", "scalar", "i32"), i32, "names that are identifiers"),
        (Param("a", "scalar", "f16"), f16, "expected a scalar of i32, u32"),
        (Param("a", "scalar", "i32"), i64, "expected i32 as the type of a, got i64"),
        (Param("a", "buffer", "bool"), Pointer(bool_, "global"), "expected a buffer of numbers"),
        (Param("a", "buffer", "f32", "append"), Pointer(f32, "global"), "expected a known access"),  # type: ignore[arg-type]
        (Param("a", "buffer", "f32"), Pointer(f16, "global"), "expected global<f32> as the type of a, got global<f16>"),
        (Param("a", "buffer", "f32"), Pointer(f32, "shared", 4), "expected global<f32> as the type of a"),
    ],
)  # fmt: skip
def test_parameters(param: Param, type_: Any, expected: str) -> None:
    refused(KernelIR("k", (param,), {param.name: Value(type_, None, param.name)}, (), 32, []), expected)


def test_parameters_have_different_names() -> None:
    param = Param("a", "scalar", "i32")
    refused(KernelIR("k", (param, param), {"a": Value(i32)}, (), 32, []), "names that differ, got 'a' twice")


# -- barriers ------------------------------------------------------------------------------------------------------


def _divergent(kit: Kit) -> dict[str, Value]:
    b, t = kit.b, kit.t
    counter = b.var(b.const(0, i32), "counter")
    with b.if_(t < 3):
        counter.value = 1  # a uniform value, but not in all threads
    carried = b.var(b.const(0, i32), "carried")
    with b.loop(0, 4):
        b.store(kit.both, carried.value, 0)
        carried.value = carried.value + t
    return {
        "thread_id": t < 3,
        "lane_id": b.eq(b.lane_id(), 0),
        "subgroup_id": b.eq(b.subgroup_id(), 0),
        "computed": b.max(t * 2 + kit.n, 3) > 2,
        "divergent index": b.load(kit.read, t) > 0.0,
        "shared": b.load(kit.tile, 0) > 0.0,
        "writable": b.load(kit.count, 0) > 0.0,
        "private": b.load(b.private("p", f32, 1), 0) > 0.0,
        "shuffle": b.shuffle(kit.n, 0) > 0,
        "reduce": b.subgroup_reduce("max", kit.n) > 0,
        "vote": b.subgroup_all(kit.p),
        "atomic": b.atomic("add", kit.both, 0, 1) > 0,
        "fragment": b.fragment_get(kit.c, 0) > 0.0,
        "variable": counter.value > 0,
        "carried variable": carried.value > 0,
        "var of thread": b.var(t).value > 0,
    }


@pytest.mark.parametrize("name", _divergent(Kit()))
@pytest.mark.parametrize("control", ["if", "else", "loop", "nested"])
def test_barrier_in_divergent_control_flow(name: str, control: str) -> None:
    kit = Kit()
    b = kit.b
    condition = _divergent(kit)[name]
    if control == "loop":
        with b.loop(0, b.cast(condition, i32)):
            b.barrier()
    else:
        with b.if_(condition):
            if control == "if":
                b.barrier()
            elif control == "nested":
                with b.loop(0, kit.n):
                    b.barrier()
        if control == "else":
            with b.else_():
                b.barrier()
    kernel = b.finish()
    verify_structure(kernel)
    message = refused(kernel, "barrier: expected uniform control flow", "the barrier is at")
    assert message.count("test_ir_verify.py:") == 2


def test_barrier_in_uniform_control_flow() -> None:
    kit = Kit()
    b = kit.b
    counter = b.var(b.const(0, i32), "counter")
    read = b.load(kit.read, b.group_id() * 2 + kit.n)
    with b.loop(0, b.cast(read, i32) + kit.n) as i:
        with b.if_(i < b.group_count()):
            counter.value = counter.value + i
            b.barrier()
        with b.if_(counter.value > 3):
            b.barrier(global_memory=True)
        with b.else_():
            b.barrier()
        with b.if_(kit.t < 3):
            b.store(kit.tile, kit.t, 0.0)
        b.barrier()
    with b.if_(b.extract(b.vector([read, kit.scale]) * 2.0, 1) > 0.0):
        b.barrier()
    verify(b.finish())


def test_a_variable_that_diverges_later_in_the_loop_is_divergent_before() -> None:
    kit = Kit()
    b = kit.b
    go = b.var(b.const(0, i32), "go")
    with b.loop(0, kit.n):
        with b.if_(go.value < 1):
            b.barrier()
        go.value = kit.t
    refused(b.finish(), "barrier: expected uniform control flow")


def test_what_is_soft_is_in_fragments_alone() -> None:
    b = Builder("soft", 32, 32)
    memory, type_ = b.buffer("x", bf16, "readwrite"), Fragment(bf16, 16, 16, "a")
    loaded = b.fragment_load(type_, memory, 0, 16)
    changed = b.fragment_set(loaded, 0, b.fragment_get(loaded, 1))
    b.fragment_store(memory, 0, 16, b.fragment_pack(type_, [b.fragment_get(changed, i) for i in range(8)]))
    b.fragment_store(memory, 256, 16, b.fragment_fill(type_, 1.0))
    kernel = b.finish()
    verify(kernel)
    lowered = soft_half(kernel, {bf16})
    with pytest.raises(KernelError, match="a fragment of u16"):
        verify(lowered)
    verify_structure(lowered, frozenset({bf16}))
    with pytest.raises(KernelError, match="a fragment of bf16"):
        verify_structure(kernel, frozenset({bf16}))


def test_walk_visits_every_operation_once() -> None:
    kit = Kit()
    with kit.b.if_(kit.p):
        kit.b.barrier()
    with kit.b.else_():
        kit.b.comment("nothing")
    ops: list[Op] = list(kit.b.finish().walk())
    assert [op.opcode for op in ops[-3:]] == ["if", "barrier", "comment"]
    assert len(set(map(id, ops))) == len(ops) == len(list(walk(kit.b.finish().body)))
