"""Device times of calls that alternate, so that changing clocks affect all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from aule.runtime.base import Device, Launch

Run = Callable[[], float]
"""Seconds of a call by the device's clock, as it is now."""


def warm_up(seconds: float) -> None:
    """Have the clocks where memory keeps them: products of matrices would heat the card, which lowers them."""
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(20):
            target.copy_(source)
        torch.cuda.synchronize()


class GraphRun:
    """A CUDA graph of so many calls on the current stream, one after the other.

    It is replayed twice and timed the second time, when the host has launched it before its turn.
    """

    def __init__(self, call: Callable[[], Any], calls: int) -> None:
        self.call, self.calls = call, calls  # a call keeps the memory that its graph reads
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
            for _ in range(calls):
                call()
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self) -> float:
        self.graph.replay()
        self.begin.record()
        self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) * 1e-3 / self.calls


def launches_run(device: Device, launches: list[Launch], calls: int) -> Run:
    """Runs launches on another device: through Vulkan, all calls in one command buffer, each launch waiting for the one
    before."""
    return lambda: device.time_launches(launches, calls)


def in_turns(runs: Mapping[str, Run], rounds: int = 15) -> dict[str, float]:
    """Median seconds of each, when all take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            seconds = run()
            if number:  # the first round brings everything to where it is used from
                times[name].append(seconds)
    return {name: statistics.median(found) for name, found in times.items()}
