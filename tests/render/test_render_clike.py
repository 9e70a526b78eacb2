"""Output of the C-like renderers. The goldens are for review; executing the code proves that it is right."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from render_cases import cases

from aule.artifact import Artifact
from aule.errors import KernelError
from aule.ir.builder import Builder
from aule.ir.kernel import KernelIR
from aule.ir.types import Vector, bf16, f16, f32, f64, i32, i64, u16, u32
from aule.target import Target

TARGETS = {
    "opencl": Target("opencl", name="Test", int64=True, storage16=True),
    "wgsl": Target("webgpu", name="Test", f16=True, storage16=True),
    "msl": Target("metal", name="Test", f16=True, int64=True, storage16=True, subgroup_size=32),
    "hip": Target("hip", name="Test", arch="gfx942", f16=True, f64=True, int64=True, storage16=True, subgroup_size=64),
}
INTEL = Target(
    "opencl", name="Arc", vendor="intel", subgroup_size=16, subgroup_sizes=(8, 16, 32), f16=True, int64=True,
    extensions=("cl_intel_required_subgroup_size", "cl_intel_subgroups", "cl_khr_fp16", "cl_khr_subgroups"),
)  # fmt: skip


def render(language: str, kernel: KernelIR, **changes: object) -> Artifact:
    target = replace(TARGETS[language], **changes)  # type: ignore[arg-type]
    artifact: Artifact = importlib.import_module(f"aule.render.{language}").render(kernel, target)
    return artifact


def row_sums() -> KernelIR:
    b = Builder("row_sums", 64)
    x, out, n = b.buffer("x", bf16), b.buffer("sums", f16, "write"), b.scalar("n", i64)
    scale = b.scalar("scale", f32)
    tile = b.shared("tile", f32, 256)
    t = b.thread_id()
    b.comment("Four columns a thread.")
    four = b.cast(b.load(x, (b.group_id() * 64 + t) * 4, 4), f32)
    b.store(tile, t * 4, four * scale)
    b.barrier()
    best, total = b.var(b.const(float("-inf"), f32), "best"), b.var(b.const(0.0, f32), "total")
    with b.loop(0, 256, 64, unroll=2, name="k") as k:
        value = b.load(tile, k + t)
        best.value = b.max(best.value, value)
        total.value = b.fma(value, 0.5, total.value)
    with b.if_(b.cast(t, i64) < n):
        b.store(out, t, b.cast(b.exp2(total.value - best.value), f16))
    return b.finish()


GOLDEN = {
    "opencl": """\
// row_sums, rendered by aule for Test.

// Fused where the hardware fuses; a software fma() costs more than the rounding is worth.
#ifdef FP_FAST_FMAF
#define FMA fma
#else
#define FMA mad
#endif

__attribute__((reqd_work_group_size(64, 1, 1)))
__kernel void row_sums(
    __global const ushort* restrict x,
    __global half* restrict sums,
    const long n,
    const float scale)
{
    __local float tile[256] __attribute__((aligned(16)));
    const int v0 = (int)get_local_id(0);
    // Four columns a thread.
    const ushort4 v1 = *(__global const ushort4*)(x + ((((int)get_group_id(0) * 64) + v0) * 4));
    const float4 v2 = as_float4(convert_uint4(v1) << (uint4)(16u)) * (float4)(scale);
    *(__local float4*)(tile + (v0 * 4)) = v2;
    barrier(CLK_LOCAL_MEM_FENCE);
    float best = -INFINITY;
    float total = 0.0f;
    #pragma unroll 2
    for (int k = 0; k < 256; k += 64) {
        const float v3 = tile[k + v0];
        best = fmax(best, v3);
        total = FMA(v3, 0.5f, total);
    }
    if ((long)v0 < n) {
        vstore_half_rte(native_exp2(total - best), v0, sums);
    }
}
""",
    "wgsl": """\
// row_sums, rendered by aule for Test.
enable f16;

