"""SPIR-V: every operation on every type passes the validator; the bytes are the same each time."""

from __future__ import annotations

import dataclasses
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from repository import ROOT

from aule.artifact import Artifact
from aule.errors import KernelError
from aule.ir.builder import Builder
from aule.ir.kernel import Arithmetic, KernelIR, Value
from aule.ir.types import (
    SCALARS,
    Fragment,
    Scalar,
    Vector,
    bf16,
    bool_,
    element,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
)
from aule.render._spirv_module import constant_words
from aule.render._spirv_ops import Capability, Decoration, Glsl, Op, StorageClass
from aule.render.spirv import render
from aule.target import Target

TARGET = Target(
    "vulkan", subgroup_size=32, f16=True, f64=True, int64=True, storage16=True, storage8=True, language_version=12,
    matrix_units=("m16n16k16:f16:f32",), extensions=("VK_KHR_shader_float16_int8", "shaderInt16"),
)  # fmt: skip
EXTENDED = dataclasses.replace(
    TARGET,
    extensions=(
        *TARGET.extensions,
        "VK_EXT_shader_atomic_float",
        "VK_KHR_shader_bfloat16",
        "VK_KHR_shader_float_controls",
        "shaderRoundingModeRTEFloat16",
    ),
)
EXPLICIT_LAYOUT = (
    "VK_KHR_workgroup_memory_explicit_layout",
    "workgroupMemoryExplicitLayout8BitAccess",
    "workgroupMemoryExplicitLayout16BitAccess",
)
EXPLICIT = dataclasses.replace(EXTENDED, extensions=(*EXTENDED.extensions, *EXPLICIT_LAYOUT))
LESSER = (
    dataclasses.replace(TARGET, matrix_units=(), f16=False, extensions=()),
    dataclasses.replace(TARGET, matrix_units=(), storage16=False, storage8=False, extensions=()),
    Target("vulkan", subgroup_size=32, f64=True),
)
"""Devices that compute in 32 bits only, store no less, or both."""
INTS = (i8, i16, i32, i64, u8, u16, u32, u64)
FLOATS = (f16, f32, f64)
LANES = (1, 2, 4, 8, 16)
ACCUMULATOR = Fragment(f32, 16, 16, "accumulator")

needs_validator = pytest.mark.skipif(shutil.which("spirv-val") is None, reason="spirv-val is not installed")


def validate(artifacts: list[Artifact], folder: Path) -> None:
    """Run the validator on all modules at once, and name the kernel that it refuses."""
    for i, artifact in enumerate(artifacts):
        (folder / f"{i}.spv").write_bytes(artifact.code)
    script = 'for f in "$1"/*.spv; do spirv-val --target-env vulkan1.2 "$f" || { echo "$f"; exit 1; }; done'
    done = subprocess.run(["sh", "-c", script, "sh", str(folder)], capture_output=True, text=True)
    if done.returncode:
        which = int(re.findall(r"(\d+)\.spv", done.stdout)[-1])
        listing = subprocess.run(["spirv-dis", str(folder / f"{which}.spv")], capture_output=True, text=True).stdout
        pytest.fail(f"{artifacts[which].entry}: {done.stderr}\n{listing}")


