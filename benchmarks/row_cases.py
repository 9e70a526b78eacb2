"""Row operations for benchmarks: tensors, the same by PyTorch, and the check of results against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from aule.engine.signatures import signatures
from aule.frontends.torch import entry, repeated
from aule.ops.catalogue import CATALOGUE

HEAD = 128
"""Columns of a head, for ops that rotate."""


@dataclass(frozen=True)
class Case:
    """An op: its tensors, our call, PyTorch's, and how many arrays of the first one's size either direction moves."""

    make: Callable[[int, int, Any, Any], list[torch.Tensor]]
    peer: Callable[..., Any]
    forward: float
    backward: float
    options: tuple[Any, ...] = ()
    differentiable: int = 9
    """Tensors from the start that want gradients."""
    axis: int = 0
    """Of the rows of the first tensor."""
    checked: tuple[Any, ...] | None = None
    """Options with which the result is compared, where those that are timed leave it to chance."""
    checks: Callable[..., Any] | None = None
    """PyTorch's call for the same."""

    @property
    def arrays(self) -> int:
        return int(self.forward)


def rows(count: int, vectors: int) -> Callable[[int, int, Any, Any], list[torch.Tensor]]:
    def make(n: int, length: int, dtype: Any, device: Any) -> list[torch.Tensor]:
        matrices = [torch.randn(n, length, dtype=dtype, device=device) for _ in range(count)]
        return matrices + [torch.randn(length, dtype=dtype, device=device) for _ in range(vectors)]

    return make


def heads(weight: bool) -> Callable[[int, int, Any, Any], list[torch.Tensor]]:
    """Heads of positions as projections leave them, ``[1, positions, heads, HEAD]``, and tables as transformers makes
    them."""

    def make(n: int, length: int, dtype: Any, device: Any) -> list[torch.Tensor]:
        x = torch.randn(1, n, max(length // HEAD, 1), HEAD, dtype=dtype, device=device).transpose(1, 2)
        angles = torch.randn(n, HEAD // 2, device=device).repeat(1, 2)
        more = [torch.randn(HEAD, dtype=dtype, device=device)] if weight else []
        return [x, *more, angles.cos().to(dtype), angles.sin().to(dtype)]

    return make


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As transformers writes it."""
    half = torch.cat((-x[..., HEAD // 2 :], x[..., : HEAD // 2]), dim=-1)
    return x * cos + half * sin


CASES: dict[str, Case] = {
    "rms_norm": Case(rows(1, 1), lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6), 2, 3, (1e-6,)),
    "layer_norm": Case(rows(1, 2), lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-5), 2, 3, (1e-5,)),
    "residual_rms_norm": Case(
        rows(2, 1), lambda x, r, w: (F.rms_norm(x + r, x.shape[-1:], w, 1e-6), x + r), 4, 4, (1e-6,)
    ),
    "residual_layer_norm": Case(
        rows(2, 2), lambda x, r, w, b: (F.layer_norm(x + r, x.shape[-1:], w, b, 1e-5), x + r), 4, 4, (1e-5,)
    ),
    "swiglu": Case(rows(2, 0), lambda g, u: F.silu(g) * u, 3, 5),
    "geglu": Case(rows(2, 0), lambda g, u: F.gelu(g) * u, 3, 5, ("none",)),
    "rope": Case(heads(False), rotated, 2, 2, (False, HEAD, False), 1, 2),
    "rms_norm_rope": Case(
        heads(True),
        lambda x, w, cos, sin: rotated(F.rms_norm(x, (HEAD,), w, 1e-6), cos, sin),
        2,
        3,
        (False, HEAD, 1e-6),
        2,
        2,
    ),
    "softmax_dropout": Case(
        rows(1, 0),
        lambda x: F.dropout(torch.softmax(x, -1), 0.1),
        2,
        3,
        (0.1, False, 1.0),
        checked=(0.0, False, 1.0),
        checks=lambda x: torch.softmax(x, -1),
    ),
}


def ours(name: str, options: tuple[Any, ...]) -> Callable[..., Any]:
    return lambda *tensors: entry.row_op(name, tuple(padded(name, list(tensors))), options, None)


def flat(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def error_of(name: str, case: Case, tensors: list[torch.Tensor]) -> float:
    """Largest error against float64, relative to the largest value, over the last rows."""

    def last(x: torch.Tensor) -> torch.Tensor:
        axis = case.axis if x.dim() == tensors[0].dim() else 0
        return x.narrow(axis, x.shape[axis] - 4, 4) if x.dim() > 1 else x

    found = flat(ours(name, case.options if case.checked is None else case.checked)(*tensors))
    want = flat((case.checks or case.peer)(*(last(x).double() for x in tensors)))
    pairs = zip(found, want, strict=True)
    return max(float((last(got).double() - right).abs().max() / right.abs().max()) for got, right in pairs)


def gradients(call: Callable[..., Any], tensors: list[torch.Tensor], case: Case) -> Callable[[], tuple[Any, ...]]:
    """A call whose gradients can be asked for again and again; outputs weigh the same for everyone who is called."""
    wanted = [
        x.detach().requires_grad_(i < case.differentiable and x.is_floating_point()) for i, x in enumerate(tensors)
    ]
    outs = flat(call(*wanted))
    torch.manual_seed(1)
    weights = [torch.randn(out.shape, device=out.device).bfloat16() for out in outs]
    grads = [torch.empty_like(out).copy_(weight) for out, weight in zip(outs, weights, strict=True)]
    leaves = [x for x in wanted if x.requires_grad]
    return lambda: torch.autograd.grad(outs, leaves, grads, retain_graph=True)


def right_gradients(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """PyTorch's in float64, over all rows, since those of weights are sums of them."""
    double = [x.double() if x.is_floating_point() else x for x in tensors]
    return [x.float() for x in gradients(case.checks or case.peer, double, case)()]


def gradient_error(name: str, case: Case, tensors: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """Largest error, relative to the largest number of its kind."""
    found = gradients(ours(name, case.options if case.checked is None else case.checked), tensors, case)()
    return max(
        float((got.float() - want).abs().max() / want.abs().max()) for got, want in zip(found, right, strict=True)
    )


def gradient_tensors(name: str, tensors: list[Any], outs: tuple[Any, ...]) -> list[torch.Tensor | None]:
    """Operands of an op's gradient, from all that the op makes; any values will do."""
    spec = CATALOGUE[name]
    assert spec.gradient is not None
    known: dict[str, Any] = dict(zip((operand.name for operand in spec.operands), tensors, strict=True))
    known |= dict(zip(spec.results, outs, strict=False))
    known |= {f"d{n}": x for n, x in zip(spec.outputs, outs, strict=False)}
    return [known.get(operand.name) for operand in spec.gradient.operands]


def padded(name: str, tensors: list[torch.Tensor]) -> list[Any]:
    """Tensors with None for optional operands that were left out."""
    return [*tensors, *(None for _ in range(len(CATALOGUE[name].operands) - len(tensors)))]


def seeded(name: str, tensors: list[Any]) -> list[Any]:
    """The same with the words of a seed where there is to be one."""
    number = CATALOGUE[name].seed
    if number is not None:
        tensors[number] = torch.tensor([1, 2], dtype=torch.int32)
    return tensors


def forget() -> None:
    """Let all calls be planned anew."""
    signatures.clear()
    repeated.forget()
