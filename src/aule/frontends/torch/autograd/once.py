"""Gradients that refuse to be differentiated again, instead of being taken for constants."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from aule.frontends.torch.calls import Results
from aule.frontends.torch.checks import no_second_derivative


def once(found: Results, *inputs: Tensor | None, op: str = "flash_attention") -> Results:
    """Gradients whose own gradient raises, where one is wanted; ``inputs`` are what they were computed from."""
    if not torch.is_grad_enabled():
        return found
    given = [x for x in inputs if x is not None]
    return tuple(None if grad is None else _Once.apply(op, grad, *given) for grad in found)


class _Once(torch.autograd.Function):  # type: ignore[misc]
    """A gradient without a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: str, grad: Tensor, *inputs: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> NoReturn:
        raise no_second_derivative(ctx.op)
