"""What a rank computes, sends and receives on every hop of a ring; each rank works it out for itself."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from aule.distributed.positions import Block, Positions, blocks

Span = tuple[int, int]
"""First and end of some keys; (0, 0) for none."""
NOTHING = (0, 0)


class Hop(NamedTuple):
    """One hop of a rank.

    Attributes
    ----------
    here : Span
        Keys of another rank that are here.
    on : Span
        Those of them that go on to the next rank.
    blocks : tuple of Block
        The calls on them.
    """

    here: Span
    on: Span
    blocks: tuple[Block, ...]

    @property
    def going_home(self) -> list[Span]:
        """Keys whose gradients are complete here."""
        return without(self.here, self.on)


class Schedule(NamedTuple):
    """All hops of a rank, and where its own keys are meanwhile.

    Attributes
    ----------
    hops : tuple of Hop
        The first is on its own keys.
    own : tuple of list of Span
        For every hop, its own keys whose gradients are then sent home.
    """

    hops: tuple[Hop, ...]
    own: tuple[list[Span], ...]


@lru_cache(256)
def schedule(at: Positions, rank: int) -> Schedule:
    """The schedule of a rank."""
    ranks = at.ranks
    calls = {(r, owner): tuple(blocks(at, r, owner)) for r in range(ranks) for owner in range(ranks)}
    needed = {pair: _span([block.keys for block in found]) for pair, found in calls.items()}

    def travelling(owner: int, hop: int) -> Span:
        """Keys of a rank that make a hop: ranks further on need them."""
        if hop == 0:
            return 0, at.keys
        wanted = [needed[(owner + h) % ranks, owner] for h in range(hop, ranks)]
        return _span([slice(*span) for span in wanted if span != NOTHING])

    last = max((h for h in range(1, ranks) for owner in range(ranks) if travelling(owner, h) != NOTHING), default=0)
    hops, own = [], []
    for h in range(last + 1):
        owner = (rank - h) % ranks
        hops.append(Hop(travelling(owner, h), travelling(owner, h + 1), calls[rank, owner]))
        own.append(without(travelling(rank, h), travelling(rank, h + 1)))
    return Schedule(tuple(hops), tuple(own))


def _span(parts: list[slice]) -> Span:
    return (min(x.start for x in parts), max(x.stop for x in parts)) if parts else NOTHING


def without(span: Span, inner: Span) -> list[Span]:
    """The parts of a span outside of another one that lies in it."""
    first, end = (span[1], span[1]) if inner == NOTHING else inner
    return [(x, y) for x, y in ((span[0], first), (end, span[1])) if x < y]
