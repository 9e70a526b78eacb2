"""The front end for caches of keys and values in NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.engine.kvcache import append_on_host, copy_on_host, no_memory, writer
from aule.engine.memory import STORED, reports_shortage
from aule.errors import InvalidDtypeError
from aule.frontends.numpy import ml_dtype, view
from aule.ops.kvcache.problem import append_problem

Array = npt.NDArray[Any]


def accepts(array: object) -> bool:
    """Whether this front end serves an array."""
    return isinstance(array, np.ndarray)


def empty(shape: tuple[int, ...], dtype: str, device: None) -> Array:
    """An array of zeros; ``dtype`` is f32, f16, bf16, i8 or e4m3. The system commits memory at the first write."""
    kind: Any = {"bf16": "bfloat16", "e4m3": "float8_e4m3fn"}.get(dtype)
    if kind is not None:
        found = ml_dtype(kind)
        if found is None:
            raise InvalidDtypeError(
                f"[KVCache] expected ml_dtypes for {kind}, which NumPy lacks, got no such package; "
                "pip install ml_dtypes, or use float16 or float32"
            )
        kind = found
    else:
        kind = {"i8": np.int8}.get(dtype) or STORED[dtype]
    try:
        return np.zeros(shape, kind)
    except (MemoryError, ValueError) as error:  # ValueError: more than there are addresses
        raise no_memory(math.prod(shape) * np.dtype(kind).itemsize, "the host", error) from error


@reports_shortage
def new(array: Array) -> Array:
    """A contiguous array of an array's shape and type, of undefined contents."""
    return np.empty(array.shape, array.dtype)


def integers(array: npt.NDArray[np.int32], device: None) -> Array:
    """Make host integers read-only; the cache is in host memory too."""
    array.flags.writeable = False
    return array


@reports_shortage
def write(op: str, arrays: Mapping[str, Array], *, interleaved: bool = False, backend: str | None = None) -> None:
    """Write new rows into caches. ``arrays`` as for `append_problem`."""
    views = {name: view(array, name) for name, array in arrays.items()}
    append_on_host(append_problem(op, views, interleaved=interleaved), views, writer(backend))


@reports_shortage
def copy_pages(arrays: Mapping[str, Array], pairs: npt.NDArray[np.int32], *, backend: str | None = None) -> None:
    """Copy pages of arrays ``[layers, pages, ...]`` of the cache."""
    flat = {name: array.reshape(*array.shape[:2], -1) for name, array in arrays.items()}
    copy_on_host(pairs, flat, writer(backend))
