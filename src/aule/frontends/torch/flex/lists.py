"""Tile lists of a mask, kept with the mask for its next use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aule.frontends.torch.calls import Results
from aule.frontends.torch.devices.base import Planned, Route
from aule.frontends.torch.flex.calls import FlexCall
from aule.ops.attention.plan.lists import LISTS

_MOST = 8
"""Kinds of calls (lengths, types, passes) that a mask keeps lists for."""


def state_of(captured: Sequence[Tensor]) -> tuple[tuple[int, int], ...] | None:
    """What changes when the tensors that a mask captured change; None if PyTorch does not count their changes."""
    if any(x.is_inference() for x in captured):
        return None
    return tuple((id(x), x._version) for x in captured)


def compute(where: Route, call: FlexCall) -> Results:
    """The results of a call, with lists of tiles from an earlier call that had the same mask, if there are any."""
    kept, tensors = call.functions.kept, call.all_tensors()
    if kept is None or not isinstance(where, Planned) or not _keeps(tensors[0]):
        return where.compute(call)
    known, state = kept
    key = (call.option_key, call.backend, tuple(call.tensors), where.layouts(tensors), _stream(tensors[0]))
    found = known.get(key)
    if found is not None and found[0] == state:
        return where.compute(call.with_lists(found[1]))
    count = len(call.results)
    results = where.compute(call.with_lists(None))
    lists = {name: x for name, x in zip(LISTS, results[count:], strict=False) if x is not None}
    if lists:
        while len(known) >= _MOST:
            known.pop(next(iter(known)))
        known[key] = state, lists
    return results[:count]


def _keeps(q: Tensor) -> bool:
    """Whether lists may be kept: not in a graph of CUDA, which is repeated when what a mask captured has changed."""
    return q.is_cpu or (q.is_cuda and not torch.cuda.is_current_stream_capturing())


def _stream(q: Tensor) -> Any:
    return torch.cuda.current_stream(q.device) if q.is_cuda else None
