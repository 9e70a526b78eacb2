"""Options that are tensors are read at every call, also in repeated calls."""

from __future__ import annotations

from typing import Any

import pytest
from test_torch_decode_cuda import device  # noqa: F401
from test_torch_varlen_cuda import Interpreted

import aule
from aule.options import AttentionOptions, DecodeOptions

torch = pytest.importorskip("torch")

from aule.frontends.torch.checks import keyed  # noqa: E402

CHANGES = {
    "scale": (0.1, 0.9),
    "softcap": (0.5, 50.0),
    "window": (2, 5),
    "causal": (True, False),
    "return_lse": (False, True),
}
"""Options of both kinds of attention, with two values each."""


def normal(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 3


def attention(**options: Any) -> Any:
    return aule.flash_attention(*(normal(1, heads, 9, 16) for heads in (4, 2, 2)), **options)


def decode(**options: Any) -> Any:
    return aule.decode_attention(*(normal(1, heads, 9, 16) for heads in (4, 2, 2)), **options)


def changed(call: Any, name: str, pair: bool = False, **options: Any) -> tuple[Any, Any]:
    """What a call gives behind a change of a tensor, and what it should."""
    before, after = CHANGES[name]
    option = torch.tensor(before)
    given = {name: (option, 0) if pair else option, **options}
    call(**given)
    option.fill_(after)
    return call(**given), call(**{name: (after, 0) if pair else after, **options})


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("call", [attention, decode], ids=lambda f: f.__name__)
def test_on_the_cpu_engine(call: Any, name: str) -> None:
    pytest.importorskip("llvmlite")
    found, wanted = changed(call, name, backend="cpu")
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("call", [attention, decode], ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["cpu", None])
def test_tensors_of_one_layout_are_told_apart(call: Any, backend: str | None, device: Interpreted) -> None:  # noqa: F811
    pytest.importorskip("llvmlite")
    numbers = torch.rand(4)
    for name in ("alibi_slopes", "sinks", "alibi_slopes"):
        found, wanted = (call(**{name: numbers}, backend=x) for x in (backend, "numpy"))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("call", [attention, decode], ids=lambda f: f.__name__)
def test_a_side_of_a_window(call: Any) -> None:
    pytest.importorskip("llvmlite")
    found, wanted = changed(call, "window", pair=True, backend="cpu")
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", CHANGES)
def test_on_the_way_of_cuda_tensors(device: Interpreted, name: str) -> None:  # noqa: F811
    found, wanted = changed(decode, name)
    assert device.prepared >= 2
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def norm(eps: Any) -> Any:
    return aule.rms_norm(normal(3, 16), eps=eps)


def rotated(interleaved: Any) -> Any:
    angles = torch.linspace(0, 3, 72).view(9, 8)
    return aule.rope(normal(1, 2, 9, 16), angles.cos(), angles.sin(), interleaved=interleaved)


@pytest.mark.parametrize(("call", "before", "after"), [(norm, 1e-6, 3.0), (rotated, True, False)])
def test_ops_of_the_catalogue(call: Any, before: Any, after: Any) -> None:
    option = torch.tensor(before)
    for _ in range(3):  # the second is remembered, and the third is like it
        call(option)
    option.fill_(after)
    torch.testing.assert_close(call(option), call(after), rtol=0, atol=0)


def test_no_option_is_a_key_by_identity() -> None:
    numbers = {name: torch.tensor(before) for name, (before, _) in CHANGES.items()}
    plain = {name: before for name, (before, _) in CHANGES.items()}
    plain["scale"] = numbers["scale"].item()  # 0.1 as a float32
    assert keyed("decode_attention", DecodeOptions(**numbers)) == DecodeOptions(**plain)
    flags = {"rope_interleaved": torch.tensor(True)}
    found = keyed("flash_attention", AttentionOptions(**numbers, **flags))
    assert found == AttentionOptions(**plain, rope_interleaved=True)
    assert {type(x) for x in (*found[:4], found.rope_interleaved, found.return_lse)} == {bool, float, int}
    assert keyed("flash_attention", found) is found
