"""Rendered kernels on disk.

An entry is one file of `aule.store`: a JSON header and the code. A damaged entry counts as missing.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict
from typing import Any

from aule import store
from aule._version import __version__
from aule.artifact import Artifact, Param, TensorMap
from aule.store.source import code_digest


@functools.cache
def source_fingerprint() -> str:
    """Return a digest of the code that makes kernels, so that a new version never reads an old one's kernels."""
    code = code_digest("aule.ir", "aule.tile", "aule.ops", "aule.render", "aule.artifact")
    return hashlib.sha256(f"{__version__} {code}".encode()).hexdigest()[:16]


def key(*parts: object) -> str:
    """Return the key of an entry; ``parts`` are everything that determines the kernel."""
    return hashlib.sha256(repr((source_fingerprint(), *parts)).encode()).hexdigest()


def load(entry: str) -> Artifact | None:
    """Return the artifact of a key; None if missing or damaged."""
    body = store.read(_name(entry))
    if body is None:
        return None
    artifact = _decode(body)
    if artifact is None:
        store.warn_damaged(_name(entry))
    return artifact


def save(entry: str, artifact: Artifact) -> None:
    """Save an artifact. A full or read-only disk costs speed, not correctness."""
    store.write(_name(entry), _encode(artifact))


def _name(entry: str) -> str:
    return f"kernels/{entry[:2]}/{entry}"


def _encode(artifact: Artifact) -> bytes:
    fields = asdict(artifact)
    code: bytes = fields.pop("code")
    header = json.dumps(fields, sort_keys=True).encode()
    return len(header).to_bytes(4, "little") + header + code


def _tensor_map(fields: dict[str, Any]) -> TensorMap:
    """A tensor map whose tuples JSON has made lists."""
    known: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    return TensorMap(**known)


def _decode(body: bytes) -> Artifact | None:
    size = int.from_bytes(body[:4], "little")
    try:
        fields = json.loads(body[4 : 4 + size])
        fields["params"] = tuple(Param(**p) for p in fields["params"])
        fields["extensions"] = tuple(fields["extensions"])
        fields["maps"] = tuple(_tensor_map(m) for m in fields["maps"])
        return Artifact(code=body[4 + size :], **fields)
    except (ValueError, TypeError, KeyError):  # undamaged, but written by another program
        return None
