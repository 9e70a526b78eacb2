"""The file format of benchmark results."""

from __future__ import annotations

import csv
import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import aule


def write_csv(path: str, rows: Sequence[Mapping[str, Any]], device: str, **about: Any) -> None:
    """Write rows, each with the date, the device and the versions; ``about`` is what else belongs to all of them."""
    common = {"date": datetime.date.today().isoformat(), "device": device, "torch": torch.__version__}
    common |= {"aule": aule.__version__, **about}
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=[*common, *names])
        writer.writeheader()
        writer.writerows({**common, **row} for row in rows)


@contextmanager
def written(path: str | None, rows: Sequence[Mapping[str, Any]], device: str, **about: Any) -> Iterator[None]:
    """Write the rows that there are when the block ends, also where it is interrupted; nothing without a path."""
    try:
        yield
    finally:
        if path and rows:
            write_csv(path, rows, device, **about)
