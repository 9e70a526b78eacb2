"""Process groups: who takes part, messages that overlap with computing, and agreement before the first of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from aule.distributed import counting
from aule.errors import AuleError, CommunicationError, InvalidArgumentError

_NO_SEED = -1


class Ring(NamedTuple):
    """A process group as seen by one of its ranks. ``group`` is None for a ring of one, which sends nothing."""

    op: str
    group: Any
    rank: int
    ranks: int

    def peer(self, step: int) -> int:
        """The number in the world of the rank ``step`` places further on."""
        return int(dist.get_global_rank(self.group, (self.rank + step) % self.ranks))


def alone(op: str) -> Ring:
    """A ring of this process only."""
    return Ring(op, None, 0, 1)


def ring_of(op: str, group: Any) -> Ring:
    """Check a group, which may be None for the default group or a mesh of one axis."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgumentError(
            f"[{op}] expected a process group, got none; call torch.distributed.init_process_group first"
        )
    if hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            raise InvalidArgumentError(
                f"[{op}] expected a group or a mesh of one axis, got a mesh of {group.ndim}; pass one axis of it, "
                "mesh['name'], or use aule.distributed.attention"
            )
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group) if isinstance(group, dist.ProcessGroup) else -1
    if rank < 0:
        raise InvalidArgumentError(
            f"[{op}] expected a group that rank {dist.get_rank()} belongs to, got {group!r}; make it with "
            "torch.distributed.new_group on every rank, and call this function on its members only"
        )
    return Ring(op, group, rank, dist.get_world_size(group))


def mesh_rings(op: str, mesh: Any) -> tuple[Ring, Ring]:
    """The ring and the Ulysses group of a mesh of one or two axes, or of a process group, which is a ring."""
    if getattr(mesh, "ndim", 1) == 1:
        return ring_of(op, mesh), alone(op)
    if mesh.ndim != 2:
        raise InvalidArgumentError(
            f"[{op}] expected a mesh of one or two axes, (ring, ulysses), got {mesh.ndim}; pass those two of it, "
            "mesh['ring', 'ulysses']"
        )
    return ring_of(op, mesh.get_group(0)), ring_of(op, mesh.get_group(1))


@contextmanager
def guarded(ring: Ring) -> Iterator[None]:
    """Turn errors of communication, such as a lost rank or a passed time limit, into one of aule."""
    try:
        yield
    except (RuntimeError, ValueError, ConnectionError) as error:
        if isinstance(error, AuleError):
            raise
        raise CommunicationError(
            f"[{ring.op}] expected all {ring.ranks} ranks of the group to take part, got an error on rank {ring.rank} "
            f"({str(error).strip()}); look for the first error of the other ranks"
        ) from error


_broken: WeakSet[Any] = WeakSet()
"""Groups in which a call has failed between its messages, which the next call would take for its own."""


@contextmanager
def messaging(ring: Ring) -> Iterator[None]:
    """Exchange messages inside. After an error some are left over, so `agree` refuses the group from then on."""
    try:
        yield
    except BaseException:
        if ring.group is not None:
            _broken.add(ring.group)
        raise


# -- messages ----------------------------------------------------------------------------------------------------------


class Messages:
    """Messages under way. Tensors stay alive until `wait`, as sends read them."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._ops: list[Any] = []
        self._works: list[Any] = []
        self._held: list[Tensor] = []

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Send tensors to the rank ``to`` places further on, as soon as `start` is called."""
        for x in tensors:
            x = x.contiguous()
            counting.sent(x.numel() * x.element_size())
            self._held.append(x)
            self._ops.append(dist.P2POp(dist.isend, x, self.ring.peer(to), self.ring.group))

    def receive(self, shapes: Sequence[tuple[int, ...]], like: Tensor, source: int) -> list[Tensor]:
        """Memory that will hold tensors from the rank ``source`` places further on, after `wait`."""
        made = [like.new_empty(shape) for shape in shapes]
        self._ops += [dist.P2POp(dist.irecv, x, self.ring.peer(source), self.ring.group) for x in made]
        return made

    def start(self) -> None:
        """Start all messages; they run while the caller computes."""
        if self._ops:
            with guarded(self.ring):
                self._works += dist.batch_isend_irecv(self._ops)
            self._ops = []

    def wait(self) -> None:
        """Wait until all messages have arrived and all sent tensors may be changed."""
        if self._works:
            self._finish()

    def _finish(self) -> None:
        with guarded(self.ring):
            for work in self._works:
                work.wait()
        self._works, self._held = [], []


