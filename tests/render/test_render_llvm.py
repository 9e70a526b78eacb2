"""LLVM IR: its text, and its results when llvmlite compiles it for several feature sets of this machine."""

from __future__ import annotations

import ctypes
import functools
import platform
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from render_cases import Array, Case, cases, differences, elementwise, numbers, trace, zeros

from aule import codegen
from aule.artifact import SCALAR_FORMATS, Artifact
from aule.errors import KernelError
from aule.ir.builder import Builder
from aule.ir.interpret import interpret
from aule.ir.kernel import KernelIR
from aule.ir.ops import OPS
from aule.ir.types import Fragment, Scalar, bf16, f16, f32, f64, i32, i64, u32
from aule.ir.verify import verify
from aule.render.llvm import render
from aule.target import Target

AVX512 = ("avx512f", "avx512dq", "avx512vl", "avx512bw", "avx2", "avx", "fma", "f16c", "sse4.1")
V3 = ("avx2", "avx", "fma", "f16c", "sse4.1")
LEVELS = {"host": None, "avx2": ("x86-64-v3", V3), "plain": ("x86-64", ())}
"""A processor and its features; None stands for this machine's."""
LIBM = {f"{name}{kind}" for name in ("log2", "sin", "cos", "floor") for kind in ("", "f")} | {"sincos", "sincosf"}
CASES = {case.name: case for case in cases()}
PROTOTYPE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_int] * 3
)


def target(*features: str, arch: str = "x86_64") -> Target:
    return Target("cpu", "Test", arch=arch, extensions=features)


def supported(kernel: KernelIR) -> bool:
    """Whether the rules of the renderer let a kernel through."""
    return not any(OPS[op.opcode].category == "fragment" for op in kernel.walk())


# -- what is printed -------------------------------------------------------------------------------------------------


def small(workgroup: int = 1) -> KernelIR:
    b = Builder("small", workgroup)
    x, out, n = b.buffer("x", f32), b.buffer("result", f32, "write"), b.scalar("n", i32)
    scale = b.scalar("scale", f32)
    b.comment("Sum of a row.")
    total = b.var(b.splat(b.const(0.0, f32), 4), "total")
    with b.loop(0, n, 4, unroll=2, name="k") as k:
        total.value = b.fma(b.load(x, k, 4), b.splat(scale, 4), total.value)
    b.store(out, b.group_id(), b.extract(total.value, 3))
    return b.finish()


GOLDEN = """\
define internal void @small.body(ptr noalias readonly %arg.x, ptr noalias %arg.result, i32 %arg.n, float %arg.scale, \
i32 %group.x, i32 %group.y, i32 %group.z, i32 %count.x, i32 %count.y, i32 %count.z, i32 %thread) #0 {
entry:
  %total.0 = alloca <4 x float>, align 16
  ; Sum of a row.
  store <4 x float> splat (float 0x0000000000000000), ptr %total.0
  br label %loop.1
loop.1:
  %k.2 = phi i32 [ 0, %entry ], [ %next.3, %latch.1 ]
  %v4 = icmp slt i32 %k.2, %arg.n
  br i1 %v4, label %body.1, label %endloop.1
body.1:
  %v5 = sext i32 %k.2 to i64
  %v6 = getelementptr inbounds float, ptr %arg.x, i64 %v5
  %v7 = load <4 x float>, ptr %v6, align 16
  %v8 = insertelement <4 x float> poison, float %arg.scale, i32 0
  %v9 = shufflevector <4 x float> %v8, <4 x float> poison, <4 x i32> zeroinitializer
  %v10 = load <4 x float>, ptr %total.0
  %v11 = call <4 x float> @llvm.fma.v4f32(<4 x float> %v7, <4 x float> %v9, <4 x float> %v10)
  store <4 x float> %v11, ptr %total.0
  br label %latch.1
latch.1:
  %next.3 = add nsw i32 %k.2, 4
  br label %loop.1, !llvm.loop !0
endloop.1:
  %v12 = load <4 x float>, ptr %total.0
  %v13 = extractelement <4 x float> %v12, i32 3
  %v14 = sext i32 %group.x to i64
  %v15 = getelementptr inbounds float, ptr %arg.result, i64 %v14
  store float %v13, ptr %v15, align 4
  ret void
}
"""


