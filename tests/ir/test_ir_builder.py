"""Tracing: what Python's operators emit, what is folded, and which line an operation remembers."""

from __future__ import annotations

import inspect
import math
import operator
from typing import Any

import pytest

from aule.errors import KernelError
from aule.ir import Builder, Value
from aule.ir.types import Fragment, Pointer, Ref, Scalar, Vector, bf16, bool_, f16, f32, f64, i8, i32, i64, u8, u32
from aule.ir.verify import verify


@pytest.fixture
def b() -> Builder:
    return Builder("traced", workgroup=32)


def opcodes(b: Builder) -> list[str]:
    return [op.opcode for op in b.finish().body if op.opcode != "const"]


# -- operators -----------------------------------------------------------------------------------------------------


def test_operators_emit_operations(b: Builder) -> None:
    x, y = b.scalar("x", i32), b.scalar("y", i32)
    results = [x + y, x - y, x * y, x // y, x / y, x % y, x & y, x | y, x ^ y, x << y, x >> y, -x, ~x]
    expected = "add sub mul div div rem and or xor shl shr neg not"
    assert [r.op.opcode for r in results if r.op] == expected.split()
    assert all(r.type == i32 for r in results)
    compared = [x < y, x <= y, x > y, x >= y, b.eq(x, y), b.ne(x, y)]
    assert [r.op.opcode for r in compared if r.op] == "lt le gt ge eq ne".split()
    assert all(r.type == bool_ for r in compared)
    verify(b.finish())


def test_python_numbers_take_the_other_operand_s_type(b: Builder) -> None:
    x, y = b.scalar("x", i32), b.scalar("y", f32)
    results = [3 + x, 3 - x, 3 * x, 3 // x, 3 % x, 3 & x, 3 | x, 3 ^ x, 3 << x, 3 >> x]
    for result in results:
        assert result.op is not None
        assert result.op.args[0].constant == 3 and result.op.args[0].type == i32
        assert result.op.args[1] is x
    mirrored = operator.lt(3, x).op
    assert mirrored is not None and mirrored.opcode == "gt"
    assert (1 / y).type == f32 and (y * 2).type == f32
    verify(b.finish())


def test_a_number_that_does_not_fit_the_type_is_refused(b: Builder) -> None:
    x = b.scalar("x", i32)
    with pytest.raises(KernelError, match=r"expected a whole number for i32, got 0\.5"):
        x * 0.5
    with pytest.raises(KernelError, match="expected a whole number for i32, got inf"):
        b.max(x, math.inf)
    assert (x * 2.0).type == i32


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda b: b.thread_id() * 0.5, "const: expected a whole number for i32, got 0.5; cast the other operand"),
        (lambda b: b.var(0.0), "var: expected a value of the kernel, got 0.0; write b.const(0.0, f32), or the type"),
        (lambda b: b.max(1, 2), "max: expected a value of the kernel, got 2"),
        (lambda b: b.cast(1, f32), "cast: expected a value of the kernel, got 1"),
        (lambda b: b.cast(b.thread_id(), "f32"), "expected a type of aule.ir.types such as f32, got 'f32'"),
        (lambda b: b.shared("tile", "f32", 4), "expected a type of aule.ir.types such as f32, got 'f32'"),
        (lambda b: b.load(3, 0), "load: expected a value of the kernel, got 3"),
        (lambda b: b.store(b.shared("tile", f32, 4), 0, "1"), "const: expected a number or a value of the kernel"),
        (lambda b: b.store(b.shared("tile", f32, 4), (0, 1), 1), "got (0, 1)"),
    ],
)
def test_a_mistake_names_its_line(b: Builder, mistake: Any, message: str) -> None:
    with pytest.raises(KernelError) as caught:
        mistake(b)
    code = mistake.__code__
    assert message in caught.value.message
    assert caught.value.message.endswith(f"(at {code.co_filename}:{code.co_firstlineno} in <lambda>)")


def test_vectors_take_scalars_along(b: Builder) -> None:
    x = b.scalar("x", f32)
    v = b.vector([x, x, x, x])
    for result in (v * 2.0, 2.0 * v, v * x, x * v, b.max(v, 0.0), b.fma(v, x, 1.0), b.select(v > x, v, 0.0)):
        assert result.type == Vector(f32, 4)
    assert (v < 1.0).type == Vector(bool_, 4)
    verify(b.finish())


def test_values_have_no_truth_and_are_found_by_identity(b: Builder) -> None:
    x = b.scalar("x", i32)
    with pytest.raises(TypeError, match=r"cannot branch on a value .*test_ir_builder\.py:"):
        if x < 1:
            pass
    assert {x: 1}[x] == 1 and x in {x}
    with pytest.raises(TypeError, match=r"cannot branch on a value .*test_ir_builder\.py:"):
        assert x in [b.const(1, i32)]
    assert repr(x) == "Value(x: i32)"


