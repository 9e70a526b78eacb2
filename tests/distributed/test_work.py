"""What ranks compute, send and wait for."""

from __future__ import annotations

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

BATCH, HEADS, ROWS, DIM, VALUE_DIM = 1, 4, 64, 16, 24


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


def memory() -> int:
    """The largest number of elements that a rank holds in one tensor while it computes."""
    sizes = []
    original = torch.Tensor.new_empty

    def watched(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = original(self, *args, **kwargs)
        sizes.append(made.numel())
        return made

    torch.Tensor.new_empty = watched  # type: ignore[method-assign]
    try:
        whole = 512
        shapes = [(1, 2, whole // dist.get_world_size(), dim) for dim in (DIM, DIM, VALUE_DIM)]
        given = [torch.randn(shape) for shape in shapes]
        distributed.ring_attention(*given)
    finally:
        torch.Tensor.new_empty = original  # type: ignore[method-assign]
    return max(sizes)


def test_buffers_shrink_with_the_number_of_ranks(worlds: Callable[[int], World]) -> None:
    two, four = (max(worlds(ranks).run(memory)) for ranks in (2, 4))
    assert two == 2 * four == 2 * 256 * VALUE_DIM
