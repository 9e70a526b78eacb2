"""Attention on packed batches of tensors as calls: one forward launch for all sequences, and its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from aule.engine.attention import (
    backward_on_host,
    forward_on_host,
    host_device,
    named,
    prepare_backward,
    prepare_forward,
)
from aule.engine.memory import MemorySource
from aule.engine.run import PreparedCall
from aule.errors import DeviceMismatchError
from aule.frontends.torch import attention
from aule.frontends.torch.attention import ARRAYS, Saved, aligned_among, on_copies, operands
from aule.frontends.torch.calls import Bound, Call, Output, Overlap, Results
from aule.frontends.torch.checks import NAMES, checked_out, integers, keyed, require_plain, require_same_device
from aule.frontends.torch.modes import refuse_tracing
from aule.frontends.torch.views import ViewOf, fresh_view, lies_over, tensor_like, view_on_host, work_dtype, written
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands
from aule.ops.attention.varlen import OP, heads_first, varlen_problem
from aule.options import AttentionOptions
from aule.runtime.base import Device


class Packed:
    """Arguments of a call on packed batches besides q, k and v: offsets, the longest lengths, and options."""

    def __init__(
        self, cu_q: Tensor, cu_k: Tensor, max_q: int | None, max_k: int | None, options: AttentionOptions
    ) -> None:
        self.cu_q, self.cu_k, self.max_q, self.max_k, self.options = cu_q, cu_k, max_q, max_k, options

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The longest lengths, read from the offsets where they were not given; that waits for the device."""
        given = ((self.cu_q, self.max_q), (self.cu_k, self.max_k))
        return tuple(  # type: ignore[return-value]
            int(offsets.diff().max()) if longest is None and len(offsets) > 1 else longest or 0
            for offsets, longest in given
        )


def packed_call(
    tensors: tuple[Tensor, Tensor, Tensor],
    offsets: tuple[object, object],
    longest: tuple[int | None, int | None],
    options: AttentionOptions,
) -> Packed:
    """Check that all tensors are plain and on the device of ``q``.

    Parameters
    ----------
    tensors, offsets, longest : tuple
        q, k and v; ``cu_seqlens_q`` and ``_k``; ``max_seqlen_q`` and ``_k``.
    """
    options = keyed(OP, options)
    given = dict(zip("qkv", tensors, strict=True)) | options.arrays()
    for name, tensor in given.items():
        require_plain(tensor, name, OP)
    require_same_device(OP, given)
    q = tensors[0]
    at_q, at_k = (_offsets(f"cu_seqlens_{name}", x, q) for name, x in zip("qk", offsets, strict=True))
    return Packed(at_q, at_k, *longest, options)


def _offsets(name: str, offsets: object, q: Tensor) -> Tensor:
    found = integers(OP, name, offsets, " [batch + 1]")
    if found.device != q.device:
        raise DeviceMismatchError(f"[{OP}] expected {name} on {q.device} like q, got {found.device}; move it with .to")
    return found


