"""Turns a kernel's configuration into a loaded program: build, verify, render, load; each once."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from aule.artifact import Artifact
from aule.backends import registry
from aule.engine import cache
from aule.ir import KernelIR
from aule.ir.verify import verify
from aule.runtime.base import Device, Program

log = logging.getLogger("aule")
_lock = threading.Lock()
_building: dict[tuple[int, Any], threading.Lock] = {}


def program(device: Device, config: Any, build: Callable[[], KernelIR]) -> Program:
    """Return the program of a configuration on a device; built once, even if several threads need it at a time.

    Parameters
    ----------
    config : hashable
        Together with the device's Target, determines the kernel.
    build : callable
        Traces the kernel.
    """
    # Stored on the device, because programs refer to it: a weak dictionary would keep both alive.
    known: dict[Any, Program] = vars(device).setdefault("_engine_programs", {})
    key = (config, device.target)
    if key in known:
        return known[key]
    with _lock:
        mine = _building.setdefault((id(device), key), threading.Lock())
    with mine:
        if key in known:
            return known[key]
        try:
            loaded = known[key] = device.load(_artifact(device, config, build))
        finally:
            with _lock:
                _building.pop((id(device), key), None)
    return loaded


def known(device: Device, config: Any) -> tuple[Artifact, str] | None:
    """The kernel of a configuration and where it is, ``loaded`` or ``on disk``; None if it has still to be built."""
    loaded: Program | None = vars(device).get("_engine_programs", {}).get((config, device.target))
    if loaded is not None:
        return loaded.artifact, "loaded"
    found = cache.load(cache.key(config, device.target))
    return None if found is None else (found, "on disk")


def _artifact(device: Device, config: Any, build: Callable[[], KernelIR]) -> Any:
    entry = cache.key(config, device.target)
    artifact = cache.load(entry)
    if artifact is None:
        start = time.perf_counter()
        kernel = build()
        verify(kernel)
        artifact = registry.backend(device.target.backend).render(kernel, device.target)
        cache.save(entry, artifact)
        log.debug("built %s for %s in %.0f ms", kernel.name, device.target.name, 1e3 * (time.perf_counter() - start))
    return artifact


def _after_fork() -> None:
    # Threads of the parent may have held these locks; nothing in the child would release them. Programs belong to the
    # parent's devices; the child opens its own.
    global _lock
    _lock = threading.Lock()
    _building.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
