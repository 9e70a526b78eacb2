"""The quick path of repeated calls, with CPU tensors in place of CUDA's."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from aule.frontends.torch import repeated as torch_repeated  # noqa: E402
from aule.frontends.torch.attention import Forward  # noqa: E402
from aule.frontends.torch.calls import Output, Ready  # noqa: E402
from aule.frontends.torch.repeated import OnCuda  # noqa: E402
from aule.options import AttentionOptions  # noqa: E402
from aule.view import contiguous_strides  # noqa: E402


class Launches:
    """What was launched."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, int]] = []
        self.tally: dict[str, int] = defaultdict(int)

    def start(self, pointers: Any, stream: int) -> None:
        self.calls.append((list(pointers), stream))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """PyTorch's functions of CUDA by those of the CPU."""
    monkeypatch.setattr(torch_repeated, "_empty_cuda", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(torch_repeated, "_raw_stream", lambda index: 7)
    monkeypatch.setattr(torch_repeated, "_current_device", lambda: -1)  # what a CPU tensor says
    return Launches()


def tensors(*shape: int, dtype: Any = torch.float32) -> list[Any]:
    return [torch.randn(shape, dtype=dtype) for _ in range(3)]


class Device:
    closed = False


def made(launches: Launches, q: Any, k: Any, v: Any) -> Any:
    call = Forward(q, k, v, AttentionOptions())
    shape = (*q.shape[:-1], v.shape[-1])
    output = Output("o", q.dtype, shape, contiguous_strides(shape))
    torch_repeated.forget()
    torch_repeated.remember(OnCuda, call, Ready(launches, (output,), None, Device()), (q, k, v))

    def again(*tensors: Any) -> Any:
        found = torch_repeated.repeat(call.repeat_key, tensors)
        return None if found is None else found[0]

    return again


def test_pytorch_tells_apart_what_it_has_to() -> None:
    assert torch_repeated.reliable()


def test_so_it_does_if_the_first_call_of_a_process_is_in_another_state() -> None:
    def in_float64() -> Any:
        torch.set_default_dtype(torch.float64)
        return contextlib.nullcontext()

    contexts = (torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.device("meta"))
    try:
        for context in (*contexts, in_float64):
            torch_repeated.reliable.cache_clear()
            with context():
                assert torch_repeated.reliable()
    finally:
        torch.set_default_dtype(torch.float32)


def test_like_calls_are_launched(launches: Launches) -> None:
    again = made(launches, *tensors(2, 3, 8, 16))
    q, k, v = tensors(2, 3, 8, 16)
    out = again(q, k, v)
    assert (out.shape, out.stride(), out.dtype) == (q.shape, q.stride(), q.dtype)
    assert launches.calls == [([q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()], 7)]


def test_the_result_has_its_own_shape(launches: Launches) -> None:
    q, k, v = torch.randn(1, 8, 2, 16).transpose(1, 2), torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 32)
    out = made(launches, q, k, v)(q, k, v)
    assert out.shape == (1, 2, 8, 32) and out.is_contiguous()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_other_tensors_take_the_longer_way(launches: Launches, place: int) -> None:
    given = tensors(2, 3, 8, 16)
    again = made(launches, *given)
    x = given[place]
    shifted = torch.randn(x.numel() + 1)[1:].view(x.shape)
    others = (x[:1], x[0], x.double(), torch.randn(2, 8, 3, 16).transpose(1, 2), x.clone().requires_grad_(), shifted)
    for other in (*others, torch.nn.Parameter(x, requires_grad=False), x.numpy(), None):
        if other is shifted and shifted.data_ptr() % 16 == 0:
            continue  # not shifted after all
        assert again(*given[:place], other, *given[place + 1 :]) is None
    assert not launches.calls


def test_whoever_wants_to_see_operators_sees_them(launches: Launches) -> None:
    from torch.autograd import forward_ad
    from torch.utils._python_dispatch import TorchDispatchMode

    q, k, v = tensors(2, 3, 8, 16)
    again = made(launches, q, k, v)
    with TorchDispatchMode():
        assert again(q, k, v) is None
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert again(q, k, v) is None
    with forward_ad.dual_level():
        assert again(q, k, v) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert again(q, k, v) is None
    seen = []
    torch.func.vmap(lambda x: seen.append(again(x, k, v)) or x)(torch.stack([q, q]))
    torch.func.grad(lambda x: seen.append(again(x, k, v)) or x.sum())(q)
    assert seen == [None, None] and not launches.calls


def test_another_current_device_takes_the_longer_way(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors(1, 1, 8, 16)
    again = made(launches, *given)
    monkeypatch.setattr(torch_repeated, "_current_device", lambda: 1)
    assert again(*given) is None and not launches.calls


def test_without_pytorchs_function_there_is_none(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors(1, 1, 8, 16)
    torch_repeated.reliable.cache_clear()
    monkeypatch.setattr(torch_repeated, "_guards", None)
    try:
        assert made(launches, *given)(*given) is None and not launches.calls
    finally:
        torch_repeated.reliable.cache_clear()


def test_a_function_that_sees_no_difference_is_not_used(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_repeated.reliable.cache_clear()
    monkeypatch.setattr(torch_repeated, "same_as", lambda *tensors: lambda *others: True)
    given = tensors(1, 1, 8, 16)
    try:
        assert made(launches, *given)(*given) is None and not launches.calls
    finally:
        torch_repeated.reliable.cache_clear()
