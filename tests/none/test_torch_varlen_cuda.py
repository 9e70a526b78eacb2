"""The way of CUDA tensors through packed batches, with CPU tensors in their place and the interpreter as the device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import aule
from aule.codegen import TARGETS
from aule.engine import attention as engine
from aule.engine import programs
from aule.ir.interpret import interpret

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="what is compared with needs the CPU engine")

from aule.frontends import torch_cuda, torch_routes, torch_varlen  # noqa: E402

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
    def params(self) -> Any:
        return self.kernel.params

    @property
    def buffers(self) -> Any:
        return tuple(p for p in self.kernel.params if p.kind == "buffer")


class Interpreted:
    """A device that runs kernels on memory by its address."""

    target = TARGETS["ptx"]
    index = None

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


def _at(address: int, dtype: Any) -> Any:
    size = ROOM * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Interpreted:
    made = Interpreted()
    for module in (engine, programs):
        monkeypatch.setattr(module, "program", lambda device, config, build: Program(build()))
    monkeypatch.setattr(torch_routes, "route", lambda q, backend: "host" if backend else "cuda")
    monkeypatch.setattr(torch_varlen, "raw_stream", lambda index: 0)
    monkeypatch.setattr(torch_varlen, "_ready", {})
    monkeypatch.setattr(torch_varlen.registry, "find", _or_else(made, torch_varlen.registry.find))
    return made


def _or_else(device: Any, find: Any) -> Any:
    return lambda spec: device if spec == "cuda:None" else find(spec)


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


def test_dropout_of_one_batch(device: Interpreted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of batches that are not packed, with a seed in the memory of the device."""
    monkeypatch.setattr(torch_cuda, "raw_stream", lambda index: 0)
    for known in ("_launches", "_gradient_launches"):
        monkeypatch.setattr(torch_cuda, known, {})
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
