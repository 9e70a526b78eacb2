"""Gradients on every device that has them: the full grid, and cases beyond the grid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import devices
import grid
import numpy as np
import pytest

from aule.engine.attention import backward_on_host, forward_on_host
from aule.engine.memory import host_view
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.ops.attention.validate import Operands, attention_problem
from aule.runtime.base import Device

pytestmark = pytest.mark.device

CASES = grid.forward_grid("full")


@pytest.fixture(params=devices.BACKENDS, scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    return devices.need(request.param)


def gradients(device: Device, problem: AttentionProblem, operands: Operands, dout: np.ndarray) -> dict[str, Any]:
    problem = replace(problem, return_lse=True)
    out, lse = forward_on_host(problem, operands, device, exact_lse=True)
    assert lse is not None
    stored = dout.view(np.uint16) if problem.dtype == "bf16" else dout
    found = backward_on_host(problem, operands, device, out, lse, host_view(problem.dtype, stored))
    return dict(zip(("dq", "dk", "dv"), found, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_grid(device: Device, case: grid.Case) -> None:
    devices.spare(device, CASES.index(case), parts=40, cpu_parts=6)  # three kernels to compile for each
    judge(device, case)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", ["cuda", "vulkan"])
def test_grid_deterministic(name: str, case: grid.Case) -> None:
    """Where the kernel of dK and dV may add up dQ otherwise, another one computes it."""
    device = devices.need(name)
    devices.spare(device, CASES.index(case), parts=80)
    judge(device, case, deterministic=True)


def judge(device: Device, case: grid.Case, deterministic: bool = False) -> None:
    inputs = grid.make_inputs(case, seed=1)
    problem, operands = grid.case_problem(case, inputs)
    problem = replace(problem, deterministic=deterministic)
    shape = (case.batch, case.heads_q, case.seq_q, case.value_dim)
    values = np.random.default_rng(7).standard_normal(shape).astype(grid.NUMPY_DTYPES[case.dtype])
    dout = grid.lay_out(values, case.strides)
    found = gradients(device, problem, operands, dout)
    arrays = {"alibi" if name == "alibi_slopes" else name: array for name, array in inputs.items()}
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


def problem_of(*shapes: tuple[int, ...], dtype: Any = np.float32, **options: Any) -> tuple[Any, Any, Any, Any]:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in zip("qkv", shapes, strict=True)}
    problem, operands = attention_problem(**{n: grid.view_of(a) for n, a in arrays.items()}, **options)
    dout = rng.standard_normal((*arrays["q"].shape[:3], arrays["v"].shape[3])).astype(dtype)
    return arrays, problem, operands, dout


@pytest.mark.parametrize("heads", [(1, 1), (8, 2)])
def test_long_sequences_in_parts(device: Device, heads: tuple[int, int]) -> None:
    """One head: tasks share its keys, and dQ is put together from their parts."""
    heads_q, heads_kv = heads
    arrays, problem, operands, dout = problem_of(
        (1, heads_q, 700, 64), (1, heads_kv, 900, 64), (1, heads_kv, 900, 64), causal=True
    )
    found = gradients(device, problem, operands, dout)
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


def test_float64(device: Device) -> None:
    if device.target.backend != "cpu":
        pytest.skip("float64 is computed by the CPU alone")
    shape = (1, 2, 70, 40)
    arrays, _, _, dout = problem_of(shape, shape, shape, dtype=np.float64)
    arrays["alibi_slopes"] = np.array([0.3, 0.07], np.float32)  # in float32, and yet nothing is rounded to that
    problem, operands = attention_problem(**{n: grid.view_of(a) for n, a in arrays.items()}, softcap=3.0)
    arrays["alibi"] = arrays.pop("alibi_slopes")
    found = gradients(device, problem, operands, dout)
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


def test_the_same_bits_again(device: Device) -> None:
    shape = (1, 1, 1000, 64)
    _, problem, operands, dout = problem_of(shape, shape, shape, causal=True, deterministic=True)
    first = gradients(device, problem, operands, dout)
    for _ in range(3):
        again = gradients(device, problem, operands, dout)
        assert all(first[name].tobytes() == again[name].tobytes() for name in first)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_dropped_keys_do_not_leak(device: Device, bad: float, softcap: float | None) -> None:
    shape = (1, 2, 70, 16)
    arrays, problem, operands, dout = problem_of(shape, shape, shape, causal=True)
    arrays["k"][:, :, 69], arrays["v"][:, :, 69] = bad, bad  # only the last row may see it
    options = {"causal": True, "softcap": softcap}
    problem, operands = attention_problem(**{n: grid.view_of(a) for n, a in arrays.items()}, **options)
    dout[:, :, 69] = 0
    found = gradients(device, problem, operands, dout)
    assert np.isfinite(found["dq"][:, :, :69]).all()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_masked_keys_do_not_leak(device: Device, bad: float, softcap: float | None) -> None:
    """No row keeps them, so nothing of theirs is in any gradient, that of K and the mask included."""
    rng = np.random.default_rng(0)
    clean = {name: rng.standard_normal((1, 2, 40, 16)).astype(np.float32) for name in "qkv"}
    clean["mask"] = np.where(np.arange(40) < 33, np.float32(0.5), np.float32(-np.inf))[None]
    dout = rng.standard_normal((1, 2, 40, 16)).astype(np.float32)
    arrays = {name: array.copy() for name, array in clean.items()}
    arrays["k"][:, :, 33:], arrays["v"][:, :, 33:] = bad, bad
    problem, operands = attention_problem(**{n: grid.view_of(a) for n, a in arrays.items()}, softcap=softcap)
    found = gradients(device, problem, operands, dout)
    for inputs in (clean, arrays):  # the reference is to be as careful
        wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **inputs))
        assert not wrong, wrong


def test_weights_of_one_are_exact_on_the_cpu(device: Device) -> None:
    """Rows that attend to one key only, with log-sum-exps of hundreds: rounding these costs the weights nothing."""
    if device.target.backend != "cpu":
        pytest.skip("GPUs round scores times log2(e): docs/numerics.md, error-large-scores")
    shape = (1, 2, 40, 64)
    arrays, _, _, dout = problem_of(shape, shape, shape)
    arrays["q"] *= 9
    arrays["k"] = arrays["q"].copy()
    problem, operands = attention_problem(**{n: grid.view_of(a) for n, a in arrays.items()})
    found = gradients(device, problem, operands, dout)
    np.testing.assert_array_equal(found["dv"], dout)


def test_rows_without_keys_have_no_gradient(device: Device) -> None:
    _, problem, operands, dout = problem_of((1, 2, 40, 16), (1, 2, 10, 16), (1, 2, 10, 16), causal=True)
    found = gradients(device, problem, operands, dout)
    assert (found["dq"][:, :, :30] == 0).all()
    assert all(np.isfinite(found[name]).all() for name in found)


@pytest.mark.parametrize("seqs", [(40, 50), (0, 5), (5, 0)])
@pytest.mark.parametrize("name", ["cuda", "vulkan", "opencl", "webgpu", "cpu"])
def test_tensors_of_a_context(name: str, seqs: tuple[int, int]) -> None:
    devices.need(name)
    import aule

    seq_q, seq_kv = seqs
    arrays, problem, _, dout = problem_of((1, 4, seq_q, 32), (1, 2, seq_kv, 32), (1, 2, seq_kv, 16), causal=True)
    with aule.Aule(name) as gpu:
        q, k, v, grad = (gpu.tensor(x.shape).upload(x) for x in (*arrays.values(), dout))
        out, lse = gpu.tensor(dout.shape), gpu.tensor(dout.shape[:3])
        found = {f"d{n}": gpu.tensor(x.shape) for n, x in arrays.items()}
        gpu.attention_forward_with_lse(q, k, v, out, lse, causal=True)
        gpu.attention_backward(q, k, v, out, lse, grad, **found, causal=True)
        results = {n: x.download() for n, x in found.items()}
        with pytest.raises(aule.InvalidShapeError, match="expected dq of shape"):
            gpu.attention_backward(q, k, v, out, lse, grad, **(found | {"dq": out}), causal=True)
    wrong = compare_gradients(problem, results, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


def test_torch_autograd() -> None:
    torch = pytest.importorskip("torch")
    devices.need("cpu")
    import aule

    q = torch.randn(2, 4, 33, 16, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 2, 50, 16, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 2, 50, 8, dtype=torch.float64)  # needs none
    assert torch.autograd.gradcheck(lambda q, k: aule.flash_attention(q, k, v, causal=True, backend="cpu"), (q, k))


def test_torch_gradients_reach_transposed_and_3d_tensors() -> None:
    torch = pytest.importorskip("torch")
    devices.need("cpu")
    import aule

    base = torch.randn(3, 40, 5, 32, requires_grad=True)  # [3, seq, heads, dim], as projections leave it
    q, k, v = (x.transpose(0, 1) for x in base.unbind(0))
    out, lse = aule.flash_attention(q, k, v, causal=True, backend="cpu", return_lse=True)
    assert not lse.requires_grad
    (found,) = torch.autograd.grad(out.square().sum(), base)
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    (wanted,) = torch.autograd.grad(want.square().sum(), base)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["cpu", "cpu-baseline", "vulkan", "opencl"])
@pytest.mark.parametrize("shape", [(1, 4, 33, 45), (2, 1, 33, 1), (33, 45)])
def test_torch_gradients_of_bias_mask_and_sinks(name: str, shape: tuple[int, ...], monkeypatch: Any) -> None:
    torch = pytest.importorskip("torch")
    chosen = devices.need(name)
    import aule
    from aule.frontends.torch import attention as torch_attention

    monkeypatch.setattr(torch_attention, "gradient_device", lambda *_: chosen)
    generator = torch.Generator().manual_seed(0)

    def made(*size: int) -> Any:
        return torch.randn(*size, generator=generator).requires_grad_()

    q, k, v = made(2, 4, 33, 16), made(2, 2, 45, 16), made(2, 2, 45, 16)
    bias, mask, sinks = made(*shape), made(2, 1, 1, 45), made(4)
    dout = torch.randn(2, 4, 33, 16, generator=generator)
    leaves = (q, k, v, bias, mask, sinks)
    out = aule.flash_attention(q, k, v, causal=True, softcap=2.0, bias=bias, mask=mask, sinks=sinks)
    found = torch.autograd.grad(out, leaves, dout)

    exact = [x.detach().double().requires_grad_() for x in leaves]
    q64, k64, v64, bias64, mask64, sinks64 = exact
    s = 2.0 * torch.tanh(q64 @ k64.repeat_interleave(2, 1).transpose(-1, -2) / 4.0 / 2.0) + bias64 + mask64
    s = s.masked_fill(~torch.ones(33, 45, dtype=torch.bool).tril(12), -torch.inf)
    p = torch.softmax(torch.cat([s, sinks64[None, :, None, None].expand(2, 4, 33, 1)], -1), -1)[..., :-1]
    wanted = torch.autograd.grad(p @ v64.repeat_interleave(2, 1), exact, dout.double())
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f.double(), w, rtol=2e-5, atol=2e-5 * float(w.abs().max()))


@pytest.mark.parametrize("seqs", [(0, 5), (5, 0), (0, 0)])
def test_torch_gradients_of_sinks_without_rows_or_keys(seqs: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    devices.need("cpu")
    import aule

    q, k = (torch.randn(2, 4, n, 16, requires_grad=True) for n in seqs)
    sinks = torch.tensor([0.5, -1.0, -torch.inf, 2.0], requires_grad=True)
    out = aule.flash_attention(q, k, k, sinks=sinks, causal=False)
    for gradient, leaf in zip(torch.autograd.grad(out.sum(), (q, k, sinks)), (q, k, sinks), strict=True):
        assert gradient.shape == leaf.shape and (gradient == 0).all()


def test_torch_second_derivative_is_refused() -> None:
    torch = pytest.importorskip("torch")
    devices.need("cpu")
    import aule

    q = torch.randn(1, 1, 3, 8, dtype=torch.float64, requires_grad=True)
    out = aule.flash_attention(q, q, q, backend="cpu").sum()
    (grad,) = torch.autograd.grad(out, q, create_graph=True)
    assert grad.requires_grad  # or a penalty on it would be lost without a word
    with pytest.raises(aule.AuleError, match="expected one derivative"):
        torch.autograd.grad(grad.square().sum(), q)


def test_torch_refuses_what_has_no_gradient() -> None:
    torch = pytest.importorskip("torch")
    devices.need("cpu")
    import aule

    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    slopes = torch.zeros(2, requires_grad=True)
    with pytest.raises(aule.AuleError, match="detach alibi_slopes"):
        aule.flash_attention(q, q, q, alibi_slopes=slopes, backend="cpu")
    with pytest.raises(aule.AuleError, match="out="):
        aule.flash_attention(q, q, q, out=torch.empty(1, 2, 8, 16), backend="cpu")
    with pytest.raises(aule.AuleError, match="NumPy has no gradients"):
        aule.flash_attention(q, q, q, backend="numpy")
    out = aule.flash_attention(q, q, q, backend="cpu")
    with torch.no_grad():
        q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
