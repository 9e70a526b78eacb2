"""The CUDA path of packed batches, with CPU tensors in place of CUDA's and the interpreter as the device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import aule
from aule import settings
from aule.backends import registry
from aule.codegen import TARGETS
from aule.engine import run as engine
from aule.engine.signatures import Signatures
from aule.ir.interpret import interpret

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="what is compared with needs the CPU engine")

from aule.frontends.torch import route as torch_routes  # noqa: E402
from aule.frontends.torch.devices import base as torch_devices  # noqa: E402
from aule.frontends.torch.devices import streams as torch_streams  # noqa: E402

NUMPY = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64, "u32": np.uint32, "i8": np.int8}
ROOM = 1 << 15
"""Elements a buffer is taken to have: only those that a kernel asks for are touched."""


@dataclass
class Program:
    """What the engine needs of a loaded kernel."""

    kernel: Any

    @property
    def artifact(self) -> Program:
        return self

    @property
    def entry(self) -> str:
        return str(self.kernel.name)

    @property
    def params(self) -> Any:
        return self.kernel.params

    @property
    def buffers(self) -> Any:
        return tuple(p for p in self.kernel.params if p.kind == "buffer")


class Interpreted:
    """A device that runs kernels on memory by its address."""

    target = TARGETS["ptx"]
    index = None
    closed = False

    def __init__(self) -> None:
        self.prepared = 0

    def prepare(self, program: Program, grid: Any, scalars: list[Any]) -> Any:
        self.prepared += 1

        def launch(pointers: list[int], stream: int) -> None:
            addresses = iter(pointers)
            arguments = [
                _at(next(addresses), NUMPY[p.dtype]) if p.kind == "buffer" else value
                for p, value in zip(program.params, scalars, strict=True)
            ]
            interpret(program.kernel, grid, arguments, subgroup_size=32, sanitize=False)

        prepared = type("Prepared", (), {})()
        prepared.launch = launch
        return prepared


def interpret_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load kernels for `Interpreted` devices without a driver."""
    load = engine.program

    def program(device: Any, config: Any, build: Any) -> Any:
        return Program(build()) if isinstance(device, Interpreted) else load(device, config, build)

    monkeypatch.setattr(engine, "program", program)


def _at(address: int, dtype: Any) -> Any:
    size = ROOM * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Interpreted:
    return in_place_of_cuda(monkeypatch)


def in_place_of_cuda(monkeypatch: pytest.MonkeyPatch) -> Interpreted:
    """CPU tensors take the route of CUDA's, unless a backend is named, and this device computes on them."""
    made, find = Interpreted(), registry.find
    interpret_programs(monkeypatch)

    def route(tensor: Any, backend: str | None) -> Any:
        if backend:
            return torch_routes.HOST
        return torch_routes.CUDA if (settings.backend() or "cuda").startswith("cuda") else torch_routes.STAGED

    monkeypatch.setattr(torch_routes, "route", route)
    monkeypatch.setattr(torch_routes, "home", lambda tensor: torch_routes.CUDA)
    monkeypatch.setattr(torch_streams, "raw_stream", lambda index: 0)
    monkeypatch.setattr(
        torch_streams.OnStream, "remember", lambda *call: None
    )  # whose results would be on a CUDA device
    monkeypatch.setattr(torch_devices, "signatures", Signatures())
    monkeypatch.setattr(registry, "find", lambda spec: made if spec == "cuda:None" else find(spec))
    return made


