"""Soak test: thousands of calls of changing shapes, lengths, options and threads, while memory is watched.

    python tools/soak.py --backend cpu --calls 20000 --csv soak-cpu.csv

Writes the curve of memory, descriptors, threads, loaded programs and prepared calls, and fails if one of them grows
without bound: over the last half of the calls only prepared calls may still increase, up to the limit of their cache,
memory with them, and programs by a third. Every 50th result is compared with NumPy's. 20,000 calls take about ten
minutes on two cores.
"""

from __future__ import annotations

import argparse
import csv
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import aule
from aule.backends import registry
from aule.engine.signatures import MOST, signatures
from aule.runtime.base import Device

MIB = 1 << 20
SAMPLES = 100
THREADS = 4
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"causal": True}, {"causal": True, "window": (7, 0)}, {"softcap": 5.0}, {"dropout_p": 0.5, "seed": 3},
    {"return_lse": True},
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """State of the process after some calls."""

    calls: int
    seconds: float
    rss_mib: float
    descriptors: int
    threads: int
    programs: int
    prepared: int


def sample(device: Device | None, calls: int, start: float) -> Sample:
    """Look at the process."""
    fields = Path("/proc/self/status").read_text().split("\n")
    status = dict(line.split(":", 1) for line in fields if ":" in line)
    return Sample(
        calls,
        round(time.perf_counter() - start, 1),
        round(int(status["VmRSS"].split()[0]) / 1024, 1),
        len(os.listdir("/proc/self/fd")),
        int(status["Threads"]),
        0 if device is None else len(vars(device).get("_engine_programs", ())),
        len(signatures),
    )


class Caller:
    """Makes random calls on a backend; one per thread."""

    def __init__(self, backend: str, seed: int) -> None:
        self.backend, self.random = backend, np.random.default_rng(seed)
        self.kinds: tuple[Callable[[bool], None], ...] = (self.attention, self.decode, self.rows, self.cache)
        if backend != "numpy":
            self.kinds += (self.gradients,)

    def array(self, *shape: int) -> np.ndarray[Any, Any]:
        """Random numbers, of a type that the row operations and attention share."""
        return self.random.standard_normal(shape).astype(np.float32)

    def call(self, number: int) -> None:
        """Make one call; every 50th is checked."""
        self.kinds[number % len(self.kinds)](number % 50 < len(self.kinds))

    def check(self, found: Any, expected: Callable[[], Any]) -> None:
        """Compare with NumPy's result."""
        found, wanted = (x if isinstance(x, tuple) else (x,) for x in (found, expected()))
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)

    def attention(self, checked: bool) -> None:
        """Attention of random lengths and one of a few sets of options."""
        batch, heads, rows, keys = (int(self.random.integers(1, n)) for n in (3, 4, 100, 100))
        dim = int(self.random.choice((16, 32)))
        arrays = (
            self.array(batch, heads, rows, dim),
            self.array(batch, heads, keys, dim),
            self.array(batch, heads, keys, dim),
        )
        options = OPTIONS[int(self.random.integers(len(OPTIONS)))]
        found = aule.flash_attention(*arrays, **options, backend=self.backend)
        if checked:
            self.check(found, lambda: aule.flash_attention(*arrays, **options, backend="numpy"))

    def decode(self, checked: bool) -> None:
        """One token of each sequence."""
        batch, keys = int(self.random.integers(1, 4)), int(self.random.integers(1, 300))
        q, k, v = self.array(batch, 4, 16), self.array(batch, 2, keys, 16), self.array(batch, 2, keys, 16)
        lens = self.random.integers(1, keys + 1, batch).astype(np.int32)
        found = aule.decode_attention(q, k, v, context_lens=lens, backend=self.backend)
        if checked:
            self.check(found, lambda: aule.decode_attention(q, k, v, context_lens=lens, backend="numpy"))

    def rows(self, checked: bool) -> None:
        """A norm of a random number of rows, and a gate."""
        x, weight = self.array(int(self.random.integers(1, 200)), 64), self.array(64)
        found = aule.rms_norm(x, weight, backend=self.backend), aule.swiglu(x, x, backend=self.backend)
        if checked:
            self.check(found, lambda: (aule.rms_norm(x, weight, backend="numpy"), aule.swiglu(x, x, backend="numpy")))

    def cache(self, checked: bool) -> None:
        """A cache that lives for a few tokens."""
        made = aule.KVCache(16, heads_kv=2, head_dim=16, page_size=4, backend=self.backend)
        sequence = made.allocate()
        k = self.array(int(self.random.integers(1, 30)), 2, 16)
        made.append(sequence, k, k)
        found = made.attend(self.array(1, 4, 16), [sequence])
        if checked and not np.isfinite(found).all():
            raise AssertionError("attention over a cache is not finite")

    def gradients(self, checked: bool) -> None:
        """A context with tensors of its own, forward and backward."""
        shape = (1, 2, int(self.random.integers(1, 80)), 16)
        with aule.Aule(self.backend) as context:
            q, k, v, do = (context.tensor(shape).upload(self.array(*shape)) for _ in range(4))
            o, dq, dk, dv = (context.tensor(shape) for _ in range(4))
            lse = context.tensor(shape[:3])
            context.attention_forward_with_lse(q, k, v, o, lse, causal=True)
            context.attention_backward(q, k, v, o, lse, do, dq, dk, dv, causal=True)
            if checked and not np.isfinite(dq.download()).all():
                raise AssertionError("gradients are not finite")


