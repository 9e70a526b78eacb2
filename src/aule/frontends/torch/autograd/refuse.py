"""Results that raise an error when differentiated; otherwise autograd would treat them as constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from aule.errors import AuleError
from aule.frontends.torch.calls import Results
from aule.frontends.torch.checks import no_gradient, no_second_derivative


def refuse_second(found: Results, *inputs: Tensor | None, op: str = "flash_attention") -> Results:
    """Let the gradient of gradients raise, if one may be asked for; ``inputs`` are what they were computed from."""
    if not torch.is_grad_enabled():
        return found
    given = [x for x in inputs if x is not None]
    return tuple(None if grad is None else _WithoutGradient.apply(op, grad, *given) for grad in found)


class _WithoutGradient(torch.autograd.Function):  # type: ignore[misc]
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


def without_gradient(compute: Callable[[], Tensor], op: str, remedy: str, *inputs: Tensor) -> Tensor:
    """A result, computed from ``inputs``, whose backward pass raises `no_gradient`."""
    return _Forward.apply(compute, lambda: no_gradient(None, remedy, op), *inputs)


class _Forward(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Tensor], error: Callable[[], AuleError], *inputs: Tensor) -> Tensor:
        ctx.error = error
        return compute()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> NoReturn:
        raise ctx.error()