def test_the_body_reads_well() -> None:
    artifact = render(small(), target(*V3))
    assert GOLDEN in artifact.text
    assert '!0 = distinct !{!0, !{!"llvm.loop.unroll.count", i32 2}}' in artifact.text
    assert (artifact.language, artifact.entry, artifact.workgroup) == ("llvm", "small", 1)
    assert artifact.extensions == ("fma",)
    entry = "define void @small(ptr %args, ptr %next, i64 %total, i64 %chunk, i32 %nx, i32 %ny, i32 %nz)"
    assert entry in artifact.text


def test_features_decide_how_a_product_and_a_sum_are_fused() -> None:
    assert "@llvm.fmuladd.v4f32" in render(small(), target()).text
    assert "@llvm.fma.v4f32" in render(small(), target(arch="aarch64")).text
    assert render(small(), target()).extensions == ()


def test_nothing_but_contraction_is_left_to_llvm() -> None:
    for case in CASES.values():
        if supported(case.kernel):
            assert not re.search(r"\b(fast|nnan|ninf|nsz|reassoc|arcp|afn)\b", render(case.kernel, target(*V3)).text)


def test_halves_without_instructions_are_integers() -> None:
    kernel = CASES["f16_exact_8"].kernel
    assert "half" in render(kernel, target(*V3)).text
    assert "half" not in render(kernel, target("avx2")).text
    assert "half" in render(kernel, target(arch="aarch64")).text
    kernel = CASES["bf16_exact_8"].kernel
    assert "bfloat" not in render(kernel, target(*AVX512)).text
    assert "bfloat" not in render(kernel, target("bf16", arch="aarch64")).text
    rounded = render(kernel, target(*AVX512, "avx512bf16"))
    assert "fptrunc" in rounded.text and "avx512bf16" in rounded.extensions


def test_arrays_are_aligned_and_in_the_entry_block() -> None:
    b = Builder("arrays", 1)
    out = b.buffer("result", f32, "write")
    tile = b.shared("tile", f32, 8)
    with b.loop(0, 4) as i:
        own = b.private("own", f32, 16)
        b.store(own, 0, b.splat(b.cast(i, f32), 8))
        b.store(tile, 0, b.load(own, 0, 8))
    b.store(out, 0, b.load(tile, 0))
    code = render(b.finish(), target()).text
    body = code[code.index(".body(") :]
    body = body[body.index("entry:") :]
    assert body.splitlines()[1:3] == [
        "  %tile.0 = alloca [8 x float], align 32",
        "  %own.5 = alloca [16 x float], align 64",
    ]


def test_arrays_are_loaded_in_vectors_as_narrow_as_those_stored() -> None:
    """LLVM 22's SROA makes invalid code of wider loads; `test_cpu_compile.py` compiles such a kernel."""
    b = Builder("halves", 1)
    x, out = b.buffer("x", f32), b.buffer("result", f32, "write")
    own, other = b.private("own", f32, 16), b.private("other", f32, 16)
    for at in (12, 4, 8, 0):
        b.store(own, at, b.load(x, at, 4))
    b.store(other, 0, b.load(x, 0))  # elements are no vectors
    b.store(other, 0, b.load(x, 0, 16))
    b.store(out, 0, b.load(own, 0, 16))
    b.store(out, 16, b.load(other, 0, 16))
    text = render(b.finish(), target(*V3)).text
    assert text.count("load <4 x float>, ptr %v") == 8
    assert text.count("load <16 x float>, ptr %v") == 2


def test_matrix_units_are_refused() -> None:
    for case in CASES.values():
        if supported(case.kernel):
            render(case.kernel, target())
        else:
            with pytest.raises(KernelError, match=r"got one of matrix units, copies or clusters|no matrix fragments"):
                render(case.kernel, target())


