"""Attention over a cache with functions of the user, and with a tree mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aule.frontends.functions import UserFunctions, with_tree
from aule.frontends.torch.checks import no_gradient, require_same_device
from aule.frontends.torch.decode import Decode
from aule.frontends.torch.flex.trace import traced_functions
from aule.frontends.torch.functions import Functions
from aule.frontends.torch.views import ViewOf
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.validate import DecodeOperands
from aule.options import DecodeOptions


def with_functions(call: Decode) -> Decode:
    """A call with its functions traced; its options are plain values."""
    q, k, v = (call.tensors[name] for name in "qkv")
    op, options, tree = call.op, call.options, call.options.tree_mask
    if tree is not None:
        is_bool = isinstance(tree, Tensor) and tree.dtype is torch.bool
        options = with_tree(options, *_tokens(q, options), is_bool)
        require_same_device(op, {"q": q, "tree_mask": tree})
    functions = traced_functions(UserFunctions.of_decoding(options), q)
    if torch.is_grad_enabled() and any(x.requires_grad for x in functions.captured.values()):
        raise no_gradient("a captured tensor", "detach it: decoding has no gradients", op)
    return FunctionDecode(q, k, v, options, functions)


def _tokens(q: Tensor, options: DecodeOptions) -> tuple[int, int | None]:
    """Sequences of a call, and queries of the longest; None if only the device knows."""
    offsets = options.cu_seqlens_q
    if offsets is None:
        return q.shape[0], q.shape[2] if q.dim() == 4 else 1
    batch = max(offsets.numel() - 1, 0)
    if options.max_seqlen_q is not None or not batch or not offsets.is_cpu:
        return batch, options.max_seqlen_q
    return batch, int(offsets.diff().max())


class FunctionDecode(Decode):
    """Decoding with functions of the user, whose captured tensors are operands."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: DecodeOptions, functions: Functions) -> None:
        super().__init__(q, k, v, options)
        self.functions = functions
        self.tensors |= functions.captured
        self.option_key = (type(self), *self.option_key, functions.score_mod, functions.mask_mod)

    def problem(self, view: ViewOf, op: str | None = None) -> tuple[DecodeProblem, DecodeOperands]:
        problem, found = super().problem(view, op)
        functions = self.functions
        captured = {name: view(self.tensors[name], "a captured tensor", self.op, "q") for name in functions.captured}
        functions.check_indices(captured, problem.batch, problem.heads_q, self.op)
        problem = replace(problem, score_mod=functions.score_mod, mask_mod=functions.mask_mod)
        return problem, replace(found, captured=captured)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Decode:
        options = super().with_tensors(tensors).options
        return self._on(tensors, options, self.functions.with_tensors(tensors))

    def _with_options(self, options: DecodeOptions) -> Decode:
        return self._on(self.tensors, options, self.functions)

    @staticmethod
    def _on(tensors: Mapping[str, Any], options: DecodeOptions, functions: Functions) -> Decode:
        return FunctionDecode(tensors["q"], tensors["k"], tensors["v"], options, functions)
