"""Attention on packed batches of tensors as calls: one forward launch for all sequences, and its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from aule.errors import DeviceMismatchError
from aule.frontends.torch import attention
from aule.frontends.torch.attention import AttentionCall, Saved, operands, options_with_tensors, saved_of
from aule.frontends.torch.calls import Call, Output
from aule.frontends.torch.checks import integers, keyed, require_plain, require_same_device
from aule.frontends.torch.functions import Functions
from aule.frontends.torch.views import Array, ViewOf, tensor_like
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands
from aule.ops.attention.varlen import OP, heads_first, varlen_problem
from aule.options import AttentionOptions


class Packed:
    """Arguments of a call on packed batches besides q, k and v: offsets, the longest lengths, options and functions."""

    def __init__(
        self,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int | None,
        max_k: int | None,
        options: AttentionOptions,
        functions: Functions | None = None,
    ) -> None:
        self.cu_q, self.cu_k, self.max_q, self.max_k, self.options = cu_q, cu_k, max_q, max_k, options
        self.functions = functions

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
    functions: Functions | None = None,
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
    return Packed(at_q, at_k, *longest, options, functions)


def _offsets(name: str, offsets: object, q: Tensor) -> Tensor:
    found = integers(OP, name, offsets, " [batch + 1]")
    if found.device != q.device:
        raise DeviceMismatchError(f"[{OP}] expected {name} on {q.device} like q, got {found.device}; move it with .to")
    return found


class _PackedCall(AttentionCall):
    """What both passes share: rows ``[rows, heads, dim]``, and a problem that depends on the offsets."""

    packed: Packed
    longest: tuple[int | None, int | None]
    inputs = AttentionCall.inputs | {"cu_q": "cu_q", "cu_k": "cu_k"}
    lift = staticmethod(heads_first)

    def _fill(self, packed: Packed, options: AttentionOptions, tensors: dict[str, Tensor]) -> None:
        self.op, self.packed, self.options, self.backend, self.repeat_key = OP, packed, options, options.backend, None
        self.tensors = tensors | {"cu_q": packed.cu_q, "cu_k": packed.cu_k}
        self.longest = packed.max_q, packed.max_k
        self.option_key = (type(self), *options.plain().values())
        if packed.functions is not None:
            self.tensors |= packed.functions.captured
            self.option_key = (*self.option_key, packed.functions.score_mod, packed.functions.mask_mod)

    def problem(self, view: ViewOf) -> tuple[AttentionProblem, Operands]:
        max_q, max_k = self.longest
        problem, found = varlen_problem(**self.views(view), max_q=max_q, max_k=max_k, **self.options.plain())
        functions = self.packed.functions
        if functions is None:
            return problem, found
        captured = {name: view(self.tensors[name], "a captured tensor", OP, "q") for name in functions.captured}
        functions.check_indices(captured, problem.batch, problem.heads_q, OP)
        problem = replace(problem, score_mod=functions.score_mod, mask_mod=functions.mask_mod)
        return problem, replace(found, captured=captured)

    def _copied(self, tensors: Mapping[str, Tensor]) -> Packed:
        packed = self.packed
        options = options_with_tensors(packed.options, tensors)
        functions = None if packed.functions is None else packed.functions.with_tensors(tensors)
        return Packed(tensors["cu_q"], tensors["cu_k"], packed.max_q, packed.max_k, options, functions)

    def placed(self, on_host: bool) -> Call:
        if not on_host:
            self.longest = self.packed.longest
            self.option_key = (*self.option_key, *self.longest)
        return self

    def has_signature(self) -> bool:
        return False  # the problem depends on what the offsets hold


class Forward(_PackedCall, attention.Forward):
    """Attention; its results are the output and, where it is wanted, the log-sum-exp in the type computed in."""

    unwritten_rows = True  # those that belong to no sequence

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, training: bool) -> None:
        options = packed.options
        options = options._replace(return_lse=training or options.return_lse)
        self._fill(packed, options, operands(q, k, v, options))
        self.training = training or None
        self.destinations = {} if options.out is None else {"o": options.out}
        self.results = ("o", "lse")[: 1 + options.return_lse]

    def result_shapes(self, found: Operands) -> tuple[tuple[int, ...], tuple[int, ...]]:
        _, heads, rows, dim = found.out_shape
        return (rows, heads, dim), (heads, rows)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Forward:
        return Forward(tensors["q"], tensors["k"], tensors["v"], self._copied(tensors), bool(self.training))


class Backward(_PackedCall, attention.Backward):
    """Gradients of q, k and v."""

    def __init__(self, saved: Saved, packed: Packed) -> None:
        # PyTorch may have been told to be deterministic since the forward pass.
        deterministic = packed.options.deterministic or torch.are_deterministic_algorithms_enabled()
        options = packed.options._replace(return_lse=True, deterministic=deterministic)
        self._fill(packed, options, self.inputs_of(saved, options))
        self.scores, self.destinations, self.results = False, {}, ("dq", "dk", "dv")

    def gradient_output(self, name: str, like: Tensor) -> Output:
        rows, heads, dim = like.shape
        # In the order of kernels, [heads, rows, dim], seen as [rows, heads, dim].
        return Output(name, like.dtype, (rows, heads, dim), (dim, rows * dim, 1), fill=0.0)

    def gradient_tensor(self, grad: Array, like: Tensor) -> Tensor:
        return tensor_like(grad[0], like.transpose(0, 1)).transpose(0, 1)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Backward:
        return Backward(saved_of(tensors), self._copied(tensors))
