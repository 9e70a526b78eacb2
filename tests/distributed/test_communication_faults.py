"""Ranks that disagree, or die: an error on every rank within the group's time limit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from world import World

import aule.distributed as distributed
from aule.distributed import compute
from aule.errors import AuleError, CommunicationError

RANKS, LIMIT = 3, 6.0
FULL = os.environ.get("AULE_FULL_GRID") == "1"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World(RANKS, LIMIT)
    made.run(dist.get_rank)  # all processes have started
    yield made
    made.close()


def differing(name: str) -> None:
    """A call that differs on the last rank."""
    last = dist.get_rank() == RANKS - 1
    rows, options = 8, {"dropout_p": 0.0}
    function: Any = distributed.ring_attention
    if name == "shards":
        rows = 10 if last else 8
    elif name == "options":
        options = {"softcap": 2.0 if last else 3.0}
    elif name == "balance":
        options = {"balance": "contiguous" if last else "zigzag"}
    elif name == "invalid":
        options = {"window": "wide" if last else None}
    elif name == "unknown":
        options = {"is_causal": True} if last else {}
    elif name == "gradients":
        options = {}
    elif name == "function":
        function, options = (distributed.unshard, {}) if last else (function, options)
    elif name.startswith("ulysses"):
        function = distributed.ulysses_attention
        options = {"scale": 0.5 if last else 0.25} if name == "ulysses" else {"causal": not last}
    elif name.startswith("decoding"):
        function, options = distributed.decode_attention, {}
        if last:
            options = {
                "decoding": {"softcap": 2.0}, "decoding window": {"window": "wide"},
                "decoding sinks": {"sinks": torch.zeros(2)}, "decoding slopes": {"alibi_slopes": torch.zeros(5)},
            }.get(name, {})  # fmt: skip
    elif name.startswith("unshard"):
        function = distributed.unshard
        rows = 10 if last and name == "unshard" else 8
        options = {"dim": 4 if last and name == "unshard axis" else 2}
    x: Any = torch.randn(1, 3, rows, 16, requires_grad=name == "gradients" and last)
    y = x[..., :8] if last and name == "decoding values" else x
    if last and name.endswith("type"):
        x = [1.0, 2.0]
    found = function(x, **options) if function is distributed.unshard else function(x, x, y, **options)
    assert found is None, "no error"


EXPECTED = {
    "shards": r"same q on every rank, got \[1, 3, 8, 16\] of float32 on rank 0, 1 and \[1, 3, 10, 16\]",
    "options": r"same softcap on every rank, got 3.0 on rank 0, 1 and 2.0 on rank 2",
    "balance": r"same balance on every rank, got zigzag on rank 0, 1 and contiguous on rank 2",
    "invalid": r"window",
    "unknown": r"is_causal",
    "gradients": r"same gradients on every rank",
    "function": r"same call on every rank, got ring_attention on rank 0, 1 and unshard on rank 2",
    "type": r"expected q to be a torch tensor.* got list",
    "ulysses": r"same scale on every rank, got 0.25 on rank 0, 1 and 0.5 on rank 2",
    "ulysses mask": r"same causal on every rank, got True on rank 0, 1 and False on rank 2",
    "decoding": r"same .* on every rank",
    "decoding window": r"window",
    "decoding values": r"same heads and dims of v on every rank, got 3, 16 .* and 3, 8 of torch.float32 on rank 2",
    "decoding sinks": r"expected sinks \[3\], got \[2\]",
    "decoding slopes": r"alibi_slopes",
    "decoding type": r"expected q to be a torch tensor.* got list",
    "unshard": r"same shape on every rank, got \[1, 3, 8, 16\] on rank 0, 1 and \[1, 3, 10, 16\] on rank 2",
    "unshard axis": r"expected dim as an axis of x \[1, 3, 8, 16\], got 4",
    "unshard type": r"expected x to be a torch tensor.* got list",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_differences_raise_on_every_rank(world: World, name: str) -> None:
    start = time.monotonic()
    for error in world.errors(differing, name):
        assert isinstance(error, AuleError), error
        assert not isinstance(error, CommunicationError)
        with pytest.raises(type(error), match=EXPECTED[name]):
            _raise(error)
    assert time.monotonic() - start < LIMIT  # nobody waited for the time limit


def _raise(error: Exception) -> None:
    raise error


def refused(name: str) -> None:
    """A call that no rank can make."""
    x = torch.randn(1, 2, 9 if name == "odd" else 8, 16)
    if name == "heads":
        distributed.ulysses_attention(x, x, x)
    elif name == "odd":
        distributed.ring_attention(x, x, x)
    elif name == "striped dropout":
        distributed.ring_attention(x, x, x, balance="striped", dropout_p=0.5)
    elif name == "dropout":
        distributed.ring_attention(x, x, x, dropout_p=0.5)
    elif name == "mask":
        distributed.ring_attention(x, x, x, mask=torch.ones(8, 8, dtype=torch.bool))
    elif name == "balance":
        distributed.shard(x, balance="zig")
    elif name == "length":
        distributed.shard(x, dim=-1)
    elif name == "cu_seqlens":
        distributed.ring_attention(x[0], x[0], x[0], cu_seqlens=(0, 5))
    elif name == "gradients of NumPy":
        distributed.ring_attention(x.requires_grad_(), x, x, backend="numpy")
    elif name == "missing backend":
        distributed.ring_attention(x, x, x, backend="metal")
    elif name == "function of scores":
        distributed.decode_attention(x[:, :, :1], x, x, score_mod=scored_by_position)


def scored_by_position(score: Any, batch: Any, head: Any, row: Any, key: Any) -> Any:
    """Would get numbers of this rank's keys."""
    return score + key


