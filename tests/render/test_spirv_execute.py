"""SPIR-V on a Vulkan device, against the interpreter: special cases of this renderer.

``test_render_execute.py`` has the cases of all backends; here are views of buffers, arrays of vectors in shared memory,
divided indices, rounding to f16, float controls and wide vectors.

Kernels with shared arrays run both with views of them (VK_KHR_workgroup_memory_explicit_layout) and without. Devices
that lack the extension are given the views in a buffer instead: see `shared_in_a_buffer`.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aule.artifact import Artifact, Param
from aule.errors import BackendUnavailableError
from aule.ir.builder import Builder
from aule.ir.interpret import interpret
from aule.ir.kernel import KernelIR
from aule.ir.types import Fragment, Scalar, Vector, bf16, f16, f32, i32, i64, u8, u16, u32
from aule.ops.attention.build import build_forward
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.problem import AttentionProblem
from aule.render._spirv_ops import Capability, Decoration, MemoryModel, MemorySemantics, Op, StorageClass
from aule.render.spirv import render
from aule.runtime import vulkan
from aule.runtime.base import Device
from aule.target import Target
from aule.view import TensorView, contiguous_strides

pytestmark = pytest.mark.device

LAYOUT = "VK_KHR_workgroup_memory_explicit_layout"
LAYOUTS = (LAYOUT, "workgroupMemoryExplicitLayout8BitAccess", "workgroupMemoryExplicitLayout16BitAccess")
RTE = "shaderRoundingModeRTEFloat16"
NUMPY = {"f16": np.float16, "f32": np.float32, "i32": np.int32, "u32": np.uint32, "u16": np.uint16, "u8": np.uint8}


@pytest.fixture(scope="module")
def device() -> Device:
    try:
        return vulkan.devices()[0]
    except BackendUnavailableError as error:
        pytest.skip(str(error))


def trace(name: str, body: Callable[[Builder], None], workgroup: int = 64) -> KernelIR:
    b = Builder(name, workgroup)
    body(b)
    return b.finish()


def execute(
    device: Device, kernel: KernelIR, args: list[Any], grid: int = 1, target: Target | None = None
) -> list[Any]:
    """The buffers after a launch on the device."""
    return launch(device, render(kernel, target or device.target), args, grid)


def launch(device: Device, artifact: Artifact, args: list[Any], grid: int = 1) -> list[Any]:
    """The buffers after a launch of rendered code."""
    program = device.load(artifact)
    allocations = [device.alloc(a.nbytes) if isinstance(a, np.ndarray) else a for a in args]
    for allocation, array in zip(allocations, args, strict=True):
        if isinstance(array, np.ndarray):
            device.upload(allocation, array)
    device.launch(program, (grid, 1, 1), allocations)
    results = []
    for allocation, array in zip(allocations, args, strict=True):
        if isinstance(array, np.ndarray):
            results.append(np.empty_like(array))
            device.download(allocation, results[-1])
            device.free(allocation)
    return results


def check(
    device: Device, kernel: KernelIR, args: list[Any], grid: int = 1, target: Target | None = None, ulp: int = 0
) -> None:
    """The device and the interpreter agree: exactly, or within ``ulp`` units in the last place."""
    expected = [np.copy(a) if isinstance(a, np.ndarray) else a for a in args]
    interpret(kernel, (grid, 1, 1), expected, subgroup_size=device.target.subgroup_size or None)
    arrays = [e for e in expected if isinstance(e, np.ndarray)]
    for artifact, more in layouts(kernel, target or device.target, grid):
        got = launch(device, artifact, [*args, *more], grid)
        for result, want in zip(got[: len(arrays)], arrays, strict=True):
            if ulp:
                np.testing.assert_array_max_ulp(result, want, ulp)
            else:
                np.testing.assert_array_equal(result, want)


def layouts(kernel: KernelIR, target: Target, grid: int = 1) -> Iterator[tuple[Artifact, list[Any]]]:
    """The kernel without and with views of its shared memory, and the arguments to add to its own."""
    without = dataclasses.replace(target, extensions=tuple(e for e in target.extensions if e not in LAYOUTS))
    yield render(kernel, without), []
    if not kernel.shared:
        return
    if LAYOUT in target.extensions:
        yield render(kernel, target), []
    elif grid == 1:
        artifact = render(kernel, dataclasses.replace(without, extensions=(*without.extensions, *LAYOUTS)))
        yield shared_in_a_buffer(artifact), [np.full(artifact.shared_bytes, 0xFF, np.uint8)]


def shared_in_a_buffer(artifact: Artifact) -> Artifact:
    """The kernel with its blocks of shared memory put into a buffer, its last parameter, where it can be launched with
    one workgroup: they have the same layout there, and variables of one binding lie on top of one another, too."""
    words = struct.unpack(f"<{len(artifact.code) // 4}I", artifact.code)
    found, at = [], 5
    while at < len(words):
        found.append((words[at] & 0xFFFF, words[at + 1 : at + (words[at] >> 16)]))
        at += words[at] >> 16
    binding = sum(p.kind == "buffer" for p in artifact.params)
    blocks = [w[1] for op, w in found if op == Op.Variable and w[2] == StorageClass.Workgroup]
    constants = {w[1]: w for op, w in found if op == Op.Constant}
    vulkan_model = any(op == Op.MemoryModel and w[1] == MemoryModel.Vulkan for op, w in found)
    capabilities = {
        Capability.WorkgroupMemoryExplicitLayoutKHR: Capability.Shader,
        Capability.WorkgroupMemoryExplicitLayout8BitAccessKHR: Capability.StorageBuffer8BitAccess,
        Capability.WorkgroupMemoryExplicitLayout16BitAccessKHR: Capability.StorageBuffer16BitAccess,
    }
    bound, code = words[3], list(words[:5])

    def emit(opcode: int, *operands: int) -> None:
        code.extend(((len(operands) + 1) << 16 | opcode, *operands))

    barriers: dict[int, int] = {}
    for opcode, w in found:
        if opcode == Op.Capability:
            w = (capabilities.get(w[0], w[0]),)
        elif opcode == Op.Extension and b"workgroup_memory" in struct.pack(f"<{len(w)}I", *w):
            continue
        elif opcode == Op.Decorate and w[1] == Decoration.Binding and w[2] == binding:
            w = (w[0], w[1], binding + 1)  # the block of scalars comes after all buffers
        elif opcode == Op.Decorate and w[1] == Decoration.Aliased and w[0] in blocks:
            emit(opcode, w[0], Decoration.DescriptorSet, 0)
            emit(opcode, w[0], Decoration.Binding, binding)
            if not vulkan_model:
                emit(opcode, w[0], Decoration.Coherent)
        elif opcode == Op.TypePointer and w[1] == StorageClass.Workgroup:
            w = (w[0], StorageClass.StorageBuffer, w[2])
        elif opcode == Op.Variable and w[2] == StorageClass.Workgroup:
            w = (w[0], w[1], StorageClass.StorageBuffer)
        elif opcode == Op.Function:
            for semantics in {w[2] for op, w in found if op == Op.ControlBarrier}:
                type_id, _, value = constants[semantics]
                barriers[semantics] = bound
                emit(Op.Constant, type_id, bound, value | MemorySemantics.UniformMemory)
                bound += 1
        elif opcode == Op.ControlBarrier:
            w = (w[0], w[1], barriers[w[2]])
        emit(opcode, *w)
    code[3] = bound
    params = (*artifact.params, Param("shared", "buffer", "u8", "readwrite"))
    return dataclasses.replace(artifact, code=struct.pack(f"<{len(code)}I", *code), params=params, shared_bytes=0)


def plain(target: Target) -> Target:
    """The same device, as if its driver promised nothing about floats."""
    names = {RTE, "VK_KHR_shader_float_controls"}
    return dataclasses.replace(target, extensions=tuple(e for e in target.extensions if e not in names))


def test_elementwise(device: Device) -> None:
    def body(b: Builder) -> None:
        x, y, out, n = b.buffer("x", f32), b.buffer("y", f32), b.buffer("out", f32, "write"), b.scalar("n", i32)
        i = b.group_id() * 64 + b.thread_id()
        with b.if_(i < n):
            p, q = b.load(x, i), b.load(y, i)
            values = [b.max(p, q), b.min(p, q), b.abs(p - q), b.select(b.ne(p, q), p, 0.0), b.unary("floor", p), -q]
            for k, value in enumerate(values):
                b.store(out, i * 6 + k, value)

    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=1000).astype(np.float32) for _ in range(2))
    y[::5] = x[::5]
    x[3], y[4], x[7] = -np.inf, np.inf, -0.0
    check(device, trace("elementwise", body), [x, y, np.zeros(6000, np.float32), 1000], grid=16)


def test_approximate_functions(device: Device) -> None:
    def body(b: Builder) -> None:
        x, out = b.buffer("x", f32), b.buffer("out", f32, "write")
        i = b.thread_id()
        p = b.load(x, i * 4, 4)
        for k, name in enumerate(("exp2", "log2", "sqrt", "rsqrt", "rcp")):
            b.store(out, i * 4 + k * 256, b.unary(name, p))

    x = np.linspace(0.1, 9.0, 256, dtype=np.float32)
    (_, got) = execute(device, trace("approximate", body), [x, np.zeros(1280, np.float32)])
    expected = np.concatenate([np.exp2(x), np.log2(x), np.sqrt(x), 1 / np.sqrt(x), 1 / x])
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)


def test_infinity(device: Device) -> None:
    """Masked scores: exp2(-inf) is 0, max(-inf, x) is x, and a row of -inf stays that."""

    def body(b: Builder) -> None:
        x, out = b.buffer("x", f32), b.buffer("out", f32, "write")
        i = b.thread_id()
        score = b.select(b.eq(i % 2, 0), b.load(x, i), float("-inf"))
        b.store(out, i * 3, b.exp2(score))
        b.store(out, i * 3 + 1, b.max(score, -3.0))
        b.store(out, i * 3 + 2, b.select(b.eq(score, float("-inf")), b.const(7.0, f32), 0.0))

    args = [np.ones(64, np.float32), np.zeros(192, np.float32)]
    for target in (device.target, plain(device.target)):
        check(device, trace("infinity", body), args, target=target, ulp=4)


def test_nested_loops_and_divergent_branches(device: Device) -> None:
    def body(b: Builder) -> None:
        out, n = b.buffer("out", i32, "write"), b.scalar("n", i64)
        t = b.thread_id()
        total = b.var(b.const(0, i32), "total")
        with b.loop(0, t % 7, unroll=1) as i:
            inner = b.var(i * 2, "inner")
            with b.loop(b.const(1, i64), n, 3) as j:
                with b.if_(b.eq((b.cast(j, i32) + t) % 3, 0)):
                    inner.value = inner.value + b.cast(j, i32)
                with b.else_(), b.if_(t > 20):
                    inner.value = inner.value - i
            total.value = total.value + inner.value
        with b.loop(0, 4, unroll=-1) as k:
            total.value = total.value * 3 + k
        with b.loop(b.const(4, u32), 3) as k:
            total.value = b.cast(k, i32)
        b.store(out, t, total.value)

    check(device, trace("control", body), [np.zeros(64, np.int32), 20])


def test_transposition_with_scalar_stores_and_vector_loads(device: Device) -> None:
    """The pattern of the flash kernel: K is stored element by element, transposed, and read four at a time."""

    def body(b: Builder) -> None:
        source, out = b.buffer("source", f32), b.buffer("out", f32, "write")
        tile = b.shared("tile", f32, 16 * 20)
        t = b.thread_id()
        row, quad = t // 4, t % 4
        for k, x in enumerate(b.unpack(b.load(source, row * 16 + quad * 4, 4))):
            b.store(tile, (quad * 4 + k) * 20 + row, x)
        b.barrier()
        b.store(out, t * 4, b.load(tile, row * 20 + quad * 4, 4))

    source = np.arange(256, dtype=np.float32)
    kernel = trace("transpose", body)
    check(device, kernel, [source, np.zeros(256, np.float32)])
    _, got = execute(device, kernel, [source, np.zeros(256, np.float32)])
    np.testing.assert_array_equal(got.reshape(16, 16), source.reshape(16, 16).T)


@pytest.mark.parametrize("elem", ["f32", "f16"])
@pytest.mark.parametrize("dim", [40, 64])
def test_flash_kernel(device: Device, dim: int, elem: str) -> None:
    """One workgroup of the kernel for which shared memory is viewed as scalars and as vectors."""
    dims = (1, 1, 32, dim)
    problem = AttentionProblem(1, 1, 1, 32, 32, dim, dim, elem, dim**-0.5, causal=True)
    views = {n: TensorView(elem, dims, contiguous_strides(dims), "d", None) for n in "qkvo"}
    target = dataclasses.replace(device.target, matrix_units=())  # on them it would be another kernel
    (step,) = plan_forward(problem, views, target).steps
    assert step.grid == (1, 1, 1)
    kernel = build_forward(step.config, target)
    rng = np.random.default_rng(9)
    values: dict[str, Any] = {f"{n}_ptr": rng.normal(size=dims).astype(NUMPY[elem]) for n in "qkvo"} | dict(
        step.scalars
    )
    results = []
    for artifact, more in layouts(kernel, target):
        got = launch(device, artifact, [values[p.name] for p in kernel.params] + more)
        results.append(got[[p.name for p in kernel.params].index("o_ptr")])
    assert len(results) == 2
    np.testing.assert_array_equal(results[0], results[1])
    q, k, v = (values[f"{n}_ptr"][0, 0].astype(np.float64) for n in "qkv")
    scores = np.where(np.tril(np.ones((32, 32), bool)), q @ k.T * dim**-0.5, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    expected = weights @ v / weights.sum(1, keepdims=True)
    np.testing.assert_allclose(results[0][0, 0], expected, rtol=0, atol=1e-5 if elem == "f32" else 2e-3)


@pytest.mark.parametrize("elem", [f16, f32, i32], ids=str)
@pytest.mark.parametrize("space", ["shared", "private"])
def test_mixed_widths_in_one_array(device: Device, elem: Scalar, space: str) -> None:
    """Scalars, pairs, quads, octets, aligned or not, through one array."""

    def body(b: Builder) -> None:
        source, out = b.buffer("source", elem), b.buffer("out", elem, "write")
        t = b.thread_id()
        own = 0 if space == "private" else t * 32
        array = b.private("own", elem, 32) if space == "private" else b.shared("all", elem, 64 * 32)
        b.store(array, own + 0, b.load(source, t * 32, 8))
        b.store(array, own + 8, b.load(source, t * 32 + 8, 4))
        b.store(array, own + 12, b.load(source, t * 32 + 12, 2))
        b.store(array, own + 14, b.load(source, t * 32 + 14))
        b.store(array, own + 15, b.load(source, t * 32 + 15))
        b.store(array, own + 16, b.load(source, t * 32 + 16, 16))
        with b.loop(0, 3) as i:
            b.store(out, t * 32 + i, b.load(array, own + i * 5))
            b.store(out, t * 32 + 4 + i * 2, b.load(array, own + i * 4 + 2, 2))
        b.store(out, t * 32 + 12, b.load(array, own + 9, 4, align=1))
        b.store(out, t * 32 + 16, b.load(array, own + 6, 8, align=2))
        b.store(out, t * 32 + 24, b.load(array, own + 24, 8))

    rng = np.random.default_rng(1)
    source = rng.integers(-100, 100, 2048).astype(NUMPY[elem.name])
    check(device, trace("mixed", body), [source, np.zeros_like(source)])


@pytest.mark.parametrize("elem", [f16, u16, u8, f32, u32], ids=str)
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
def test_views_of_a_buffer(device: Device, elem: Scalar, lanes: int) -> None:
    """The same buffer read and written in one width and another."""

    def body(b: Builder) -> None:
        x = b.buffer("x", elem, "readwrite")
        t = b.thread_id()
        b.store(x, t * 48, b.load(x, t * 48 + 16, lanes))
        b.store(x, t * 48 + 16, b.load(x, t * 48 + 1))
        b.store(x, t * 48 + 24, b.load(x, t * 48, lanes, align=1), align=min(lanes, 2))

    rng = np.random.default_rng(2)
    check(device, trace("views", body), [rng.integers(0, 255, 4096).astype(NUMPY[elem.name])])


def test_vectors_wider_than_spirv_has(device: Device) -> None:
    def body(b: Builder) -> None:
        x, out = b.buffer("x", f16), b.buffer("out", f32, "write")
        t = b.thread_id()
        v = b.cast(b.load(x, t * 8, 8), f32)
        w = b.var(v * 2.0, "w")
        w.value = b.select(v > 0.0, w.value, v)
        bits = b.bitcast(b.bitcast(w.value, Vector(u16, 16)), Vector(f32, 8))
        b.store(out, t * 8, b.fma(bits, b.splat(b.extract(v, 5), 8), v))

    x = np.random.default_rng(3).normal(size=512).astype(np.float16)
    check(device, trace("wide", body), [x, np.zeros(512, np.float32)], ulp=1)


def half_cases() -> np.ndarray[Any, np.dtype[np.float32]]:
    """f32 numbers on, beside and halfway between f16 numbers, subnormal and overflowing ones included."""
    halves = np.arange(0, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (halves[:-1] + halves[1:]) / 2
    above, below = (np.nextafter(middle, np.float32(towards)) for towards in (np.inf, 0))
    special = [65519.0, 65520.0, 65536.0, 1e30, np.inf, 1e-9, 2.0**-25, 2.0**-25 * 1.001, 1e-40, 0.0]
    positive = np.concatenate([halves, middle, above, below, special])
    every = np.concatenate([positive, -positive])
    return np.resize(every, -(-every.size // 512) * 512).astype(np.float32)


@pytest.mark.parametrize("promises", [True, False], ids=["declared", "not declared"])
@pytest.mark.parametrize("way", ["stored", "computed"])
@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
def test_rounding_to_half(device: Device, promises: bool, way: str, lanes: int) -> None:
    """To nearest even, by each of the three ways: execution mode, decoration, integers."""
    if not device.target.f16 or not device.target.storage16:
        pytest.skip("f16 is made of integers here")

    def body(b: Builder) -> None:
        x, out, bits = b.buffer("x", f32), b.buffer("out", f16, "write"), b.buffer("bits", u16, "write")
        i = (b.group_id() * 64 + b.thread_id()) * lanes
        half = b.cast(b.load(x, i, lanes), f16)
        if way == "computed":
            b.store(bits, i, b.bitcast(half, u16 if lanes == 1 else Vector(u16, lanes)))
        b.store(out, i, half)

    extensions = set(plain(device.target).extensions) | ({RTE} if promises else set())
    target = dataclasses.replace(device.target, extensions=tuple(sorted(extensions)))
    x = half_cases()
    kernel = trace("rounding", body)
    _, out, bits = execute(
        device, kernel, [x, np.zeros(x.size, np.float16), np.zeros(x.size, np.uint16)], x.size // (64 * lanes), target
    )
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(out.view(np.uint16), expected.view(np.uint16))
    if way == "computed":
        np.testing.assert_array_equal(bits, expected.view(np.uint16))


LESSER: dict[str, dict[str, Any]] = {
    "all": {},
    "no f16": {"f16": False},
    "no 16-bit or 8-bit arithmetic": {"f16": False, "extensions": ()},
    "no 16-bit storage": {"storage16": False, "storage8": False},
    "nothing": {"f16": False, "storage16": False, "storage8": False, "int64": False, "extensions": ()},
}
"""What a device may lack; the renderer has to find another way."""


@pytest.mark.parametrize("lacks", LESSER)
@pytest.mark.parametrize("elem", [f16, bf16], ids=str)
def test_lesser_devices(device: Device, elem: Scalar, lacks: str) -> None:
    """Sixteen-bit floats and 64-bit integers, where some or all of the device's own are taken away."""

    def body(b: Builder) -> None:
        x, out, n = b.buffer("x", elem), b.buffer("out", elem, "write"), b.scalar("n", i64)
        tile = b.shared("tile", elem, 64 * 8)
        t = b.thread_id()
        v = b.load(x, t * 8, 8)
        b.store(tile, t * 8, b.cast(b.cast(v, f32) * 1.25, elem))
        b.barrier()
        other = b.cast(b.cast(t, i64) + n, i32) % 64
        w = b.load(tile, other * 8, 8)
        b.store(out, t * 16, b.select(v > 0.0, w + v, w))
        b.store(out, t * 16 + 8, b.cast(b.cast(b.load(x, t * 8 + 1, 2, align=1), f32) * 3.0, elem))
        b.store(out, t * 16 + 10, b.cast(b.cast(t, f32) / 3.0, elem))
        with b.loop(11, 16) as i:
            b.store(out, t * 16 + i, -b.load(tile, t * 8 + i - 10))

    x = np.random.default_rng(6).normal(size=512).astype(np.float32)
    bits = x.astype(np.float16) if elem == f16 else (x.view(np.uint32) >> 16).astype(np.uint16)
    target = dataclasses.replace(device.target, **LESSER[lacks])
    args = [bits, np.zeros(1024, bits.dtype), (1 << 33) + 5]
    check(device, trace("lesser", body), args, target=target)