def soak(backend: str, calls: int, samples: int = SAMPLES, seed: int = 0) -> list[Sample]:
    """Make calls on several threads, new ones from time to time; return the curve."""
    device = registry.find(backend)
    start, curve = time.perf_counter(), []
    callers = [Caller(backend, seed + i) for i in range(THREADS)]
    errors: queue.Queue[BaseException] = queue.Queue()

    def work(caller: Caller, first: int, count: int) -> None:
        try:
            for number in range(first, first + count):
                caller.call(number)
        except BaseException as error:
            errors.put(error)

    each = max(1, calls // samples // THREADS)
    for done in range(0, calls, each * THREADS):
        threads = [threading.Thread(target=work, args=(caller, done // THREADS, each)) for caller in callers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not errors.empty():
            raise errors.get()
        curve.append(sample(device, done + each * THREADS, start))
    return curve


def growth(curve: list[Sample]) -> list[str]:
    """Return what grew over the last half."""
    half = (len(curve) + 1) // 2
    middle, last = curve[half - 1], curve[-1]
    # Short sequences have kernels of their own, a few dozen per set of options, which come up one by one.
    allowances = {"descriptors": 0, "threads": 0, "programs": middle.programs // 3}
    found = []
    for name, more in allowances.items():
        # The most in each half: the system still lists a thread for a moment after its end.
        first, then = (max(getattr(one, name) for one in part) for part in (curve[:half], curve[half:]))
        if then > first + more:
            found.append(f"{name}: {first} -> {then}")
    if last.prepared > MOST:
        found.append(f"prepared calls: {last.prepared} of at most {MOST}")
    # A prepared call holds its plan: a few dozen kilobytes.
    allowed = 16 + 0.05 * middle.rss_mib + 0.05 * max(0, last.prepared - middle.prepared)
    if last.rss_mib - middle.rss_mib > allowed:
        found.append(f"memory: {middle.rss_mib} -> {last.rss_mib} MiB, more than {allowed:.0f} MiB")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path)
    chosen = parser.parse_args(argv)
    curve = soak(chosen.backend, chosen.calls, seed=chosen.seed)
    if chosen.csv is not None:
        with chosen.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(asdict(curve[0])))
            writer.writeheader()
            writer.writerows(map(asdict, curve))
    for one in (curve[0], curve[len(curve) // 4], curve[len(curve) // 2], curve[-1]):
        print(one)
    grown = growth(curve)
    print("\n".join(f"grew: {line}" for line in grown) or "nothing grew")
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