struct Params {
    n_low: u32,
    n_high: u32,
    scale: f32,
}

var<private> minus_infinity_bits: u32 = 0xff800000u;

@group(0) @binding(0) var<storage, read> x: array<vec2<u32>>;
@group(0) @binding(1) var<storage, read_write> sums: array<f16>;
@group(0) @binding(2) var<uniform> params: Params;
var<workgroup> tile: array<vec4<f32>, 64>;

@compute @workgroup_size(64, 1, 1)
fn row_sums(
    @builtin(local_invocation_index) local_invocation_index: u32,
    @builtin(workgroup_id) workgroup_id: vec3<u32>,
) {
    let minus_infinity = bitcast<f32>(minus_infinity_bits);
    let v0: i32 = i32(local_invocation_index);
    // Four columns a thread.
    let v1: vec2<u32> = x[((((i32(workgroup_id.x) * 64) + v0) * 4) >> 1u) >> 1u];
    let v2: vec4<u32> = vec4<u32>(v1.x & 65535u, v1.x >> 16u, v1.y & 65535u, v1.y >> 16u);
    let v3: vec4<f32> = bitcast<vec4<f32>>(v2 << vec4<u32>(16u)) * vec4<f32>(params.scale);
    tile[(v0 * 4) >> 2u] = v3;
    workgroupBarrier();
    var best: f32 = minus_infinity;
    var total: f32 = 0.0f;
    for (var k: i32 = 0; k < 256; k += 64) {
        let v4: f32 = tile[(k + v0) >> 2u][(k + v0) & 3];
        best = max(best, v4);
        total = fma(v4, 0.5f, total);
    }
    let v5: u32 = bitcast<u32>(v0 >> 31u);
    let v6: bool = (v5 == params.n_high) && (bitcast<u32>(v0) < params.n_low);
    let v7: bool = (bitcast<i32>(v5) < bitcast<i32>(params.n_high)) || v6;
    if (v7) {
        sums[v0] = f16(exp2(total - best));
    }
}
""",
    "msl": """\
// row_sums, rendered by aule for Test.
#include <metal_stdlib>
using namespace metal;

struct Params {
    long n;
    float scale;
};