def test_forward_and_gradients(device: Interpreted) -> None:
    generator = torch.Generator().manual_seed(0)
    at_q, at_k = torch.tensor([0, 5, 5, 20, 33]), torch.tensor([0, 7, 9, 30, 30], dtype=torch.int32)

    def made(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).requires_grad_()

    q, k, v, sinks = made(33, 4, 16), made(30, 2, 16), made(30, 2, 16), made(4)
    slopes = torch.rand(4, 4, generator=generator)
    dout = torch.randn(33, 4, 16, generator=generator)

    def run(backend: str | None, seed: int) -> list[Any]:
        options = {"sinks": sinks, "alibi_slopes": slopes, "dropout_p": 0.2, "seed": seed, "window": (12, 0)}
        out, lse = aule.flash_attention_varlen(q, k, v, at_q, at_k, **options, return_lse=True, backend=backend)
        return [out, lse, *torch.autograd.grad(out, (q, k, v, sinks), dout)]

    for seed in (3, 4):
        for found, wanted in zip(run(None, seed), run("cpu", seed), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert device.prepared == 4  # the second time, with another seed, nothing is planned again


def test_rows_of_no_sequence_are_zero(device: Interpreted) -> None:
    at = torch.tensor([0, 3, 7], dtype=torch.int32)
    x = torch.randn(9, 2, 8, requires_grad=True)
    out = aule.flash_attention_varlen(x, x, x, at, at, 4, 4)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    assert out[:7].any() and grad[:7].any() and not out[7:].any() and not grad[7:].any()


def test_dropout_of_one_batch(device: Interpreted) -> None:
    """The way of batches that are not packed, with a seed in the memory of the device."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 33, 16), (1, 2, 30, 16), (1, 2, 30, 16), (1, 1, 33, 30))
    q, k, v, bias = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    dout = torch.randn(1, 4, 33, 16, generator=generator)

    def run(backend: str | None, **options: Any) -> list[Any]:
        out, lse = aule.flash_attention(
            q, k, v, bias=bias, window=(12, 3), causal=False, return_lse=True, backend=backend, **options
        )
        return [out, lse, *torch.autograd.grad(out, (q, k, v, bias), dout)]

    seen = []
    for options in ({}, {"dropout_p": 0.2, "seed": 3}, {"dropout_p": 0.2, "seed": 4}, {"dropout_p": 0.4, "seed": 4}):
        found = run(None, **options)
        for mine, theirs in zip(found, run("cpu", **options), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        seen.append(device.prepared)
    # Planned for each chance to drop, forward and three kernels for the gradients, and not again for another seed.
    assert seen == [4, 8, 8, 12]


@pytest.mark.parametrize("target", ["q", "k", "v"])
def test_out_may_be_an_input(target: str, device: Interpreted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write rows while others read K and V, so they are never given the same memory for both."""
    given: list[list[int]] = []
    prepare = device.prepare

    def recorded(*args: Any) -> Any:
        prepared = prepare(*args)
        launch = prepared.launch
        prepared.launch = lambda pointers, stream: (given.append(pointers), launch(pointers, stream))
        return prepared

    monkeypatch.setattr(device, "prepare", recorded)
    generator = torch.Generator().manual_seed(0)
    arrays = {name: torch.randn((1, 2, 40, 16), generator=generator) for name in "qkv"}
    expected = aule.flash_attention(**arrays, return_lse=True, backend="cpu")
    for _ in range(2):
        inputs = {name: x.clone() for name, x in arrays.items()}
        out, lse = aule.flash_attention(**inputs, out=inputs[target], return_lse=True)
        assert out is inputs[target]
        torch.testing.assert_close((out, lse), expected, rtol=1e-4, atol=1e-5)
        q, k, v, o, _ = given[-1]
        assert o not in (k, v) and (o == q) == (target == "q")


def test_out_of_a_packed_batch_may_be_an_input(device: Interpreted) -> None:
    at = torch.tensor([0, 5, 20], dtype=torch.int32)
    q, k, v = torch.randn(3, 20, 2, 16, generator=torch.Generator().manual_seed(0))  # in one piece of memory
    expected = aule.flash_attention_varlen(q, k, v, at, at, 15, 15, return_lse=True, backend="cpu")
    found = aule.flash_attention_varlen(q, k, v, at, at, 15, 15, return_lse=True, out=v)
    assert found[0] is v
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
