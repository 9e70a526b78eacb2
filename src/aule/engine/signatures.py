"""Signatures: what was prepared for calls like this one. One bounded cache serves the engine and all front ends."""

from __future__ import annotations

import os
import threading
from typing import Any

MOST = 8192
"""Entries that are kept. The oldest goes when there is one more."""


class Signatures:
    """A bounded cache from the signature of a call to what was prepared for it.

    A key begins with a word or a function that no other user of the cache begins its keys with. Entries belong to a
    device: once it is closed, they are not found any more and soon let go.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._entries: dict[Any, tuple[Any, Any]] = {}
        self._devices: set[Any] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Any) -> Any:
        """The entry of a signature, or None. Raises TypeError if the key cannot be hashed."""
        found = self._entries.get(key)  # without the lock: reading a dictionary is atomic
        if found is None or found[1].closed:
            return None
        return found[0]

    def put(self, key: Any, entry: Any, device: Any) -> Any:
        """Keep an entry and return it. ``device`` needs a ``closed`` and a hash."""
        with self._lock:
            closed = [known for known in self._devices if known.closed]
            if closed:
                self._devices.difference_update(closed)
                self._entries = {k: e for k, e in self._entries.items() if not e[1].closed}
            self._entries.pop(key, None)  # to the end, as the newest
            while len(self._entries) >= self._most:
                del self._entries[next(iter(self._entries))]
            self._entries[key] = entry, device
            self._devices.add(device)
        return entry

    def clear(self) -> None:
        """Forget all entries."""
        with self._lock:
            self._entries = {}
            self._devices.clear()

    def after_fork(self) -> None:
        """Forget the parent's entries in a forked child, whose devices are its own."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self.clear()


signatures = Signatures()
"""The cache that all share."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=signatures.after_fork)