kernel void row_sums(
    device const ushort* x [[buffer(0)]],
    device half* sums [[buffer(1)]],
    constant Params& params [[buffer(2)]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
{
    threadgroup float4 tile_storage[64];
    threadgroup float* const tile = (threadgroup float*)tile_storage;
    const int v0 = int(thread_index_in_threadgroup);
    // Four columns a thread.
    const int v1 = ((int(threadgroup_position_in_grid.x) * 64) + v0) * 4;
    const ushort4 v2 = *(device const ushort4*)(x + v1);
    const float4 v3 = as_type<float4>(uint4(v2) << uint4(16u)) * float4(params.scale);
    *(threadgroup float4*)(tile + (v0 * 4)) = v3;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float best = -INFINITY;
    float total = 0.0f;
    #pragma unroll 2
    for (int k = 0; k < 256; k += 64) {
        const float v4 = tile[k + v0];
        best = fmax(best, v4);
        total = fma(v4, 0.5f, total);
    }
    if (long(v0) < params.n) {
        sums[v0] = half(precise::exp2(total - best));
    }
}
""",
    "hip": r"""// row_sums, rendered by aule for Test.
#define AULE_WAVE 64
#ifndef AULE_STAND_IN
#define AULE_KERNEL(threads) \
    extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#define AULE_SHARED(bytes) __attribute__((shared)) __attribute__((aligned(bytes)))
#define AULE_HERE(registers) asm volatile("" : "+v"(registers))
#define AULE_DEVICE static inline __attribute__((device)) __attribute__((always_inline))
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef _Float16 f16;
typedef float f32;
typedef double f64;
typedef f32 f32x4 __attribute__((vector_size(16)));
typedef u16 u16x4 __attribute__((vector_size(8)));
typedef u32 u32x4 __attribute__((vector_size(16)));

namespace aule {
#if __clang_major__ >= 20
AULE_DEVICE void barrier()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}
#else
AULE_DEVICE void barrier()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
#endif
template <class T, class S> AULE_DEVICE T bits(S x) { return __builtin_bit_cast(T, x); }
template <class T, class S> AULE_DEVICE T convert(S x) { return __builtin_convertvector(x, T); }
AULE_DEVICE f32 exp2(f32 x) { return __builtin_amdgcn_exp2f(x); }
AULE_DEVICE f16 exp2(f16 x) { return (f16)exp2((f32)x); }
template <class V> AULE_DEVICE V exp2(V x)
{
    for (u32 i = 0; i < sizeof(x) / sizeof(x[0]); i++)
        x[i] = exp2(x[i]);
    return x;
}
template <class T> AULE_DEVICE T fma(T a, T b, T c) { return __builtin_elementwise_fma(a, b, c); }
AULE_DEVICE i32 group_id_x() { return __builtin_amdgcn_workgroup_id_x(); }
AULE_DEVICE i32 group_id_y() { return __builtin_amdgcn_workgroup_id_y(); }
AULE_DEVICE i32 group_id_z() { return __builtin_amdgcn_workgroup_id_z(); }
template <class T> AULE_DEVICE T max(T a, T b) { return __builtin_elementwise_max(a, b); }
AULE_DEVICE i32 thread_id() { return __builtin_amdgcn_workitem_id_x(); }
}
#endif

AULE_KERNEL(64) void row_sums(
    const u16* __restrict__ x,
    f16* __restrict__ sums,
    const i64 n,
    const f32 scale)
{
    AULE_SHARED(16) f32 tile[256];
    const i32 v0 = aule::thread_id();
    // Four columns a thread.
    const u16x4 v1 = *(const u16x4*)(x + (((aule::group_id_x() * 64) + v0) * 4));
    const u32x4 v2 = aule::convert<u32x4>(v1) << u32x4{16u, 16u, 16u, 16u};
    const f32x4 v3 = aule::bits<f32x4>(v2) * f32x4{scale, scale, scale, scale};
    *(f32x4*)(tile + (v0 * 4)) = v3;
    aule::barrier();
    f32 best = -__builtin_inff();
    f32 total = 0.0f;
    #pragma unroll 2
    for (i32 k = 0; k < 256; k += 64) {
        const f32 v4 = tile[k + v0];
        best = aule::max(best, v4);
        total = aule::fma(v4, 0.5f, total);
    }
    if ((i64)v0 < n) {
        sums[v0] = (f16)aule::exp2(total - best);
    }
}
""",
}


@pytest.mark.parametrize("language", GOLDEN)
def test_golden(language: str) -> None:
    artifact = render(language, row_sums())
    assert artifact.text == GOLDEN[language]
    assert artifact.entry == "row_sums"
    assert artifact.language == language
    assert [(p.name, p.dtype) for p in artifact.params] == [
        ("x", "bf16"),
        ("sums", "f16"),
        ("n", "i64"),
        ("scale", "f32"),
    ]
    assert (artifact.workgroup, artifact.shared_bytes) == (64, 1024)


@pytest.mark.parametrize("language", GOLDEN)
def test_rendering_is_deterministic(language: str) -> None:
    for first, second in zip(cases(), cases(), strict=True):
        if not first.needs:
            assert render(language, first.kernel).code == render(language, second.kernel).code


@pytest.mark.parametrize("language", GOLDEN)
def test_names_that_a_language_reserves_are_changed(language: str) -> None:
    b = Builder("main", 32)
    out = b.buffer("float", f32, "write")
    value = b.var(b.const(1.0, f32), "FMA")
    value.value = b.fma(value.value, value.value, 1.0)
    b.store(out, b.thread_id(), value.value)
    artifact = render(language, b.finish())
    assert artifact.entry == "main_"
    assert "float_[" in artifact.text


@pytest.mark.parametrize("language", GOLDEN)
def test_subgroups_are_refused_where_there_are_none(language: str) -> None:
    b = Builder("lanes", 32)
    b.store(b.buffer("result", i32, "write"), b.thread_id(), b.lane_id())
    with pytest.raises(KernelError, match="uses subgroups"):
        render(language, b.finish(), subgroup_size=0)


@pytest.mark.parametrize("language", ["wgsl", "msl"])
def test_types_that_a_language_lacks_are_refused(language: str) -> None:
    b = Builder("wide", 32)
    b.store(b.buffer("result", f64, "write"), b.thread_id(), b.const(1.0, f64))
    with pytest.raises(KernelError, match="no type f64"):
        render(language, b.finish())


def test_a_device_without_doubles_refuses_them() -> None:
    b = Builder("wide", 32)
    b.store(b.buffer("result", f64, "write"), b.thread_id(), b.const(0.1, f64))
    with pytest.raises(KernelError, match="f64"):
        render("opencl", b.finish())
    artifact = render("opencl", b.finish(), f64=True)
    assert "cl_khr_fp64" in artifact.extensions and "= 0.1;" in artifact.text


def test_lanes_of_a_wide_vector_in_an_intrinsic() -> None:
    """Vectors of more than four have no .x before OpenCL C 3.0."""
    b = Builder("wide", 1)
    x, out = b.buffer("x", f32), b.buffer("out", f32, "write")
    value = b.intrinsic("opencl", "{0} = {1[1]} + {1[5]};", [b.load(x, 0, 8)], f32)
    assert value is not None
    b.store(out, 0, value)
    assert re.search(r"= (\w+)\.s1 \+ \1\.s5;", render("opencl", b.finish()).text)


@pytest.mark.parametrize("language", GOLDEN)
def test_an_intrinsic_belongs_to_one_language(language: str) -> None:
    b = Builder("special", 32)
    value = b.intrinsic(language, "{0} = {1} * {1};", [b.const(3.0, f32)], f32)
    lanes = b.intrinsic(language, "{0[0]} = {1}; {0[1]} = {1};", [b.const(2.0, f32)], Vector(f32, 2))
    assert value is not None and lanes is not None
    out = b.buffer("result", f32, "write")
    b.store(out, b.thread_id() * 2, lanes * value)
    text = render(language, b.finish()).text
    lanes_set = "v1[0] = 2.0f; v1[1] = 2.0f;" if language == "hip" else "v1.x = 2.0f; v1.y = 2.0f;"
    assert " = 3.0f * 3.0f;" in text and lanes_set in text
    other = Builder("special", 32)
    other.intrinsic("ptx", "nanosleep.u32 10;", [], None)
    with pytest.raises(KernelError, match="intrinsic of ptx"):
        render(language, other.finish())


@pytest.mark.parametrize("language", GOLDEN)
def test_products_of_pairs_are_refused(language: str) -> None:
    b = Builder("pairs", 32)
    pair = b.const(0x3F803F80, u32)
    b.store(b.buffer("result", f32, "write"), b.thread_id(), b.dot_pairs(pair, pair, b.const(0.0, f32)))
    with pytest.raises(KernelError, match="has no dot_pairs"):
        render(language, b.finish())


@pytest.mark.parametrize("language", [name for name in GOLDEN if name != "hip"])
def test_fences_of_the_device_are_refused(language: str) -> None:
    b = Builder("fence", 32)
    b.device_fence()
    with pytest.raises(KernelError, match="has no fence of the device"):
        render(language, b.finish())


@pytest.mark.parametrize("language", GOLDEN)
def test_clusters_are_refused_and_launches_need_not_be_told_when_to_start(language: str) -> None:
    for cluster in (1, 2):
        b = Builder("together", 32, cluster=cluster)
        b.launch_await()
        b.store(b.buffer("result", f32, "write"), b.thread_id(), b.const(0.0, f32))
        b.launch_next()
        if cluster == 1:
            render(language, b.finish())
        else:
            with pytest.raises(KernelError, match="expected no cluster, got one of 2"):
                render(language, b.finish())


@pytest.mark.parametrize("language", ["opencl", "wgsl"])
def test_fragments_are_refused_where_there_are_none(language: str) -> None:
    case = next(c for c in cases() if "fragments" in c.needs)
    with pytest.raises(KernelError, match="no"):
        render(language, case.kernel, subgroup_size=32)


def test_fp16_without_its_extension_is_only_stored() -> None:
    text = render("opencl", next(c.kernel for c in cases() if c.name == "copy_f16x8")).text
    assert "vloada_half8" in text and "vstorea_half8_rte" in text and "cl_khr_fp16" not in text
    native = render("opencl", next(c.kernel for c in cases() if c.name == "copy_f16x8"), f16=True)
    assert "half8" in native.text and "vload" not in native.text
    assert native.extensions == ("cl_khr_fp16",)


def test_the_hardwares_exp2_is_for_hardware() -> None:
    assert "native_exp2" in render("opencl", row_sums()).text
    assert "native_exp2" not in render("opencl", row_sums(), software=True).text


def test_wgsl_declares_buffers_by_how_they_are_accessed() -> None:
    def declared(*accesses: tuple[str, int], elem: object = f32) -> str:
        b = Builder("access", 64)
        x, out = b.buffer("x", elem, "readwrite"), b.buffer("result", f32, "write")  # type: ignore[arg-type]
        for kind, lanes in accesses:
            if kind == "load":
                value = b.load(x, b.thread_id() * 4, lanes)
                b.store(out, 0, b.cast(b.extract(value, 0), f32))
            elif kind == "store":
                value = b.const(1, elem)  # type: ignore[arg-type]
                b.store(x, b.thread_id() * 4, b.splat(value, lanes))
            else:
                b.atomic("add", x, 0, 1)
        text = render("wgsl", b.finish()).text
        return next(line.split(": ", 1)[1] for line in text.splitlines() if "> x:" in line)

    assert declared(("load", 4)) == "array<vec4<f32>>;"
    assert declared(("load", 4), ("load", 1)) == "array<vec4<f32>>;"
    assert declared(("load", 4), ("store", 2)) == "array<vec2<f32>>;"
    assert declared(("load", 4), ("store", 1)) == "array<f32>;"
    assert declared(("load", 8)) == "array<vec4<f32>>;"
    assert declared(("load", 4), ("atomic", 1), elem=i32) == "array<atomic<i32>>;"
    assert declared(("load", 4), ("atomic", 1)) == "array<atomic<u32>>;"
    assert declared(("load", 8), elem=u16) == "array<vec4<u32>>;"
    assert declared(("store", 1), elem=u16) == "array<atomic<u32>>;"
    assert declared(("load", 4), elem=f16) == "array<vec4<f16>>;"


def test_wgsl_has_no_constant_infinities() -> None:
    b = Builder("masks", 64)
    out = b.buffer("result", f32, "write")
    for k, value in enumerate((float("inf"), float("-inf"), float("nan"))):
        b.store(out, k, b.const(value, f32))
    text = render("wgsl", b.finish()).text
    assert "var<private> infinity_bits: u32 = 0x7f800000u;" in text
    assert "result[1] = minus_infinity;" in text and "result[2] = not_a_number;" in text


def test_wgsl_makes_signed_remainders_of_quotients() -> None:
    """Of its own operator naga makes an instruction that Vulkan leaves undefined for negative numbers."""
    texts = {}
    for arithmetic in ("exact", "quick"):
        b = Builder("rest", 64, arithmetic=arithmetic)  # type: ignore[arg-type]
        out = b.buffer("result", i32, "write")
        i = b.thread_id()
        b.store(out, i, (i - 9) % -7)
        b.store(out, i, b.cast(b.cast(i, u32) % 7, i32))
        texts[arithmetic] = render("wgsl", b.finish()).text
    assert "= v1 - v1 / (-7) * (-7);" in texts["exact"] and "% 7u" in texts["exact"]
    assert [text.count("%") for text in texts.values()] == [1, 2]  # a quick kernel has no negative ones


def test_wgsl_finds_what_is_not_a_number() -> None:
    """naga's ``!=`` is false where an operand is NaN, and a compiler may assume that there is none."""
    b = Builder("nan", 64)
    x, out = b.buffer("x", f32), b.buffer("result", f32, "write")
    i = b.thread_id()
    value = b.load(x, i)
    b.store(out, i, b.select(b.ne(value, 2.0), value, 1.0))
    b.store(out, i, b.select(b.ne(value, value), 0.0, value))
    text = render("wgsl", b.finish()).text
    assert "!(v1 == 2.0f)" in text and "(bitcast<u32>(v1) & u32(0x7fffffffu)) > u32(0x7f800000u)" in text
    assert "!=" not in text


def test_values_that_are_moved_past_nothing_are_inlined() -> None:
    b = Builder("inline", 64)
    x, out = b.buffer("x", i32), b.buffer("result", i32, "write")
    i = b.thread_id()
    value = b.load(x, i)
    b.store(out, i, (value + 1) * (value - 1))
    assert "result[v0] = (v1 + 1) * (v1 - 1);" in render("opencl", b.finish()).text


def test_subgroups_of_intel() -> None:
    from aule.render import opencl

    b = Builder("lanes", 64, 16)
    x, out = b.buffer("x", f32), b.buffer("result", f32, "write")
    value = b.load(x, b.thread_id())
    b.store(out, b.thread_id(), b.subgroup_reduce("max", value) + b.shuffle_xor(value, 4))
    artifact = opencl.render(b.finish(), INTEL)
    assert "__attribute__((intel_reqd_sub_group_size(16)))" in artifact.text
    assert "sub_group_reduce_max(" in artifact.text and "intel_sub_group_shuffle_xor(" in artifact.text
    assert artifact.uses_subgroups and artifact.subgroup_size == 16
    with pytest.raises(KernelError, match="expected subgroups of 16 lanes, Arc has 32"):
        opencl.render(b.finish(), replace(INTEL, subgroup_size=32, subgroup_sizes=()))


@pytest.mark.skipif(shutil.which("ocloc") is None, reason="Intel's offline compiler ocloc is not installed")
@pytest.mark.parametrize(
    "name",
    ["f16_near_4", "bf16_exact_8", "masks_f16x4", "atomic_floats", "shared_atomic_floats", "subgroup_f32", "scalars"],
)
def test_intels_offline_compiler_takes_it(name: str, tmp_path: Path) -> None:
    from aule.render import opencl

    kernel = next(c.kernel for c in cases() if c.name == name)
    (tmp_path / "kernel.cl").write_bytes(opencl.render(kernel, INTEL).code)
    command = ["ocloc", "compile", "-file", "kernel.cl", "-device", "dg2", "-options", "-cl-std=CL3.0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "warning" not in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("language", GOLDEN)
def test_the_artifact_keeps_the_parameters_of_the_kernel(language: str) -> None:
    b = Builder("keep", 64)
    x, y, n = b.buffer("x", bf16), b.buffer("y", u16, "write"), b.scalar("n", i64)
    b.store(y, b.thread_id(), b.cast(b.cast(b.load(x, b.thread_id()), f32), u16) + b.cast(n, u16))
    kernel = b.finish()
    artifact = render(language, kernel)
    assert artifact.params == kernel.params
    assert artifact.scalar_struct.size == 16
    assert u32.name not in [p.dtype for p in artifact.params]