def test_what_llvm_has_not_is_refused() -> None:
    b = Builder("foreign", 1)
    b.intrinsic("ptx", "{0} = clock;", [], i32)
    with pytest.raises(KernelError, match="expected an intrinsic of llvm, got ptx"):
        render(b.finish(), target())
    b = Builder("matrix", 1)
    b.fragment_fill(Fragment(f32, 8, 8, "a"), 0.0)
    with pytest.raises(KernelError, match="no matrix fragments"):
        render(b.finish(), target())
    with pytest.raises(KernelError, match="x86_64 or aarch64"):
        render(small(), target(arch="riscv64"))
    b = Builder("braces", 1)
    b.intrinsic("llvm", "{0} = {3}", [], i32)
    with pytest.raises(KernelError, match="double literal braces"):
        render(b.finish(), target())


def dot_pairs(lanes: int) -> KernelIR:
    b = Builder("dot_pairs", 1)
    sources = [b.buffer(name, elem) for name, elem in (("a", u32), ("x", u32), ("c", f32))]
    out, at = b.buffer("result", f32, "write"), b.group_id() * lanes
    a, x, c = (b.load(source, at, lanes) for source in sources)
    b.store(out, at, b.dot_pairs(a, x, c))
    return b.finish()


def test_pairs_are_multiplied_where_there_is_an_instruction() -> None:
    with pytest.raises(KernelError, match="AVX512_BF16 instructions, got a target for x86_64 without them"):
        render(dot_pairs(16), target(*AVX512))
    with pytest.raises(KernelError, match="AVX512_BF16 instructions, got a target for aarch64 without them"):
        render(dot_pairs(4), target("bf16", arch="aarch64"))
    with pytest.raises(KernelError, match=r"4, 8 or 16 lanes .*, got 2 lanes"):
        render(dot_pairs(2), target(*AVX512, "avx512bf16"))
    assert "avx512bf16" in render(dot_pairs(8), target(*AVX512, "avx512bf16")).extensions


def test_codegen_knows_the_language() -> None:
    artifact = codegen.generate(small(64), "llvm")
    assert artifact.language == "llvm" and codegen.target_for("cpu") is codegen.TARGETS["llvm"]


# -- compiling -------------------------------------------------------------------------------------------------------


