"""Functions of the user, traced, with the tensors that they captured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aule.errors import DeviceMismatchError
from aule.ops.scores.functions.emit import MASK_FUNCTION, SCORE_FUNCTION
from aule.ops.scores.functions.indices import check_indices
from aule.ops.scores.functions.program import BoundFunction
from aule.ops.scores.functions.trace import OP
from aule.view import TensorView

_WIDENED = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Integers that kernels do not load."""


def loaded_dtype(dtype: torch.dtype, q: Tensor) -> torch.dtype:
    """The type that a captured tensor of a type is converted to, for attention with queries like ``q``."""
    return torch.float32 if dtype == torch.float64 != q.dtype else _WIDENED.get(dtype, dtype)


def loadable(x: Tensor, q: Tensor, op: str) -> Tensor:
    """A captured tensor in a type that kernels load.

    One of another device than ``q`` is refused, except for a number on the CPU, which is moved, as PyTorch does.
    """
    if x.device != q.device:
        if x.dim() or not x.is_cpu:
            raise DeviceMismatchError(
                f"[{op}] expected captured tensors on {q.device} like query, got {x.device}; move it with .to"
            )
        x = x.to(q.device)
    return x.to(loaded_dtype(x.dtype, q))


@dataclass(frozen=True)
class Functions:
    """The user's functions of one call, with the tensors that they captured by buffer name."""

    score_mod: BoundFunction | None
    mask_mod: BoundFunction | None
    captured: Mapping[str, Tensor]
    kept: tuple[dict[Any, Any], Any] | None = None
    """Where the mask keeps lists of tiles, and the state of what it captured; see `flex.lists`."""

    @staticmethod
    def of(
        score: tuple[BoundFunction, list[Tensor]] | None,
        mask: tuple[BoundFunction, list[Tensor]] | None,
        kept: tuple[dict[Any, Any], Any] | None = None,
    ) -> Functions:
        """Functions as `trace` gives them."""
        named: dict[str, Tensor] = {}
        for name, found in ((SCORE_FUNCTION, score), (MASK_FUNCTION, mask)):
            named |= {f"{name}{i}": x for i, x in enumerate(found[1] if found else ())}
        return Functions(score and score[0], mask and mask[0], named, kept)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Functions:
        """The same functions with other captured tensors."""
        return replace(self, captured={name: tensors[name] for name in self.captured})

    def checked(self, q: Tensor, op: str = OP) -> Functions:
        """The same functions with captured tensors that kernels can load; see `loadable`."""
        return replace(self, captured={name: loadable(x, q, op) for name, x in self.captured.items()})

    def check_indices(self, views: Mapping[str, TensorView], batch: int, heads: int, op: str) -> None:
        """See `indices.check_indices`."""
        check_indices({SCORE_FUNCTION: self.score_mod, MASK_FUNCTION: self.mask_mod}, views, batch, heads, op)

    @property
    def of_score(self) -> dict[str, Tensor]:
        """The tensors that the score function captured."""
        return {name: x for name, x in self.captured.items() if name.startswith(SCORE_FUNCTION)}
