"""What the calls of this process have computed and sent."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counters", "counters", "reset_counters"]


@dataclass
class Counters:
    """Work of this rank since the last `reset_counters`.

    Attributes
    ----------
    flops : int
        Floating-point operations of the products of kept scores: two for each multiplication and addition.
    calls : int
        Calls of kernels: parts of a problem that were computed, forward and backward.
    bytes_sent, messages : int
        Bytes and tensors sent to other ranks; digests of arguments are not counted.
    """

    flops: int = 0
    calls: int = 0
    bytes_sent: int = 0
    messages: int = 0


_counted = Counters()


def counters() -> Counters:
    """Return the counters of this process; they go on counting."""
    return _counted


def reset_counters() -> None:
    """Set all counters of this process to 0."""
    _counted.__init__()  # type: ignore[misc]


def sent(size: int) -> None:
    """Count a message."""
    _counted.bytes_sent += size
    _counted.messages += 1


def computed(kept: int, width: int) -> None:
    """Count a call on ``kept`` scores, each of which takes ``width`` multiplications and additions."""
    _counted.flops += 2 * kept * width
    _counted.calls += 1
