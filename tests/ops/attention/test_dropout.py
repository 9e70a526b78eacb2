"""Dropout on every device: all keep the same weights, forward and backward."""

from __future__ import annotations

from typing import Any

import devices
import grid
import numpy as np
import pytest

import aule
from aule.engine.attention import forward_on_host
from aule.ops.attention.validate import attention_problem
from aule.ops.softmax.dropout import kept, seed_words
from aule.runtime.base import Device

pytestmark = pytest.mark.device

SEED = 0xFEDCBA9876543210


@pytest.fixture(params=devices.BACKENDS, scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    return devices.need(request.param)


def weights(device: Device, p: float, seq_q: int, seq_kv: int, dtype: str = "float32") -> Any:
    """The weights themselves of two times three heads: all scores are 0, and V is the identity, a part at a time."""
    batch, heads = 2, 3
    found = []
    for first in range(0, seq_kv, 128):
        width = min(128, seq_kv - first)
        v = np.zeros((batch, heads, seq_kv, width), dtype)
        v[:, :, first : first + width] = np.eye(width)
        q, k = np.zeros((batch, heads, seq_q, 8), dtype), np.zeros((batch, heads, seq_kv, 8), dtype)
        views = {name: grid.view_of(x) for name, x in {"q": q, "k": k, "v": v, "seed": seed_words(SEED)}.items()}
        problem, operands = attention_problem(**views, dropout_p=p)
        found.append(forward_on_host(problem, operands, device)[0])
    return np.concatenate(found, -1) * seq_kv


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(70, 150), (3, 77), (1, 300)])
def test_the_same_weights_are_kept(device: Device, seq_q: int, seq_kv: int, dtype: str) -> None:
    """On matrix units, too, which float16 is for."""
    found = weights(device, 0.25, seq_q, seq_kv, dtype)
    wanted = kept(0.25, seed_words(SEED), np.arange(6).reshape(2, 3), slice(0, seq_q), slice(0, seq_kv))
    assert ((found != 0) == wanted).all()
    np.testing.assert_allclose(found[wanted], 1 / 0.75, rtol=1e-5 if dtype == "float32" else 2**-9)


def test_everything_dropped_is_zero(device: Device) -> None:
    assert (weights(device, 1.0, 20, 40) == 0).all()


def test_the_same_bits_again_and_others_for_another_seed(device: Device) -> None:
    arrays = {name: np.random.default_rng(0).standard_normal((1, 2, 70, 32)).astype(np.float32) for name in "qkv"}

    def run(seed: int) -> bytes:
        views = {n: grid.view_of(x) for n, x in (arrays | {"seed": seed_words(seed)}).items()}
        problem, operands = attention_problem(**views, dropout_p=0.5)
        return forward_on_host(problem, operands, device)[0].tobytes()

    assert run(1) == run(1) != run(2)


def test_masked_values_do_not_leak(device: Device) -> None:
    """Inf in a key that is masked out stays out, dropped or not."""
    q, k, v = (np.random.default_rng(i).standard_normal((1, 1, 70, 16)).astype(np.float32) for i in range(3))
    k[:, :, 69], v[:, :, 69] = np.nan, np.inf  # only the last row may see it
    views = {n: grid.view_of(x) for n, x in {"q": q, "k": k, "v": v, "seed": seed_words(3)}.items()}
    problem, operands = attention_problem(**views, dropout_p=0.3, causal=True)
    out, _ = forward_on_host(problem, operands, device)
    assert np.isfinite(out[:, :, :69]).all()


@pytest.mark.parametrize("name", ["cuda", "vulkan", "opencl", "webgpu", "cpu"])
def test_tensors_of_a_context(name: str) -> None:
    devices.need(name)
    q, k, v, dout = (np.random.default_rng(i).standard_normal((1, 2, 40, 32)).astype(np.float32) for i in range(4))
    options = {"causal": True, "dropout_p": 0.3}
    with aule.Aule(name) as gpu:
        given = [gpu.tensor(x.shape).upload(x) for x in (q, k, v)]
        out, grad = gpu.tensor(q.shape), gpu.tensor(q.shape).upload(dout)
        lse, found = gpu.tensor((1, 2, 40)), [gpu.tensor(q.shape) for _ in range(3)]
        gpu.attention_forward_with_lse(*given, out, lse, seed=SEED, **options)
        gpu.attention_backward(*given, out, lse, grad, *found, seed=SEED, **options)
        results = [x.download() for x in (out, *found)]
        gpu.attention_gpu(*given, out, **options)  # a seed of its own
        assert (out.download() != results[0]).any()
        with pytest.raises(aule.InvalidArgumentError, match="expected the seed of the forward pass"):
            gpu.attention_backward(*given, out, lse, grad, *found, **options)
    np.testing.assert_allclose(
        results[0], aule.flash_attention(q, k, v, backend="numpy", seed=SEED, **options), rtol=1e-4, atol=1e-5
    )
    # <dout, out> is linear in V: its gradient times V gives it back, for the same weights only.
    np.testing.assert_allclose((results[3] * v).sum(), (dout * results[0]).sum(), rtol=1e-3)


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def test_gradcheck() -> None:
    torch = pytest.importorskip("torch")
    devices.need("cpu")
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    q, k, v, bias = made(2, 4, 9, 8), made(2, 2, 21, 8), made(2, 2, 21, 5), made(1, 4, 9, 21)
    sinks = torch.randn(4, generator=generator)

    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        options = {"softcap": 2.0, "sinks": sinks, "dropout_p": 0.3, "seed": SEED, "backend": "cpu"}
        return aule.flash_attention(q, k, v, bias=bias, **options)

    assert torch.autograd.gradcheck(attend, (q, k, v, bias))


@pytest.mark.parametrize("name", ["cpu", "vulkan"])
def test_manual_seed_makes_it_repeatable(name: str) -> None:
    torch = pytest.importorskip("torch")
    devices.need(name)
    q, k, v = (torch.randn(1, 2, 33, 16, requires_grad=True) for _ in range(3))

    def run() -> Any:
        out = aule.flash_attention(q, k, v, dropout_p=0.5, backend=name)
        return torch.cat([out.detach().flatten(), *(g.flatten() for g in torch.autograd.grad(out.sum(), (q, k, v)))])

    torch.manual_seed(5)
    first, second = run(), run()
    torch.manual_seed(5)
    assert torch.equal(first, run()) and not torch.equal(first, second)
    with torch.no_grad():
        torch.manual_seed(5)
        assert torch.equal(aule.flash_attention(q, k, v, dropout_p=0.5, backend=name).flatten(), first[: q.numel()])


def test_numpy_and_torch_agree_on_a_seed() -> None:
    torch = pytest.importorskip("torch")
    devices.need("cpu")
    q, k, v = (np.random.default_rng(i).standard_normal((1, 2, 33, 16)).astype(np.float32) for i in range(3))
    for seed in (0, SEED, 2**64 - 1):
        theirs = aule.flash_attention(*map(torch.from_numpy, (q, k, v)), dropout_p=0.5, seed=seed, backend="cpu")
        assert theirs.numpy().tobytes() == (
            aule.flash_attention(q, k, v, dropout_p=0.5, seed=seed, backend="cpu").tobytes()
        )
