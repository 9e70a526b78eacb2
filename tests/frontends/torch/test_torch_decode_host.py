"""Repeated decoding on CPU tensors: which calls take the quick path, and that it checks lengths and tables, too."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="these run on the CPU engine")

from aule.frontends.torch import repeated  # noqa: E402
from aule.frontends.torch.devices.host import Host  # noqa: E402

F = torch.nn.functional
HEADS, HEADS_KV, DIM, PAGE, PAGES = 4, 2, 16, 8, 6


@pytest.fixture
def longer(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions whose calls took the longer way."""
    monkeypatch.delenv("AULE_BACKEND", raising=False)
    repeated.forget()
    taken: list[str] = []
    planned = Host.planned
    monkeypatch.setattr(Host, "planned", lambda self, call, *x: (taken.append(call.op), planned(self, call, *x))[1])
    return taken


def contiguous(seed: int, dtype: Any = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, HEADS, DIM), (2, HEADS_KV, 40, DIM), (2, HEADS_KV, 40, DIM)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def paged(seed: int) -> list[Any]:
    """Queries, pools, tables and lengths of two sequences."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, HEADS, DIM), (PAGES, PAGE, HEADS_KV, DIM), (PAGES, PAGE, HEADS_KV, DIM)
    tables = torch.randperm(PAGES, generator=generator).view(2, -1).int()
    return [*(torch.randn(shape, generator=generator) for shape in shapes), tables, torch.tensor([20, 9]).int()]


def right(q: Any, k: Any, v: Any, lens: Any) -> Any:
    rows = [F.scaled_dot_product_attention(x[None, :, None], y[None, :, :n], z[None, :, :n], enable_gqa=True)[0, :, 0]
            for x, y, z, n in zip(q, k, v, lens.tolist(), strict=True)]  # fmt: skip
    return torch.stack(rows)


def gathered(pool: Any, tables: Any) -> Any:
    return pool[tables.long()].flatten(1, 2).transpose(1, 2)


def test_like_calls_with_other_tensors_and_other_contents(longer: list[str]) -> None:
    for seed in range(3):
        given, lens = contiguous(seed), torch.tensor([40 - seed, 7 + seed]).int()
        torch.testing.assert_close(aule.decode_attention(*given, context_lens=lens), right(*given, lens))
        q, k, v, tables, lens = paged(seed)
        lens += seed
        want = right(q, gathered(k, tables), gathered(v, tables), lens)
        torch.testing.assert_close(aule.flash_attention_paged(q, k, v, tables, lens), want)
    assert longer == ["decode_attention", "flash_attention_paged"]


def test_with_log_sum_exps(longer: list[str]) -> None:
    for seed in range(2):
        q, k, v = contiguous(seed)
        out, lse = aule.decode_attention(q, k, v, return_lse=True)
        scores = torch.einsum("bhd,bhkd->bhk", q, k.repeat_interleave(2, 1)) / DIM**0.5
        torch.testing.assert_close(lse, scores.logsumexp(-1))
        torch.testing.assert_close(out, aule.decode_attention(q, k, v))
    assert len(longer) == 2
    exact = contiguous(0, torch.float64)
    for _ in range(2):
        assert [x.dtype for x in aule.decode_attention(*exact, return_lse=True)] == [torch.float64, torch.float32]


@pytest.mark.parametrize("length", [-1, 25])
def test_lengths_are_looked_at(longer: list[str], length: int) -> None:
    q, k, v, tables, lens = paged(0)
    for _ in range(2):
        aule.flash_attention_paged(q, k, v, tables, lens)
    lens[1] = length
    with pytest.raises(aule.AuleError, match=f"expected context_lens from 0 to 24, .* got {length} for sequence 1"):
        aule.flash_attention_paged(q, k, v, tables, lens)
    assert len(longer) == 1


@pytest.mark.parametrize("page", [-1, PAGES])
def test_tables_are_looked_at_where_they_are_used(longer: list[str], page: int) -> None:
    q, k, v, tables, lens = paged(0)
    want, _ = (aule.flash_attention_paged(q, k, v, tables, lens) for _ in range(2))
    tables[1, 2] = page  # behind its nine keys
    torch.testing.assert_close(aule.flash_attention_paged(q, k, v, tables, lens), want)
    tables[1, 1] = page
    with pytest.raises(aule.AuleError, match=f"got {page} as page 1 of sequence 1"):
        aule.flash_attention_paged(q, k, v, tables, lens)
    assert len(longer) == 1


def test_who_takes_the_longer_way(longer: list[str]) -> None:
    """Numbers that are converted first, and options that are tensors; results that are given do not."""
    q, k, v, tables, lens = paged(0)
    want, _ = (aule.flash_attention_paged(q, k, v, tables, lens) for _ in range(2))
    longer.clear()
    for _ in range(2):
        torch.testing.assert_close(aule.flash_attention_paged(q, k, v, tables.long(), lens), want)
        torch.testing.assert_close(aule.flash_attention_paged(q, k, v, tables, lens.long()), want)
        out = torch.empty_like(want)
        assert aule.flash_attention_paged(q, k, v, tables, lens, out=out) is out
        torch.testing.assert_close(out, want)
    assert len(longer) == 5  # of which the result that is given is one
    scale = torch.tensor(0.5)
    first = aule.flash_attention_paged(q, k, v, tables, lens, scale=scale)
    scale += 1.0  # the same tensor
    second = aule.flash_attention_paged(q, k, v, tables, lens, scale=scale)
    torch.testing.assert_close(first, aule.flash_attention_paged(q, k, v, tables, lens, scale=0.5))
    torch.testing.assert_close(second, aule.flash_attention_paged(q, k, v, tables, lens, scale=1.5))
    with pytest.raises(aule.AuleError, match="need no gradient"):
        aule.flash_attention_paged(q.requires_grad_(), k, v, tables, lens)


def test_calls_at_the_same_time_do_not_share_their_tickets() -> None:
    """Two threads decode keys that are divided among tasks, whose last one puts the parts together."""
    generator = torch.Generator().manual_seed(0)
    many = [[torch.randn(shape, generator=generator) for shape in ((1, 2, 8), (1, 1, 8192, 8), (1, 1, 8192, 8))]
            for _ in range(2)]  # fmt: skip
    want = [aule.decode_attention(*given) for given in many]
    found: list[list[Any]] = [[], []]

    def work(number: int) -> None:
        found[number] = [aule.decode_attention(*many[number]) for _ in range(200)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for first, others in zip(want, found, strict=True):
        assert len(others) == 200
        assert all(torch.equal(first, other) for other in others)
