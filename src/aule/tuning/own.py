"""The user's own records, measured by `aule tune` on this machine. They precede the tables.

They are files of the disk cache, by device and driver, in the format of the tables. Lines that cannot be parsed, or
that no planner of this version understands, are ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from aule import settings, store
from aule.store import sweep
from aule.target import Target
from aule.tuning.record import Record, by_op, every, parse

_known: dict[str, Mapping[str, tuple[Record, ...]]] = {}
"""Own records by file name, then by op."""
_tried: ContextVar[Mapping[str, tuple[Record, ...]] | None] = ContextVar("aule_tried_records", default=None)


def own_records(target: Target, op: str) -> tuple[Record, ...]:
    """Return the user's records of an op for a device; inside `trying`, the tried records instead."""
    tried = _tried.get()
    return (_of(target) if tried is None else tried).get(op, ())


@contextmanager
def trying(*records: Record) -> Iterator[None]:
    """Plan with these records before the tables, and without the user's own."""
    token = _tried.set(by_op(records))
    try:
        yield
    finally:
        _tried.reset(token)


def save(target: Target, op: str, when: Mapping[str, Any], record: Record | None) -> None:
    """Save a record for a device, replacing one of the same op and conditions; None only removes that one."""
    others = [r for found in _of(target).values() for r in found if (r.op, r.when) != (op, when)]
    saved = [*others, *([record] if record is not None else [])]
    store.write(file_name(target), "".join(f"{r.line()}\n" for r in saved).encode())
    _known[file_name(target)] = by_op(saved)


def saved() -> dict[str, tuple[Record, ...]]:
    """Return all records on disk by file name, also those of devices and drivers that are no longer here."""
    names = sweep.tuned(str(settings.cache_dir()))
    return {name: tuple(_readable((store.read(name) or b"").decode(errors="replace").splitlines())) for name in names}


def remove(name: str) -> None:
    """Remove a file of records; the tables' choices apply again, in this process too."""
    sweep.remove(str(settings.cache_dir()), name)
    _known.pop(name, None)


def forget(target: Target) -> None:
    """Read a device's records from disk again at the next use."""
    _known.pop(file_name(target), None)


def file_name(target: Target) -> str:
    """Return the cache file of a device's records."""
    about = f"{target.backend} {target.name} {target.driver} {target.arch}"
    return f"tuned/{hashlib.sha256(about.encode()).hexdigest()[:32]}.jsonl"


def _of(target: Target) -> Mapping[str, tuple[Record, ...]]:
    name = file_name(target)
    known = _known.get(name)
    if known is None:
        body = store.read(name) or b""
        known = _known[name] = by_op(_readable(body.decode(errors="replace").splitlines()))
    return known


def _readable(lines: Iterable[str]) -> Iterator[Record]:
    for line in lines:
        try:
            found = parse(line)
        except (ValueError, TypeError):
            continue
        yield from (record for record in found if _understood(record))


def _understood(record: Record) -> bool:
    """Return whether the tables have records of this op with the same fields of the same types."""
    if not isinstance(record.when, dict) or not isinstance(record.use, dict):
        return False
    return bool(record.use) and _alike(record.use, [known.use for known in every(record.op)])


def _alike(value: Mapping[str, Any], known: list[Mapping[str, Any]]) -> bool:
    for name, field in value.items():
        others = [x[name] for x in known if name in x and type(x[name]) is type(field)]
        if not others or (isinstance(field, dict) and not _alike(field, others)):
            return False
    return True