@pytest.mark.parametrize(
    ("name", "message"),
    (
        ("heads", "multiple of 3 query heads"),
        ("odd", "even number of rows"),
        ("striped dropout", "balance 'zigzag' or 'contiguous' with dropout"),
        ("dropout", "chunks of a multiple of 8 keys"),
        ("mask", "this rank's rows and all keys"),
        ("balance", "expected balance"),
        ("length", "multiple of 3 rows"),
        ("cu_seqlens", "cu_seqlens up to"),
        ("gradients of NumPy", "need no gradient"),
        ("missing backend", "metal"),
        ("function of scores", "got `score_mod`"),
    ),
)
def test_impossible_calls_are_refused(world: World, name: str, message: str) -> None:
    for error in world.errors(refused, name):
        with pytest.raises(AuleError, match=message):
            _raise(error)


def wrong_group() -> None:
    """A group of the first two ranks, called on all."""
    group = dist.new_group([0, 1])
    x = torch.randn(1, 2, 8, 16)
    if dist.get_rank() < 2:
        distributed.ring_attention(x, x, x, group=group)
        raise AuleError("FINE", "[test] members are served")
    distributed.ring_attention(x, x, x, group=group)


def test_a_rank_outside_of_the_group_is_told(world: World) -> None:
    first, second, third = world.errors(wrong_group)
    assert "members are served" in str(first) and "members are served" in str(second)
    assert "that rank 2 belongs to" in str(third)


def failing_between_messages() -> None:
    """Ranks that fail on different hops, such as for want of memory, and call again: messages are left over."""
    group = dist.new_group(list(range(RANKS)))
    x = torch.randn(1, 3, 8, 16)
    original, calls = compute.forward, 0

    def forward(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > (dist.get_rank() != 1):
            dist.barrier()  # all messages of the first hop have arrived
            raise MemoryError
        return original(*args)

    compute.forward = forward
    try:
        distributed.ring_attention(x, x, x, group=group, causal=False)
    except MemoryError:
        pass
    finally:
        compute.forward = original
    distributed.ring_attention(x, x, x, group=group, causal=False)


def test_messages_of_a_failed_call_are_not_taken_for_those_of_the_next(world: World) -> None:
    for error in world.errors(failing_between_messages):
        with pytest.raises(CommunicationError, match="earlier call failed between its messages; make a new group"):
            _raise(error)


def missing(kind: str) -> None:
    """The last rank does not call, calls on another group, or dies."""
    x = torch.randn(1, 3, 8, 16, requires_grad=True)
    last = dist.get_rank() == RANKS - 1
    function: Any = distributed.ulysses_attention if "Ulysses" in kind else distributed.ring_attention
    group = None
    if kind == "other group":
        pair = dist.new_group([0, 1])
        group = None if last else pair
    elif last and kind == "late":
        raise AuleError("FINE", "[test] does not call")
    elif last and "while" in kind:
        compute.forward = lambda *args: os._exit(1)
    out = function(x, x, x, group=group)
    if kind == "other group":
        raise AuleError("FINE", "[test] members are served")
    if last and "between" in kind:
        os._exit(1)
    out.sum().backward()


def test_a_rank_that_does_not_call_is_noticed(world: World) -> None:
    start = time.monotonic()
    *others, _ = world.errors(missing, "late")
    assert all(isinstance(error, CommunicationError) for error in others)
    assert time.monotonic() - start < 3 * LIMIT


KINDS = (
    "dies between forward and backward",
    "dies while others compute",
    "dies while others compute for Ulysses",
    "dies between forward and backward of Ulysses",
    "other group",
)


@pytest.mark.parametrize("kind", KINDS if FULL else KINDS[:1])
def test_a_rank_that_dies_is_noticed(kind: str) -> None:
    own = World(RANKS, LIMIT)
    own.run(dist.get_rank)
    start = time.monotonic()
    *others, third = own.errors(missing, kind)
    lost = [third] if kind == "other group" else others
    assert all(isinstance(error, CommunicationError) and "3 ranks" in str(error) for error in lost), (others, third)
    assert kind != "other group" or all("members are served" in str(error) for error in others), others
    assert time.monotonic() - start < 3 * LIMIT
    own.close()
