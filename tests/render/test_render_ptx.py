"""PTX: every operation on every type assembles for every architecture, and uses the intended instructions.

Nothing here executes PTX; the kernels of `all_kernels` are plain IR, so a device test can run them too.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from aule.errors import KernelError
from aule.ir.builder import Builder
from aule.ir.kernel import KernelIR, Value
from aule.ir.types import SCALARS, Fragment, Scalar, Vector, bf16, bool_, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32
from aule.render.ptx import render
from aule.target import Target

ARCHS = ("sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
NUMBERS = [t for t in SCALARS.values() if t.kind != "bool"]
INTS = [t for t in NUMBERS if t.is_int]
FLOATS = [t for t in NUMBERS if t.is_float]
PTXAS = shutil.which("ptxas")
needs_ptxas = pytest.mark.skipif(PTXAS is None, reason="ptxas (CUDA toolkit) is not installed")

UNARY_INT = ("neg", "abs", "not")
UNARY_FLOAT = ("neg", "abs", "exp2", "log2", "sqrt", "rsqrt", "rcp", "floor", "sin", "cos")
BINARY_INT = ("add", "sub", "mul", "div", "rem", "min", "max", "and", "or", "xor", "shl", "shr")
BINARY_FLOAT = ("add", "sub", "mul", "div", "min", "max")
COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")


def target(arch: str = "sm_90") -> Target:
    return Target("cuda", arch=arch, subgroup_size=32)


def text(kernel: KernelIR, arch: str = "sm_90") -> str:
    return render(kernel, target(arch)).text


def arithmetic(elem: Scalar, lanes: int) -> KernelIR:
    """Every operation a number knows, results stored one after the other; some operands are constants."""
    b = Builder(f"arithmetic_{elem}_{lanes}", 32)
    source, out, flags = b.buffer("source", elem), b.buffer("out", elem, "write"), b.buffer("flags", i32, "write")
    t = b.thread_id()
    x, y, z = (b.load(source, (t * 3 + i) * lanes, lanes) for i in range(3))
    one = b.const(3, elem) if lanes == 1 else b.splat(b.const(3, elem), lanes)
    results, truths = [], []
    for opcode in UNARY_FLOAT if elem.is_float else UNARY_INT:
        if not (elem.name == "f64" and opcode in ("exp2", "log2", "sin", "cos")):
            results += [b.unary(opcode, x), b.unary(opcode, one)]
    if elem.name == "u32":
        results += [b.mulhi(x, y), b.mulhi(one, y)]
    for opcode in BINARY_FLOAT if elem.is_float else BINARY_INT:
        amount = one if opcode in ("shl", "shr") else y
        results += [b.binary(opcode, x, amount), b.binary(opcode, x, one)]
        if lanes > 1 or elem.is_float:  # scalar integers are folded while tracing
            results.append(b.binary(opcode, one, one))
        if opcode not in ("shl", "shr"):
            results.append(b.binary(opcode, one, y))
        else:
            results.append(b.binary(opcode, x, b.binary("and", y, one)))
    if elem.is_float:
        results += [b.fma(x, y, z), b.fma(x, one, one), b.fma(one, one, one)]
    for opcode in COMPARE:
        truths += [b.binary(opcode, x, y), b.binary(opcode, x, one), b.binary(opcode, one, y)]
    results += [b.select(c, x, y) for c in truths[:3]] + [b.select(truths[3], one, b.splat(b.const(1, elem), lanes))]
    scalar = b.extract(truths[0], 0)
    results += [b.select(scalar, x, y), b.select(scalar, x, z)]
    for i, value in enumerate(results):
        b.store(out, (t * len(results) + i) * lanes, value)
    for i, value in enumerate(truths):
        b.store(flags, (t * len(truths) + i) * lanes, b.cast(value, i32))
    return b.finish()


def casts(source_type: Scalar, lanes: int) -> KernelIR:
    """From one type to every other."""
    b = Builder(f"cast_{source_type}_{lanes}", 32)
    stored = u8 if source_type == bool_ else source_type
    source = b.buffer("source", stored)
    t = b.thread_id()
    x = b.load(source, t * lanes, lanes)
    if source_type == bool_:
        x = b.binary("ne", x, 0)
    for other in NUMBERS:
        b.store(b.buffer(f"out_{other}", other, "write"), t * lanes, b.cast(x, other))
    return b.finish()


def bitcasts() -> KernelIR:
    """Between all types and lanes of 32, 64 and 128 bits."""
    b = Builder("bitcasts", 32)
    t = b.thread_id()
    for bits in (8, 16, 32, 64, 128):
        shapes = [(e, bits // e.bits) for e in NUMBERS if bits >= e.bits and bits // e.bits in (1, 2, 4, 8, 16)]
        for source, n in shapes:
            x = b.load(b.buffer(f"in_{bits}_{source}", source), t * n, n)
            for other, m in shapes:
                if other != source:
                    y = b.bitcast(x, other if m == 1 else Vector(other, m))
                    b.store(b.buffer(f"out_{bits}_{source}_{other}", other, "write"), t * m, y)
    return b.finish()


def copies(elem: Scalar, space: str) -> KernelIR:
    """Loads and stores of every width and alignment, at constant, computed and 64-bit indices."""
    b = Builder(f"copy_{elem}_{space}", 32)
    out = b.buffer("out", elem, "readwrite")
    wide = b.scalar("wide", i64)
    t = b.thread_id()
    if space == "global":
        memory = b.buffer("source", elem)
    else:
        memory = b.shared("array", elem, 4096) if space == "shared" else b.private("array", elem, 64)
    for lanes in (1, 2, 4, 8, 16):
        for align in sorted({1, 2, lanes}):
            b.store(out, t * 16 + 64, b.load(memory, t * lanes + lanes, lanes, align=min(align, lanes)), align=align)
            b.store(out, 16, b.load(memory, 32, lanes, align=align), align=align)
            b.store(out, b.cast(t, i64) * 16 + wide * 16, b.load(memory, wide * 16 + 16, lanes), align=align)
            if space != "global":
                b.store(memory, t * 16, b.load(out, t * 16, lanes), align=align)
    return b.finish()


def booleans() -> KernelIR:
    """Logic, selection and variables of bool, scalar and vector."""
    b = Builder("booleans", 32)
    x, out = b.buffer("x", i32), b.buffer("out", i32, "write")
    t = b.thread_id()
    for lanes in (1, 4):
        v = b.load(x, t * 4, lanes)
        p, q = b.binary("lt", v, 5), b.binary("gt", v, 7)
        r = b.binary("eq", v, 6)
        results = [p & q, p | q, p ^ q, ~p, b.eq(p, q), b.ne(p, r), b.select(p, q, r), b.select(b.extract(p, 0), q, r)]
        for i, value in enumerate(results):
            b.store(out, (t * 8 + i) * 4, b.cast(value, i32))
    state = b.var(b.const(True, bool_))
    with b.loop(0, 4) as i:
        state.value = b.select(b.eq(i, t), b.const(False, bool_), state.value)
    with b.if_(state.value):
        b.store(out, t, 1)
    b.store(out, t, b.select(b.const(True, bool_), t, t + 1))
    with b.if_(b.const(False, bool_)):
        b.store(out, t, 2)
    return b.finish()


def control() -> KernelIR:
    """Loops of every kind and index type, branches, variables, ids, barriers, comments."""
    b = Builder("control", 64)
    out, n, n64, un = b.buffer("out", i32, "readwrite"), b.scalar("n", i32), b.scalar("n64", i64), b.scalar("un", u32)
    shared = b.shared("shared", i32, 64)
    b.comment("ids\nof the thread — all of them")
    t = b.thread_id()
    total = b.var(t + b.lane_id() + b.subgroup_id() + b.group_id(0) + b.group_id(1) + b.group_id(2) + b.group_count(0))
    total.value = total.value + b.group_count(1) + b.group_count(2)
    pair = b.var(b.splat(n, 4))
    with b.loop(0, n) as i:
        with b.if_(i > t):
            total.value = total.value + i
        with b.else_():
            with b.if_(b.eq(i, 3)):
                total.value = total.value - i * 2
            pair.value = pair.value + b.splat(i, 4)
    with b.loop(n64, n64 + 7, 2, unroll=1) as j:
        total.value = total.value + b.cast(j, i32)
    with b.loop(b.const(0, u32), un, unroll=4) as k:
        total.value = total.value ^ b.cast(k, i32)
    for unroll in (-1, 2, 4, 1, 0):
        with b.loop(2, 10, 2, unroll=unroll) as m:
            b.store(shared, t, m * 3 + 1)
            with b.if_(m < 6):
                total.value = total.value + b.load(shared, (t + m) % 64)
            b.barrier()
    with b.loop(5, 5) as never:
        total.value = never
    with b.loop(0, 1) as once:
        total.value = total.value + once
    b.barrier(global_memory=True)
    old = total.value
    total.value = 0
    for v in b.unpack(pair.value):
        old = old + v
    b.store(out, t, old + total.value)
    return b.finish()


def subgroups() -> KernelIR:
    """Shuffles, reductions, votes."""
    b = Builder("subgroups", 64, subgroup_size=32)
    t = b.thread_id()
    for elem in (i32, u32, f32):
        source, out = b.buffer(f"source_{elem}", elem), b.buffer(f"out_{elem}", elem, "write")
        x = b.load(source, t)
        results = [b.shuffle(x, t ^ 1), b.shuffle(x, 3), b.shuffle(b.const(1, elem), 3)]
        results += [b.shuffle_xor(x, m) for m in (1, 2, 16)]
        results += [b.subgroup_reduce(kind, x) for kind in ("add", "min", "max")]
        results += [b.select(vote(x > 0), x, results[0]) for vote in (b.subgroup_any, b.subgroup_all)]
        b.subgroup_barrier()
        for i, value in enumerate(results):
            b.store(out, t * len(results) + i, value)
    return b.finish()


def atomics() -> KernelIR:
    """Every atomic in global and shared memory."""
    b = Builder("atomics", 64)
    t = b.thread_id()
    for elem in (i32, u32, f32):
        kinds = ("add", "exchange") if elem == f32 else ("add", "min", "max", "and", "or", "xor", "exchange")
        for memory in (b.buffer(f"g_{elem}", elem, "readwrite"), b.shared(f"s_{elem}", elem, 256)):
            out = b.buffer(f"out_{elem}_{'g' if memory.type.space == 'global' else 's'}", elem, "write")  # type: ignore[union-attr]
            for i, kind in enumerate(kinds):
                old = b.atomic(kind, memory, t + i, 3)
                b.store(out, t * 8 + i, old)
                b.atomic(kind, memory, 5, old)
    return b.finish()


def intrinsics() -> KernelIR:
    """Scalars, vectors, variables and pointers as operands of a line of PTX."""
    b = Builder("intrinsics", 32)
    out, shared = b.buffer("out", f32, "write"), b.shared("shared", f32, 64)
    b.shared("other", f16, 64)
    array = b.private("array", f32, 4)
    t, x = b.thread_id(), b.const(2.0, f32)
    b.intrinsic("ptx", "st.global.f32 [{1}+4], {2}", (out, x), None)
    b.intrinsic("ptx", "st.shared.f32 [{1}], {2};", (shared, x), None)
    b.intrinsic("ptx", "st.local.f32 [{1}], {2};", (array, x), None)
    pair = b.intrinsic("ptx", "mov.b64 {{{0[0]}, {0[1]}}}, {1};", (b.const(7, i64),), Vector(i32, 2))
    state = b.var(b.splat(x, 2))
    b.intrinsic("ptx", "add.f32 {1[1]}, {1[0]}, {2};", (state.ref, x), None)
    address = b.intrinsic("ptx", "mov.b32 {0}, {1}", (shared,), i32)
    assert pair is not None and address is not None
    b.store(out, t, b.cast(b.extract(pair, 1) + address, f32) + b.extract(state.value, 1))
    return b.finish()


def sgemm(depth: int) -> KernelIR:
    """C = A^T B over 128 x 128 tiles, 8 x 8 a thread, with ``depth`` steps between barriers."""
    b = Builder("sgemm", 256)
    left, right, out = b.buffer("left", f32), b.buffer("right", f32), b.buffer("out", f32, "write")
    n = b.scalar("n", i32)
    tile_a, tile_b = b.shared("tile_a", f32, 128 * depth), b.shared("tile_b", f32, 128 * depth)
    t = b.thread_id()
    column, row = (t & 15) * 8, (t >> 4) * 8
    acc = [[b.var(b.const(0.0, f32)) for _ in range(8)] for _ in range(8)]
    with b.loop(0, n, depth) as k0:
        for i in range(depth // 8):
            b.store(tile_a, (t + 256 * i) * 4, b.load(left, k0 * 128 + (t + 256 * i) * 4, 4))
            b.store(tile_b, (t + 256 * i) * 4, b.load(right, k0 * 128 + (t + 256 * i) * 4, 4))
        b.barrier()
        with b.loop(0, depth, unroll=-1) as k:
            a = [x for h in (0, 4) for x in b.unpack(b.load(tile_a, k * 128 + row + h, 4))]
            c = [x for h in (0, 4) for x in b.unpack(b.load(tile_b, k * 128 + column + h, 4))]
            for i in range(8):
                for j in range(8):
                    acc[i][j].value = b.fma(a[i], c[j], acc[i][j].value)
        b.barrier()
    for i in range(8):
        for h in (0, 4):
            b.store(out, (row + i) * 128 + column + h, b.vector([acc[i][h + j].value for j in range(4)]))
    return b.finish()


def all_kernels() -> Iterator[KernelIR]:
    """Small kernels that between them use every opcode on every type that PTX supports."""
    for elem in NUMBERS:
        yield arithmetic(elem, 1)
        yield arithmetic(elem, 4)
        for space in ("global", "shared", "private"):
            yield copies(elem, space)
    for elem in SCALARS.values():
        for lanes in (1, 2, 8):
            yield casts(elem, lanes)
    yield from (bitcasts(), booleans(), control(), subgroups(), atomics(), intrinsics(), sgemm(8))


def assemble(path: Path, kernels: list[KernelIR], arch: str, *options: str) -> str:
    """All kernels as one module through ptxas; what it says. ptxas 13 has no machine code older than sm_75, but refuses
    instructions that the PTX's own target lacks."""
    texts = [text(k, arch) for k in kernels]
    header = max((t.split("\n\n", 1)[0] for t in texts), key=lambda x: [int(n) for n in re.findall(r"\d+", x)[:2]])
    source, cubin = path / f"{arch}.ptx", path / f"{arch}.cubin"
    source.write_text("\n".join([header, *(t.split("\n\n", 1)[1] for t in texts)]))
    assert PTXAS is not None
    assembled = "sm_75" if arch in ("sm_60", "sm_70") else arch
    command = [PTXAS, f"-arch={assembled}", *options, str(source), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return done.stderr + done.stdout


@needs_ptxas
@pytest.mark.parametrize("arch", ARCHS)
def test_everything_assembles(tmp_path: Path, arch: str) -> None:
    assert "warning" not in assemble(tmp_path, list(all_kernels()), arch, "-O1")


def test_text_is_deterministic_and_old() -> None:
    assert text(control()) == text(control())
    versions = [re.search(r"\.version (\S+)", text(booleans(), arch))[1] for arch in (*ARCHS, "sm_90a")]  # type: ignore[index]
    assert versions == ["6.0", "6.0", "6.3", "7.0", "7.1", "7.8", "7.8", "8.6", "8.7", "8.0"]


def test_entry_and_artifact() -> None:
    b = Builder("entry", 96)
    b.buffer("q_ptr", f16)
    b.buffer("o_ptr", f32, "write")
    b.scalar("count", i32)
    b.scalar("scale", f32)
    b.shared("first", f16, 5)
    b.shared("second", f32, 4096 * 3)
    artifact = render(b.finish(), target())
    assert artifact.dynamic_shared and artifact.shared_bytes == 16 + 3 * 16384
    assert ".extern .shared .align 1024 .b8 entry_shared[];" in artifact.text
    buffers = [f"\t.param .u64 .ptr .global .align {align} {name}," for align, name in ((2, "q_ptr"), (4, "o_ptr"))]
    scalars = ["\t.param .s32 count,", "\t.param .f32 scale"]
    entry = ["\n.visible .entry entry(", *buffers, *scalars, ")", ".reqntid 96, 1, 1", "{"]
    assert "\n".join(entry) in artifact.text
    assert not artifact.uses_subgroups and render(subgroups(), target()).uses_subgroups
    assert not render(control(), target()).dynamic_shared


def test_addresses_are_folded_and_shared() -> None:
    b = Builder("fold", 32)
    source, out = b.buffer("source", f32), b.buffer("out", f32, "write")
    array, other = b.shared("array", f32, 1024), b.shared("other", f32, 1024)
    t, n = b.thread_id(), 4
    for i in range(n):
        x = b.load(array, t * 16 + 4 * i, 4)
        y = b.load(other, 8 + (t * 16 + i * 4), 4)
        b.store(out, (t + i) * 4, x + y + b.load(source, (t * 4 + 400) + 4 * i, 4))
        b.store(array, 4 * i, b.load(other, t * 16 + 16 + i))
    code = text(b.finish())
    shared = re.findall(r"ld\.shared\.v4\.f32 \{.*\}, \[(%r\d+)\+?(\d*)\];", code)
    assert len({register for register, _ in shared}) == 1
    offsets = {x for i in range(n) for x in (16 * i, 4096 + 32 + 16 * i)}
    assert {int(offset or 0) for _, offset in shared} == offsets
    assert len(re.findall(r"mad\.lo\.s32", code)) == 1
    assert len(re.findall(r"mad\.wide\.s32", code)) == 2
    assert re.search(r"ld\.global\.nc\.v4\.f32 \{.*\}, \[%rd\d+\+1648\];", code)
    assert "st.shared.f32 [fold_shared+48]" in code
    assert "st.global.v4.f32" in code


def test_what_is_computed_in_a_block_is_not_used_outside() -> None:
    b = Builder("scopes", 32)
    source, out = b.buffer("source", f32), b.buffer("out", f32, "write")
    t = b.thread_id()
    index = t + 1
    with b.if_(t > 3):
        b.store(out, t * 2, b.load(source, index))
    with b.else_():
        b.store(out, t * 2, b.load(source, index + 1))
    b.store(out, t, b.load(source, t * 2) + b.cast(index, f32))
    code = text(b.finish())
    defined: list[set[str]] = [set()]
    for line in code.split("{", 1)[1].splitlines():  # a small dominance check: braces of labels
        names = re.findall(r"%(?:rd|r|f|p)\d+", line.split(" ", 1)[1]) if line.startswith("\t") and " " in line else []
        if line.startswith("\t@!") or line.startswith("$"):
            defined = [*defined, set()] if line.startswith("\t@!") else [*defined[:-1], set()]
            if line.startswith("$endif"):
                defined = defined[:1]
        elif names and not line.startswith(("\t.reg", "\tst.", "\tbra", "\t@")):
            assert all(any(x in d for d in defined) for x in names[1:]), line
            defined[-1].add(names[0])
        elif line.startswith("\tst."):
            assert all(any(x in d for d in defined) for x in names), line


@pytest.mark.parametrize(
    ("elem", "lanes", "align", "expected"),
    [
        (f32, 4, 4, ["v4.f32"]),
        (f32, 8, 8, ["v4.f32"] * 2),
        (f32, 4, 2, ["v2.f32"] * 2),
        (f32, 4, 1, ["f32"] * 4),
        (f32, 4, 3, ["f32"] * 4),
        (f64, 4, 4, ["v2.f64"] * 2),
        (f16, 8, 8, ["v4.b32"]),
        (bf16, 16, 16, ["v4.b32"] * 2),
        (f16, 4, 4, ["v4.b16"]),
        (f16, 8, 2, ["v2.b16"] * 4),
        (i8, 16, 16, ["v4.b32"]),
        (i8, 4, 4, ["v4.s8"]),
        (i16, 8, 8, ["v4.b32"]),
        (i64, 2, 2, ["v2.b64"]),
    ],
)
def test_vector_widths(elem: Scalar, lanes: int, align: int, expected: list[str]) -> None:
    b = Builder("widths", 32)
    source, out = b.buffer("source", elem), b.buffer("out", elem, "write")
    b.store(out, b.thread_id() * align, b.load(source, b.thread_id() * align, lanes, align=align), align=align)
    code = text(b.finish())
    assert re.findall(r"ld\.global\.nc\.(\S+)", code) == expected
    assert re.findall(r"st\.global\.(\S+)", code) == [x.replace("s8", "b8") for x in expected]


def test_what_is_read_once_leaves_the_caches_first() -> None:
    b = Builder("once", 32)
    at = b.thread_id() * 4
    x, y = b.buffer("x", u32), b.buffer("y", u32, "readwrite")
    b.store(y, at, b.load_streaming(x, at, 4) + b.load_streaming(y, at, 4))
    code = text(b.finish())
    assert "ld.global.cs.nc.v4" in code and "ld.global.cs.v4" in code


def test_what_lasts_is_given_up_last_by_the_second_level_cache() -> None:
    def copied(arch: str) -> str:
        b = Builder("evict_last", 32)
        at = b.thread_id() * 8
        x, y = b.buffer("x", f16, evict_last=True), b.buffer("y", f16, "readwrite")
        tile = b.shared("tile", f16, 256)
        b.async_copy(tile, at, x, at, 8)
        b.async_commit()
        b.async_wait(0)
        b.store(y, at, b.load(tile, at, 8) + b.load(x, at, 8) + b.load(y, at, 8))
        with b.if_(b.thread_id() < 3):
            b.store(y, at, b.load(x, at + 256, 8))
        return text(b.finish(), arch)

    code = copied("sm_80")
    assert ".version 7.4" in code and ".version 7.8" in copied("sm_89")
    policy = re.findall(r"createpolicy\.fractional\.L2::evict_last\.b64 (%rd\d+), 1\.0;", code)
    assert len(policy) == 1
    assert len(re.findall(rf"ld\.global\.nc\.L2::cache_hint\.v4\.b32 .*\], {policy[0]};", code)) == 2
    assert re.search(rf"cp\.async\.cg\.shared\.global\.L2::cache_hint .*, 16, {policy[0]};", code)
    assert "ld.global.v4.b32" in code


def test_what_workgroups_of_a_cluster_wait_for() -> None:
    """The loop tests at its end."""
    b = Builder("waits", 32, cluster=2)
    mail, done = b.shared("mail", i32, 32), b.var(b.const(0, i32), "done")
    with b.repeat(done):
        done.value = b.atomic("exchange", mail, b.thread_id(), 0)
    found = re.search(
        r"\$(loop_\d+):.*atom\.shared\.exch.*setp\.eq\.s32 (\S+),.*@\2 bra \$\1;", text(b.finish(), "sm_90"), re.DOTALL
    )
    assert found


def test_unrolling() -> None:
    def looped(unroll: int, stop: int = 8) -> str:
        b = Builder("unrolled", 32)
        array, out = b.shared("array", f32, 64), b.buffer("out", f32, "write")
        total = b.var(b.const(0.0, f32))
        with b.loop(0, stop, unroll=unroll) as i:
            total.value = total.value + b.load(array, i * 4 + 1)
        b.store(out, b.thread_id(), total.value)
        return text(b.finish())

    full = looped(-1)
    assert "bra" not in full
    assert re.findall(r"ld\.shared\.f32 %f\d+, \[unrolled_shared\+(\d+)\]", full) == [str(16 * i + 4) for i in range(8)]
    by_four = looped(4)
    assert by_four.count("ld.shared") == 4 and by_four.count("bra $loop") == 1
    assert re.findall(r"\[%r\d+\+(\d+)\]", by_four) == ["4", "20", "36", "52"]
    assert re.search(r"add\.s32 (%r\d+), \1, 4;", by_four)
    assert looped(3).count("ld.shared") == 1  # 8 is no multiple of 3
    assert '.pragma "nounroll";' in looped(1) and "pragma" not in looped(0)
    assert looped(-1, 10**6).count("ld.shared") == 1


def test_both_words_of_a_product_are_one_instruction() -> None:
    b = Builder("words", 32)
    out, t = b.buffer("out", u32, "write"), b.cast(b.thread_id(), u32)
    with b.if_(t > 3):
        b.store(out, t, b.mulhi(t, 0xD2511F53) ^ (t * 0xD2511F53))
    b.store(out, t, t * 0xD2511F53)  # what a block has computed is not known behind it
    found = text(b.finish())
    assert (found.count("mul.wide.u32"), found.count("mul.hi"), found.count("mul.lo.u32")) == (1, 0, 1)
    low, high = re.findall(r"mov.b64 \{(%r\d+), (%r\d+)\}", found)[0]
    assert re.search(rf"xor.b32 %r\d+, {high}, {low};", found)


def test_unordered_comparison_and_predicates() -> None:
    code = text(arithmetic(f32, 1))
    assert "setp.neu.f32" in code and "setp.eq.f32" in code and "setp.ne.f32" not in code
    assert "selp.pred" not in text(booleans())


def test_architectures_differ_where_they_must() -> None:
    assert "redux.sync" not in text(subgroups(), "sm_75") and "redux.sync.add.s32" in text(subgroups(), "sm_80")
    assert "cvt.rn.bf16.f32" not in text(casts(f32, 1), "sm_75") and "cvt.rn.bf16.f32" in text(casts(f32, 1), "sm_80")
    assert "cvt.rn.f16x2.f32" in text(casts(f32, 8), "sm_80") and "f16x2" not in text(casts(f32, 8), "sm_75")


def test_constants() -> None:
    def moved(value: float, elem: Scalar) -> str:
        b = Builder("constant", 32)
        b.store(b.buffer("out", elem, "write"), 0, b.const(value, elem))
        return re.search(r"mov\.\S+ \S+, (0[fdx]?\w+|-?\d+);\n\tst", text(b.finish()))[1]  # type: ignore[index]

    assert moved(1.0, f32) == "0f3F800000"
    assert moved(float("-inf"), f32) == "0fFF800000"
    assert moved(1e300, f32) == "0f7F800000"
    assert moved(float("nan"), f32) == "0f7FC00000"
    assert moved(1.0, f64) == "0d3FF0000000000000"
    assert moved(65504.0, f16) == "0x7BFF" and moved(1e6, f16) == "0x7C00"
    assert moved(1.00390625, bf16) == "0x3F80" and moved(1.01171875, bf16) == "0x3F82"  # ties to even
    assert moved(float("nan"), bf16) == "0x7FC0" and moved(3.4e38, bf16) == "0x7F80"
    assert moved(-1, i32) == "-1" and moved(2**32 - 1, i32) == "-1" and moved(-1, u32) == str(2**32 - 1)


def _accumulator(b: Builder) -> Value:
    return b.fragment_fill(Fragment(f32, 16, 16, "accumulator"), 0.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda b: b.fragment_fill(Fragment(f32, 8, 8, "accumulator"), 0.0), "plan for such fragments"),
        (lambda b: b.fragment_store(b.shared("s", f32, 256), 0, 16, _accumulator(b)), "store their components"),
        (lambda b: b.exp2(b.const(1.0, f64)), "cast to f32"),
        (lambda b: b.intrinsic("msl", "x", (), None), "an intrinsic of ptx"),
        (lambda b: b.intrinsic("ptx", "{3}", (), None), "double literal braces"),
        (lambda b: b.dot_pairs(b.const(0, u32), b.const(0, u32), b.const(1.0, f32)), "multiply in f32"),
        (lambda b: b.shuffle_xor(b.const(1.0, f16), 1), "32 bits"),
        (lambda b: b.subgroup_reduce("mul", b.const(1.0, f32)), "add, min or max"),
        (lambda b: b.atomic("max", b.shared("s", f32, 4), 0, 1.0), "an atomic of ir.ops"),
    ],
)
def test_refusals_name_the_remedy(make: object, message: str) -> None:
    b = Builder("refused", 32)
    make(b)  # type: ignore[operator]
    with pytest.raises(KernelError, match=re.escape(message)) as caught:
        text(b.finish())
    assert "test_render_ptx.py" in str(caught.value)


