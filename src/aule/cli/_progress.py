"""A progress bar under lines that are printed as they come."""

from __future__ import annotations

import sys
from types import TracebackType

_WIDTH = 24


class Progress:
    """Draws on a terminal; anywhere else, and in logs, only the lines are seen.

    Parameters
    ----------
    total : int
        Steps to come.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.drawn = sys.stdout.isatty() and sys.stderr.isatty()

    def step(self, label: str) -> None:
        """Say what is being done now."""
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
        """Take the bar off the terminal."""
        if self.drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
