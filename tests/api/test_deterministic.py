"""The option ``deterministic``: where it is accepted and refused, and that it reaches the plan of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grid
import numpy as np
import pytest
from test_fragment_interpreted import target

import aule
from aule.engine.attention import attention_views
from aule.ops.attention.plan.backward import plan_backward
from aule.ops.attention.validate import attention_problem
from aule.ops.attention.varlen import varlen_problem
from aule.ops.shared.plan import Plan
from aule.options import AttentionOptions
from aule.view import TensorView, contiguous_strides

AT = np.array([0, 3, 8], np.int32)


def made(*shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


# -- the plan ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_it_reaches_the_plan(dtype: Any) -> None:
    """Without it there is no kernel for dQ where a device has atomics: that of dK and dV adds it up, on matrix units
    or not."""
    views = dict.fromkeys("qkv", grid.view_of(made(1, 2, 256, 64, dtype=dtype)))

    def steps(**options: Any) -> list[str]:
        problem, operands = attention_problem(**views, return_lse=True, **options)
        memory = attention_views(operands, operands.q) | {"do": operands.q}
        for name in ("dq", "dk", "dv"):
            shape = operands.q.shape
            memory[name] = TensorView(problem.dtype, shape, contiguous_strides(shape), "device", None)
        plan = plan_backward(problem, memory, target())
        return [getattr(step.config, "of", type(step.config).__name__) for step in plan.steps]

    assert steps(deterministic=True) == ["DeltaConfig", "queries", "keys"]
    assert steps() == steps(deterministic=False) == ["DeltaConfig", "keys", "RoundConfig"]


def test_it_reaches_packed_problems() -> None:
    views = dict.fromkeys("qkv", grid.view_of(made(8, 2, 16)))
    offsets = dict.fromkeys(("cu_q", "cu_k"), TensorView("i32", AT.shape, (1,), "host", AT))
    for value in (True, False):
        problem, _ = varlen_problem(**views, **offsets, max_q=None, max_k=None, deterministic=value)
        assert problem.deterministic == value


# -- accepted and refused ----------------------------------------------------------------------------------------------


def on_a_context(**options: Any) -> Any:
    with aule.Aule("cpu") as device:
        q, k, v, out, dout, dq, dk, dv = (device.tensor((1, 2, 5, 8)).upload(made(1, 2, 5, 8)) for _ in range(8))
        lse = device.tensor((1, 2, 5))
        device.attention_forward_with_lse(q, k, v, out, lse)
        device.attention_backward(q, k, v, out, lse, dout, dq, dk, dv, **options)
        return dq.download()


def calls() -> dict[str, Callable[..., Any]]:
    x, rows = made(1, 2, 5, 8), made(8, 2, 8)
    found: dict[str, Callable[..., Any]] = {
        "numpy": lambda **options: aule.flash_attention(x, x, x, **options),
        "numpy, packed": lambda **options: aule.flash_attention_varlen(rows, rows, rows, AT, AT, **options),
        "context": on_a_context,
    }
    try:
        import torch
    except ImportError:
        return found
    from aule.integrations import flash_attn

    t, packed, at = torch.from_numpy(x), torch.from_numpy(rows), torch.from_numpy(AT)
    wanted = t.clone().requires_grad_()
    return found | {
        "torch": lambda **options: aule.flash_attention(t, t, t, **options),
        "torch, gradient": lambda **options: aule.flash_attention(wanted, t, t, **options).sum().backward(),
        "torch, operator": lambda **options: torch.vmap(lambda q: aule.flash_attention(q, t, t, **options))(t[None]),
        "aule_attention": lambda **options: aule.aule_attention(t, t, t, **options),
        "torch, packed": lambda **options: aule.flash_attention_varlen(packed, packed, packed, at, at, **options),
        "flash_attn": lambda **options: flash_attn.flash_attn_func(t, t, t, **options),
        "flash_attn, packed": lambda **options: flash_attn.flash_attn_varlen_func(
            packed, packed, packed, at, at, 5, 5, **options
        ),
        "flash_attn, qkv": lambda **options: flash_attn.flash_attn_qkvpacked_func(torch.stack([t, t, t], 2), **options),
        "flash_attn, kv": lambda **options: flash_attn.flash_attn_kvpacked_func(t, torch.stack([t, t], 2), **options),
    }


@pytest.mark.parametrize("name", calls())
def test_a_bool_and_nothing_else(name: str) -> None:
    if name == "context" or name.startswith("torch, gradient"):
        pytest.importorskip("llvmlite", reason="gradients need the CPU engine")
    call = calls()[name]
    for value in (True, False, np.True_):
        call(deterministic=value)
    for bad in (1, 0, None, "yes"):  # also where a call of this signature is known already
        with pytest.raises(aule.InvalidArgumentError, match=r"expected deterministic to be True or False, got"):
            call(deterministic=bad)


# -- torch -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def switch() -> Iterator[Callable[[bool], None]]:
    torch = pytest.importorskip("torch")
    pytest.importorskip("llvmlite", reason="gradients need the CPU engine")
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


def test_gradients_of_tensors(switch: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by the option, or by PyTorch's switch when the gradients are computed."""
    import torch

    from aule.frontends.torch.attention import Backward
    from aule.frontends.torch.devices.host import Host

    seen: list[bool] = []
    compute = Host.compute

    def gradients(self: Host, call: Any) -> Any:
        if not isinstance(call, Backward):
            return compute(self, call)
        seen.append(call.options.deterministic)
        return tuple(call.tensors[name].clone() for name in "qkv")

    monkeypatch.setattr(Host, "compute", gradients)
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    for option in (False, True):
        aule.flash_attention(q, q, q, deterministic=option).sum().backward()
        torch.compile(
            lambda q, option=option: aule.flash_attention(q, q, q, deterministic=option), backend="aot_eager"
        )(q).sum().backward()
    assert seen == [False, False, True, True]
    out = aule.flash_attention(q, q, q)
    switch(True)
    out.sum().backward()
    assert seen[4:] == [True]


def test_planned_again_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients on a device are remembered by signature, to which this belongs."""
    torch = pytest.importorskip("torch")
    from test_torch_varlen_cuda import in_place_of_cuda

    from aule.frontends.torch import attention as torch_attention
    from aule.frontends.torch import route

    seen: list[bool] = []

    def plan(problem: Any, *_: Any) -> Any:
        seen.append(problem.deterministic)
        return Plan(())

    in_place_of_cuda(monkeypatch)
    monkeypatch.setattr(torch_attention, "backward_plan", plan)
    x, lse = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5)
    saved = torch_attention.Saved(x, x, x, x, lse, x)
    for option in (False, True, False, True):
        options = AttentionOptions(deterministic=option)
        route.CUDA.compute(torch_attention.Backward(saved, options, False))
    assert seen == [False, True]


def test_gradients_of_packed_tensors(switch: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from aule.frontends.torch import attention as torch_attention

    seen: list[bool] = []
    compute = torch_attention.backward_on_host

    def gradients(problem: Any, *rest: Any) -> Any:
        seen.append(problem.deterministic)
        return compute(problem, *rest)

    monkeypatch.setattr(torch_attention, "backward_on_host", gradients)
    x, at = torch.randn(8, 2, 8, requires_grad=True), torch.from_numpy(AT)
    for option in (False, True):
        aule.flash_attention_varlen(x, x, x, at, at, deterministic=option).sum().backward()
    out = aule.flash_attention_varlen(x, x, x, at, at)
    switch(True)
    out.sum().backward()
    assert seen == [False, True, True]