def test_bytes_are_converted_where_there_is_an_instruction() -> None:
    b = Builder("bytes", 32)
    words, out = b.buffer("words", u32), b.buffer("out", f16, "write")
    b.store(out, b.thread_id() * 4, b.e4m3_halves(b.load(words, b.thread_id())))
    kernel = b.finish()
    assert text(kernel, "sm_90").count("cvt.rn.f16x2.e4m3x2") == 2
    with pytest.raises(KernelError, match="shift the bits into place"):
        text(kernel, "sm_89")


def test_pascal_orders_memory_by_fences() -> None:
    """It has no ordered atomics, and its first-level caches do not see what other workgroups write."""
    b = Builder("last", 32)
    parts, tickets = b.buffer("parts", f32, "readwrite"), b.buffer("tickets", i32, "readwrite")
    b.store(parts, b.thread_id(), 1.0)
    drawn = b.atomic("add", tickets, 0, 1, ordered=True)
    b.device_fence()
    b.store(parts, b.thread_id(), b.load(parts, drawn))
    kernel = b.finish()
    old, new = text(kernel, "sm_60"), text(kernel, "sm_70")
    assert old.count("membar.gl;") == 3 and "ld.global.cg.f32" in old and "acq_rel" not in old
    assert new.count("acq_rel") == 2 and "membar" not in new and ".cg" not in new


