"""A progress bar that stays below the printed lines."""

from __future__ import annotations

import sys
from types import TracebackType

_WIDTH = 24


class Progress:
    """A progress bar, drawn only on a terminal. Elsewhere only the lines are printed.

    Parameters
    ----------
    total : int
        Number of steps.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.drawn = sys.stdout.isatty() and sys.stderr.isatty()

    def step(self, label: str) -> None:
        """Start the next step and show its label."""
        if self.drawn:
            filled = _WIDTH * self.done // max(self.total, 1)
            bar = "#" * filled + "-" * (_WIDTH - filled)
            sys.stderr.write(f"\r\x1b[K[{bar}] {self.done}/{self.total} {label}")
            sys.stderr.flush()
        self.done += 1

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        self.clear()
        print(text, flush=True)

    def clear(self) -> None:
        """Remove the bar from the terminal."""
        if self.drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