def test_half_only_in_buffers_needs_no_half_arithmetic(device: Device) -> None:
    def body(b: Builder) -> None:
        x, out = b.buffer("x", f16), b.buffer("out", f16, "write")
        t = b.thread_id()
        b.store(out, t * 8, b.cast(b.cast(b.load(x, t * 8, 8), f32) * 0.3, f16))

    target = dataclasses.replace(plain(device.target), f16=False)
    kernel = trace("storage_only", body)
    assert render(kernel, target).extensions == ("storageBuffer16BitAccess",)
    x = np.random.default_rng(7).normal(size=512).astype(np.float16)
    check(device, kernel, [x, np.zeros_like(x)], target=target)


def test_subgroups(device: Device) -> None:
    if not device.target.subgroup_size:
        pytest.skip("the device has no subgroup operations")

    def body(b: Builder) -> None:
        x, out = b.buffer("x", i32), b.buffer("out", i32, "write")
        t = b.thread_id()
        v = b.load(x, t)
        values = [b.subgroup_reduce(kind, v) for kind in ("add", "min", "max")]
        values += [b.shuffle_xor(v, 1), b.shuffle(v, b.lane_id() ^ 2), b.lane_id(), b.subgroup_id()]
        values += [b.cast(b.subgroup_any(v > 90), i32), b.cast(b.subgroup_all(v > -90), i32)]
        for k, value in enumerate(values):
            b.store(out, t * 9 + k, value)

    x = np.random.default_rng(4).integers(-100, 100, 64).astype(np.int32)
    check(device, trace("subgroups", body), [x, np.zeros(64 * 9, np.int32)])