@pytest.mark.parametrize("arch", ["", "sm_52", "gfx90a"])
def test_unknown_architectures_are_refused(arch: str) -> None:
    with pytest.raises(KernelError, match="sm_60 or newer"):
        text(booleans(), arch)


def test_other_subgroup_sizes_are_refused() -> None:
    with pytest.raises(KernelError, match="subgroup_size 32"):
        text(Builder("wave64", 64, subgroup_size=64).finish())


def instructions(cubin: Path, kernel: str) -> Counter[str]:
    """Counts of FFMA and of shared loads by width, read from the machine code (sm_80 to sm_90: 128-bit instructions
    whose low 12 bits are the operation)."""
    data = cubin.read_bytes()
    (table,), (count, names) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HH", data, 60)
    sections = [struct.unpack_from("<IIQQQQ", data, table + 64 * i) for i in range(count)]
    found: Counter[str] = Counter()
    for section in sections:
        start = sections[names][4] + section[0]
        if data[start : data.index(b"\0", start)].decode() == f".text.{kernel}":
            for low, high in struct.iter_unpack("<QQ", data[section[4] : section[4] + section[5]]):
                if low & 0xFFF == 0x223:
                    found["ffma"] += 1
                elif low & 0xFFF == 0x984:
                    found[f"lds.{2 << (high >> 9 & 7)}"] += 1
    return found