class _PackedCall(Call):
    """Operands and problem of both passes."""

    __slots__ = ("longest", "packed")

    packed: Packed
    longest: tuple[int | None, int | None]

    def _fill(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> None:
        self.op, self.packed, self.backend, self.repeat_key = OP, packed, packed.options.backend, None
        self.tensors = operands(q, k, v, packed.options) | {"cu_q": packed.cu_q, "cu_k": packed.cu_k}
        self.longest = packed.max_q, packed.max_k

    def _problem(self, view: ViewOf, return_lse: bool, deterministic: bool) -> tuple[AttentionProblem, Operands]:
        refuse_tracing(OP)
        given = self.tensors
        names = {"q": "q", "k": "k", "v": "v", "cu_q": "cu_q", "cu_k": "cu_k"} | ARRAYS
        views: dict[str, Any] = {name: view(given[at], name, OP, "q") for name, at in names.items() if at in given}
        plain = self.packed.options.plain() | {"return_lse": return_lse, "deterministic": deterministic}
        return varlen_problem(**views, max_q=self.longest[0], max_k=self.longest[1], **plain)

    def _copied(self, tensors: Mapping[str, Tensor]) -> Packed:
        packed = self.packed
        options = on_copies(packed.options, tensors)
        return Packed(tensors["cu_q"], tensors["cu_k"], packed.max_q, packed.max_k, options)

    def placed(self, on_host: bool) -> Call:
        if not on_host:
            self.longest = self.packed.longest
            self.option_key = (*self.option_key, *self.longest)
        return self

    def has_signature(self) -> bool:
        return False  # the problem depends on what the offsets hold


class Forward(_PackedCall):
    """Attention; its results are the output and, where it is wanted, the log-sum-exp in the type computed in."""

    __slots__ = ("lse", "training")

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, training: bool) -> None:
        self._fill(q, k, v, packed)
        options = packed.options
        self.training, self.lse = training, training or options.return_lse
        self.given = {} if options.out is None else {"o": options.out}
        self.option_key = ("packed attention", *options.plain().values(), self.lse)
        self.results = ("o", "lse")[: 1 + self.lse]

    def bind(self, view: ViewOf) -> Bound:
        problem, found = self._problem(view, self.lse, self.packed.options.deterministic)
        _, heads, rows, dim = problem.out_shape
        q = self.tensors["q"]
        out = fresh_view(problem.dtype, (rows, heads, dim))
        if self.given:
            out = view(checked_out(self.given["o"], (rows, heads, dim), q, OP), "out", OP, "q")
        # No kernel writes rows that belong to no sequence.
        outputs = [Output("o", q.dtype, (rows, heads, dim), fill=0.0)]
        if self.lse:
            outputs.append(Output("lse", work_dtype(q), (heads, rows), fill=-torch.inf, empty=-torch.inf))
        return Bound(problem, named(found, heads_first(out)), tuple(outputs))

    def prepare(
        self, bound: Bound, device: Device, memory: MemorySource | None, aligned: Mapping[str, bool]
    ) -> PreparedCall:
        problem = cast(AttentionProblem, bound.problem)
        return prepare_forward(problem, dict(bound.views), device, aligned_among(aligned), memory)

    def host_device(self, foreign: bool) -> Device | None:
        q = self.tensors["q"]
        if self.training:
            return attention.gradient_device(q, self.backend, True, False)
        return host_device(NAMES.get(q.dtype, ""), self.backend)

    def through_host(self, device: Device | None) -> Results:
        problem, found = self._problem(view_on_host, self.lse, self.packed.options.deterministic)
        _, heads, rows, dim = problem.out_shape
        q, out = self.tensors["q"], self.given.get("o")
        out = q.new_empty((rows, heads, dim)) if out is None else written(checked_out(out, (rows, heads, dim), q, OP))
        target = heads_first(view_on_host(out, "out", OP)).storage
        _, lse = forward_on_host(problem, found, device, target, exact_lse=True)
        return (out,) if lse is None else (out, torch.from_numpy(lse[0]))

    def overlap(self, on_host: bool) -> Overlap | None:
        return lies_over if self.given else None

    def moved(self, tensors: dict[str, Tensor]) -> Forward:
        return Forward(tensors["q"], tensors["k"], tensors["v"], self._copied(tensors), self.training)


class Backward(_PackedCall):
    """Gradients of q, k and v."""

    __slots__ = ("deterministic",)

    def __init__(self, saved: Saved, packed: Packed) -> None:
        self._fill(saved.q, saved.k, saved.v, packed)
        self.tensors |= {"o": saved.out, "lse": saved.lse, "do": saved.dout}
        self.given = {}
        # PyTorch may have been told to be deterministic since the forward pass.
        self.deterministic = packed.options.deterministic or torch.are_deterministic_algorithms_enabled()
        self.option_key = ("packed attention gradients", *packed.options.plain().values(), self.deterministic)
        self.results = ("dq", "dk", "dv")

    def bind(self, view: ViewOf) -> Bound:
        problem, found = self._problem(view, True, self.deterministic)
        results = {name: heads_first(view(self.tensors[name], name, OP, "q")) for name in ("o", "do")}
        views = named(found, results["o"]) | {"do": results["do"]}
        outputs = []
        for name in ("dq", "dk", "dv"):
            like = self.tensors[name[1:]]
            rows, heads, dim = like.shape
            views[name] = fresh_view(problem.dtype, (1, heads, rows, dim))
            # In the order of kernels, [heads, rows, dim], seen as [rows, heads, dim].
            outputs.append(Output(name, like.dtype, (rows, heads, dim), (dim, rows * dim, 1), fill=0.0))
        return Bound(problem, views, tuple(outputs))

    def prepare(
        self, bound: Bound, device: Device, memory: MemorySource | None, aligned: Mapping[str, bool]
    ) -> PreparedCall:
        problem = cast(AttentionProblem, bound.problem)
        return prepare_backward(problem, dict(bound.views), device, aligned_among(aligned), memory)

    def host_device(self, foreign: bool) -> Device | None:
        return attention.gradient_device(self.tensors["q"], self.backend, True, False)

    def through_host(self, device: Device | None) -> Results:
        assert device is not None  # NumPy is refused by `gradient_device`
        problem, found = self._problem(view_on_host, True, self.deterministic)
        out, dout = (heads_first(view_on_host(self.tensors[name], name, OP)) for name in ("o", "do"))
        lse = self.tensors["lse"].numpy()[None]
        grads = backward_on_host(problem, found, device, out.storage, lse, dout)
        made = zip(grads, (self.tensors[name].transpose(0, 1)[None] for name in "qkv"), strict=True)
        return tuple(tensor_like(grad, like)[0].transpose(0, 1) for grad, like in made)

    def moved(self, tensors: dict[str, Tensor]) -> Backward:
        saved = Saved(*(tensors[name] for name in ("q", "k", "v", "o", "lse", "do")))
        return Backward(saved, self._copied(tensors))
