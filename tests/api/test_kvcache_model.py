"""`KVCache` against a plain dictionary: tokens, sharing and pages are right after any sequence of calls."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

import aule

LAYERS, PAGES, PAGE, HEADS, DIM = 2, 7, 3, 2, 4
SIX = np.array([0, 1, 1, 1, 1, 1], np.int32)  # where five sequences begin


class CacheModel(RuleBasedStateMachine):
    """A dictionary from sequences to the numbers of their tokens, layer by layer."""

    seqs: Bundle[int] = Bundle("seqs")
    backend = "numpy"

    def __init__(self) -> None:
        super().__init__()
        self.cache = aule.KVCache(
            PAGES, HEADS, DIM, page_size=PAGE, layers=LAYERS, layout="HND", value_dim=DIM + 1, backend=self.backend
        )
        self.model: dict[int, list[list[int]]] = {}
        self.freed: list[int] = []
        self.tokens = 0

    @rule(target=seqs)
    def allocate(self) -> int:
        seq = self.cache.allocate()
        assert seq not in self.model and seq not in self.freed
        self.model[seq] = [[] for _ in range(LAYERS)]
        return seq

    @rule(target=seqs, seq=seqs)
    def fork(self, seq: int) -> int:
        before = self.cache.pages_free
        new = self.cache.fork(seq)
        assert self.cache.pages_free == before
        self.model[new] = [list(tokens) for tokens in self.model[seq]]
        return new

    @rule(seq=consumes(seqs))
    def free(self, seq: int) -> None:
        self.cache.free(seq)
        del self.model[seq]
        self.freed.append(seq)

    @rule(seq=seqs, data=st.data())
    def truncate(self, seq: int, data: st.DataObject) -> None:
        longest = max(map(len, self.model[seq]))
        length = data.draw(st.integers(0, longest))
        self.cache.truncate(seq, length)
        self.model[seq] = [tokens[:length] for tokens in self.model[seq]]

    @rule(chosen=st.lists(seqs, min_size=1, max_size=3, unique=True), data=st.data())
    def append(self, chosen: list[int], data: st.DataObject) -> None:
        counts = data.draw(st.lists(st.integers(0, 2 * PAGE), min_size=len(chosen), max_size=len(chosen)))
        layers = data.draw(st.sampled_from([(0, 1), (0,), (1,)]))
        for layer in layers:
            numbers = np.arange(self.tokens, self.tokens + sum(counts))
            self.tokens += sum(counts)
            k, v = (np.broadcast_to(numbers[:, None, None], (len(numbers), HEADS, n)) for n in (DIM, DIM + 1))
            tables, used = self.tables(), self.cache.pages_in_use
            try:
                self.cache.append(chosen, k.astype(np.float32), -v.astype(np.float32), layer, lengths=counts)
            except aule.CacheFullError as error:
                assert error.pages_needed > error.pages_free == self.cache.pages_free
                assert self.tables() == tables and self.cache.pages_in_use == used
                assert len(chosen) * (2 * PAGE + PAGE) // PAGE >= error.pages_needed
                return
            done = 0
            for seq, count in zip(chosen, counts, strict=True):
                self.model[seq][layer] += numbers[done : done + count].tolist()
                done += count

    @rule()
    def use_after_free(self) -> None:
        for seq in self.freed:
            with pytest.raises(aule.ClosedError, match="was freed"):
                self.cache.free(seq)
            with pytest.raises(aule.ClosedError, match="was freed"):
                self.cache.fork(seq)

    def tables(self) -> dict[int, tuple[int, ...]]:
        result = {}
        for seq in self.model:
            pages = -(-max(len(tokens) for tokens in self.model[seq]) // PAGE)
            row = self.cache.block_tables(seq)[0]
            assert len(row) == pages
            result[seq] = tuple(row.tolist())
        return result

    @invariant()
    def contents(self) -> None:
        for seq, layers in self.model.items():
            table = self.cache.block_tables([seq])[0]
            for layer, tokens in enumerate(layers):
                assert self.cache.length(seq, layer) == self.cache.context_lens([seq], layer)[0] == len(tokens)
                pool = self.cache.pool(layer)
                for array, sign in ((pool.k, 1), (pool.v, -1)):
                    rows = array[table].swapaxes(1, 2).reshape(-1, HEADS, array.shape[3])[: len(tokens)]
                    assert (rows == sign * np.array(tokens, np.float32)[:, None, None]).all()

    @invariant()
    def pages(self) -> None:
        held = Counter(page for row in self.tables().values() for page in row)
        assert self.cache.pages_in_use == len(held) == PAGES - self.cache.pages_free
        assert all(self.cache._pages.references(page) == held[page] for page in range(PAGES))
        assert self.cache.sequences == tuple(self.model)


class CacheModelOnCpu(CacheModel):
    """The same, written by the CPU engine."""

    backend = "cpu"


TestNumpy = CacheModel.TestCase
TestNumpy.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestCpu = CacheModelOnCpu.TestCase
TestCpu.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


def filled(tokens: int = 4, **options: Any) -> tuple[aule.KVCache, int]:
    cache = aule.KVCache(4, 1, 2, page_size=2, **options)
    seq = cache.allocate()
    rows = np.ones((tokens, 1, 2), np.float32)
    cache.append(seq, rows, rows)
    return cache, seq


def test_exhaustion_says_what_is_missing_and_writes_nothing() -> None:
    cache, seq = filled(7)
    before = cache.pool().k.copy()
    rows = np.full((4, 1, 2), 2.0, np.float32)
    with pytest.raises(aule.CacheFullError, match="expected 2 free pages of 2 tokens, got 0 of 4") as caught:
        cache.append(seq, rows, rows)
    assert isinstance(caught.value, aule.OutOfMemoryError)
    assert caught.value.code == "AULE_ERROR_CACHE_FULL"
    assert caught.value.requested_bytes == 2 * cache.page_bytes == 2 * 2 * (2 + 2) * 4
    assert (cache.pool().k == before).all() and cache.length(seq) == 7


def test_a_shared_page_is_copied_by_the_first_that_writes() -> None:
    cache, seq = filled(3)
    other = cache.fork(seq)
    assert cache.pages_in_use == 2
    rows = np.array([[[5.0, 5.0]], [[6.0, 6.0]]], np.float32)
    cache.append([seq, other], rows, rows)  # one of the two may keep the page
    assert cache.pages_in_use == 3
    tables = cache.block_tables([seq, other])
    assert tables[0, 0] == tables[1, 0] and tables[0, 1] != tables[1, 1]
    assert cache.pool().k[tables[:, 1], 1, 0, 0].tolist() == [5.0, 6.0]
    assert cache.pool().k[tables[:, 1], 0, 0, 0].tolist() == [1.0, 1.0]


def test_a_launch_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, seq = filled(3)

    def fail(*_: Any, **__: Any) -> None:
        raise aule.LaunchError("[cuda] expected a launch, got none; try again")

    rows = np.ones((4, 1, 2), np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(cache._front, "write", fail)
        with pytest.raises(aule.LaunchError):
            cache.append(seq, rows, rows)
    assert cache.length(seq) == 3 and cache.pages_in_use == 2
    cache.append(seq, rows, rows)
    assert cache.length(seq) == 7


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda c, s: c.free(99), aule.InvalidArgumentError, "allocate"),
        (lambda c, s: c.truncate(s, 5), aule.InvalidArgumentError, "0 to the sequence's 4"),
        (lambda c, s: c.truncate(s, -1), aule.InvalidArgumentError, "0 to"),
        (lambda c, s: c.length(s, 1), aule.InvalidArgumentError, "layer from 0 to 0"),
        (lambda c, s: c.append([s, s], *two((2, 1, 2))), aule.InvalidArgumentError, "every sequence once"),
        (lambda c, s: c.append(s, *two((2, 2, 2))), aule.InvalidShapeError, "heads_kv 1 and dim 2"),
        (lambda c, s: c.append(s, *two((2, 1, 3))), aule.InvalidShapeError, "heads_kv 1 and dim 2"),
        (lambda c, s: c.append(s, *two((2, 2))), aule.InvalidShapeError, "add the missing axes"),
        (lambda c, s: c.append(s, *two((3, 1, 2)), lengths=[2]), aule.InvalidShapeError, "lengths"),
        (lambda c, s: c.append(s, *two((2, 1, 2), np.float16)), aule.InvalidDtypeError, "one dtype"),
        (lambda c, s: c.append(s, *two((2, 1, 2), np.int32)), aule.InvalidDtypeError, "float32"),
        (lambda c, s: c.append(s, [1.0], [1.0]), aule.InvalidDtypeError, "device="),
        (lambda c, s: c.append(s, *two((1, 1, 2)), rope=two((9, 2))), aule.InvalidShapeError, "at most 1"),
        (lambda c, s: c.append(s, *two((1, 1, 2)), rope=two((4, 1))), aule.InvalidShapeError, "at least 5 positions"),
        (lambda c, s: c.attend(two((1, 1, 2))[0], s, rope=two((3, 1))), aule.InvalidShapeError, "at least 4 positions"),
        (lambda c, s: c.append(s, *two((2, 1, 2)), lengths=[]), aule.InvalidShapeError, "lengths"),
        (lambda c, s: c.append(s, *two((2, 1, 2)), layer=True), aule.InvalidArgumentError, "expected layer"),
        (lambda c, s: c.attend(two((2, 1, 2))[0], s, rope=two((9, 1))), aule.InvalidShapeError, "q of .* 1 sequences"),
        (lambda c, s: c.attend(two((2, 1, 2))[0], s), aule.InvalidShapeError, "q of .* 1 sequences"),
        (lambda c, s: c.attend([1.0], s, rope=two((9, 1))), aule.InvalidDtypeError, "q to be an array like"),
        (lambda c, s: c.attend(two((1, 1, 2))[0], s, layout="HND"), aule.InvalidArgumentError, "has its own"),
        (
            lambda c, s: c.attend(two((1, 1, 2))[0], s, cascade=True, cu_seqlens_q=SIX),
            aule.InvalidShapeError,
            "batch = 5",
        ),
    ],
)
def test_errors(call: Any, error: type[Exception], words: str) -> None:
    cache, seq = filled()
    before = cache.pool().k.copy()
    with pytest.raises(error, match=words):
        call(cache, seq)
    assert cache.length(seq) == 4 and cache.pages_in_use == 2 and (cache.pool().k == before).all()


def two(shape: tuple[int, ...], dtype: Any = np.float32) -> tuple[Any, Any]:
    return np.zeros(shape, dtype), np.zeros(shape, dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 257}, {"page_size": 0}, {"layers": 0}, {"dtype": "float64"}, {"layout": "DHN"},
        {"quantize": "int4"}, {"num_pages": 0}, {"head_dim": 577}, {"backend": "fortran"},
    ],
)  # fmt: skip
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(aule.AuleError, match="expected"):
        aule.KVCache(**{"num_pages": 2, "heads_kv": 1, "head_dim": 8, **options})


def test_threads_have_sequences_of_their_own() -> None:
    """Forks, appends and frees of several threads at once leave each with its own tokens."""
    wrong: list[tuple[int, int]] = []
    cache = aule.KVCache(200, 1, 2, page_size=2)
    shared = cache.allocate()
    cache.append(shared, *two((3, 1, 2)))

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for turn in range(25):
            seq = cache.fork(shared)
            mine = [0.0] * 3
            for _ in range(int(rng.integers(1, 5))):
                rows = np.full((int(rng.integers(1, 4)), 1, 2), number + turn / 32, np.float32)
                cache.append(seq, rows, rows)
                mine += rows[:, 0, 0].tolist()
            found = cache.pool().k[cache.block_tables(seq)[0]].reshape(-1, 2)[: len(mine), 0].tolist()
            if found != mine:
                wrong.append((number, turn))
            cache.free(seq)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.sequences == (shared,) and cache.pages_in_use == 2


@pytest.mark.parametrize("length", [1.5, None, "1", np.ones(2)])
def test_a_length_that_is_none_changes_nothing(length: Any) -> None:
    cache = aule.KVCache(4, 1, 2, page_size=2)
    seq = cache.allocate()
    cache.append(seq, np.ones((3, 1, 2), np.float32), np.ones((3, 1, 2), np.float32))
    with pytest.raises(aule.InvalidArgumentError, match="expected length to be an int"):
        cache.truncate(seq, length)
    assert (cache.length(seq), cache.pages_in_use) == (3, 2)
    cache.truncate(seq, np.int64(1))
    assert (cache.length(seq), cache.pages_in_use) == (1, 1)


@pytest.mark.parametrize("wrong", [None, 1.5, "x", [[1], [2]], np.ones(2)])
def test_what_is_no_sequence(wrong: Any) -> None:
    cache = aule.KVCache(4, 1, 2)
    k = np.ones((1, 1, 2), np.float32)
    for call in (
        lambda: cache.append(wrong, k, k), lambda: cache.attend(k, wrong), lambda: cache.fork(wrong),
        lambda: cache.free(wrong), lambda: cache.length(wrong), lambda: cache.block_tables(wrong),
    ):  # fmt: skip
        with pytest.raises((aule.InvalidArgumentError, aule.InvalidShapeError), match="expected"):
            call()


@pytest.mark.parametrize("number", [int, np.int64])
def test_a_freed_sequence_is_closed_whatever_its_type(number: Any) -> None:
    cache, seq = filled()
    cache.free(number(seq))
    for call in (cache.free, cache.fork, cache.length, cache.block_tables):
        with pytest.raises(aule.ClosedError, match=r"\[KVCache\..* which was freed"):
            call(number(seq))
    with pytest.raises(aule.ClosedError, match=r"\[KVCache.attend\]"):
        cache.attend(two((1, 1, 2))[0], [number(seq)])


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_pool_that_is_too_large(device: str | None) -> None:
    if device is not None:
        pytest.importorskip("torch")
    with pytest.raises(aule.OutOfMemoryError, match="expected 72057594037927936 bytes on") as caught:
        aule.KVCache(1 << 30, 1 << 16, 256, page_size=1, device=device)
    assert caught.value.requested_bytes == 72057594037927936


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_has_its_own_pages(duplicate: Any, device: str | None) -> None:
    torch = pytest.importorskip("torch") if device is not None else None

    def rows(value: float) -> tuple[Any, Any]:
        made = np.full((1, 1, 2), value, np.float32)
        return (made, made) if torch is None else (torch.from_numpy(made), torch.from_numpy(made))

    cache = aule.KVCache(4, 1, 2, page_size=2, device=device)
    seq = cache.allocate()
    cache.append(seq, *rows(1.0))
    other = duplicate(cache)
    other.append(seq, *rows(3.0))
    assert (cache.length(seq), other.length(seq)) == (1, 2)
    cache.append(seq, *rows(5.0))
    q = rows(0.0)[0]
    assert [float(c.attend(q, seq)[0, 0, 0]) for c in (cache, other)] == [3.0, 2.0]


def test_pages_are_counted_without_assertions() -> None:
    """Python's -O leaves out assert statements, and with them whatever they do."""
    code = (
        "import aule, numpy as np\n"
        "cache = aule.KVCache(4, 1, 2, page_size=2)\n"
        "rows = np.ones((3, 1, 2), np.float32)\n"
        "for _ in range(2): cache.append(cache.allocate(), rows, rows)\n"
        "print(cache.pages_in_use, cache.block_tables(cache.sequences).tolist())\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == ["4", "[[0, 1], [2, 3]]\n"]


@pytest.mark.parametrize("rope", [False, True])
def test_gradients_are_refused_and_not_lost(rope: bool) -> None:
    torch = pytest.importorskip("torch")
    cache = aule.KVCache(4, 1, 2, page_size=2, device="cpu")
    seq = cache.allocate()
    rows = torch.ones(1, 1, 2)
    angles = (torch.ones(4, 1), torch.zeros(4, 1)) if rope else None
    wanting = torch.ones(1, 1, 2, requires_grad=True)
    with pytest.raises(aule.AuleError, match=r"\[KVCache.append\] expected tensors that need no gradient"):
        cache.append(seq, wanting, rows, rope=angles)
    assert cache.length(seq) == 0
    with torch.no_grad():
        cache.append(seq, wanting, rows, rope=angles)
    with pytest.raises(aule.AuleError, match="expected tensors that need no gradient"):
        cache.attend(wanting, seq, rope=angles)
