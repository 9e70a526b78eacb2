"""Attention over a cache of keys and values as a call, and merging of partial results.

Nothing waits for the device, so a CUDA graph can hold a call: lengths and block tables on the device are read there.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor

from aule.engine.decode import decode_on_host, decode_plan
from aule.errors import InvalidShapeError
from aule.frontends.numpy import states_message
from aule.frontends.torch.attention import tensor_device
from aule.frontends.torch.calls import Bound, Call, ContentsCheck, Output, Overlap, Results
from aule.frontends.torch.checks import by_value, checked_out, integers, require_tensor
from aule.frontends.torch.modes import refuse_tracing
from aule.frontends.torch.views import (
    ViewOf,
    fresh_view,
    shares_memory,
    view_on_device,
    view_on_host,
    work_dtype,
    written,
)
from aule.ops.decode.plan.decode import decode_views
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.validate import DecodeOperands, check_contents, check_numbers, decode_problem
from aule.ops.shared.plan import Plan
from aule.options import DecodeOptions
from aule.runtime.base import Device
from aule.view import TensorView

_ARRAYS = {
    "context_lens": "lens",
    "block_tables": "tables",
    "cu_seqlens_q": "cu_q",
    "k_scale": "k_scale",
    "v_scale": "v_scale",
    "alibi_slopes": "alibi",
    "sinks": "sinks",
}
"""Options that are tensors, with the names of their buffers."""
_ALIGNED = ("q", "k", "v", "o")


def _fields(names: tuple[str, ...]) -> itemgetter[tuple[object, ...]]:
    return itemgetter(*(DecodeOptions._fields.index(name) for name in names))


_arrays, _extras = _fields(tuple(_ARRAYS)), _fields((*_ARRAYS, "out"))
_plain = _fields(("layout", "causal", "scale", "window", "softcap", "return_lse", "backend", "latent"))


def repeat_key(q: Tensor, k: Tensor, v: Tensor, options: DecodeOptions) -> tuple[Hashable, list[Tensor]] | None:
    """Key and tensors under which a call may be repeated; None if it cannot be.

    It cannot if an option is a tensor, if indices must be converted to int32, if the longest length of packed queries
    must be read from the device, or if functions must be traced.
    """
    if options.has_functions:
        return None
    lens, tables, cu_q, longest = options[:4]
    if (
        (lens is not None and getattr(lens, "dtype", None) is not torch.int32)
        or (tables is not None and getattr(tables, "dtype", None) is not torch.int32)
        or (cu_q is not None and (longest is None or getattr(cu_q, "dtype", None) is not torch.int32))
        or by_value(options.op, options)
    ):
        return None
    tensors, absent = [q, k, v], 0
    for x in _extras(options):
        absent = 2 * absent + (x is None)
        if x is not None:
            tensors.append(x)
    return ("decode", absent, longest, _plain(options)), tensors


class Decode(Call):
    """Decoding; its results are the output and, with ``return_lse``, the log-sum-exp in the type computed in."""

    __slots__ = ("options",)
    indices = ("lens", "tables", "cu_q")

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: DecodeOptions, key: Hashable | None = None) -> None:
        self.op, self.options, self.backend, self.repeat_key = options.op, options, options.backend, key
        self.tensors = {"q": q, "k": k, "v": v}
        for name, x in zip(_ARRAYS.values(), _arrays(options), strict=True):
            if x is not None:
                self.tensors[name] = cast(Tensor, x)
        self.destinations = {} if options.out is None else {"o": options.out}
        self.option_key = ("decode", *_plain(options), options.max_seqlen_q)
        self.results = ("o", "lse")[: 1 + options.return_lse]

    def problem(self, view: ViewOf, op: str | None = None) -> tuple[DecodeProblem, DecodeOperands]:
        """Check the call; errors name ``op``, by default the call's own."""
        op = op or self.op
        refuse_tracing(op)
        names = {"q": "q", "k": "k", "v": "v"} | _ARRAYS
        given = self.tensors
        views: dict[str, Any] = {name: view(given[at], name, op, "q") for name, at in names.items() if at in given}
        return decode_problem(op, **views, **self.options.plain())

    def bind(self, view: ViewOf) -> Bound:
        problem, found = self.problem(view)
        q = self.tensors["q"]
        out = fresh_view(problem.dtype, found.out_shape)
        if self.destinations:
            out = view(checked_out(self.destinations["o"], found.out_shape, q, self.op), "out", self.op, "q")
        # No kernel writes rows that belong to no sequence.
        packed = "cu_q" in self.tensors
        outputs = [Output("o", q.dtype, found.out_shape, fill=0.0 if packed else None)]
        if self.options.return_lse:
            fill = -torch.inf if packed else None
            outputs.append(Output("lse", work_dtype(q), found.lse_shape, fill=fill, empty=-torch.inf))
        return Bound(problem, decode_views(found, _lifted(out, found.form)), tuple(outputs))

    def plan(self, bound: Bound, device: Device, aligned: Mapping[str, bool]) -> Plan:
        problem = cast(DecodeProblem, bound.problem)
        known = {name: aligned[name] for name in _ALIGNED if name in aligned}
        return decode_plan(self.op, problem, dict(bound.views), device, known)

    def host_device(self, foreign: bool) -> Device | None:
        return tensor_device(self.tensors["q"], self.backend, foreign)

    def through_host(self, device: Device | None) -> Results:
        problem, found = self.problem(view_on_host)
        q, out = self.tensors["q"], self.destinations.get("o")
        out = q.new_empty(found.out_shape) if out is None else written(checked_out(out, found.out_shape, q, self.op))
        target = found.lifted(view_on_host(out, "out").storage)
        _, lse = decode_on_host(self.op, problem, found, device, target)
        return (out,) if lse is None else (out, torch.from_numpy(lse).reshape(found.lse_shape))

    def overlap(self, on_host: bool) -> Overlap | None:
        return shares_memory if on_host and self.destinations else None

    def with_tensors(self, tensors: dict[str, Tensor]) -> Decode:
        arrays: dict[str, Any] = {name: tensors.get(buffer) for name, buffer in _ARRAYS.items()}
        return Decode(tensors["q"], tensors["k"], tensors["v"], self.options._replace(out=None, **arrays))

    def placed(self, on_host: bool) -> Decode:
        options, index = self.options, self.tensors["q"].get_device()
        given = [x for x in (options.context_lens, options.block_tables, options.cu_seqlens_q) if x is not None]
        if any(x.dtype is not torch.int32 or (x.get_device() != index and not on_host) for x in given):
            options = self._converted() if on_host else self._brought()
        if not on_host and options.cu_seqlens_q is not None and options.max_seqlen_q is None:
            at = options.cu_seqlens_q
            options = options._replace(max_seqlen_q=int(at.diff().max()) if len(at) > 1 else None)
        return self if options is self.options else self._with_options(options)

    def _with_options(self, options: DecodeOptions) -> Decode:
        q, k, v = (self.tensors[name] for name in "qkv")
        return Decode(q, k, v, options, self.repeat_key)

    def _converted(self) -> DecodeOptions:
        options = self.options
        return options._replace(**{name: integers(self.op, name, x) for name, x in options.indices().items()})

    def _brought(self) -> DecodeOptions:
        """The options with indices as int32 on the device of ``q``; those from the host are checked first."""
        q, k, v = (self.tensors[name] for name in "qkv")
        options = self._converted()
        moved = options.indices()
        host = {name: view_on_host(x, name, self.op) for name, x in moved.items() if x.is_cpu}
        if "context_lens" in host:
            problem, _ = Decode(q, k, v, options).problem(view_on_device)
            check_contents(self.op, problem, host["context_lens"], host.get("block_tables"))
        return options._replace(**{name: x.to(q.device, non_blocking=True) for name, x in moved.items()})

    def has_signature(self) -> bool:
        return "cu_q" not in self.tensors  # with which the problem depends on what the offsets hold

    def contents_check(self, problem: Hashable) -> ContentsCheck | None:
        names = list(self.tensors)
        if "lens" not in names:
            return None
        lens = names.index("lens")
        tables = names.index("tables") if "tables" in names else None
        op, checked = self.op, cast(DecodeProblem, problem)

        def check(tensors: Sequence[Tensor]) -> None:
            pages = None if tables is None else tensors[tables].numpy()
            check_numbers(op, checked, tensors[lens].numpy(), pages)

        return check