def instructions(code: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Opcode and operands of each instruction."""
    words = struct.unpack(f"<{len(code) // 4}I", code)
    at = 5
    while at < len(words):
        length = words[at] >> 16
        yield words[at] & 0xFFFF, words[at + 1 : at + length]
        at += length


def with_layout(target: Target) -> Target:
    """The same device with views of shared memory, of 32 and 64 bits only."""
    return dataclasses.replace(target, extensions=(*target.extensions, EXPLICIT_LAYOUT[0]))


def blocks_of(artifact: Artifact) -> dict[str, dict[str, tuple[int, int]]]:
    """The views of shared memory: by name of the variable and of the array, its offset and stride."""
    found = list(instructions(artifact.code))
    names = {w[0]: _text(w[1:]) for op, w in found if op == Op.Name}
    members = {(w[0], w[1]): _text(w[2:]) for op, w in found if op == Op.MemberName}
    decorated = [w for op, w in found if op == Op.Decorate]
    strides = {w[0]: w[2] for w in decorated if w[1] == Decoration.ArrayStride}
    offsets = {(w[0], w[1]): w[3] for op, w in found if op == Op.MemberDecorate and w[2] == Decoration.Offset}
    structs = {w[0]: w[1:] for op, w in found if op == Op.TypeStruct}
    pointers = {w[0]: w[2] for op, w in found if op == Op.TypePointer}
    result = {}
    for type_id, variable, _ in (w for op, w in found if op == Op.Variable and w[2] == StorageClass.Workgroup):
        struct_id = pointers[type_id]
        assert (struct_id, Decoration.Block) in decorated and (variable, Decoration.Aliased) in decorated
        result[names[variable]] = {
            members[struct_id, i]: (offsets[struct_id, i], strides[array]) for i, array in enumerate(structs[struct_id])
        }
    return result


def _text(words: tuple[int, ...]) -> str:
    return struct.pack(f"<{len(words)}I", *words).split(b"\0")[0].decode()


def opcodes(artifact: Artifact) -> list[int]:
    return [opcode for opcode, _ in instructions(artifact.code)]


def kernel_of(name: str, body: Callable[[Builder], None], arithmetic: Arithmetic = "exact") -> KernelIR:
    b = Builder(name, workgroup=64, arithmetic=arithmetic)
    body(b)
    return b.finish()


def number(b: Builder, elem: Scalar, lanes: int, at: int = 0) -> Value:
    """A value that is not constant; bool is made by a comparison."""
    if elem == bool_:
        return b.binary("lt", number(b, f32, lanes, at), number(b, f32, lanes, at + 1))
    name = f"in_{elem}"
    source = b._values[name] if name in b._values else b.buffer(name, elem)
    return b.load(source, b.thread_id() * 16 + at * 16, lanes)


def keep(b: Builder, value: Value) -> None:
    """Write a value, so that it is used."""
    elem = element(value.type)
    if elem == bool_:
        lanes = value.type.lanes if isinstance(value.type, Vector) else 1
        ones = b.splat(b.const(1.0, f32), lanes)
        value, elem = b.select(value, ones, b.splat(b.const(0.0, f32), lanes)), f32
    name = f"out_{elem}"
    out = b._values[name] if name in b._values else b.buffer(name, elem, "write")
    b.store(out, b.thread_id() * 16, value)


@needs_validator
@pytest.mark.parametrize("lanes", LANES)
def test_arithmetic(lanes: int, tmp_path: Path) -> None:
    artifacts = []
    every = {"neg", "abs", "add", "sub", "mul", "div", "min", "max"}
    bits = {"and", "or", "xor", "not"}
    compare = {"lt", "le", "gt", "ge", "eq", "ne"}
    floats = {"exp2", "log2", "sqrt", "rsqrt", "rcp", "floor", "sin", "cos", "fma"}
    unary = {"neg", "abs", "not"} | floats - {"fma"}
    for elem in (*INTS, *FLOATS, bool_):
        names = bits | {"eq", "ne"} if elem == bool_ else every | compare
        names = names | (floats if elem.is_float else set())
        names = names | (bits | {"rem", "shl", "shr"} if elem.is_int else set())
        names = names | ({"mulhi"} if elem.name == "u32" else set())
        names -= {"exp2", "log2", "sin", "cos"} if elem == f64 else set()

        def body(b: Builder, elem: Scalar = elem, names: set[str] = names) -> None:
            x, y, z = (number(b, elem, lanes, i) for i in range(3))
            for name in sorted(names):
                if name == "fma":
                    keep(b, b.fma(x, y, z))
                else:
                    keep(b, b.unary(name, x) if name in unary else b.binary(name, x, y))
            shape = elem if lanes == 1 else Vector(elem, lanes)
            for condition in (number(b, bool_, 1), number(b, bool_, lanes)):
                keep(b, b.emit("select", (condition, x, y), shape))
            variable = b.var(x, "kept")
            variable.value = y
            keep(b, variable.value)
            if lanes > 1:
                keep(b, b.vector([b.extract(x, lane) for lane in range(lanes)]))
                keep(b, b.splat(b.extract(y, lanes - 1), lanes))

        artifacts.append(render(kernel_of(f"arithmetic_{elem}", body), TARGET))
    validate(artifacts, tmp_path)


@needs_validator
def test_casts(tmp_path: Path) -> None:
    artifacts = []
    for source in (bool_, *INTS, *FLOATS):

        def body(b: Builder, source: Scalar = source) -> None:
            for lanes in LANES:
                x = number(b, source, lanes)
                for target in (*INTS, *FLOATS):
                    keep(b, b.cast(x, target))
                    if source != bool_ and target.bits == source.bits:
                        keep(b, b.bitcast(x, target if lanes == 1 else Vector(target, lanes)))
            for target in (*INTS, *FLOATS) if source != bool_ else ():
                keep(b, b.bitcast(number(b, source, 128 // source.bits), Vector(target, 128 // target.bits)))

        kernel = kernel_of(f"cast_{source}", body)
        artifacts += [render(kernel, target) for target in (TARGET, EXTENDED, *LESSER)]
    validate(artifacts, tmp_path)


@needs_validator
def test_narrow_integers_in_buffers_need_no_arithmetic(tmp_path: Path) -> None:
    def body(b: Builder) -> None:
        for elem in (i8, u8, i16, u16):
            for lanes in (1, 2, 4):
                x = b.cast(number(b, elem, lanes), f32)
                keep(b, b.cast(x, elem))

    artifact = render(kernel_of("narrow", body), LESSER[0])
    assert artifact.extensions == ("storageBuffer16BitAccess", "storageBuffer8BitAccess")
    validate([artifact], tmp_path)


@needs_validator
def test_memory(tmp_path: Path) -> None:
    artifacts = []
    for elem in (f16, f32, f64, u8, u16, i32, i64):
        for space in ("global", "shared", "private"):

            def body(b: Builder, elem: Scalar = elem, space: str = space) -> None:
                if space == "global":
                    memory = b.buffer("memory", elem, "readwrite")
                else:
                    memory = b.shared("tile", elem, 4096) if space == "shared" else b.private("own", elem, 4096)
                wide = b.cast(b.thread_id(), i64)
                for index in (b.thread_id() * 16, b.const(32, i32), wide * 16, b.group_id() * 16 + 48):
                    for lanes in LANES:
                        for align in {1, 2, lanes, 16} if lanes > 1 else {1}:
                            x = b.load(memory, index, lanes, align)
                            b.store(memory, index + lanes, x, min(align, lanes))
                if space != "global":
                    keep(b, b.load(memory, 0))

            kernel = kernel_of(f"memory_{elem}_{space}", body)
            artifacts += [render(kernel, target) for target in (TARGET, EXPLICIT, *LESSER)]
            artifacts += [render(kernel, with_layout(target)) for target in LESSER]
    validate(artifacts, tmp_path)


@needs_validator
def test_control_sync_and_subgroups(tmp_path: Path) -> None:
    def body(b: Builder) -> None:
        n, wide, scale, fine = b.scalar("n", i32), b.scalar("wide", i64), b.scalar("scale", f32), b.scalar("fine", f64)
        out, counters = b.buffer("out", f32, "readwrite"), b.buffer("counters", u32, "readwrite")
        tile, bins = b.shared("tile", f32, 256), b.shared("bins", i32, 64)
        b.comment("not in the binary")
        total = b.var(scale, "total")
        for unroll in (0, 1, -1, 4):
            with b.loop(0, n, 2, unroll=unroll) as i, b.if_(b.binary("lt", i, b.thread_id())):
                total.value = total.value + b.cast(i, f32)
                with b.loop(b.const(0, u32), 4) as j:
                    inner = b.var(b.cast(j, f32))
                    total.value = total.value * inner.value
        with b.if_(wide > 5):
            b.store(tile, b.thread_id(), total.value)
        with b.else_():
            b.store(tile, b.thread_id(), b.cast(fine, f32))
        for kind in ("add", "min", "max", "and", "or", "xor", "exchange"):
            b.atomic(kind, counters, b.thread_id(), 1)
            b.atomic(kind, bins, b.thread_id(), 1)
        b.barrier()
        b.barrier(global_memory=True)
        b.subgroup_barrier()
        x = b.load(tile, b.thread_id() ^ 1)
        for value in (x, b.bitcast(x, i32), b.bitcast(x, u32)):
            results = [b.shuffle(value, b.lane_id() ^ 1), b.shuffle_xor(value, 3)]
            results += [b.subgroup_reduce(kind, value) for kind in ("add", "min", "max")]
            for result in results:
                b.store(out, b.subgroup_id() + b.group_id(2), b.cast(result, f32))
        both = b.subgroup_any(x > 1.0) & b.subgroup_all(x < 2.0)
        b.store(out, b.group_count(1) + b.group_count(0), b.select(both, x, 0.0))

    def atomic_float(b: Builder) -> None:
        b.atomic("add", b.buffer("sums", f32, "readwrite"), b.thread_id(), 1.0)

    artifact = render(kernel_of("control", body), EXTENDED)
    assert artifact.uses_subgroups and artifact.shared_bytes == 256 * 4 + 64 * 4
    add = render(kernel_of("atomic_float", atomic_float), EXTENDED)
    assert "shaderBufferFloat32AtomicAdd" in add.extensions
    views = render(kernel_of("control", body), EXPLICIT)
    assert views.shared_bytes == artifact.shared_bytes
    # Atomics, too, go through the scalar view; no vectors are accessed.
    assert blocks_of(views) == {"shared": {"tile": (0, 4), "bins": (1024, 4)}}
    validate([artifact, add, views], tmp_path)
    with pytest.raises(KernelError, match=r"atomic add on global<f32>.*\n.*at .*test_render_spirv.py"):
        render(kernel_of("atomic_float", atomic_float), TARGET)

    def shared_float(b: Builder) -> None:
        b.atomic("add", b.shared("sums", f32, 64), b.thread_id(), 1.0)

    shared = dataclasses.replace(EXTENDED, extensions=(*EXTENDED.extensions, "shaderSharedFloat32AtomicAdd"))
    assert Op.AtomicFAddEXT in opcodes(render(kernel_of("shared_float", shared_float), shared))
    with pytest.raises(KernelError, match="atomic add on shared<f32"):
        render(kernel_of("shared_float", shared_float), EXTENDED)


def _fragments(b: Builder) -> None:
    source, out = b.buffer("source", f16), b.buffer("out", f32, "write")
    tile = b.shared("tile", f16, 16 * 24)
    left, right = Fragment(f16, 16, 16, "a"), Fragment(f16, 16, 16, "b")
    b.store(tile, b.thread_id() * 4, b.load(source, b.thread_id() * 4, 4))
    b.barrier()
    total = b.var(b.fragment_fill(ACCUMULATOR, 0.0), "total")
    with b.loop(0, 4) as i:
        a = b.fragment_load(left, tile, 0, 24)
        c = b.fragment_load(right, source, i * 16, 64, layout="column")
        total.value = b.fragment_mma(a, c, total.value)
    kept = total.value
    kept = b.fragment_set(kept, 1, b.fragment_get(kept, 0) * 2.0)
    b.fragment_store(out, b.group_id() * 256, 16, b.cast(b.cast(kept, f16), f32))


def test_fragments() -> None:
    """The structure only: this machine's validator is older than SPV_KHR_cooperative_matrix."""
    artifact = render(kernel_of("fragments", _fragments), TARGET)
    found = opcodes(artifact)
    assert found.count(Op.CooperativeMatrixLoadKHR) == 2 and found.count(Op.CooperativeMatrixStoreKHR) == 1
    assert found.count(Op.CooperativeMatrixMulAddKHR) == 1 and Op.CompositeInsert in found
    assert {"cooperativeMatrix", "vulkanMemoryModel"} <= set(artifact.extensions)
    # The tile is an array of f16vec4, which the loads of matrices step through: 24 elements are 6 of them.
    constants = {w[1]: w[2] for op, w in instructions(artifact.code) if op == Op.Constant and len(w) == 3}
    strides = [constants[w[4]] for op, w in instructions(artifact.code) if op == Op.CooperativeMatrixLoadKHR]
    assert strides == [6, 64]
    # In views of shared memory matrices have the widest that their stride allows: 24 elements are 3 of eight.
    views = render(kernel_of("fragments", _fragments), EXPLICIT)
    constants = {w[1]: w[2] for op, w in instructions(views.code) if op == Op.Constant and len(w) == 3}
    strides = [constants[w[4]] for op, w in instructions(views.code) if op == Op.CooperativeMatrixLoadKHR]
    assert strides == [3, 64] and blocks_of(views) == {"shared_x4": {"tile": (0, 8)}, "shared_x8": {"tile": (0, 16)}}
    with pytest.raises(KernelError, match="cooperative matrices"):
        render(kernel_of("fragments", _fragments), dataclasses.replace(TARGET, matrix_units=()))


def test_bf16_fragments() -> None:
    """bf16 is a type of fragments alone. Memory and registers hold u16, which is not widened under a matrix."""

    def body(b: Builder) -> None:
        source, tile = b.buffer("source", bf16, "readwrite"), b.shared("tile", bf16, 1024)
        b.store(tile, b.thread_id() * 8, b.load(source, b.thread_id() * 8, 8))
        b.barrier()
        a = b.fragment_load(Fragment(bf16, 16, 16, "a"), tile, 0, 32)
        a = b.fragment_set(a, 0, b.fragment_get(a, 1))
        c = b.fragment_mma(a, b.fragment_fill(Fragment(bf16, 16, 16, "b"), 1.0), b.fragment_fill(ACCUMULATOR, 0.0))
        b.fragment_store(source, 0, 16, b.cast(c, bf16))

    artifact = render(kernel_of("bf16_fragments", body), EXTENDED)
    assert {"shaderBFloat16Type", "shaderBFloat16CooperativeMatrix", "shaderInt16"} <= set(artifact.extensions)
    floats = [w[1:] for op, w in instructions(artifact.code) if op == Op.TypeFloat]
    assert sorted(floats) == [(16, 0), (32,)]
    assert artifact.shared_bytes == 2 * 1024
    unlisted = dataclasses.replace(EXTENDED, extensions=("VK_KHR_shader_bfloat16",))
    assert render(kernel_of("bf16_fragments", body), unlisted).shared_bytes == 2 * 1024
    with pytest.raises(KernelError, match="VK_KHR_shader_bfloat16"):
        render(kernel_of("bf16_fragments", body), TARGET)


@pytest.mark.parametrize("small", [False, True])
def test_bf16_is_rounded_before_it_is_converted(small: bool) -> None:
    """OpFConvert may truncate, and compilers take t - (t - x) for x unless told otherwise. What is not known to be
    small is rounded so where a kernel says that this will do."""

    def body(b: Builder) -> None:
        value = number(b, f32, 8)
        keep(b, b.cast(b.small(value) if small else value, bf16))

    artifact = render(kernel_of("narrow", body, "exact" if small else "quick"), EXTENDED)
    assert "shaderBFloat16Type" in artifact.extensions
    assert "shaderBFloat16CooperativeMatrix" not in artifact.extensions
    made = {w[1]: (op, w[2:]) for op, w in instructions(artifact.code) if len(w) > 2}
    exact = {w[0] for op, w in instructions(artifact.code) if op == Op.Decorate and w[1] == Decoration.NoContraction}
    converted = [w[2] for op, w in instructions(artifact.code) if op == Op.FConvert]
    assert len(converted) == 2  # vectors of four
    for found in converted:
        if small:
            fused, (_, function, x, _, scaled) = made[found]
            assert (fused, function) == (Op.ExtInst, Glsl.Fma)
            parts = {found, scaled}
        else:
            chosen, (_, upper, x) = made[found]
            outer, (scaled, rest) = made[upper]
            assert (chosen, outer, made[rest]) == (Op.Select, Op.FSub, (Op.FSub, (scaled, x)))
            parts = {upper, rest, scaled}
        assert made[scaled][0] == Op.FMul and made[scaled][1][0] == x
        assert parts <= exact
    assert Op.FConvert not in opcodes(render(kernel_of("narrow", body), TARGET))


def test_nvidia_leaves_no_way_to_f16_and_back_out() -> None:
    """The conversion would be a pair that its compiler drops, so that the numbers kept all their bits."""

    def body(b: Builder) -> None:
        half = b.cast(number(b, f32, 4), f16)
        keep(b, half)
        keep(b, b.cast(half, f32))
        keep(b, b.cast(number(b, f32, 4, at=1), f16))  # to a buffer alone

    nvidia = dataclasses.replace(EXTENDED, vendor="nvidia")
    pieces = {(EXTENDED, "exact"): 3, (nvidia, "quick"): 3, (nvidia, "exact"): 2}
    for (target, arithmetic), count in pieces.items():
        assert opcodes(render(kernel_of("halves", body, arithmetic), target)).count(Op.FConvert) == count  # type: ignore[arg-type]


def test_bf16_is_rounded_in_integers_where_nothing_else_is_said() -> None:
    """The quick way is not right from 2**110 on."""
    found = opcodes(render(kernel_of("narrow", lambda b: keep(b, b.cast(number(b, f32, 8), bf16))), EXTENDED))
    assert not {Op.FConvert, Op.FMul} & set(found) and Op.ShiftRightLogical in found


@pytest.mark.parametrize("elem", [i8, i16, i32, i64], ids=str)
def test_the_remainder_of_signed_numbers_is_made_of_their_quotient(elem: Scalar) -> None:
    """Vulkan defines OpSRem for numbers that are not negative alone, which a kernel has to say."""

    def body(b: Builder) -> None:
        keep(b, number(b, elem, 4) % number(b, elem, 4, at=1))

    found = opcodes(render(kernel_of("rest", body), EXTENDED))
    assert Op.SRem not in found and {Op.SDiv, Op.IMul, Op.ISub} <= set(found)
    found = opcodes(render(kernel_of("rest", body, "quick"), EXTENDED))
    assert Op.SRem in found and Op.SDiv not in found


def test_bf16_is_rounded_by_a_fused_operation_where_a_kernel_says_so() -> None:
    code = render(kernel_of("narrow", lambda b: keep(b, b.cast(number(b, f32, 8), bf16)), "fused"), EXTENDED).code
    made = {w[1]: (op, w[2:]) for op, w in instructions(code) if len(w) > 2}
    exact = {w[0] for op, w in instructions(code) if op == Op.Decorate and w[1] == Decoration.NoContraction}
    converted = [w[2] for op, w in instructions(code) if op == Op.FConvert]
    assert len(converted) == 2
    for selected in converted:
        chosen, (_, upper, x) = made[selected]
        outer, (_, number_of_it, *operands) = made[upper]
        assert (chosen, outer, number_of_it, operands[0]) == (Op.Select, Op.ExtInst, Glsl.Fma, x)
        assert made[operands[2]][0] == Op.FMul and made[operands[2]][1][0] == x
        assert {upper, operands[2]} <= exact


def test_what_the_fused_rounding_computes_is_nearest_even() -> None:
    """For every mantissa: -65535 x is rounded once, and 65536 x taken from it without an error."""
    x = np.arange(1 << 23, 1 << 24, dtype=np.uint32).astype(np.float32) * np.float32(2.0**-23)
    scaled = (x.astype(np.float64) * -65535.0).astype(np.float32)
    upper = (x.astype(np.float64) * 65536.0 + scaled).astype(np.float32)
    np.testing.assert_array_equal(upper, x.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_both_words_of_a_product_are_one_multiplication(tmp_path: Path) -> None:
    def body(b: Builder) -> None:
        x = number(b, u32, 2)
        keep(b, b.mulhi(x, 0xD2511F53) ^ (x * 0xD2511F53))
        with b.if_(b.thread_id() < 7):  # where that of the block outside is not looked for
            keep(b, x * 0xD2511F53)

    wide = render(kernel_of("products", body), TARGET)
    words = render(kernel_of("products", body), dataclasses.replace(TARGET, int64=False))
    assert "shaderInt64" in wide.extensions
    assert [opcodes(x).count(Op.UMulExtended) for x in (wide, words)] == [0, 1]
    # One for both words beside that in the branch, where the other has one for the low words.
    assert opcodes(wide).count(Op.IMul) == opcodes(words).count(Op.IMul)
    validate([wide, words], tmp_path)


def test_refusals() -> None:
    def intrinsic(b: Builder) -> None:
        b.intrinsic("ptx", "nanosleep.u32 1;", (), None)

    def shuffle(b: Builder) -> None:
        b.store(b.buffer("out", f32, "write"), 0, b.shuffle_xor(b.const(1.0, f32), 1))

    def double(b: Builder) -> None:
        b.store(b.buffer("out", f64, "write"), 0, 1.0)

    def pairs(b: Builder) -> None:
        pair = b.const(0, u32)
        b.store(b.buffer("out", f32, "write"), 0, b.dot_pairs(pair, pair, b.const(1.0, f32)))

    def bytes_(b: Builder) -> None:
        halves = b.e4m3_halves(b.const(0, u32))
        b.store(b.buffer("out", f32, "write"), 0, b.cast(b.extract(halves, 0), f32))

    with pytest.raises(KernelError, match=r"\[spirv\] expected no products of packed pairs"):
        render(kernel_of("pairs", pairs), TARGET)
    with pytest.raises(KernelError, match=r"\[spirv\] expected no conversion of e4m3"):
        render(kernel_of("bytes", bytes_), TARGET)
    with pytest.raises(KernelError, match=r"\[spirv\] expected a target with f64"):
        render(kernel_of("double", double), dataclasses.replace(TARGET, f64=False))
    with pytest.raises(KernelError, match=r"\[spirv\] expected portable operations, got an intrinsic of ptx"):
        render(kernel_of("intrinsic", intrinsic), TARGET)
    with pytest.raises(KernelError, match=r"\[spirv\] expected a target with subgroup operations"):
        render(kernel_of("shuffle", shuffle), dataclasses.replace(TARGET, subgroup_size=0))


def test_index_arithmetic_is_divided_where_it_is_made() -> None:
    """No shift hides the constant part of a vector's address."""

    def body(b: Builder) -> None:
        tile, out = b.shared("tile", f32, 4096), b.buffer("out", f32, "write")
        base = b.thread_id() * 128
        b.store(tile, b.thread_id() * 4 + 3, 1.0)
        b.barrier()
        with b.loop(0, 8) as i:
            x = b.load(tile, base + i * 16 + 64, 4) + b.load(tile, base + i * 16 + 68, 4)
            b.store(out, b.cast(base, i64) + 4, x)

    artifact = render(kernel_of("divided", body), TARGET)
    assert Op.ShiftRightArithmetic not in opcodes(artifact) and Op.BitwiseAnd not in opcodes(artifact)


def _transposed(b: Builder) -> None:
    """Stores of scalars and loads of vectors, as of K in the flash kernel."""
    source, out, n = b.buffer("source", f32), b.buffer("out", f32, "write"), b.scalar("n", i32)
    flags, tile = b.shared("flags", i32, 3), b.shared("tile", f32, 16 * 20)
    halves = b.shared("halves", f16, 1024)
    b.atomic("or", flags, n, 1)
    for k, x in enumerate(b.unpack(b.load(source, b.thread_id() * 4, 4))):
        b.store(tile, n * 20 + k * 20 + b.thread_id(), x)
    b.store(halves, b.thread_id() * 8, b.splat(b.const(0.5, f16), 8))
    b.barrier()
    b.store(out, b.thread_id() * 4, b.load(tile, n * 20 + b.thread_id() * 4, 4))
    b.store(out, b.thread_id() * 4, b.cast(b.load(halves, n * 4, 4), f32))


@needs_validator
def test_views_of_shared_memory(tmp_path: Path) -> None:
    """Each width is a block of its own, with the arrays that are accessed so; scalars need no arithmetic."""
    kernel = kernel_of("transposed", _transposed)
    artifact = render(kernel, EXPLICIT)
    assert blocks_of(artifact) == {
        "shared": {"flags": (0, 4), "tile": (16, 4)},
        "shared_x4": {"tile": (16, 16), "halves": (1296, 8)},
        "shared_x8": {"halves": (1296, 16)},
    }
    assert artifact.shared_bytes == 1296 + 2048
    assert not {Op.ShiftRightArithmetic, Op.BitwiseAnd} & set(opcodes(artifact))
    needed = {"workgroupMemoryExplicitLayout", "workgroupMemoryExplicitLayout16BitAccess"}
    assert {name for name in artifact.extensions if name.startswith("workgroup")} == needed
    assert artifact.code.count(b"SPV_KHR_workgroup_memory_explicit_layout") == 1
    validate([artifact], tmp_path)


def test_views_of_shared_memory_are_all_or_none() -> None:
    """Halves that blocks must not hold keep all arrays out of them; accessed as words alone, they do not."""

    def words(b: Builder) -> None:
        halves = b.shared("halves", f16, 1024)
        b.store(halves, b.thread_id() * 8, number(b, f16, 8))
        b.barrier()
        keep(b, b.load(halves, b.thread_id() * 8, 8))

    def none(b: Builder) -> None:
        keep(b, number(b, f32, 4))

    layout = Capability.WorkgroupMemoryExplicitLayoutKHR
    for kernel, target, there in (
        (kernel_of("transposed", _transposed), with_layout(EXTENDED), False),
        (kernel_of("words", words), with_layout(EXTENDED), True),
        (kernel_of("words", words), EXTENDED, False),
        (kernel_of("none", none), EXPLICIT, False),
    ):
        found = list(instructions(render(kernel, target).code))
        assert ((Op.Capability, (layout,)) in found) is there
        assert any(op == Op.Decorate and w[1] == Decoration.Aliased for op, w in found) is there


def test_wide_half_loads_are_one_access() -> None:
    def body(b: Builder) -> None:
        keep(b, number(b, f16, 8))

    code = opcodes(render(kernel_of("wide", body), TARGET))
    # The built-in thread index, and eight halves.
    assert code.count(Op.Load) == 2 and code.count(Op.Store) == 1


def test_deterministic() -> None:
    def body(b: Builder) -> None:
        out, tile = b.buffer("out", f32, "write"), b.shared("tile", f32, 4096)
        x = b.var(b.const(1.0, f32), "x")
        for i in range(100):
            y = b.load(tile, b.thread_id() * 4 + 4 * i, 4)
            x.value = b.fma(b.extract(y, i % 4), b.const(0.5, f32), x.value)
        b.store(out, b.thread_id(), x.value)

    first, second = (render(kernel_of("large", body), TARGET) for _ in range(2))
    assert first.code == second.code


def test_names_reach_the_disassembly() -> None:
    def body(b: Builder) -> None:
        n, out = b.scalar("row_count", i32), b.buffer("result", f32, "write")
        b.store(out, n, b.var(b.const(1.0, f32), "running_max").value)

    code = render(kernel_of("named", body), TARGET).code
    for name in (b"row_count", b"result", b"running_max", b"named"):
        assert name in code


def test_constants() -> None:
    assert constant_words(i16, -2) == (0xFFFFFFFE,)
    assert constant_words(u16, -2) == (0xFFFE,)
    assert constant_words(i64, -1) == (0xFFFFFFFF, 0xFFFFFFFF)
    assert constant_words(f16, 1.0) == (0x3C00,)
    assert constant_words(f16, 1e6) == (0x7C00,)
    assert constant_words(f32, float("-inf")) == (0xFF800000,)
    assert constant_words(f32, -1e300) == (0xFF800000,)
    assert set(SCALARS) >= {"bf16", "f16"}


def test_generated_table_is_current() -> None:
    if not Path("/usr/include/spirv/unified1/spirv.core.grammar.json").exists():
        pytest.skip("Khronos' grammar is not installed (Debian: spirv-headers)")
    subprocess.run([sys.executable, str(ROOT / "tools" / "generate_spirv.py"), "--check"], check=True)
