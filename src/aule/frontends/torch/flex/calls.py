"""The passes of attention with functions, as calls of the routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from aule.errors import DeviceMismatchError
from aule.frontends.torch import attention
from aule.frontends.torch.attention import Saved, options_with_tensors, saved_of
from aule.frontends.torch.flex.trace import loaded_dtype
from aule.frontends.torch.views import ViewOf
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands
from aule.ops.scores.functions.emit import MASK_FUNCTION, SCORE_FUNCTION
from aule.ops.scores.functions.program import BoundFunction
from aule.ops.scores.functions.trace import OP
from aule.options import AttentionOptions


@dataclass(frozen=True)
class Functions:
    """The user's functions of one call, with the tensors that they captured by buffer name."""

    score_mod: BoundFunction | None
    mask_mod: BoundFunction | None
    captured: Mapping[str, Tensor]

    @staticmethod
    def of(
        score: tuple[BoundFunction, list[Tensor]] | None, mask: tuple[BoundFunction, list[Tensor]] | None
    ) -> Functions:
        """Functions as `trace` gives them."""
        named: dict[str, Tensor] = {}
        for name, found in ((SCORE_FUNCTION, score), (MASK_FUNCTION, mask)):
            named |= {f"{name}{i}": x for i, x in enumerate(found[1] if found else ())}
        return Functions(score and score[0], mask and mask[0], named)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Functions:
        """The same functions with other captured tensors."""
        return replace(self, captured={name: tensors[name] for name in self.captured})

    def checked(self, q: Tensor) -> Functions:
        """Refuse captured tensors of another device than ``q``; numbers on the CPU are moved, as PyTorch does.

        Types that kernels do not load are converted.
        """
        found = {}
        for name, x in self.captured.items():
            if x.device != q.device:
                if x.dim() or not x.is_cpu:
                    raise DeviceMismatchError(
                        f"[{OP}] expected captured tensors on {q.device} like query, got {x.device}; move it with .to"
                    )
                x = x.to(q.device)
            found[name] = x.to(loaded_dtype(x.dtype, q))
        return replace(self, captured=found)


class _FlexCall(attention.AttentionCall):
    """What both passes share."""

    functions: Functions

    def _add(self, functions: Functions) -> None:
        self.op, self.functions, self.repeat_key = OP, functions, None
        self.tensors |= functions.captured
        self.option_key = (type(self), *self.option_key, functions.score_mod, functions.mask_mod)

    def problem(self, view: ViewOf) -> tuple[AttentionProblem, Operands]:
        problem, found = super().problem(view)
        functions = self.functions
        captured = {name: view(self.tensors[name], "a captured tensor", OP, "query") for name in functions.captured}
        problem = replace(problem, score_mod=functions.score_mod, mask_mod=functions.mask_mod)
        return problem, replace(found, captured=captured)


class Forward(_FlexCall, attention.Forward):
    """Attention and its log-sum-exp."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, functions: Functions, training: bool | None
    ) -> None:
        super().__init__(q, k, v, options, training, key=())
        self._add(functions)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Forward:
        options = options_with_tensors(self.options, tensors)
        functions = self.functions.with_tensors(tensors)
        return Forward(tensors["q"], tensors["k"], tensors["v"], options, functions, self.training)


class Backward(_FlexCall, attention.Backward):
    """Gradients of q, k and v and, for those of captured tensors, of the modified scores (``ds``)."""

    def __init__(
        self, saved: Saved, options: AttentionOptions, functions: Functions, scores: bool, dlse: Tensor | None
    ) -> None:
        super().__init__(saved, options, scores)
        if dlse is not None:
            self.tensors |= {"dlse": dlse}
        self._add(functions)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Backward:
        options, functions = options_with_tensors(self.options, tensors), self.functions.with_tensors(tensors)
        return Backward(saved_of(tensors), options, functions, self.scores, tensors.get("dlse"))