def decode_call(q: Tensor, k: Tensor, v: Tensor, options: DecodeOptions, key: Hashable | None = None) -> Decode:
    """A call with plain values for options; refuses arrays that are not tensors."""
    if key is None:
        options = options._replace(**by_value(options.op, options))
        for name, x in {"k": k, "v": v, **options.arrays()}.items():
            require_tensor(x, name, options.op)
        for name, x in options.indices().items():
            if not isinstance(x, Tensor):
                integers(options.op, name, x)  # refuses it
    return Decode(q, k, v, options, key)


def check_decode(op: str, q: Tensor, k: Tensor, v: Tensor, options: DecodeOptions) -> None:
    """Check a call without computing it; errors name ``op``."""
    indices = {name: integers(op, name, x) for name, x in options.indices().items()} if q.is_cpu else {}
    Decode(q, k, v, options._replace(**indices)).problem(view_on_host if q.is_cpu else view_on_device, op)


def _lifted(view: TensorView, form: str) -> TensorView:
    """A view of the caller's shape with the four axes of the normal form."""
    shape, strides, storage = view.shape, view.strides, view.storage
    if form == "packed":
        shape, strides = (1, shape[1], shape[0], shape[2]), (0, strides[1], strides[0], strides[2])
        storage = storage.transpose(1, 0, 2)[None] if view.is_host else storage
    elif form == "token":
        shape, strides = (*shape[:2], 1, shape[2]), (*strides[:2], 0, strides[2])
        storage = storage[:, :, None] if view.is_host else storage
    return replace(view, shape=shape, strides=strides, storage=storage)


# -- merging -----------------------------------------------------------------------------------------------------------


def merge_states(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge results over disjoint keys, by PyTorch's own operators."""
    for name, tensor in (("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)):
        require_tensor(tensor, name, "merge_states", "o_a")
    if not (o_a.shape == o_b.shape and lse_a.shape == lse_b.shape == o_a.shape[:-1]):
        raise InvalidShapeError(states_message(o_a, lse_a, o_b, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    level = torch.where(lse == -torch.inf, 0, lse)  # nothing on either side: exp(-inf + inf) would be NaN
    work = work_dtype(o_a)
    parts = []
    for o, own in ((o_a, lse_a), (o_b, lse_b)):
        weight = torch.exp(own - level).to(work)[..., None]
        # Selected, not multiplied by 0: a side without keys may hold anything.
        parts.append(torch.where(weight != 0, o.to(work) * weight, 0))
    return (parts[0] + parts[1]).to(o_a.dtype), lse
