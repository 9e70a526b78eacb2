"""The passes of attention with functions, as calls of the routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from aule.engine.attention import scores_on_host
from aule.frontends.torch import attention
from aule.frontends.torch.attention import Saved, options_with_tensors, saved_of
from aule.frontends.torch.calls import Bound, Output, Results
from aule.frontends.torch.checks import NAMES
from aule.frontends.torch.functions import Functions
from aule.frontends.torch.views import ViewOf, fresh_view, view_on_host, work_dtype
from aule.ops.attention.plan.lists import LISTS, lists_of, with_lists
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands
from aule.ops.scores.functions.trace import OP
from aule.ops.shared.plan import Plan
from aule.options import AttentionOptions
from aule.runtime.base import Device

PADDING = 128
"""Rows and keys of the scores' gradient are padded to multiples of this."""


def result_strides(q: Tensor, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of an output: batch, heads and rows lie in memory in the order of query's, as PyTorch has it; None if the
    output is contiguous."""
    given = q.stride()[:3]
    if given[0] >= given[1] >= given[2] or 0 in given:
        return None
    strides, step = [1] * 4, shape[3]
    for axis in sorted(range(3), key=lambda i: (given[i], -i)):
        strides[axis], step = step, step * max(shape[axis], 1)
    return tuple(strides)


class FlexCall(attention.AttentionCall):
    """What both passes share."""

    functions: Functions
    lists: Mapping[str, Tensor] | None = None
    """Lists of the mask's tiles that an earlier call made; empty if this call is to return its own."""
    made: Mapping[str, int] = {}
    """Sizes of the lists that it returns, in 32-bit words; known when it is planned."""

    def _add(self, functions: Functions) -> None:
        self.op, self.functions, self.repeat_key = OP, functions, None
        self.tensors |= functions.captured
        self.option_key = (type(self), *self.option_key, functions.score_mod, functions.mask_mod)

    def problem(self, view: ViewOf) -> tuple[AttentionProblem, Operands]:
        problem, found = super().problem(view)
        functions = self.functions
        captured = {name: view(self.tensors[name], "a captured tensor", OP, "query") for name in functions.captured}
        functions.check_indices(captured, problem.batch, problem.heads_q, OP)
        problem = replace(problem, score_mod=functions.score_mod, mask_mod=functions.mask_mod)
        return problem, replace(found, captured=captured)

    def with_lists(self, lists: Mapping[str, Tensor] | None) -> FlexCall:
        """The call with lists of tiles that were made before; with None it makes them, as further results."""
        call = copy(self)
        call.lists = lists or {}
        call.tensors = {**self.tensors, **call.lists}
        call.option_key = (*self.option_key, "lists", tuple(call.lists))
        call.results = self.results if lists else (*self.results, *LISTS)
        return call

    def listed(self, bound: Bound, plan: Plan) -> Plan:
        """The plan of the pass, with lists of tiles as operands or results."""
        if self.lists is None:
            return plan
        wide = 2 if getattr(bound.problem, "dtype", None) == "f64" else 1
        words = {name: n * wide for name, n in lists_of(plan).items()}
        if not self.lists:
            self.made = words
        elif words != {name: x.numel() for name, x in self.lists.items()}:  # the plan has other tiles by now
            return plan
        return with_lists(plan, bool(self.lists))

    def further_outputs(self) -> tuple[Output, ...]:
        return tuple(Output(name, torch.int32, (n,)) for name, n in self.made.items())


class Forward(FlexCall, attention.Forward):
    """Attention and its log-sum-exp."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, functions: Functions, training: bool | None
    ) -> None:
        super().__init__(q, k, v, options, training, key=())
        self._add(functions)

    def result_strides(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return result_strides(self.tensors["q"], shape)

    def plan(self, bound: Bound, device: Device, aligned: Mapping[str, bool]) -> Plan:
        return self.listed(bound, super().plan(bound, device, aligned))

    def with_tensors(self, tensors: dict[str, Tensor]) -> Forward:
        options = options_with_tensors(self.options, tensors)
        functions = self.functions.with_tensors(tensors)
        return Forward(tensors["q"], tensors["k"], tensors["v"], options, functions, self.training)


class Backward(FlexCall, attention.Backward):
    """Gradients of q, k and v."""

    def __init__(self, saved: Saved, options: AttentionOptions, functions: Functions, dlse: Tensor | None) -> None:
        super().__init__(saved, options, scores=False)
        if dlse is not None:
            self.tensors |= {"dlse": dlse}
        self._add(functions)

    def plan(self, bound: Bound, device: Device, aligned: Mapping[str, bool]) -> Plan:
        return self.listed(bound, super().plan(bound, device, aligned))

    def with_tensors(self, tensors: dict[str, Tensor]) -> Backward:
        options, functions = options_with_tensors(self.options, tensors), self.functions.with_tensors(tensors)
        return type(self)(saved_of(tensors), options, functions, tensors.get("dlse"))


class ScoreGradients(Backward):
    """The gradient of the modified scores, ``[batch, heads_q, seq_q, seq_kv]`` and zeros that pad the last two axes to
    multiples of `PADDING`, with at least as many zeros behind each row."""

    def __init__(self, saved: Saved, options: AttentionOptions, functions: Functions, dlse: Tensor | None) -> None:
        super().__init__(saved, options, functions, dlse)
        self.results = ("ds",)

    @property
    def _shape(self) -> tuple[int, ...]:
        q, k = self.tensors["q"], self.tensors["k"]
        rows, keys = (-(-x.shape[2] // PADDING) * PADDING for x in (q, k))
        return (*q.shape[:2], rows, keys + PADDING)

    def bind(self, view: ViewOf) -> Bound:
        bound, work = super().bind(view), work_dtype(self.tensors["q"])
        views = {name: x for name, x in bound.views.items() if name not in ("dq", "dk", "dv")}
        ds = fresh_view(NAMES[work], self._shape)
        return Bound(bound.problem, views | {"ds": ds}, (Output("ds", work, ds.shape, fill=0.0),))

    def through_host(self, device: Device | None) -> Results:
        assert device is not None  # as in `Backward`
        problem, found = self.problem(view_on_host)
        out, dout = (view_on_host(self.tensors[name], name, self.op) for name in ("o", "do"))
        lse, dlse = self.tensors["lse"], self.tensors.get("dlse")
        ds = lse.new_zeros(self._shape)
        of_lse = None if dlse is None else view_on_host(dlse, "dlse", self.op)
        scores_on_host(problem, found, device, out.storage, lse.numpy(), dout, ds.numpy(), of_lse)
        return (ds,)
