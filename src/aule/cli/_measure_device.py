"""Cases of ``aule bench`` on tensors of any device, without PyTorch: attention forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.api.context import Aule
from aule.cli._measure import Attention, Call, Result, on_clock, race
from aule.errors import AuleError


class DeviceBench:
    """Measures on memory of a device.

    Parameters
    ----------
    device : str
        As ``backend=`` takes it.
    quick : bool
        Fewer cases.
    """

    def __init__(self, device: str, quick: bool, rounds: int) -> None:
        self._context = Aule(device)
        self._quick, self._rounds = quick, rounds
        self._slow = self._context.get_device_info()["software"]

    def cases(self) -> Iterator[tuple[str, Callable[[], Result]]]:
        """Labels, and functions that measure."""
        for sizes in self._attention():
            yield f"forward {sizes.name}", partial(self._measure, sizes, "forward")
            yield f"backward {sizes.name}", partial(self._measure, sizes, "backward")

    def _attention(self) -> Iterator[Attention]:
        seq = 256 if self._slow else 2048
        for dtype in ("float32", "float16"):
            for dim in (64,) if self._quick else (64, 128):
                for causal in (False, True):
                    yield Attention(1, 2 if self._slow else 16, 2 if self._slow else 16, seq, seq, dim, causal, dtype)

    def _measure(self, sizes: Attention, group: str) -> Result:
        gpu, rng = self._context, np.random.default_rng(0)
        shape = (sizes.batch, sizes.heads, sizes.seq_q, sizes.dim)
        arrays = rng.standard_normal((4, *shape), dtype=np.float32).astype(sizes.dtype)
        q, k, v, dout = (gpu.tensor(shape, sizes.dtype).upload(x) for x in arrays)
        out, lse = gpu.tensor(shape, sizes.dtype), gpu.tensor(shape[:3])
        gpu.attention_forward_with_lse(q, k, v, out, lse, causal=sizes.causal)
        self._check(sizes, arrays, out.download())
        ours = partial(gpu.attention_gpu, q, k, v, out, causal=sizes.causal)
        if group == "backward":
            grads = [gpu.tensor(shape, sizes.dtype) for _ in "qkv"]
            ours = partial(gpu.attention_backward, q, k, v, out, lse, dout, *grads, causal=sizes.causal)
        return race(sizes.case(group), ours, {}, self._rounds, self._timed)

    def _timed(self, call: Call, count: int) -> float:
        self._context.synchronize()

        def finished() -> None:
            for _ in range(count):
                call()
            self._context.synchronize()

        return on_clock(finished, 1)

    @staticmethod
    def _check(sizes: Attention, arrays: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Compare the last head with float64; its error may be some roundings of the largest value."""
        q, k, v = (x[-1, -1].astype(np.float64) for x in arrays[:3])
        scores = q @ k.T / math.sqrt(sizes.dim)
        if sizes.causal:
            scores = np.where(np.tri(*scores.shape) > 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = weights @ v / weights.sum(-1, keepdims=True)
        error = float(np.abs(out[-1, -1] - wanted).max() / np.abs(wanted).max())
        allowed = 1e-5 if sizes.dtype == "float32" else 4e-3
        if not error <= allowed:
            raise AuleError(
                "AULE_ERROR_WRONG_RESULT",
                f"[bench] expected an error of at most {allowed:.1e} for {sizes.name}, got {error:.1e}; run "
                "`aule check`, and report this",
            )
