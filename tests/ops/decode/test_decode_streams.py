"""Decoding with PyTorch on CUDA where calls run at the same time: on several streams, and in graphs beside them."""

from __future__ import annotations

from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.version.cuda is None, reason="PyTorch has no NVIDIA GPU here"
    ),
]

KEYS = 20000
ROUNDS = 50


@pytest.fixture(scope="module")
def given() -> tuple[list[Any], Any]:
    """Calls of one signature whose sequences are split, with their results."""
    calls = []
    for seed in range(4):
        generator = torch.Generator("cuda").manual_seed(seed)
        shapes = ((1, 32, 1, 128), (1, 8, KEYS, 128), (1, 8, KEYS, 128))
        calls.append([torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16) for s in shapes])
    wanted = torch.stack([aule.decode_attention(*call) for call in calls])
    plain = torch.nn.functional.scaled_dot_product_attention(*calls[0], enable_gqa=True)
    torch.testing.assert_close(wanted[0], plain, rtol=2e-2, atol=3e-4)
    return calls, wanted


def test_streams(given: tuple[list[Any], Any]) -> None:
    calls, wanted = given
    streams = [torch.cuda.Stream() for _ in calls]
    results: list[list[Any]] = [[] for _ in calls]
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        for stream, call, found in zip(streams, calls, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(aule.decode_attention(*call))
    torch.cuda.synchronize()
    for found, right in zip(results, wanted, strict=True):
        assert all(torch.equal(out, right) for out in found)


def test_graphs_beside_calls(given: tuple[list[Any], Any]) -> None:
    """Two graphs from the same stream of PyTorch's, each of several calls, replayed together and beside plain calls on
    the stream that captured them."""
    calls, wanted = given
    capturing, others = torch.cuda.Stream(), [torch.cuda.Stream() for _ in range(2)]
    graphs, outs = [], []
    for call in calls[:2]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=capturing):
            outs.append([aule.decode_attention(*call) for _ in range(3)])
        graphs.append(graph)
    plain = []
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        for stream, graph in zip(others, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(capturing):
            plain.append(aule.decode_attention(*calls[2]))
    torch.cuda.synchronize()
    for made, right in zip(outs, wanted, strict=False):
        assert all(torch.equal(out, right) for out in made)
    assert all(torch.equal(out, wanted[2]) for out in plain)
