"""One bounded cache of prepared calls by signature, for the engine and all front ends."""

from __future__ import annotations

import os
import threading
from typing import Any

MOST = 8192
"""Maximum number of entries. One more evicts the oldest."""


class Signatures:
    """A bounded cache from the signature of a call to the prepared call.

    A key begins with a word or a function that is unique to one user of the cache. Entries belong to a device: after it
    is closed they are not found, and the next `put` drops them.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._entries: dict[Any, tuple[Any, Any]] = {}
        self._devices: set[Any] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Any) -> Any:
        """Return the entry of a signature; None if missing. Raises TypeError if the key cannot be hashed."""
        found = self._entries.get(key)  # without the lock: reading a dictionary is atomic
        if found is None or found[1].closed:
            return None
        return found[0]

    def put(self, key: Any, entry: Any, device: Any) -> Any:
        """Add an entry and return it. ``device`` must be hashable and have ``closed``."""
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
        """Forget the parent's entries in a forked child, which opens its own devices."""
        self._lock = threading.Lock()  # a thread of the parent may have held it
        self.clear()


signatures = Signatures()
"""The shared cache."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=signatures.after_fork)
