"""What ``aule bench`` measures: cases, their results, and timing that is fair on a noisy machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Call = Callable[[], Any]

QUICK_ROUNDS, ROUNDS = 3, 7
_SECONDS = 0.02
"""Least time of a round: shorter calls are repeated in it."""


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes
    ----------
    group : str
        ``forward``, ``backward``, ``decode`` or ``rows``.
    work : float
        Floating-point operations of a call, or bytes if ``unit`` is ``GB/s``.
    """

    name: str
    group: str
    dtype: str
    work: float
    unit: str = "GFLOP/s"


@dataclass(frozen=True)
class Attention:
    """Sizes of one attention call."""

    batch: int
    heads: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    dim: int
    causal: bool
    dtype: str

    @property
    def name(self) -> str:
        """What the table calls it."""
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        length = f"{self.seq_q}" if self.seq_q == self.seq_kv else f"{self.seq_q} x {self.seq_kv}"
        return f"batch {self.batch}, {heads} heads, {length}, d{self.dim}" + (", causal" if self.causal else "")

    def case(self, group: str) -> Case:
        """The row of its forward or backward pass; the latter counts 2.5 times the operations, as papers do."""
        flops = 4.0 * self.batch * self.heads * self.seq_q * self.seq_kv * self.dim * (0.5 if self.causal else 1.0)
        return Case(self.name, group, self.dtype, flops * (2.5 if group == "backward" else 1.0))


@dataclass(frozen=True)
class Result:
    """Times of one case; those of the peer are None if there is none."""

    name: str
    group: str
    dtype: str
    seconds: float
    rate: float
    unit: str
    peer: str = ""
    peer_seconds: float | None = None
    ratio: float | None = None
    """Speed in units of the peer's: the median over rounds that time both."""


def race(case: Case, ours: Call, peers: dict[str, Call], rounds: int, timed: Callable[[Call, int], float]) -> Result:
    """Time a call and its peers in turns, so that all see the same noise; the peer with the best time counts.

    ``timed(call, count)`` returns the seconds of ``count`` calls.
    """
    calls = {"": ours, **peers}
    counts = {}
    for name, call in calls.items():
        timed(call, 1)  # builds kernels, and warms caches up
        once = max(timed(call, 1), 1e-6)
        counts[name] = max(1, round(_SECONDS / once))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call, counts[name]) / counts[name])
    seconds = statistics.median(times[""])
    rate = case.work / seconds / 1e9
    if not peers:
        return Result(case.name, case.group, case.dtype, seconds, rate, case.unit)
    best = min(peers, key=lambda name: statistics.median(times[name]))
    ratio = statistics.median(theirs / mine for mine, theirs in zip(times[""], times[best], strict=True))
    return Result(
        case.name, case.group, case.dtype, seconds, rate, case.unit, best, statistics.median(times[best]), ratio
    )


def on_clock(call: Call, count: int) -> float:
    """Time calls that are finished when they return."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start
