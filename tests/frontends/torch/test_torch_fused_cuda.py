"""The CUDA path of row operations, with CPU tensors in place of CUDA's and the interpreter as the device."""

from __future__ import annotations

from typing import Any

import pytest
from test_torch_varlen_cuda import Interpreted, in_place_of_cuda

import aule
from aule.ops.catalogue import CATALOGUE

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="what is compared with needs the CPU engine")

from aule.frontends.torch import passes  # noqa: E402
from aule.frontends.torch.devices import streams as torch_streams  # noqa: E402


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Interpreted:
    return in_place_of_cuda(monkeypatch)


def made(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def test_both_directions_are_planned_once(device: Interpreted) -> None:
    weight = made(96)
    for offset in range(2):
        x = made(5, 96) + offset
        results = []
        for backend in (None, "cpu"):
            y = aule.rms_norm(x, weight, backend=backend)
            results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight), retain_graph=True)))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)
    assert device.prepared == 3  # forward, backward, and the sums of columns


@pytest.mark.parametrize("name", ["layer_norm", "residual_layer_norm", "softmax_dropout"])
def test_statistics_are_kept_where_arrays_are_large(
    name: str, device: Interpreted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the gradients are the same with them and without."""
    asked: list[Any] = []
    compute = passes.compute
    monkeypatch.setattr(passes, "compute", lambda *x: (asked.append((x[0].name, x[1], x[4])), compute(*x))[1])

    def gradients(backend: str | None) -> Any:
        x = made(6, 128)
        if name == "softmax_dropout":
            y = aule.softmax_dropout(x, dropout_p=0.3, seed=5, backend=backend)
        elif name == "layer_norm":
            y = aule.layer_norm(x, made(128), backend=backend)
        else:
            y = aule.residual_layer_norm(x, made(6, 128) * 2, made(128), backend=backend)[0]
        return torch.autograd.grad(y.square().sum(), x)[0]

    right = gradients("cpu")
    for least, kept in ((1 << 22, False), (6 * 128, True)):
        asked.clear()
        monkeypatch.setattr(torch_streams, "_SAVE_FROM", least)
        torch.testing.assert_close(gradients(None), right, rtol=1e-5, atol=1e-5)
        (forward, _, wanted), (backward, given, _) = asked
        assert (forward, backward) == (name, f"{name}_backward")
        operands = [operand.name for operand in CATALOGUE[name].gradient.operands]
        assert ("statistics" in wanted) == (given[operands.index("statistics")] is not None) == kept
    monkeypatch.setenv("AULE_BACKEND", "cpu")  # where CUDA tensors go by way of the host
    asked.clear()
    torch.testing.assert_close(gradients(None), right, rtol=1e-5, atol=1e-5)
    assert "statistics" not in asked[0][2]


def test_views_that_start_anywhere(device: Interpreted) -> None:
    """Halves of one tensor, and one that starts off a multiple of 16 bytes: planned apart, computed alike."""
    whole = made(4, 130).detach()
    for both in (whole[:, :128], whole[:, 1:129], whole[:, 2:130]):
        gate, up = both.chunk(2, -1)
        torch.testing.assert_close(aule.swiglu(gate, up), aule.swiglu(gate, up, backend="cpu"), rtol=1e-5, atol=1e-6)
    assert device.prepared == 3


def test_in_place_and_dropout(device: Interpreted) -> None:
    x, angles = made(1, 2, 3, 16).detach(), made(3, 8).detach()
    want = aule.rope(x, angles.cos(), angles.sin(), backend="cpu")
    assert aule.rope(x, angles.cos(), angles.sin(), inplace=True) is x
    torch.testing.assert_close(x, want, rtol=1e-5, atol=1e-6)
    found, right = (aule.softmax_dropout(x, dropout_p=0.5, seed=7, backend=backend) for backend in (None, "cpu"))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def test_several_launches_and_what_they_share(device: Interpreted) -> None:
    """Workspaces, buffers that go by another name in an op that is made of others, numbers, and rows that are bad."""
    given = (made(9, 24), made(24), made(24), made(12, 24), made(12))
    results = []
    for backend in (None, "cpu"):
        y = aule.layer_norm_linear(*given, backend=backend)
        loss = aule.cross_entropy(y, torch.tensor([3, -100, 0, 11, 5, 5, 2, 1, 7]), backend=backend)
        results.append((y, loss, *torch.autograd.grad(loss, given)))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    found = aule.cross_entropy(results[0][0], torch.full((9,), 12), reduction="none")
    assert torch.isnan(found).all(), "no column has this number, and nobody looked"


def test_tensors_elsewhere_are_refused(device: Interpreted) -> None:
    with pytest.raises(aule.DeviceMismatchError, match=r"\[rms_norm\] expected weight on"):
        aule.rms_norm(made(2, 8), torch.ones(8, device="meta"))
