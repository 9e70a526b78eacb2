"""DTensors as arguments and results: their local parts are shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aule.errors import InvalidArgumentError


def _is_dtensor(x: object) -> bool:
    return type(x).__name__ == "DTensor" and hasattr(x, "placements")


def call(
    op: str,
    tensors: tuple[Any, ...],
    group: Any,
    options: dict[str, Any],
    function: Callable[[tuple[Any, ...], Any, dict[str, Any]], Any],
    packed: bool,
) -> Any:
    """Call a function with local tensors; its results are DTensors if its arguments are.

    Parameters
    ----------
    tensors : tuple
        q, k and v.
    group : object
        Their group; None for the mesh of a DTensor.
    options : dict
        Further tensors may be among them.
    function : callable
        Takes local tensors, a group and local options.
    packed : bool
        Rows are the first axis, else the last but one.
    """
    if not any(map(_is_dtensor, tensors)):
        return function(tensors, group, options)
    q = tensors[0]
    for name, x in zip("qkv", tensors, strict=True):
        rows = 0 if packed else x.ndim - 2
        divided = _is_dtensor(x) and all(place.is_shard(rows) for place in x.placements)
        if not divided or x.device_mesh != q.device_mesh:
            got = f"{list(x.placements)} on {x.device_mesh}" if _is_dtensor(x) else type(x).__name__
            raise InvalidArgumentError(
                f"[{op}] expected {name} as a DTensor with [Shard({rows})] on the mesh of q, got {got}; redistribute it"
            )
    local = {name: _local(x) for name, x in options.items()}
    found = function(tuple(x.to_local() for x in tensors), q.device_mesh if group is None else group, local)
    if isinstance(found, tuple):
        return _divided(found[0], q, rows), _divided(found[1], q, 1 if packed else q.ndim - 2)
    return _divided(found, q, rows)


def _local(x: Any) -> Any:
    """Return this rank's part of an option; gradients of what all ranks have are summed."""
    if not _is_dtensor(x):
        return x
    from torch.distributed.tensor import Partial

    return x.to_local(grad_placements=[Partial() if place.is_replicate() else place for place in x.placements])


def _divided(x: Any, like: Any, rows: int) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(x, like.device_mesh, [Shard(rows)] * like.device_mesh.ndim, run_check=False)