@needs_ptxas
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_sgemm_becomes_ideal_machine_code(tmp_path: Path, arch: str) -> None:
    log = assemble(tmp_path, [sgemm(16)], arch, "-v")
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    registers = int(re.search(r"Used (\d+) registers", log)[1])  # type: ignore[index]
    assert registers <= 128
    found = instructions(tmp_path / f"{arch}.cubin", "sgemm")
    assert found == {"ffma": 64 * 16, "lds.128": 4 * 16}


def test_two_16_bit_numbers_by_one_instruction() -> None:
    """Extremes of floats from sm_80 on, arithmetic of integers from sm_90 on, for which PTX must be 8.0."""

    def pairs(elem: Scalar, arch: str) -> tuple[str, set[str]]:
        b = Builder("pairs", 32)
        x, out = b.load(b.buffer("x", elem), b.thread_id() * 4, 4), b.buffer("out", elem, "write")
        value = b.max(x, b.splat(b.extract(x, 0), 4))
        b.store(out, b.thread_id() * 4, value + 1 if elem == u16 else value)
        made = text(b.finish(), arch)
        return made.split()[1], set(re.findall(r"\b(?:max|add)\.\w+x2\b", made))

    for elem in (f16, bf16):
        assert pairs(elem, "sm_75")[1] == set() and pairs(elem, "sm_80")[1] == {f"max.{elem}x2"}
    assert pairs(u16, "sm_80")[1] == set()
    assert pairs(u16, "sm_90") == ("8.0", {"max.u16x2", "add.u16x2"})
    assert pairs(u32, "sm_90")[0] == "7.8"


@pytest.mark.parametrize("more", [False, True])
def test_the_last_barrier_of_a_cluster_waits_for_no_stores(more: bool, tmp_path: Path) -> None:
    """It is there so that nobody ends while others read; where anything comes behind it, it is as others are."""
    b = Builder("neighbours", 32, cluster=2)
    tile, out, t = b.shared("tile", i32, 32), b.buffer("out", i32, "write"), b.thread_id()
    b.store(tile, t, t)
    for first in (True, False):
        b.cluster_barrier()
        if first:
            b.store(out, t, b.cluster_load(tile, t, 1 - (b.group_id() & 1)))
    if more:
        b.store(out, t + 32, t)
    kernel = b.finish()
    made = text(kernel)
    arrivals = re.findall(r"barrier\.cluster\.arrive\S*;", made)
    usual, alone = "barrier.cluster.arrive.aligned;", "barrier.cluster.arrive.relaxed.aligned;"
    assert arrivals == [usual, usual if more else alone] and made.count("barrier.cluster.wait.aligned;") == 2
    assert made.split()[1] == ("7.8" if more else "8.0")
    if PTXAS is not None:
        assert "warning" not in assemble(tmp_path, [kernel], "sm_90")