class Jit:
    """Compiles for one processor and runs."""

    def __init__(self, cpu: str = "", features: str = "", triple: str = "") -> None:
        self.llvm = llvm = pytest.importorskip("llvmlite.binding")
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        self.triple = triple or llvm.get_process_triple()
        target = llvm.Target.from_triple(self.triple)
        self.create = functools.partial(target.create_target_machine, cpu=cpu, features=features, opt=3)
        self.machine = self.create()

    def module(self, artifact: Artifact) -> Any:
        llvm = self.llvm
        module = llvm.parse_assembly(artifact.text)
        module.triple, module.data_layout = self.triple, str(self.machine.target_data)
        module.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization = options.slp_vectorization = False
        builder = llvm.create_pass_builder(self.machine, options)
        builder.getModulePassManager().run(module, builder)
        module.verify()
        return module

    def assembly(self, artifact: Artifact) -> str:
        return str(self.machine.emit_assembly(self.module(artifact)))

    def run(
        self, artifact: Artifact, grid: tuple[int, int, int], args: Sequence[Any], chunk: int = 3, threads: int = 1
    ) -> str:
        """Launch; returns the assembly."""
        module = self.module(artifact)
        text = str(self.machine.emit_assembly(module))
        engine = self.llvm.create_mcjit_compiler(module, self.create())  # the engine takes the machine as its own
        engine.finalize_object()
        function = PROTOTYPE(engine.get_function_address(artifact.entry))
        cells = np.zeros(max(len(args), 1), np.uint64)
        held = []
        for i, (param, value) in enumerate(zip(artifact.params, args, strict=True)):
            if param.kind == "buffer":
                held.append(aligned(value))
                cells[i] = held[-1].ctypes.data
            else:
                cells[i] = int.from_bytes(struct.pack(f"<{SCALAR_FORMATS[param.dtype]}", value), "little")
        counter = np.zeros(1, np.int64)
        total = grid[0] * grid[1] * grid[2]
        call = functools.partial(function, cells.ctypes.data, counter.ctypes.data, total, chunk, *grid)
        workers = [threading.Thread(target=call) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        buffers = iter(held)
        for param, value in zip(artifact.params, args, strict=True):
            if param.kind == "buffer":
                value[...] = next(buffers)
        return text


def aligned(data: Array) -> Array:
    """A copy at a multiple of 128 bytes, as the widest vector of the language wants it."""
    raw = np.empty(data.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 128
    copy = raw[start : start + data.nbytes].view(data.dtype)
    copy[...] = data
    return copy


@functools.cache
def level(name: str) -> tuple[Jit, Target]:
    """A compiler and the Target for it."""
    llvm = pytest.importorskip("llvmlite.binding")
    arch = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    known = LEVELS[name]
    if known is None:
        features = llvm.get_host_cpu_features()
        present = tuple(sorted(f for f, on in features.items() if on))
        return Jit(llvm.get_host_cpu_name(), features.flatten()), target(*present, arch=arch)
    cpu, wanted = known
    if arch != "x86_64" or not all(llvm.get_host_cpu_features().get(f) for f in wanted):
        pytest.skip(f"this machine is no {cpu}")
    return Jit(cpu), target(*wanted)


@functools.cache
def expectation(name: str) -> tuple[Any, ...]:
    args = CASES[name].copies()
    interpret(CASES[name].kernel, CASES[name].grid, args)
    return tuple(args)


def called(assembly: str) -> set[str]:
    """Functions that the code calls or jumps to, other than its own."""
    names = set(re.findall(r"^\s+(?:callq?|jmp|bl|b)\s+\"?([A-Za-z_][\w.]*)", assembly, re.MULTILINE))
    return {n for n in names if f"\n{n}:" not in assembly and not n.startswith(".L")}


@pytest.mark.parametrize("name", LEVELS)
def test_a_cpu_computes_what_the_interpreter_does(name: str) -> None:
    jit, machine = level(name)
    wrong, count = [], 0
    for case in CASES.values():
        if not supported(case.kernel):
            continue
        count += 1
        got = case.copies()
        assembly = jit.run(render(case.kernel, machine), case.grid, got)
        assert called(assembly) <= LIBM, case.name
        difference = differences(case, list(expectation(case.name)), got)
        if difference:
            wrong.append(difference)
    assert count > 150
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_pairs_are_multiplied_as_the_interpreter_does(lanes: int) -> None:
    jit, machine = level("host")
    if "avx512bf16" not in machine.extensions:
        pytest.skip("this machine has no AVX512_BF16")
    rng = np.random.default_rng(0)
    count = 64
    a, x = ((rng.standard_normal(2 * count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for _ in "ax")
    c = rng.standard_normal(count).astype(np.float32)
    # Infinities and NaN come out where they go in, in either half and in the sum.
    a[[3, 10]], x[[20, 31]], c[[20, 21]] = 0x7F80, 0x7FC0, (np.inf, np.nan)
    a[6], x[6] = 0x7F80, 0  # 0 times infinity
    args = [a.view(np.uint32), x.view(np.uint32), c, np.zeros(count, np.float32)]
    expected = [arg.copy() for arg in args]
    grid = (count // lanes, 1, 1)
    interpret(dot_pairs(lanes), grid, expected)
    assert np.isnan(expected[3]).sum() == 4
    assembly = jit.run(render(dot_pairs(lanes), machine), grid, args)
    assert "vdpbf16ps" in assembly
    np.testing.assert_array_equal(args[3], expected[3])


def alone() -> Iterator[Case]:
    """Kernels of one thread: shared memory, barriers and subgroups of their own."""

    @trace("alone", 1, 1)
    def kernel(b: Builder) -> None:
        x, out = b.buffer("x", f32), b.buffer("result", f32, "write")
        tile, count = b.shared("tile", f32, 32), b.shared("count", i32, 1)
        at = b.group_id() * 32
        with b.loop(0, 32, 16, name="k") as k:
            b.store(tile, k, b.load(x, at + k, 16) * 2.0)
        b.store(count, 0, 3)
        b.barrier()
        b.subgroup_barrier()
        first = b.subgroup_reduce("add", b.shuffle(b.load(tile, 5), b.lane_id()))
        whole = b.subgroup_all(b.subgroup_any(first > 0.0)) & b.workgroup_any(first > 0.0)
        before = b.atomic("max", count, 0, 7)
        value = b.select(whole, first, -first) + b.cast(before + b.subgroup_id() + b.thread_id(), f32)
        with b.loop(0, 32, 16, unroll=-1, name="k") as k:
            b.store(out, at + k, b.permute(b.load(tile, k, 16), None, range(16)[::-1]) + value)

    yield Case("alone", kernel, [numbers(f32, 128), zeros(f32, 128)], (4, 1, 1), 1e-6)

    @trace("branches", 1)
    def branches(b: Builder) -> None:
        out, n = b.buffer("result", i32, "write"), b.scalar("n", i64)
        g = b.group_id()
        total = b.var(b.const(0, i32), "total")
        with b.loop(b.const(0, i64), n, name="k") as k, b.loop(0, g, unroll=4, name="j") as j:
            with b.if_(b.eq(j & 1, 0)):
                total.value = total.value + b.cast(k, i32)
                with b.if_(j > 4):
                    total.value = total.value * 3
            with b.else_():
                total.value = total.value - j
        b.store(out, g, total.value)

    yield Case("branches", branches, [zeros(i32, 16), 7], (16, 1, 1))


@pytest.mark.parametrize("name", LEVELS)
def test_a_workgroup_of_one_thread_shares_with_itself(name: str) -> None:
    jit, machine = level(name)
    for case in alone():
        verify(case.kernel)
        want, got = case.copies(), case.copies()
        interpret(case.kernel, case.grid, want, subgroup_size=1)
        jit.run(render(case.kernel, machine), case.grid, got)
        assert not differences(case, want, got)


@pytest.mark.parametrize(("chunk", "threads", "workgroup"), [(1, 1, 1), (7, 1, 1), (1000, 2, 3), (4, 2, 1), (1, 4, 3)])
def test_threads_share_the_workgroups_of_a_launch(chunk: int, threads: int, workgroup: int) -> None:
    b = Builder("where", workgroup)
    out, turns = b.buffer("result", i32, "write"), b.buffer("turns", u32, "readwrite")
    group = (b.group_id(2) * b.group_count(1) + b.group_id(1)) * b.group_count(0) + b.group_id(0)
    at = group * workgroup + b.thread_id()
    b.atomic("add", turns, at, 1)
    parts = [b.group_id(0), b.group_id(1), b.group_id(2), b.thread_id()]
    b.store(out, at * 4, b.vector(parts))
    grid = (5, 3, 4)
    got, counts = np.zeros((4, 3, 5, workgroup, 4), np.int32), np.zeros(60 * workgroup, np.uint32)
    jit, machine = level("host")
    flat = got.reshape(-1)
    jit.run(render(b.finish(), machine), grid, [flat, counts], chunk, threads)
    z, y, x, t = np.indices((4, 3, 5, workgroup))
    np.testing.assert_array_equal(got, np.stack([x, y, z, t], -1))
    assert (counts == 1).all()


@pytest.mark.parametrize("features", [(), V3, AVX512])
def test_hints_to_unroll_and_odd_names_compile(features: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    jit = Jit("x86-64", ",".join(f"+{f}" for f in features), "x86_64-unknown-linux-gnu")
    b = Builder("args", 1)
    v0, out = b.buffer("v0", f32), b.buffer("entry", f32, "write")
    total = b.var(b.load(v0, 0, 16), "thread")
    for stop, unroll in ((b.group_count(1), -1), (b.group_count(1), 4), (24, -1), (24, 5), (100000, -1), (3, 2)):
        with b.loop(0, stop, unroll=unroll, name="x") as i:
            total.value = b.exp2(b.load(v0, i * 16, 16)) + total.value
    b.store(out, 0, b.cast(b.cast(total.value, f16), f32))
    artifact = render(b.finish(), target(*features))
    assert called(jit.assembly(artifact)) == set()
    assert artifact.text.count("unroll.full") == 1 and artifact.text.count("unroll.count") == 3
    assert capfd.readouterr().err == ""  # where LLVM complains of hints that it cannot follow


def test_an_intrinsic_is_a_line_of_llvm() -> None:
    b = Builder("own", 1)
    x, out = b.buffer("x", f32), b.buffer("result", f32, "write")
    value = b.intrinsic("llvm", "{0} = call float @llvm.copysign.f32(float {1}, float {2})",
                        [b.load(x, 0), b.const(-1.0, f32)], f32)  # fmt: skip
    assert value is not None
    b.store(out, 0, value)
    got = np.zeros(1, np.float32)
    jit, machine = level("host")
    jit.run(render(b.finish(), machine), (1, 1, 1), [np.array([3.0], np.float32), got])
    assert got[0] == -3


# -- exp2 ------------------------------------------------------------------------------------------------------------


def exp2_kernel(elem: Scalar, lanes: int, count: int) -> KernelIR:
    b = Builder("powers", 1)
    x, out = b.buffer("x", elem), b.buffer("result", elem, "write")
    with b.loop(b.const(0, i64), count, lanes) as i:
        b.store(out, i, b.exp2(b.load(x, i, lanes)))
    return b.finish()


def ulps(x: Array, got: Array) -> Array:
    """Distance to 2**x in units of the last place of a normal result; of the smallest number for subnormal ones."""
    wide = np.longdouble
    exact = np.exp2(x.astype(wide))
    info = np.finfo(got.dtype)
    exponent = np.clip(np.floor(x.astype(np.float64)), info.minexp, info.maxexp - 1)
    return np.asarray(np.abs(got.astype(wide) - exact) / np.exp2(exponent.astype(wide) - info.nmant), np.float64)


SPECIAL = [-np.inf, np.inf, np.nan, 0.0, -0.0, -1.0, 10.0]


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("elem", [f32, f64], ids=str)
@pytest.mark.parametrize("name", LEVELS)
def test_exp2_is_good_to_two_ulp(name: str, elem: Scalar, lanes: int) -> None:
    jit, machine = level(name)
    dtype: Any = np.float32 if elem == f32 else np.float64
    edge = 150.0 if elem == f32 else 1076.0
    rng = np.random.default_rng(0)
    size = (1 << 21 if elem == f32 and lanes == 16 else 1 << 16) - 16
    near = rng.uniform(-1, 1, size // 4)
    sweep = [np.linspace(-edge, 0, size // 2), near, near * 2.0 ** rng.uniform(-40, 0, size // 4)]
    sweep += [np.linspace(0, edge, 16)]
    top = 128.0 if elem == f32 else 1024.0
    exact = [*SPECIAL, top, np.nextafter(dtype(top), dtype(0)), -edge, 3 - edge, -3e38, 3e38, top - 1, 1e-30]
    x: Array = np.concatenate([*sweep, exact]).astype(dtype)
    x = np.concatenate([x, np.zeros(-len(x) % 16, dtype)])
    x[-1] = np.array([-1], f"i{x.itemsize}").view(dtype)[0]  # a NaN with every bit set
    got = np.zeros_like(x)
    jit.run(render(exp2_kernel(elem, lanes, len(x)), machine), (1, 1, 1), [x, got])
    with np.errstate(over="ignore", under="ignore"):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
        assert (got[x >= top] == np.inf).all() and (got[x <= -edge] == 0).all()
        whole = (x == np.rint(x)) & (x < top)
        powers = np.ldexp(np.ones_like(x[whole]), np.clip(x[whole], -2000, 2000).astype(int))
        np.testing.assert_array_equal(got[whole], powers)
        finite = (x < top) & (x > -edge)
        error = ulps(x[finite], got[finite])
    assert error.max() < 2.0, (error.max(), x[finite][error.argmax()])


def test_exp2_with_avx512_is_eight_instructions() -> None:
    jit = Jit("x86-64-v4", "", "x86_64-unknown-linux-gnu")
    artifact = render(exp2_kernel(f32, 16, 1 << 20), target(*AVX512))
    assert {"avx512f", "avx512dq", "avx512vl", "fma"} == set(artifact.extensions)
    found = re.findall(r"^\s+(v\w+)\s", jit.assembly(artifact), re.MULTILINE)
    arithmetic = [i for i in found if not i.startswith(("vmov", "vbroadcast", "vzero"))]
    fused = [i for i in arithmetic if i.startswith("vfmadd")]
    assert len(fused) * 8 == len(arithmetic) * 6, arithmetic
    assert sum(i == "vreduceps" for i in arithmetic) == sum(i == "vscalefps" for i in arithmetic) == len(fused) // 6


def test_maximum_is_one_instruction_and_keeps_a_nan() -> None:
    @trace("extremes", 1)
    def kernel(b: Builder) -> None:
        x, out = b.buffer("x", f32), b.buffer("result", f32, "write")
        value = b.load(x, 0, 4)
        b.store(out, 0, b.max(value, -3.0))
        b.store(out, 4, b.min(value, 3.0))
        b.store(out, 8, b.max(value, b.load(x, 4, 4)))

    x = np.array([np.nan, 5, -5, 0, 1, np.inf, -6, -np.inf], np.float32)
    for name in LEVELS:
        jit, machine = level(name)
        got = np.zeros(12, np.float32)
        assembly = jit.run(render(kernel, machine), (1, 1, 1), [x, got])
        np.testing.assert_array_equal(got, [np.nan, 5, -3, 0, np.nan, 3, -5, 0, np.nan, np.inf, -5, 0])
        if machine.arch == "x86_64":
            assert len(re.findall(r"v?maxps", assembly)) == 2 and len(re.findall(r"v?minps", assembly)) == 1
            assert not re.findall(r"v?cmp\w*ps|blend", assembly)


# -- aarch64 ---------------------------------------------------------------------------------------------------------


def test_aarch64_compiles_to_its_own_instructions() -> None:
    jit = Jit("generic", "", "aarch64-unknown-linux-gnu")
    machine = target("neon", arch="aarch64")

    def assembly(elem: Scalar, op: Callable[..., Any], lanes: int = 4) -> str:
        kernel, _ = elementwise("kernel", [elem] * 3, elem, [op], lanes)
        return jit.assembly(render(kernel, machine))

    assert "fmla\tv" in assembly(f32, lambda b, x, y, z: b.fma(x, y, z))
    assert "fmla\tv" in assembly(f32, lambda b, x, y, z: b.fma(x, y, z), 16)
    assert "fmax\tv" in assembly(f32, lambda b, x, y, z: b.max(x, y))
    halves = assembly(f16, lambda b, x, y, z: x * y + z)
    assert "fcvtl" in halves and "fcvtn" in halves
    for elem in (f16, bf16, f32):
        code = assembly(elem, lambda b, x, y, z: b.exp2(x) + b.rcp(y) + b.unary("rsqrt", z))
        assert called(code) == set()


def test_every_case_compiles_for_aarch64() -> None:
    jit = Jit("generic", "", "aarch64-unknown-linux-gnu")
    for case in CASES.values():
        if supported(case.kernel):
            assert called(jit.assembly(render(case.kernel, target("neon", arch="aarch64")))) <= LIBM, case.name