def test_what_python_cannot_do_with_values_names_the_operation_that_can(b: Builder) -> None:
    x, buffer = b.scalar("x", i32), b.buffer("buffer", f32, "readwrite")
    with pytest.raises(TypeError, match=r"use b\.loop\(\.\.\.\) instead of range \(at .*test_ir_builder\.py:"):
        range(x)
    with pytest.raises(TypeError, match=r"use b\.load\(buffer, index\) \(at .*test_ir_builder\.py:"):
        buffer[x]
    with pytest.raises(TypeError, match=r"use b\.store\(buffer, index, value\) \(at .*test_ir_builder\.py:"):
        buffer[x] = 1.0


def test_equality_is_an_operation(b: Builder) -> None:
    x = b.scalar("x", i32)
    same, other = x == 1, x != b.const(2, i32)
    assert [same.op.opcode, other.op.opcode] == ["eq", "ne"]  # type: ignore[attr-defined]


# -- folding -------------------------------------------------------------------------------------------------------


def test_integer_constants_are_folded(b: Builder) -> None:
    x = b.scalar("x", i32)
    six = b.const(6, i32)
    for value, expected in ((six + 1, 7), (six - 8, -2), (six * 3, 18), (b.min(six, 4), 4), (b.max(six, 4), 6),
                            (six & 3, 2), (six | 1, 7), (six << 2, 24)):  # fmt: skip
        assert value.constant == expected
    for same in (x + 0, 0 + x, x - 0, x * 1, 1 * x, x // 1, x | 0, 0 ^ x, x << 0, x >> 0):
        assert same is x
    assert (x * 0).constant == 0
    assert opcodes(b) == []


def test_what_would_wrap_is_not_folded(b: Builder) -> None:
    big, one = b.const(2**31 - 1, i32), b.const(1, u32)
    assert (big + 1).constant is None
    assert (one - 2).constant is None
    assert (b.const(100, i8) + 100).constant is None
    assert (one << 31).constant == 1 << 31
    assert (one << 32).constant is None
    assert (b.const(1, i64) << 40).constant == 1 << 40
    verify(b.finish())


def test_floats_are_not_folded(b: Builder) -> None:
    assert (b.const(1.0, f32) + 1.0).constant is None
    assert (b.scalar("x", f32) * 1.0).op is not None


def test_operands_of_two_types_are_not_folded(b: Builder) -> None:
    x, zero = b.scalar("x", i32), b.const(0, i64)
    assert (x + zero) is not x  # so that the verifier sees it
    with pytest.raises(KernelError, match="one type"):
        verify(b.finish())


@pytest.mark.parametrize(
    ("value", "source", "target", "folded"),
    [
        (5, i32, i64, True), (4096, i32, i64, True), (300, i32, u8, False), (-1, i32, u32, False), (3, i32, f32, True),
        (2**24 + 1, i32, f32, False), (257, i32, bf16, False), (2.0, f32, i32, True), (2.5, f32, i32, False),
        (0.0, f32, f16, True), (0.1, f32, f64, False), (-math.inf, f32, f16, True), (math.inf, f32, i32, False),
        (math.nan, f32, f16, False), (1e10, f32, i32, False), (True, bool_, i32, True),
    ],
)  # fmt: skip
def test_casts_of_constants(b: Builder, value: Any, source: Scalar, target: Scalar, folded: bool) -> None:
    result = b.cast(b.const(value, source), target)
    assert result.type == target
    assert (result.constant == value) if folded else (result.op is not None and result.op.opcode == "cast")
    verify(b.finish())


def test_nothing_is_emitted_where_nothing_changes(b: Builder) -> None:
    x = b.scalar("x", f32)
    assert b.cast(x, f32) is x and b.bitcast(x, f32) is x and b.vector([x]) is x and b.splat(x, 1) is x
    assert b.extract(x, 0) is x and b.unpack(x) == [x]
    assert opcodes(b) == []


def test_permutations_have_as_many_lanes_as_are_taken(b: Builder) -> None:
    v = b.load(b.buffer("v", f32), 0, 4)
    assert b.permute(v, None, [2]).type == f32 and b.permute(v, None, (0, 0)).type == Vector(f32, 2)
    both = b.permute(v, v, range(8))
    assert both.type == Vector(f32, 8)
    assert both.op is not None and both.op.args == (v, v) and both.op.attrs == {"lanes": tuple(range(8))}
    verify(b.finish())


def test_there_is_no_cast_to_bool(b: Builder) -> None:
    with pytest.raises(KernelError, match=r"use b\.ne\(value, 0\)"):
        b.cast(b.scalar("x", i32), bool_)


# -- memory, variables and control ---------------------------------------------------------------------------------


def test_types_of_memory(b: Builder) -> None:
    x, s, p = b.buffer("x", f16), b.shared("s", f32, 8), b.private("p", i32, 4)
    assert x.type == Pointer(f16, "global") and s.type == Pointer(f32, "shared", 8)
    assert p.type == Pointer(i32, "private", 4)
    assert b.load(x, 0).type == f16 and b.load(x, 0, 4).type == Vector(f16, 4)
    loads = [op for op in b.finish().body if op.opcode == "load"]
    assert [op.attrs["align"] for op in loads] == [1, 4]
    kernel = b.finish()
    assert kernel.shared == (s,) and kernel.values["x"] is x and kernel.shared_bytes == 32
    verify(kernel)


def test_shared_arrays_are_aligned_to_16_bytes(b: Builder) -> None:
    b.shared("odd", u8, 3)
    b.shared("more", f32, 5)
    assert b.finish().shared_bytes == 16 + 32


def test_parameters_are_checked(b: Builder) -> None:
    b.buffer("x", f32)
    with pytest.raises(KernelError, match="parameter x is declared twice"):
        b.scalar("x", i32)
    with pytest.raises(KernelError, match="scalar parameter h: expected one of i32"):
        b.scalar("h", f16)


def test_variables(b: Builder) -> None:
    v = b.var(b.const(1.0, f32), "total")
    v.value = v.value + 1.0
    v.value = 3
    assert v.ref.type == Ref(f32) and v.ref.hint == "total"
    w = b.var(b.splat(b.const(0.0, f32), 4))
    w.value = 2.0
    assert opcodes(b) == ["var", "get", "add", "set", "set", "splat", "var", "splat", "set"]
    verify(b.finish())


def test_control_nests(b: Builder) -> None:
    n = b.scalar("n", i64)
    with b.loop(0, n, 2, unroll=-1, name="k") as k:
        assert k.type == i64 and k.hint == "k"
        with b.if_(k > 3):
            b.barrier()
        with b.else_():
            b.subgroup_barrier()
    (loop,) = [op for op in b.finish().body if op.opcode == "loop"]
    assert loop.attrs["unroll"] == -1 and loop.attrs["index"] is k
    (branch,) = [op for op in loop.blocks[0] if op.opcode == "if"]
    assert [[op.opcode for op in block] for block in branch.blocks] == [["barrier"], ["subgroup_barrier"]]
    verify(b.finish())


def test_else_follows_if(b: Builder) -> None:
    with pytest.raises(KernelError, match="must follow"), b.else_():
        pass
    with b.if_(b.eq(b.scalar("n", i32), 0)):
        pass
    b.barrier()
    with pytest.raises(KernelError, match="must follow"), b.else_():
        pass


def test_an_error_in_a_block_closes_it(b: Builder) -> None:
    with pytest.raises(ZeroDivisionError), b.loop(0, 3):
        raise ZeroDivisionError
    b.barrier()
    assert opcodes(b) == ["loop", "barrier"]


def test_fragments(b: Builder) -> None:
    a = b.fragment_fill(Fragment(f16, 16, 8, "a"), 0)
    c = b.fragment_fill(Fragment(f32, 16, 16, "accumulator"), 1.0)
    y = b.fragment_load(Fragment(f16, 8, 16, "b"), b.buffer("y", f16), 0, 16)
    c = b.fragment_mma(a, y, c)
    c = b.fragment_set(c, 1, b.fragment_get(c, 0) * 2.0)
    b.fragment_store(b.buffer("out", f32, "write"), 0, 16, c)
    assert b.cast(c, f16).type == Fragment(f16, 16, 16, "accumulator")
    verify(b.finish())


# -- lines ---------------------------------------------------------------------------------------------------------


def lineno() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_operations_remember_their_line(b: Builder) -> None:
    x = b.scalar("x", f32)
    first = lineno() + 1
    y = x * 2.0
    v = b.var(y)
    v.value = v.value + 1.0
    with b.if_(v.value > 0.0):
        b.barrier()
    lines = {op.opcode: op.where.line - first for op in b.finish().walk() if op.where}
    assert lines["mul"] == 0 and lines["var"] == 1 and lines["set"] == lines["add"] == 2
    assert lines["if"] == 3 and lines["barrier"] == 4
    where = b.finish().body[0].where
    assert where is not None and where.file == __file__ and where.function == "test_operations_remember_their_line"
    assert str(where) == f"{__file__}:{where.line} in test_operations_remember_their_line"


def test_helpers_are_named_themselves(b: Builder) -> None:
    def twice(x: Value) -> Value:
        return x + x

    op = twice(b.scalar("x", f32)).op
    assert op is not None and op.where is not None and op.where.function == "twice"
