"""Dropout in CUDA graphs: one launch draws the seeds of all calls of a capture, and draws anew in each replay."""

from __future__ import annotations

from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.version.cuda is None, reason="PyTorch has no CUDA device"
    ),
]


def masks(outs: list[Any]) -> list[Any]:
    return [out != 0 for out in outs]


def test_replays_draw_anew_and_follow_the_generator() -> None:
    x = torch.randn(256, 1024, device="cuda").bfloat16().requires_grad_()
    q = torch.randn(1, 2, 256, 64, device="cuda").bfloat16()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())

    def step() -> tuple[list[Any], Any, Any]:
        outs = [aule.softmax_dropout(x, dropout_p=0.5) for _ in range(3)]
        attended = aule.flash_attention(q, q, q, dropout_p=0.5)
        return outs, torch.autograd.grad(outs[1].sum(), x)[0], attended

    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        outs, grad, attended = step()
    replays = []
    for seed in (3, 4, 3):
        torch.manual_seed(seed)
        graph.replay()
        replays.append([x.clone() for x in (*masks(outs), grad, attended)])
    graph.replay()
    replays.append([x.clone() for x in (*masks(outs), grad, attended)])
    torch.cuda.synchronize()
    first = replays[0]
    assert not any(torch.equal(first[i], first[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert all(torch.equal(found, right) for found, right in zip(replays[2], first, strict=True))
    for other in (replays[1], replays[3]):
        assert not any(torch.equal(found, wrong) for found, wrong in zip(other, first, strict=True))
    weights, keep = torch.softmax(x.detach().double(), -1), first[1] * 2.0
    right = weights * (keep - (weights * keep).sum(-1, keepdim=True))  # the gradient has the same seed
    assert (first[3].double() - right).abs().max() <= 1e-2 * right.abs().max()
