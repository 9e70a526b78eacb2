"""Attention on a part of a larger problem as calls: `aule.distributed` computes on the rows and keys a rank holds."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from aule.frontends.torch import attention
from aule.frontends.torch.attention import AttentionCall, Saved, options_with_tensors, saved_of
from aule.frontends.torch.views import ViewOf
from aule.ops.attention.problem import AttentionProblem, Origin
from aule.ops.attention.validate import Operands
from aule.options import AttentionOptions


class _Part(AttentionCall):
    """What both passes share: a problem that begins elsewhere."""

    origin: Origin

    def _begin(self, origin: Origin) -> None:
        self.origin, self.option_key = origin, (*self.option_key, origin)
        if self.repeat_key is not None:
            self.repeat_key = (self.repeat_key, origin)

    def problem(self, view: ViewOf) -> tuple[AttentionProblem, Operands]:
        problem, found = super().problem(view)
        return replace(problem, origin=self.origin), found


class Forward(_Part, attention.Forward):
    """Attention and its log-sum-exp, in the type computed in."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, origin: Origin, training: bool
    ) -> None:
        options = options._replace(return_lse=True, out=None)
        super().__init__(q, k, v, options, training)
        self._begin(origin)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Forward:
        options = options_with_tensors(self.options, tensors)
        return Forward(tensors["q"], tensors["k"], tensors["v"], options, self.origin, bool(self.training))


class Backward(_Part, attention.Backward):
    """Gradients of q, k and v from the output and log-sum-exp of the larger problem and, if wanted, of the scores."""

    def __init__(self, saved: Saved, options: AttentionOptions, origin: Origin, scores: bool) -> None:
        super().__init__(saved, options, scores)
        self._begin(origin)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Backward:
        options = options_with_tensors(self.options, tensors)
        return Backward(saved_of(tensors), options, self.origin, self.scores)
