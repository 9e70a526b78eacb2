"""What is done while something fails. A scenario returns its results, which must be right whenever it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from drivers import Driver

import aule
from aule.engine import tune as tuner
from aule.engine.tune_cases import Settings
from aule.tuning import own

Array = npt.NDArray[Any]


def _made(seed: int, *shape: int) -> Array:
    array = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    array.flags.writeable = False
    return array


Q, K, V, DO = _made(0, 1, 2, 20, 16), _made(1, 1, 2, 20, 16), _made(2, 1, 2, 20, 16), _made(3, 1, 2, 20, 16)
NEW, CACHE_K, CACHE_V = _made(4, 2, 2, 16), _made(5, 2, 2, 40, 16), _made(6, 2, 2, 40, 16)
ROWS, WEIGHT = _made(7, 6, 64), _made(8, 64)
INPUTS = (Q, K, V, DO, NEW, CACHE_K, CACHE_V, ROWS, WEIGHT)
"""Read-only; and tests compare them with copies, since kernels know no such flag."""


def forward(driver: Driver) -> list[Array]:
    return list(aule.flash_attention(Q, K, V, causal=True, return_lse=True, backend=driver.backend))


def backward(driver: Driver) -> list[Array]:
    with aule.Aule(driver.backend) as context:
        q, k, v, do = (context.tensor(x.shape).upload(x) for x in (Q, K, V, DO))
        o, dq, dk, dv = (context.tensor(Q.shape) for _ in range(4))
        lse = context.tensor(Q.shape[:3])
        context.attention_forward_with_lse(q, k, v, o, lse, causal=True)
        context.attention_backward(q, k, v, o, lse, do, dq, dk, dv, causal=True, deterministic=True)
        return [x.download() for x in (o, lse, dq, dk, dv)]


def decode(driver: Driver) -> list[Array]:
    lens = np.array([40, 17], np.int32)
    return [aule.decode_attention(NEW, CACHE_K, CACHE_V, context_lens=lens, backend=driver.backend)]


def rows(driver: Driver) -> list[Array]:
    return [aule.rms_norm(ROWS, WEIGHT, backend=driver.backend)]


def cache(driver: Driver) -> list[Array]:
    """Append to a sequence and to a fork of it, whose last page is copied. A failed append changes nothing."""
    found = aule.KVCache(8, heads_kv=2, head_dim=16, page_size=4, backend=driver.backend)
    tokens = np.swapaxes(CACHE_K[0], 0, 1)
    first = found.allocate()
    found.append(first, tokens[:6], tokens[:6])
    second = found.fork(first)
    before = found.pages_free, found.length(first), found.length(second)
    pool = [np.copy(x) for x in found.pool()[:2]]
    try:
        found.append([first, second], tokens[6:8], tokens[6:8])
    except aule.AuleError:
        assert (found.pages_free, found.length(first), found.length(second)) == before
        owned = np.asarray(found.block_tables([first])).ravel()[:2]
        for old, new in zip(pool, found.pool()[:2], strict=True):
            assert (old[owned[0]] == new[owned[0]]).all() and (old[owned[1], :2] == new[owned[1], :2]).all()
        raise
    return [found.attend(NEW, [first, second])]


def tune(driver: Driver) -> list[Array]:
    device = driver.device()
    own.forget(device.target)
    kept, tuner.candidates = tuner.candidates, lambda *_: iter([])  # the table's choice alone: each takes seconds
    try:
        outcome = next(tuner.tune(device, "forward", Settings("f32", 16, 16), seconds=0.0))
    finally:
        tuner.candidates = kept
    if outcome.measured[0].refused:  # the user is told why, and nothing is saved
        raise aule.AuleError("AULE_ERROR_NOT_MEASURED", outcome.measured[0].refused)
    return []


def close(driver: Driver) -> list[Array]:
    """Close the open device: it never raises, and the next call opens it again."""
    driver.device().close()
    return []


class Scenario(NamedTuple):
    """``cold`` ones begin with a device that was never opened and an empty disk cache."""

    run: Callable[[Driver], list[Array]]
    cold: bool = False


SCENARIOS = {
    "forward": Scenario(forward),
    "backward": Scenario(backward),
    "decode": Scenario(decode),
    "rows": Scenario(rows),
    "cache": Scenario(cache),
    "compile": Scenario(rows, cold=True),
    "tune": Scenario(tune),
    "close": Scenario(close, cold=True),
}