# -- agreement ---------------------------------------------------------------------------------------------------------


def device_of(x: object) -> torch.device:
    """The device for messages about a call whose first argument is ``x``, which may be anything."""
    return x.device if isinstance(x, Tensor) else torch.device("cpu")


def agree(
    rings: Sequence[Ring], device: torch.device, check: Callable[[], dict[str, object]], seed: int | None = None
) -> int | None:
    """Make sure that all ranks make the same call, so that none waits for a message that another never sends.

    Parameters
    ----------
    rings : sequence of Ring
        Groups whose product are all ranks: the ranks of each tell those of the next what they found.
    check : callable
        Checks this rank's arguments and returns what must be the same everywhere. Its error is told to all ranks.
    seed : int, optional
        A seed that this rank has drawn.

    Returns
    -------
    int or None
        The first rank's seed.
    """
    if any(ring.group in _broken for ring in rings):  # not told to the others: messages in the way could block it
        raise CommunicationError(
            f"[{rings[0].op}] expected a group whose messages have all arrived, got one in which an earlier call "
            "failed between its messages; make a new group with torch.distributed.new_group"
        )
    error: Exception | None = None
    facts: dict[str, str] = {}
    try:
        facts = {name: str(x) for name, x in check().items()}
    except Exception as caught:  # of any kind: the others must not wait for this rank
        error, facts = caught, {"error": str(caught)}
    rings = [ring for ring in rings if ring.ranks > 1]
    text = repr(sorted(facts.items())).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
    told = [digest, int(error is None), _NO_SEED if seed is None else seed]
    for ring in rings:
        own = torch.tensor(told, dtype=torch.int64, device=device)
        all_told = [torch.empty_like(own) for _ in range(ring.ranks)]
        with guarded(ring):
            dist.all_gather(all_told, own, group=ring.group)
        found = torch.stack(all_told).tolist()
        told = [found[0][0], int(all(x[1] and x[0] == found[0][0] for x in found)), found[0][2]]
    if not told[1] and rings:
        facts_of = _gathered(rings, facts)
    if error is not None:
        raise error
    if not told[1]:
        raise InvalidArgumentError(_difference(rings[0].op, facts_of))
    return None if seed is None else int(told[2])


def _gathered(rings: Sequence[Ring], facts: dict[str, str]) -> dict[int, dict[str, str]]:
    """What every rank says, by its number in the world."""
    known = {dist.get_rank(): facts}
    for ring in rings:
        others: list[Any] = [None] * ring.ranks
        with guarded(ring):
            dist.all_gather_object(others, known, group=ring.group)
        known = {rank: x for other in others for rank, x in other.items()}
    return dict(sorted(known.items()))


def _difference(op: str, facts: dict[int, dict[str, str]]) -> str:
    """Say what differs and between which ranks, or which rank refused its arguments."""
    for rank, own in facts.items():
        if "error" in own:
            return f"[{op}] expected valid arguments on every rank, got an error on rank {rank}: {own['error']}"
    first, (_, *others) = next(iter(facts)), facts.values()
    for name in facts[first]:
        values: dict[str, list[int]] = {}
        for rank, own in facts.items():
            values.setdefault(own.get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            got = " and ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in values.items())
            return f"[{op}] expected the same {name} on every rank, got {got}; make the same call on all ranks"
    return f"[{op}] expected the same call on every rank, got {others}; make the same call on all ranks"