def test_atomics(device: Device) -> None:
    def body(b: Builder) -> None:
        x, out, sums = b.buffer("x", i32), b.buffer("out", i32, "readwrite"), b.buffer("sums", f32, "readwrite")
        bins = b.shared("bins", i32, 8)
        t = b.thread_id()
        with b.if_(t < 8):
            b.store(bins, t, 0)
        b.barrier()
        v = b.load(x, b.group_id() * 64 + t)
        b.atomic("add", bins, v & 7, 1)
        b.barrier()
        with b.if_(t < 8):
            b.atomic("add", out, t, b.load(bins, t))
            b.atomic("max", out, t + 8, b.load(bins, t))
        if "VK_EXT_shader_atomic_float" in device.target.extensions:
            b.atomic("add", sums, v & 3, 1.0)

    x = np.random.default_rng(5).integers(0, 100, 256).astype(np.int32)
    for grid in (1, 4):
        check(device, trace("atomics", body), [x, np.zeros(16, np.int32), np.zeros(4, np.float32)], grid)


@pytest.mark.parametrize("elem", [f16, bf16], ids=str)
@pytest.mark.parametrize("place", ["global", "shared", "shared as vectors"])
def test_cooperative_matrices(device: Device, elem: Scalar, place: str) -> None:
    """A product of two tiles, rounded to ``elem`` by way of fragments, and a component changed on the way."""
    if f"m16n16k16:{elem}:f32" not in device.target.matrix_units:
        pytest.skip(f"the device does not multiply 16x16x16 {elem}")
    size = device.target.subgroup_size
    # Sums stay exact in f32, and have bits that both f16 and bf16 must round, up as well as down.
    start = 0.6875

    def body(b: Builder) -> None:
        x, y = b.buffer("x", elem), b.buffer("y", elem)
        out, rounded = b.buffer("out", f32, "write"), b.buffer("rounded", elem, "write")
        t = b.thread_id()
        left, right = Fragment(elem, 16, 16, "a"), Fragment(elem, 16, 16, "b")
        source, stride = x, 32
        if place != "global":
            source, stride = b.shared("tile", elem, 16 * 40), 40
            lanes = 4 if place == "shared as vectors" else 1
            with b.loop(t * lanes, 16 * 32, size * lanes) as i:
                b.store(source, i // 32 * 40 + i % 32, b.load(x, i, lanes))
            b.barrier()
        total = b.var(b.fragment_fill(Fragment(f32, 16, 16, "accumulator"), start), "total")
        with b.loop(0, 32, 16) as k:
            first = b.fragment_load(left, source, k, stride)
            second = b.fragment_load(right, y, k, 32, layout="column")
            total.value = b.fragment_mma(first, second, total.value)
        result = total.value
        result = b.fragment_set(result, 0, b.fragment_get(result, 0) + 1.0)
        b.fragment_store(out, 0, 16, result)
        b.fragment_store(rounded, 0, 16, b.cast(result, elem))

    rng = np.random.default_rng(8)
    x, y = rng.integers(-8, 8, (2, 16, 32)).astype(np.float32)

    def pack(v: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return v.astype(np.float16) if elem == f16 else (v.view(np.uint32) >> 16).astype(np.uint16)

    zeros = np.zeros((16, 16), np.float32)
    kernel = trace("product", body, workgroup=size)
    for artifact, more in layouts(kernel, device.target):
        _, _, out, rounded, *_ = launch(device, artifact, [pack(x), pack(y), zeros, pack(zeros), *more])
        changed = out - (x @ y.T + start)
        # One component of each lane was raised by one; which one is the driver's affair.
        assert set(np.unique(changed)) == {0.0, 1.0} and np.count_nonzero(changed) == size
        bits = out.view(np.uint32)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        np.testing.assert_array_equal(rounded, out.astype(np.float16) if elem == f16 else even.astype(np.uint16))


def test_global_memory_barrier(device: Device) -> None:
    def body(b: Builder) -> None:
        x = b.buffer("x", i32, "readwrite")
        t = b.thread_id()
        with b.loop(0, 6) as i:
            value = b.load(x, (t + i) % 64)
            b.barrier(global_memory=True)
            b.store(x, t, value * 3 + i)
            b.barrier(global_memory=True)

    check(device, trace("global_barrier", body), [np.arange(64, dtype=np.int32)])
