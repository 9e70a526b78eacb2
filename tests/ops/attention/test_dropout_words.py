"""Dropout: the generator against its published vectors, which weights it keeps, and its options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aule
from aule.ir.builder import Builder
from aule.ir.interpret import interpret
from aule.ir.types import Vector, i32, u32, u64
from aule.ops.softmax.dropout import Dropout, keep_scale, kept, philox_words, rounded_chance, seed_words, threshold
from aule.tile.common.random import philox
from aule.tile.vector.engine import Vectors

FULL = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL, FULL, FULL, FULL), (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""Random123's known answers for philox4x32-10: counter, key, result."""


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_published_answers(counter: Any, key: Any, result: Any, wide: bool) -> None:
    assert [int(word) for word in philox_words(counter, key)] == list(result)
    b = Builder("known_answer", workgroup=1)
    given, out = b.buffer("given", u32), b.buffer("out", u32, "write")
    words = [b.load(given, i) for i in range(6)]
    x = [b.cast(word, u64 if wide else u32) for word in words[:4]]
    for i, word in enumerate(philox(b, (x[0], x[1], x[2], x[3]), (words[4], words[5]))):
        b.store(out, i, b.cast(word, u32))
    found = np.zeros(4, np.uint32)
    interpret(b.finish(), (1, 1, 1), [np.array([*counter, *key], np.uint32), found])
    assert found.tolist() == list(result)


def chances(p: float) -> int:
    """How many of the 65536 numbers are dropped."""
    return round(p * 65536)


def bits_at(head: int, row: int, columns: int, seed: int) -> np.ndarray:
    """The definition, one number of 16 bits after the other."""
    key = (seed & FULL, seed >> 32)
    words = [philox_words((c >> 3, row, head, 0), key)[(c & 7) >> 1] for c in range(columns)]
    return np.array([int(word) >> 16 * (c & 1) & 0xFFFF for c, word in enumerate(words)])


