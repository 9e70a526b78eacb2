"""KV caches in host memory: appends new rows and copies pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from aule.backends import registry
from aule.engine import observe
from aule.engine.host import prepare_once
from aule.engine.memory import address
from aule.engine.run import prepare
from aule.errors import AuleError, OutOfMemoryError
from aule.ops.kvcache import numpy_append
from aule.ops.kvcache.plan import plan_append, plan_copy
from aule.ops.kvcache.problem import AppendProblem
from aule.runtime.base import Device
from aule.view import TensorView

Array = npt.NDArray[Any]

APPEND, COPY = "KVCache.append", "KVCache.copy_pages"
"""Names under which calls are counted."""


def writer(spec: str | None) -> Device | None:
    """Return the device that writes into a cache in host memory: the CPU; None means NumPy.

    NumPy is used if requested, or if the CPU backend is unavailable. Any other requested device is ignored: it could
    only write to a copy.
    """
    if registry.requested_backend(spec) == registry.NUMPY:
        return None
    try:
        return registry.find("cpu")
    except AuleError:
        return None


def no_memory(nbytes: int, where: str, error: Exception) -> OutOfMemoryError:
    """Make the error for a cache whose pool does not fit."""
    return OutOfMemoryError(
        f"[KVCache] expected {nbytes} bytes on {where}, got none ({error}); take fewer pages, or quantize", nbytes
    )


def append_on_host(problem: AppendProblem, views: Mapping[str, TensorView], device: Device | None) -> None:
    """Write new rows into caches in host memory, in place; ``device`` comes from `writer`."""
    if device is None:
        with observe.on_numpy(APPEND):
            numpy_append.append(problem, views)
        return
    prepare_once(APPEND, plan_append, problem, views, device).run({name: view.storage for name, view in views.items()})


def copy_on_host(pairs: Array, arrays: Mapping[str, Array], device: Device | None) -> None:
    """Copy pages of caches in host memory: ``arrays`` of ``[layers, pages, elements]``, ``pairs`` as in `plan_copy`."""
    if device is None:
        with observe.on_numpy(COPY):
            numpy_append.copy_pages(pairs, arrays)
        return
    views = {name: words(array) for name, array in arrays.items()}
    alignment = {name: at & -at for name, at in ((name, address(array)) for name, array in arrays.items())}
    plan = plan_copy(len(pairs), views, device.target, alignment)
    prepare(plan, device, op=COPY).run({"pairs": pairs, **arrays})


def words(array: Any) -> TensorView:
    """Return a view of the bits of a contiguous array ``[layers, pages, elements]``, for `plan_copy`."""
    layers, pages, size = array.shape
    bits = {1: "u8", 2: "f16", 4: "u32"}[array.itemsize]
    return TensorView(bits, (layers, pages, size), (pages * size, size, 1), "host", array)
