"""Rendered kernels on disk.

An entry is one file: a digest, a JSON header and the code. It is written to a temporary file and renamed, so that
readers and other processes see all of it or nothing; the digest makes a damaged entry a miss, never a kernel.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from aule import settings
from aule._version import __version__
from aule.artifact import Artifact, Param

log = logging.getLogger("aule")
_MAGIC = b"AULE1\n"


@functools.cache
def source_fingerprint() -> str:
    """Digest of the package's own source: a new version never reads an old one's kernels."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256(__version__.encode())
    sources = [path for folder in ("ir", "tile", "ops", "render") for path in sorted((root / folder).rglob("*.py"))]
    for path in [*sources, root / "artifact.py"]:
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def key(*parts: object) -> str:
    """Key of an entry: everything that decides what the kernel is."""
    return hashlib.sha256(repr((source_fingerprint(), *parts)).encode()).hexdigest()


def load(entry: str) -> Artifact | None:
    """The artifact of a key; None when there is none, or it is damaged."""
    if not settings.disk_cache():
        return None
    try:
        data = _path(entry).read_bytes()
    except OSError:
        return None
    artifact = _decode(data)
    if artifact is None:
        log.warning("kernel cache: entry %s is damaged and is rebuilt", _path(entry))
    return artifact


def save(entry: str, artifact: Artifact) -> None:
    """Keep an artifact. A disk that is full or read-only costs speed, not correctness."""
    if not settings.disk_cache():
        return
    path = _path(entry)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_encode(artifact))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        log.debug("kernel cache: could not write %s: %s", path, error)


def _path(entry: str) -> Path:
    return settings.cache_dir() / "kernels" / entry[:2] / entry


def _encode(artifact: Artifact) -> bytes:
    fields = asdict(artifact)
    code: bytes = fields.pop("code")
    header = json.dumps(fields, sort_keys=True).encode()
    body = len(header).to_bytes(4, "little") + header + code
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode(data: bytes) -> Artifact | None:
    start = len(_MAGIC) + 32
    body = data[start:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        return None
    size = int.from_bytes(body[:4], "little")
    try:
        fields = json.loads(body[4 : 4 + size])
        fields["params"] = tuple(Param(**p) for p in fields["params"])
        fields["extensions"] = tuple(fields["extensions"])
        return Artifact(code=body[4 + size :], **fields)
    except (ValueError, TypeError, KeyError):  # whole, but not of this program
        return None