def test_kept_is_what_is_defined() -> None:
    seed, p = 0x123456789ABCDEF0, 0.3
    found = kept(p, seed_words(seed), np.array([[5, 2]]), slice(3, 6), slice(6, 21))
    assert found.shape == (1, 2, 3, 15)
    for n, head in enumerate((5, 2)):
        for r in range(3):
            wanted = bits_at(head, 3 + r, 21, seed)[6:] >= chances(p)
            assert (found[0, n, r] == wanted).all()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_a_thread_finds_the_columns_it_holds(width: int) -> None:
    b = Builder("strips", workgroup=32 // width)
    seed, out, limit = b.buffer("seed", u32), b.buffer("out", i32, "write"), b.scalar("limit", u32)
    column = b.thread_id() * width
    dropout = Dropout(b, limit, seed, b.const(0, i32))
    for i, keep in enumerate(dropout.strip(b.const(7, i32), b.const(11, i32), column, width)):
        b.store(out, column + i, b.cast(keep, i32))
    found = np.zeros(32, np.int32)
    interpret(b.finish(), (1, 1, 1), [seed_words(99), found, threshold(0.5)])
    assert (found == (bits_at(7, 11, 32, 99) >= chances(0.5))).all()


@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_vectors_of_columns(lanes: int) -> None:
    from aule.ir.types import f64

    b = Builder("vectors", workgroup=1)
    seed, out, limit = b.buffer("seed", u32), b.buffer("out", f64, "write"), b.scalar("limit", u32)
    dropout = Dropout(b, limit, seed, b.const(0, i32))
    engine = Vectors(b, f64, lanes)
    parts = dropout.vectors(engine, b.const(7, i32), b.const(11, i32), b.const(8, i32), b.const(1.25, f64))
    for i, x in enumerate(parts):
        assert x.type == Vector(f64, lanes)
        b.store(out, i * lanes, x)
    found = np.zeros(4 * lanes)
    interpret(b.finish(), (1, 1, 1), [seed_words(99), found, threshold(0.2)])
    wanted = bits_at(7, 11, 8 + 4 * lanes, 99)[8:] >= chances(0.2)
    assert (found == np.where(wanted, 1.25, 0.0)).all()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_fraction_kept(p: float) -> None:
    mask = kept(p, seed_words(1), np.arange(4), slice(0, 256), slice(0, 1000))
    spread = np.sqrt(p * (1 - p) / mask.size)
    assert abs(mask.mean() - (1 - p)) < 5 * spread
    for axis in range(3):  # nor does any head, row or column stand out
        others = tuple(i for i in range(3) if i != axis)
        fractions = mask.mean(axis=others)
        assert np.abs(fractions - (1 - p)).max() < 6 * np.sqrt(p * (1 - p) / (mask.size / mask.shape[axis]))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_columns_of_a_counter_are_independent(p: float) -> None:
    """Both halves of each word and all four words: how often two columns of an octet are kept together, and in one row
    and the next, is as often as chance would have it."""
    mask = kept(p, seed_words(2), np.arange(8), slice(0, 512), slice(0, 512))
    octets = mask.reshape(-1, 512, 64, 8).astype(np.float64) - (1 - p)
    count, variance = octets.size / 8, p * (1 - p)
    together = np.einsum("hroi,hroj->ij", octets, octets) / count
    assert np.abs(together - np.diag(np.diag(together))).max() < 5 * variance / np.sqrt(count)
    after = np.einsum("hroi,hroj->ij", octets[:, 1:], octets[:, :-1]) / count
    assert np.abs(after).max() < 5.5 * variance / np.sqrt(count)


def test_all_numbers_of_16_bits_come_as_often() -> None:
    """Chi-square over 256 classes of the upper and of the lower byte, for each of the eight columns of a counter."""
    words = philox_words((np.arange(1 << 16), 3, 4, 0), (5, 6))
    for column in range(8):
        bits = words[column >> 1] >> np.uint32(16 * (column & 1)) & np.uint32(0xFFFF)
        for shift in (0, 8):
            found = np.bincount((bits >> np.uint32(shift) & np.uint32(0xFF)).astype(np.int64), minlength=256)
            chi = float(((found - 256.0) ** 2 / 256.0).sum())
            assert abs(chi - 255) < 5 * np.sqrt(2 * 255)


@pytest.mark.parametrize(
    ("p", "chance"),
    [(0.0, 0), (1e-9, 1), (1e-5, 1), (0.1, 6554), (0.5, 32768), (0.9, 58982), (1 - 1e-9, 65535), (1.0, 65536)],
)
def test_chances_are_multiples_of_one_in_65536(p: float, chance: int) -> None:
    """Only 0 drops nothing, and only 1 all."""
    assert rounded_chance(p) == chance / 65536
    assert threshold(p) == min(chance, 65535) << 16
    assert keep_scale(p) == (65536 / (65536 - chance) if p < 1 else 0.0)  # weights are right on average


# -- the public functions ----------------------------------------------------------------------------------------------

Q, K, V = (np.random.default_rng(i).standard_normal((2, 2, 20, 8)).astype(np.float32) for i in range(3))


def attend(**options: Any) -> Any:
    return aule.flash_attention(Q, K, V, backend="numpy", **options)


def test_seeds() -> None:
    first = attend(dropout_p=0.4, seed=7)
    assert (first == attend(dropout_p=0.4, seed=np.int64(7))).all()
    assert (first != attend(dropout_p=0.4, seed=8)).any()
    assert (first != attend(dropout_p=0.4, seed=7 + 2**32)).any()  # all 64 bits count
    assert (attend(dropout_p=0.4) != attend(dropout_p=0.4)).any()
    assert attend(dropout_p=0.4, seed=2**64 - 1).shape == Q.shape


def test_no_chance_is_no_dropout() -> None:
    plain = attend(causal=True)
    assert plain.tobytes() == attend(causal=True, dropout_p=0.0, seed=3).tobytes() == attend(dropout_p=0).tobytes()
    assert (attend(dropout_p=1.0) == 0).all()


def test_the_log_sum_exp_is_that_of_all_keys() -> None:
    _, lse = attend(dropout_p=0.9, return_lse=True, seed=0)
    assert (lse == attend(return_lse=True)[1]).all()


@pytest.mark.parametrize("p", [-0.1, 1.0001, float("nan"), float("inf")])
def test_chances_out_of_range(p: float) -> None:
    with pytest.raises(aule.InvalidArgumentError, match=r"^\[flash_attention\] expected dropout_p in 0..1, got"):
        attend(dropout_p=p)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": "much"}, "expected dropout_p to be a number"),
        ({"dropout_p": None}, r"expected dropout_p in 0\.\.1, got None"),
        ({"dropout_p": 0.1, "seed": 1.5}, "expected seed to be an int or None, got 1.5; pass an int, or None"),
        ({"dropout_p": 0.1, "seed": True}, "expected seed to be an int or None, got True"),
        ({"dropout_p": 0.1, "seed": "x"}, "expected seed to be an int or None, got 'x'"),
        ({"dropout_p": 0.1, "seed": -1}, r"expected a seed in 0..2\*\*64-1, got -1"),
        ({"dropout_p": 0.1, "seed": 2**64}, r"expected a seed in 0..2\*\*64-1"),
        ({"seed": -1}, "expected a seed"),  # also where nothing is dropped
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(aule.InvalidArgumentError, match=message):
        attend(**options)
    torch = pytest.importorskip("torch")
    with pytest.raises(aule.InvalidArgumentError, match=message):
        aule.flash_attention(*(torch.from_numpy(x) for x in (Q, K, V)), **options)


def test_dlpack_arrays_take_a_seed() -> None:
    class Plain:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    found = aule.flash_attention(Plain(Q), Plain(K), Plain(V), backend="numpy", dropout_p=0.4, seed=7)
    assert (found == attend(dropout_p=0.4, seed=7)).all()
