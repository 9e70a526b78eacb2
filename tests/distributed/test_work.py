"""What ranks compute, send and wait for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from world import World

import aule.distributed as distributed
from aule.distributed import compute
from aule.distributed.group import Messages

FULL = os.environ.get("AULE_FULL_GRID") == "1"
BATCH, HEADS, ROWS, DIM, VALUE_DIM = 1, 4, 64, 16, 24
MEMORY_HEADS, MEMORY_ROWS = 8, 1024


def tensors(heads_kv: int = HEADS) -> tuple[torch.Tensor, ...]:
    """q, k and v of this rank."""
    shapes = ((HEADS, DIM), (heads_kv, DIM), (heads_kv, VALUE_DIM))
    return tuple(torch.randn(BATCH, heads, ROWS, dim, requires_grad=True) for heads, dim in shapes)


def counted(function: str, options: dict[str, Any], heads_kv: int = HEADS) -> list[tuple[int, int, int]]:
    """FLOPs, bytes and messages of a forward pass, then of a backward pass."""
    given = tensors(heads_kv)
    found = []
    distributed.reset_counters()
    out = getattr(distributed, function)(*given, **options)
    found.append((distributed.counters().flops, distributed.counters().bytes_sent, distributed.counters().messages))
    distributed.reset_counters()
    out.sum().backward()
    found.append((distributed.counters().flops, distributed.counters().bytes_sent, distributed.counters().messages))
    return found


def test_zigzag_is_even_and_sends_what_theory_says(worlds: Callable[[int], World]) -> None:
    ranks = 4
    found = worlds(ranks).run(counted, "ring_attention", {})
    whole = ranks * ROWS
    for number, width in ((0, DIM + VALUE_DIM), (1, 3 * DIM + 2 * VALUE_DIM)):
        flops = [own[number][0] for own in found]
        assert max(flops) <= 1.05 * sum(flops) / ranks
        assert sum(flops) == 2 * BATCH * HEADS * width * whole * (whole + 1) // 2
    keys = 4 * BATCH * HEADS * ROWS * (DIM + VALUE_DIM)  # bytes of K and V of a rank
    sent = [own[0][1] for own in found]
    # Everything goes ranks - 1 hops, except for the second chunk of rank 0: nobody after it keeps those keys.
    assert sum(sent) == ranks * (ranks - 1) * keys - (ranks - 1) * keys // 2
    # Backward: the same again, and gradients of what travels as often, and once more to go home; in float32, too.
    back = [own[1][1] for own in found]
    assert sum(back) == 2 * sum(sent) + (ranks - 1) * keys + keys // 2


def test_contiguous_windows_send_neighbours_only(worlds: Callable[[int], World]) -> None:
    found = worlds(4).run(counted, "ring_attention", {"balance": "contiguous", "window": 10})
    keys = 4 * BATCH * HEADS * ROWS * (DIM + VALUE_DIM)
    assert [own[0][1] for own in found] == [keys, keys, keys, 0]  # the last rank's keys are needed nowhere else
    assert [own[0][2] for own in found] == [2, 2, 2, 0]


def test_ulysses_sends_each_key_head_to_the_ranks_that_need_it(worlds: Callable[[int], World]) -> None:
    ranks, row = 4, 4 * BATCH * ROWS * (DIM + VALUE_DIM)
    for heads_kv, copies in ((4, 1), (2, 2), (1, 4)):
        found = worlds(ranks).run(counted, "ulysses_attention", {}, heads_kv)
        heads = HEADS + heads_kv * copies  # of q and the result, and of k and v
        assert {own[0][1] for own in found} == {row * heads * (ranks - 1) // ranks}
        assert len({own[0][0] for own in found}) == 1


def events() -> list[str]:
    """The order of starts, waits and calls of a forward and a backward pass."""
    seen: list[str] = []

    def watch(place: Any, name: str, label: str) -> Callable[[], None]:
        original = getattr(place, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            sends = getattr(args[0], "_ops", None) if label == "start" else None
            if label != "start" or sends:
                seen.append(label)
            return original(*args, **kwargs)

        setattr(place, name, watched)
        return lambda: setattr(place, name, original)

    undo = [watch(Messages, "start", "start"), watch(compute, "forward", "call"), watch(compute, "backward", "call")]
    undo.append(watch(Messages, "_finish", "wait"))
    try:
        out = distributed.ring_attention(*tensors(), causal=False)
        seen.append("backward")
        out.sum().backward()
    finally:
        for back in undo:
            back()
    return seen


def test_the_next_hop_is_sent_before_this_one_is_computed(worlds: Callable[[int], World]) -> None:
    for seen in worlds(4).run(events):
        forward, backward = seen[: seen.index("backward")], seen[seen.index("backward") + 1 :]
        assert forward == ["start", "call", "wait"] * 3 + ["call"]
        # Keys go on before a hop is computed; gradients after it, while the next hop is computed.
        hop = ["start", "call", "start"]
        assert [x for x in backward if x != "wait"] == hop * 3 + ["call", "start"]
        for number, at in enumerate(i for i, x in enumerate(backward) if x == "call"):
            before = backward[:at]
            assert before.count("wait") == max(2 * number - 1, 0)  # those of earlier hops only


def clocked(work: float, delay: float) -> tuple[float, float]:
    """What a forward and a backward pass would take, by a clock that calls move on by ``work`` and that messages,
    which arrive ``delay`` after they are started, hold up where they are waited for."""
    now, taken = 0.0, []
    arrival: dict[Messages, float] = {}
    originals = Messages.start, Messages._finish, compute.forward, compute.backward

    def start(self: Messages) -> None:
        if self._ops:
            arrival[self] = now + delay
        originals[0](self)

    def finish(self: Messages) -> None:
        nonlocal now
        originals[1](self)
        now = max(now, arrival[self])

    def computing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += work
            return function(*args, **kwargs)

        return call

    places = (Messages, "start"), (Messages, "_finish"), (compute, "forward"), (compute, "backward")
    for (place, name), new in zip(places, (start, finish, *map(computing, originals[2:])), strict=True):
        setattr(place, name, new)
    try:
        out = distributed.ring_attention(*tensors(), causal=False)
        taken.append(now)
        out.sum().backward()
        taken.append(now - taken[0])
    finally:
        for (place, name), old in zip(places, originals, strict=True):
            setattr(place, name, old)
    return taken[0], taken[1]


@pytest.mark.parametrize(("work", "delay"), ((3.0, 2.0), (3.0, 3.0), (2.0, 5.0)))
def test_a_step_takes_the_longer_of_computing_and_sending(
    worlds: Callable[[int], World], work: float, delay: float
) -> None:
    hops, longer = 4, max(work, delay)
    for forward, backward in worlds(hops).run(clocked, work, delay):
        assert forward == (hops - 1) * longer + work  # and not hops * work + (hops - 1) * delay
        # The first keys arrive while the first hop is computed, and the last gradients go home after the last one.
        assert hops * work + delay <= backward <= hops * longer + delay


def memory(function: str) -> list[int]:
    """The most bytes that a forward and a backward pass hold at a time beyond their arguments.

    The least of five runs: gloo's threads free some of what was sent, which the profiler does not see.
    """
    rows = MEMORY_ROWS // dist.get_world_size()
    shapes = [(1, MEMORY_HEADS, rows, dim) for dim in (DIM, DIM, VALUE_DIM)]
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]
    runs = [held(getattr(distributed, function), given, torch.randn(shapes[-1])) for _ in range(5)]
    return [min(run[i] for run in runs) for i in (0, 1)]


def held(attention: Callable[..., Any], given: list[torch.Tensor], dout: torch.Tensor) -> list[int]:
    """The most bytes of one forward and one backward pass, as the profiler counts them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as watched:
        out = attention(*given, causal=False)
        before = torch.empty(1 << 20, dtype=torch.uint8)  # marks the end of the forward pass
        del before
        torch.autograd.grad(out, given, dout)
    now, most = 0, [0]
    for event in sorted(watched.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            if event.nbytes() == 1 << 20:
                most.append(0)
            elif event.nbytes() != -(1 << 20):
                now += event.nbytes()
                most[-1] = max(most[-1], now)
    return most


KEYS, RESULT = DIM + VALUE_DIM, VALUE_DIM + 1
# Numbers for each of a rank's rows and heads. A ring holds its sums, a hop's result and keys and values of two ranks;
# backward the result, gradients of this rank, of a hop and of a call, keys and values of two ranks, and gradients that
# arrive, go on and go home. Ulysses holds arguments and result as sent and as received, and one tensor
# that a thread of gloo frees late; backward their gradients, too.
LIMITS = {
    "ring_attention": (2 * RESULT + 2 * KEYS + 16, RESULT + 2 * (DIM + KEYS) + 6 * KEYS),
    "ulysses_attention": (2 * (DIM + KEYS) + RESULT + VALUE_DIM, 5 * (DIM + KEYS) + RESULT + VALUE_DIM),
}


@pytest.mark.parametrize("function", LIMITS)
def test_memory_falls_with_the_number_of_ranks(worlds: Callable[[int], World], function: str) -> None:
    held = {}
    for ranks in (2, 4, 8) if FULL else (2, 4):
        most = worlds(ranks).run(memory, function)
        held[ranks] = [max(own[i] for own in most) / (4 * MEMORY_HEADS * MEMORY_ROWS // ranks) for i in (0, 1)]
        assert all(VALUE_DIM <= x <= limit for x, limit in zip(held[ranks], LIMITS[function], strict=True)), held
    assert not FULL or all(y <= 1.05 * x for x, y in zip(held[4], held[8], strict=True)), held
