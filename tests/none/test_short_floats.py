"""Floats of 24 bits, on the interpreter: what is kept of a number, and what is not a number."""

from __future__ import annotations

import numpy as np
import pytest

from aule.ir import Builder, KernelIR
from aule.ir.interpret import interpret
from aule.ir.types import f32, u32
from aule.ir.verify import verify
from aule.tile.short_floats import RUN, short_words, shortened, widened


def build(threads: int) -> KernelIR:
    """Cuts runs of numbers, puts them where a row of sums has them, and makes them wide again."""
    b = Builder("there_and_back", threads)
    source, words, out = b.buffer("source", f32), b.buffer("words", u32, "readwrite"), b.buffer("out", f32, "write")
    at = b.thread_id() * RUN
    upper, lower = shortened(b, b.unpack(b.load(source, at, RUN)))
    b.store(words, at >> 1, upper)
    b.store(words, (at >> 2) + threads * RUN // 2, lower)
    found = widened(b, b.load(words, at >> 1, 4), b.load(words, (at >> 2) + threads * RUN // 2, 2))
    for i, value in enumerate(found):
        b.store(out, at + i, value)
    kernel = b.finish()
    verify(kernel)
    return kernel


def test_numbers_lose_their_last_byte() -> None:
    threads = 32
    rng = np.random.default_rng(7)
    numbers = rng.integers(0, 1 << 32, threads * RUN, dtype=np.uint64).astype(np.uint32).view(np.float32)
    numbers[np.isnan(numbers)] = 1.0
    numbers[:8] = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -3.4e38, 1 + 2.0**-15)
    words, out = np.zeros(short_words(threads * RUN), np.uint32), np.zeros(threads * RUN, np.float32)
    interpret(build(threads), (1, 1, 1), [numbers, words, out])
    wanted = (numbers.view(np.uint32) & np.uint32(0xFFFFFF00)).view(np.float32)
    np.testing.assert_array_equal(out.view(np.uint32), wanted.view(np.uint32))
    assert np.isnan(out[4]) and out[7] == numbers[7] and words.nbytes == numbers.nbytes * 3 // 4
    np.testing.assert_array_equal((words[: numbers.size // 2]).view(np.uint16), numbers.view(np.uint16)[1::2])


def test_a_row_that_is_no_whole_number_of_pieces() -> None:
    with pytest.raises(AssertionError):
        short_words(24)
