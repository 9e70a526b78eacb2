"""The quick path of repeated row operations on CPU tensors: which calls take it, and which must not."""

from __future__ import annotations

from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="these run on the CPU engine")

from aule.backends import registry  # noqa: E402
from aule.frontends.torch import passes, repeated  # noqa: E402

F = torch.nn.functional
SHAPE = (3, 5, 64)


@pytest.fixture
def longer(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops of calls that took the longer way."""
    monkeypatch.delenv("AULE_BACKEND", raising=False)
    repeated.forget()
    taken: list[str] = []
    compute = passes.compute
    monkeypatch.setattr(passes, "compute", lambda *given: (taken.append(given[0].name), compute(*given))[1])
    return taken


def tensors(seed: int = 0, dtype: Any = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in (SHAPE, SHAPE[-1:], SHAPE[-1:])]


def right(given: list[Any]) -> Any:
    return F.layer_norm(given[0], SHAPE[-1:], *given[1:])


def test_like_calls_with_other_tensors(longer: list[str]) -> None:
    first = [tensors(seed) for seed in range(3)]
    found = [aule.layer_norm(*given) for given in first]
    assert longer == ["layer_norm"]
    for given, y in zip(first, found, strict=True):
        torch.testing.assert_close(y, right(given))
    assert len({y.data_ptr() for y in found}) == 3


def test_several_results_and_operands_that_are_not_there(longer: list[str]) -> None:
    for seed in range(3):
        x, weight, _ = tensors(seed)
        y, total = aule.residual_rms_norm(x, x + 1, weight)
        torch.testing.assert_close(total, 2 * x + 1)
        torch.testing.assert_close(y, F.rms_norm(2 * x + 1, SHAPE[-1:], weight, 1e-6))
        torch.testing.assert_close(aule.layer_norm(x, bias=weight), F.layer_norm(x, SHAPE[-1:], None, weight))
    assert longer == ["residual_rms_norm", "layer_norm"]
    torch.testing.assert_close(aule.layer_norm(x, weight), F.layer_norm(x, SHAPE[-1:], weight))
    assert longer[2:] == ["layer_norm"]


def test_tensors_that_are_negated_when_they_are_read(longer: list[str]) -> None:
    for seed in range(3):
        x, weight, bias = tensors(seed)
        negated = torch.complex(x, x).conj().imag
        assert negated.is_neg()
        torch.testing.assert_close(aule.layer_norm(negated, weight, bias), right([-x, weight, bias]))
        torch.testing.assert_close(aule.layer_norm(x, weight, bias), right([x, weight, bias]))
    cos, sin = torch.ones(5, 8), torch.zeros(5, 8)
    x = tensors()[0].view(1, 12, 5, 16)
    negated = torch.complex(x, x).conj().imag
    assert aule.rope(negated, cos, sin, inplace=True) is negated
    torch.testing.assert_close(negated, -x)


def test_gradients(longer: list[str]) -> None:
    for seed in range(3):
        mine, theirs = ([x.requires_grad_() for x in tensors(seed)] for _ in range(2))
        grad = tensors(seed + 9)[0]
        found = torch.autograd.grad(aule.layer_norm(*mine), mine, grad)
        for got, want in zip(found, torch.autograd.grad(right(theirs), theirs, grad), strict=True):
            torch.testing.assert_close(got, want)
    assert longer == ["layer_norm", "layer_norm_backward"]


def test_what_was_called_without_gradients_has_them_when_they_are_wanted(longer: list[str]) -> None:
    given = [x.requires_grad_() for x in tensors()]
    with torch.no_grad():
        assert not aule.layer_norm(*given).requires_grad
        assert not aule.layer_norm(*given).requires_grad
    assert longer == ["layer_norm"]
    assert aule.layer_norm(*given).requires_grad


def test_other_tensors_take_the_longer_way(longer: list[str]) -> None:
    x, weight, bias = tensors()
    aule.layer_norm(x, weight, bias)
    longer.clear()
    transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
    others = [(x[:2], weight, bias), (transposed, weight, bias), (x, weight.bfloat16(), bias), (x, weight, weight)]
    for given in others:
        torch.testing.assert_close(aule.layer_norm(*given).float(), right([y.float() for y in given]))
    assert len(longer) == len(others)
    aule.layer_norm(x, weight, bias, eps=1e-3)
    aule.layer_norm(x, weight, bias, backend="cpu")
    assert len(longer) == len(others) + 2
    with pytest.raises(aule.AuleError, match="expected weight"):
        aule.layer_norm(x, "weight", bias)


def test_nested_and_sparse_tensors_are_refused(longer: list[str]) -> None:
    """PyTorch's own check of repeated calls would end the process for a nested one."""
    x, weight, bias = tensors()
    for _ in range(2):
        aule.layer_norm(x, weight, bias)
    nested = torch.nested.nested_tensor([weight])
    for bad in ((torch.nested.nested_tensor([x[0]]), weight), (x, nested), (x.to_sparse(), weight)):
        with pytest.raises(aule.InvalidDtypeError, match=r"as a (plain|dense) tensor"):
            aule.layer_norm(*bad, bias)


def test_the_environment_and_closed_devices_are_seen(longer: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors()
    aule.layer_norm(*given)
    monkeypatch.setenv("AULE_BACKEND", "numpy")
    torch.testing.assert_close(aule.layer_norm(*given), right(given))
    assert len(longer) == 2
    monkeypatch.delenv("AULE_BACKEND")
    registry.forget()
    for _ in range(2):
        torch.testing.assert_close(aule.layer_norm(*given), right(given))
    assert len(longer) == 3


def test_whoever_wants_to_see_operators_sees_them(longer: list[str]) -> None:
    from torch.autograd import forward_ad
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    given = tensors()
    aule.layer_norm(*given)
    with Watch():
        aule.layer_norm(*given)
    assert any("layer_norm" in name for name in seen)
    mapped = torch.func.vmap(aule.layer_norm, in_dims=(0, None, None))(*given)
    torch.testing.assert_close(mapped, right(given))
    with forward_ad.dual_level(), pytest.raises((aule.AuleError, RuntimeError)):
        aule.layer_norm(forward_ad.make_dual(given[0], given[0]), *given[1:])


def test_calls_in_turns_do_not_replace_each_other(longer: list[str]) -> None:
    """What is remembered first stays, unless it does not come back."""
    one, other = tensors(), tensors()
    other[1] = other[1].bfloat16()
    for _ in range(4):
        aule.layer_norm(*one)
        aule.layer_norm(*other)
    assert len(longer) == 1 + 4
    for _ in range(repeated._MISSES_BEFORE_REPLACEMENT + 3):
        aule.layer_norm(*other)
    assert len(longer) == 1 + 4 + repeated._MISSES_BEFORE_REPLACEMENT  # of which the last of the four was the first


def test_without_what_pytorch_promises_to_nobody(longer: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_empty_cpu", None)
    given = tensors()
    for _ in range(2):
        torch.testing.assert_close(aule.layer_norm(*given), right(given))
    assert len(longer) == 2
