"""aule.launch: kernels of a user's own, on every backend, with NumPy arrays and torch tensors."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
from devices import need
from repository import ROOT

import aule
from aule.errors import InvalidArgumentError, InvalidDtypeError, KernelError
from aule.ir import Builder
from aule.ir.types import f32, i32


@aule.kernel(workgroup=128, x="read", out="write", n="int32")
def total(b: Builder, x: Any, out: Any, n: Any) -> None:
    """Partial sums of x, one for each workgroup."""
    thread, part, tally = b.thread_id(), b.shared("part", f32, 128), b.var(b.const(0, f32))
    with b.loop(b.group_id() * 128 + thread, n, b.group_count() * 128) as i:
        tally.value = tally.value + b.cast(b.load(x, i), f32)
    b.store(part, thread, tally.value)
    b.barrier()
    for half in (64, 32, 16, 8, 4, 2, 1):
        with b.if_(thread < half):
            b.store(part, thread, b.load(part, thread) + b.load(part, thread + half))
        b.barrier()
    with b.if_(thread == 0):
        b.store(out, b.group_id(), b.load(part, 0))


@aule.kernel(workgroup=64, x="readwrite", bias="read", n="int32", columns="int32")
def bias_gelu(b: Builder, x: Any, bias: Any, n: Any, columns: Any) -> None:
    """gelu(x + bias) in place, by its approximation x * sigmoid(1.702 x)."""
    i = b.group_id() * 64 + b.thread_id()
    with b.if_(i < n):
        y = b.load(x, i) + b.load(bias, i % columns)
        b.store(x, i, y * b.rcp(b.exp2(y * (-1.702 * 1.4426950408889634)) + 1.0))


DEVICES = ("cuda", "vulkan", "opencl", "webgpu", "cpu")


@pytest.fixture(params=["numpy", *(pytest.param(name, marks=pytest.mark.device) for name in DEVICES)])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name != "numpy":
        need(name)
    return name


def in_frame(framework: str, array: Any) -> Any:
    """An array as NumPy's or PyTorch's, in its own memory."""
    if framework == "numpy":
        return array.copy()
    return pytest.importorskip("torch").from_numpy(array.copy())


@functools.cache
def tutorial() -> dict[str, Any]:
    """The kernels of the tutorial: the blocks of its page up to the last of the three."""
    page = ROOT / "docs" / "tutorials" / "own-kernel.md"
    if not page.exists():
        pytest.skip("the documentation is not part of this installation")
    found: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        exec(compile(block, str(page), "exec"), found)
        if "bias_gelu" in found:
            return found
    raise AssertionError("the tutorial has no bias_gelu")


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_kernels_of_the_tutorial(backend: str, framework: str) -> None:
    page, rng = tutorial(), np.random.default_rng(0)
    matrix = rng.integers(-9, 9, (50, 170)).astype(np.float32)
    sums = in_frame(framework, np.zeros(50, np.float32))
    aule.launch(page["row_sum"], 50, in_frame(framework, matrix), sums, 170, backend=backend)
    np.testing.assert_array_equal(np.asarray(sums), matrix.sum(1))

    matrix = rng.standard_normal((50, 70), dtype=np.float32)
    turned = in_frame(framework, np.zeros((70, 50), np.float32))
    aule.launch(page["transpose"], (5, 4), in_frame(framework, matrix), turned, 50, 70, backend=backend)
    np.testing.assert_array_equal(np.asarray(turned), matrix.T)

    bias = rng.standard_normal(70, dtype=np.float32)
    changed, groups = in_frame(framework, matrix), page["blocks"](3500)
    aule.launch(page["bias_gelu"], groups, changed, in_frame(framework, bias), 3500, 70, backend=backend)
    y = matrix.astype(np.float64) + bias
    expected = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    np.testing.assert_allclose(np.asarray(changed), expected, rtol=2e-5, atol=1e-6)


def test_buffers_take_the_elements_of_their_arrays(backend: str) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float16, torch.bfloat16, torch.int32):
        x = torch.arange(-500, 500).to(dtype)
        sums = torch.zeros(2)
        aule.launch(total, 2, x, sums, 1000, backend=backend)
        assert sums.sum() == x.float().sum()


def test_a_kernel_of_the_builder() -> None:
    b = Builder("twice", workgroup=32)
    x, n = b.buffer("x", f32, "readwrite"), b.scalar("n", i32)
    i = b.group_id() * 32 + b.thread_id()
    with b.if_(i < n):
        b.store(x, i, b.load(x, i) * 2)
    kernel, x = b.finish(), np.arange(40, dtype=np.float32)
    aule.launch(kernel, 2, x, np.int64(40), backend="numpy")
    np.testing.assert_array_equal(x, 2 * np.arange(40))
    aule.launch(kernel, 0, x, 40)  # no workgroup
    np.testing.assert_array_equal(x, 2 * np.arange(40))


def test_autograd_learns_of_written_tensors() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(64, requires_grad=True)
    y = x * 1
    z = (y * y).sum()
    aule.launch(bias_gelu, 1, y, torch.zeros(64), 64, 64, backend="numpy")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()
    leaf = torch.zeros(64, requires_grad=True)
    with pytest.raises(aule.AuleError, match=r"\[launch\] expected tensors that need no gradient, .* write to x"):
        aule.launch(bias_gelu, 1, leaf, torch.zeros(64), 64, 64, backend="numpy")
    with torch.no_grad():
        aule.launch(bias_gelu, 1, leaf, torch.zeros(64), 64, 64, backend="numpy")


ARRAY = np.zeros(8, np.float32)
LARGE = np.zeros(8, np.float32)


@aule.kernel(workgroup=1, x="read", y="read", out="write")
def both(b: Builder, x: Any, y: Any, out: Any) -> None:
    b.store(out, 0, b.load(x, 0) + b.load(y, 0))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: aule.launch(total, 1, ARRAY, 8), InvalidArgumentError, r"expected 3 arguments \(x, out, n\), got 2"),
        (lambda: aule.launch(total, 1, 1, 2, 3), InvalidArgumentError, "expected an array to write to, got none"),
        (lambda: aule.launch(total, 1, ARRAY, 1.0, 8), InvalidDtypeError, "expected an array .* for out, got float"),
        (lambda: aule.launch(total, 1, [1.0], ARRAY, 8), InvalidDtypeError, "expected an array .* for x, got list"),
        (
            lambda: aule.launch(total.trace("float32", "float32"), 1, ARRAY, [1.0], 8),
            InvalidArgumentError,
            "expected an array of float32 for out, got list; pass one for each parameter, in order, and all arrays of",
        ),
        (lambda: total.trace("float32"), InvalidArgumentError, "element types of x, out"),
        (lambda: aule.launch(total, 1, ARRAY, np.ones(8, np.float32), "8"), InvalidArgumentError, "got '8'; convert"),
        (lambda: aule.launch(total, 1, ARRAY, ARRAY, 8), InvalidArgumentError, "do not overlap .* got .*x"),
        (
            lambda: aule.launch(total, 1, ARRAY, np.zeros(8)[::2].astype(np.float32)[::2], 8),
            InvalidArgumentError,
            "out to be C-contiguous",
        ),
        (
            lambda: aule.launch(total.trace("float32", "float32"), 1, ARRAY, np.zeros(8), 8),
            InvalidDtypeError,
            "expected out of float32, got float64",
        ),
        (
            lambda: aule.launch(total, 1, np.ones(8, np.float32), np.frombuffer(bytes(32), np.float32), 8),
            InvalidArgumentError,
            "expected out to be writable",
        ),
        (
            lambda: aule.launch(total, 1, ARRAY, np.ones(8, np.float32), ARRAY),
            InvalidArgumentError,
            "a number for n, got an array",
        ),
        (
            lambda: aule.launch(total, 1, ARRAY, np.ones(8, np.float32), 1.5),
            InvalidArgumentError,
            r"expected a whole number, int32, for n, got 1\.5",
        ),
        (
            lambda: aule.launch(both, 1, LARGE, LARGE[1:2], LARGE[4:6]),
            InvalidArgumentError,
            "got x and out in the same memory",
        ),
        (lambda: aule.launch(total, "1", ARRAY, ARRAY, 8), InvalidArgumentError, "a grid of one to three numbers"),
        (lambda: aule.launch(total, (1, 2, 3, 4), ARRAY, ARRAY, 8), InvalidArgumentError, "a grid of one to three"),
        (lambda: aule.launch("total", 1, ARRAY), InvalidArgumentError, "expected a kernel, got str"),
        (lambda: aule.kernel(workgroup=1, y="read")(total._function), InvalidArgumentError, "parameters x, out, n"),
        (
            lambda: aule.kernel(workgroup=1, x="in", out="write", n="int32")(total._function),
            InvalidArgumentError,
            "expected x to be 'read', 'write', 'readwrite' or the type of a scalar",
        ),
    ],
)
def test_mistakes_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_what_threads_cannot_do_in_turn_is_refused() -> None:
    need("cpu")

    @aule.kernel(workgroup=64, out="write")
    def some_threads(b: Builder, out: Any) -> None:
        with b.if_(b.thread_id() < 32):
            b.store(out, b.thread_id(), b.subgroup_reduce("add", b.thread_id()))

    with pytest.raises(KernelError, match=r"that all threads of the workgroup reach.*test_launch\.py"):
        aule.launch(some_threads, 1, np.zeros(64, np.int32), backend="cpu")
