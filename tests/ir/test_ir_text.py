"""The printer: readable, stable, and different for different kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from aule.ir import Builder, KernelIR, Op, Value
from aule.ir.text import line, text
from aule.ir.types import Fragment, bool_, f16, f32, i32, i64, u32


def everything() -> KernelIR:
    b = Builder("everything", workgroup=64, subgroup_size=32, max_registers=128, arithmetic="quick")
    source, out, n = b.buffer("source", f16), b.buffer("out", f32, "readwrite"), b.scalar("n", i32)
    tile, own = b.shared("tile", f32, 64), b.private("own", f32, 4)
    t = b.thread_id()
    b.comment("first\nsecond")
    total, x = b.var(b.const(0.0, f32), "total"), b.cast(b.load(source, t, 2), f32)
    with b.loop(0, n, 2, unroll=4, name="row") as row:
        with b.loop(b.cast(row, i64), 8, name="row") as _, b.if_(b.ne(t, 1)):
            b.store(own, row, b.extract(x, 1))
        with b.if_(b.const(True, bool_)):
            b.barrier(global_memory=True)
        with b.else_():
            b.store(tile, t, -math.inf)
        total.value = b.fma(total.value, 0.5, b.load(own, 0))
    b.atomic("add", out, 0, total.value)
    a = b.fragment_load(Fragment(f32, 8, 8, "accumulator"), tile, 0, 8, "column")
    b.fragment_store(out, 0, 8, b.fragment_set(a, 1, math.nan))
    b.intrinsic("ptx", "mov.b32 {0}, {1};", [t], u32)
    b.intrinsic("ptx", "fence;", [], None)
    return b.finish()


EVERYTHING = """\
kernel everything(
  %source: buffer f16 read
  %out: buffer f32 readwrite
  %n: scalar i32
) workgroup 64 subgroup 32 registers 128 quick arithmetic {
  %tile = shared<f32[64]>
  %own = private<f32[4]>
  %0 = thread_id i32
  # first
  # second
  %total = var<f32> 0.0
  %1 = load f16x2 %source[%0] align=2
  %2 = cast f32x2 %1
  loop i32 %row = 0 to %n step 2 unroll=4 {
    %3 = cast i64 %row
    loop i64 %row.1 = %3 to 8:i64 step 1:i64 unroll=0 {
      %4 = ne bool %0, 1
      if %4 {
        %5 = extract f32 %2 lane=1
        store %own[%row], %5 align=1
      }
    }
    if true {
      barrier global_memory=true
    } else {
      store %tile[%0], -inf align=1
    }
    %6 = get f32 %total
    %7 = load f32 %own[0] align=1
    %8 = fma f32 %6, 0.5, %7
    set %total, %8
  }
  %9 = get f32 %total
  %10 = atomic f32 %out[0], %9 kind='add' ordered=false
  %11 = fragment_load fragment<f32,8x8,accumulator> %tile[0], 8 layout='column'
  %12 = fragment_set fragment<f32,8x8,accumulator> %11, nan component=1
  fragment_store %out[0], 8, %12 layout='row'
  %13 = intrinsic u32 %0 language='ptx' code='mov.b32 {0}, {1};'
  intrinsic language='ptx' code='fence;'
}
"""


def test_golden_text() -> None:
    assert text(everything()) == EVERYTHING
    assert str(everything()) == EVERYTHING


def test_the_same_trace_gives_the_same_text() -> None:
    assert text(everything()) == text(everything())


def small(
    change: Callable[[Builder, Value], Value] = lambda b, x: x + 1.0,
    *, name: str = "k", buffer: str = "x", access: str = "readwrite", workgroup: int = 32, subgroup: int = 0,
    registers: int = 0, index: object = 0, align: int = 1, shared: int = 0,
) -> str:  # fmt: skip
    b = Builder(name, workgroup, subgroup, registers)
    x = b.buffer(buffer, f32, access)  # type: ignore[arg-type]
    if shared:
        b.shared("s", f32, shared)
    b.store(x, index, change(b, b.load(x, 0, align=align)))
    return text(b.finish())


def test_any_difference_shows() -> None:
    b = Builder("other", 32)
    variants = [
        small(),
        small(name="l"),
        small(buffer="y"),
        small(access="read"),
        small(workgroup=64),
        small(subgroup=32),
        small(registers=64),
        small(align=2),
        small(shared=4),
        small(shared=8),
        small(index=1),
        small(index=b.const(0, i64)),
        small(index=b.const(0, u32)),
        small(lambda b, x: x + 2.0),
        small(lambda b, x: x + 1.0000000001),
        small(lambda b, x: x + -0.0),
        small(lambda b, x: x + 0.0),
        small(lambda b, x: x - 1.0),
        small(lambda b, x: b.cast(b.cast(x, f16) + 1.0, f32)),
        small(lambda b, x: b.shuffle_xor(x, 1)),
        small(lambda b, x: b.shuffle_xor(x, 2)),
        small(lambda b, x: (b.comment("why"), x + 1.0)[1]),
    ]
    assert len(set(variants)) == len(variants)


def test_unused_constants_do_not_show() -> None:
    assert small(lambda b, x: (b.const(7.0, f32), x + 1.0)[1]) == small()


def test_one_line() -> None:
    kernel = everything()
    loop = next(op for op in kernel.walk() if op.opcode == "loop")
    assert line(kernel, loop) == "loop i32 %row = 0 to %n step 2 unroll=4"
    assert line(kernel, loop.blocks[0][-1]) == "set %total, %8"


@pytest.mark.parametrize(
    "op",
    [
        Op("frobnicate", (Value(i32),), {"odd": True}, Value(f32)),
        Op("loop", (), {}, None, ([],)),
        Op("load", (), {}, Value(f32)),
        Op("if", (), {}, None, ()),
    ],
)
def test_broken_operations_print_too(op: Op) -> None:
    kernel = KernelIR("broken", (), {}, (), 32, [op])
    assert op.opcode in line(kernel, op)
    assert line(kernel, op) in text(kernel)
