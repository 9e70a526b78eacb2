"""Keeps lines that native libraries write to stderr away from the user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_lines(containing: bytes) -> Iterator[None]:
    """Drop the lines with a text that are written to stderr's descriptor meanwhile, by any thread.

    All other lines are written when the block ends. The descriptor is redirected because native code knows neither
    ``sys.stderr`` nor a setting for this; to change the environment instead would be a race with every other thread
    that reads it. Does nothing without memory files (all systems but Linux) or without stderr.
    """
    try:
        written = os.memfd_create("aule-stderr")
        shown = os.dup(2)
    except (AttributeError, OSError):
        yield
        return
    os.dup2(written, 2)
    try:
        yield
    finally:
        os.dup2(shown, 2)
        os.close(shown)
        with os.fdopen(written, "rb") as file:
            file.seek(0)
            rest = b"".join(line for line in file if containing not in line)
        if rest:
            os.write(2, rest)
