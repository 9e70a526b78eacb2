"""PyTorch layers that compute with aule: norms, gated units and the rotary embedding.

    from aule import nn

    norm = nn.RMSNorm(4096, eps=1e-5)  # replaces torch.nn.RMSNorm

Each has the arguments and parameters of the layer it replaces, so a state dictionary fits either.
Calls are counted in `aule.dispatch_stats`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from aule.api import row_ops
from aule.api.sdpa import count_op
from aule.errors import InvalidDtypeError, InvalidShapeError
from aule.frontends.torch.modes import called_by
from aule.ops.rope.tables import checked_frequencies, frequencies

__all__ = ["GeGLU", "LayerNorm", "RMSNorm", "RotaryEmbedding", "SwiGLU"]

_by_layer = called_by("nn")
geglu, swiglu = _by_layer(row_ops.geglu), _by_layer(row_ops.swiglu)
layer_norm, rms_norm = _by_layer(row_ops.layer_norm), _by_layer(row_ops.rms_norm)
rope = _by_layer(row_ops.rope)


def count(op: str) -> None:
    """Count a call of an op, except while PyTorch's compiler traces it."""
    if not torch.compiler.is_compiling():
        count_op(op)


def _rows(op: str, x: Any, shape: tuple[int, ...]) -> Any:
    """Flatten the normalised axes, which must be the last axes of ``x``, into rows."""
    if not isinstance(x, torch.Tensor):
        raise InvalidDtypeError(f"[{op}] expected x to be a torch tensor, got {type(x).__name__}; convert it first")
    if not x.is_floating_point():
        raise InvalidDtypeError(f"[{op}] expected x of floats, got {x.dtype}; convert it first")
    if x.shape[-len(shape) :] != shape:
        raise InvalidShapeError(
            f"[{op}] expected x of [..., {', '.join(map(str, shape))}], got {list(x.shape)}; these axes are normalised"
        )
    return x if len(shape) == 1 else x.flatten(-len(shape))


def _default_eps(dtype: Any) -> float:
    """Return the default eps of `torch.nn.RMSNorm`.

    It is the eps of the type it computes in or, in older versions and in its documentation, of x. A small input shows
    which.
    """
    with _disable_current_modes():  # this module may be imported under a fake-tensor mode
        small = torch.full((1,), 2.0**-6, dtype=dtype, device="cpu")
        found = torch.nn.functional.rms_norm(small, (1,)).item()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return float(torch.finfo(wide if found > 0.75 else dtype).eps)


_DEFAULT_EPS = {x: _default_eps(x) for x in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}


class RMSNorm(torch.nn.RMSNorm):  # type: ignore[misc]
    """`torch.nn.RMSNorm`, computed by `aule.rms_norm`.

    Parameters
    ----------
    normalized_shape, eps, elementwise_affine, device, dtype
        As for `torch.nn.RMSNorm`.
    weight_offset : float
        Added to the weight; 1 for Gemma, which stores weights minus 1.
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        weight_offset: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.weight_offset = weight_offset
        if weight_offset:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        offset = getattr(self, "weight_offset", 0.0)  # PyTorch's constructor calls this before it is set
        if self.elementwise_affine and offset:
            with torch.no_grad():
                self.weight -= offset

    def forward(self, x: Any) -> Any:
        rows = _rows("nn.RMSNorm", x, self.normalized_shape)
        count("rms_norm")
        weight = self.weight
        if weight is not None:
            weight = weight.flatten()
            if self.weight_offset:
                weight = weight.float() + self.weight_offset
        eps = _DEFAULT_EPS.get(x.dtype, 0.0) if self.eps is None else self.eps
        return rms_norm(rows, weight, eps=eps).reshape(x.shape)

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{super().extra_repr()}{offset}"


class LayerNorm(torch.nn.LayerNorm):  # type: ignore[misc]
    """`torch.nn.LayerNorm`, computed by `aule.layer_norm`."""

    def forward(self, x: Any) -> Any:
        rows = _rows("nn.LayerNorm", x, self.normalized_shape)
        count("layer_norm")
        weight, bias = (None if y is None else y.flatten() for y in (self.weight, self.bias))
        return layer_norm(rows, weight, bias, eps=self.eps).reshape(x.shape)


class _GatedUnit(torch.nn.Module, ABC):  # type: ignore[misc]
    """``down_proj(activation(gate_proj(x)) * up_proj(x))``, with Llama's parameter names."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        made = {"bias": bias, "device": device, "dtype": dtype}
        self.gate_proj = torch.nn.Linear(in_features, hidden_features, **made)
        self.up_proj = torch.nn.Linear(in_features, hidden_features, **made)
        self.down_proj = torch.nn.Linear(hidden_features, in_features if out_features is None else out_features, **made)

    @abstractmethod
    def activated(self, gate: Any, up: Any) -> Any:
        """Return ``activation(gate) * up``."""

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.activated(self.gate_proj(x), self.up_proj(x)))


class SwiGLU(_GatedUnit):
    """Gated layer, computed by `aule.swiglu`: ``down_proj(silu(gate_proj(x)) * up_proj(x))``.

    Parameters
    ----------
    in_features, hidden_features : int
    out_features : int, optional
        By default ``in_features``.
    bias, device, dtype
        As for `torch.nn.Linear`; apply to ``gate_proj``, ``up_proj`` and ``down_proj``.
    """

    def activated(self, gate: Any, up: Any) -> Any:
        count("swiglu")
        return swiglu(gate, up)


class GeGLU(_GatedUnit):
    """Gated layer, computed by `aule.geglu`: ``down_proj(gelu(gate_proj(x)) * up_proj(x))``.

    Parameters
    ----------
    in_features, hidden_features, out_features, bias, device, dtype
        As for `SwiGLU`.
    approximate : {"none", "tanh"}
        As for `aule.geglu`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        approximate: str = "none",
    ) -> None:
        super().__init__(in_features, hidden_features, out_features, bias, device, dtype)
        self.approximate = approximate

    def activated(self, gate: Any, up: Any) -> Any:
        count("geglu")
        return geglu(gate, up, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class RotaryEmbedding(torch.nn.Module):  # type: ignore[misc]
    """Rotary position embedding, computed by `aule.rope` from a stored table of cosines and sines.

    Parameters
    ----------
    dim : int
        Columns to rotate; heads may have more.
    max_positions : int
        Rows of the table. Longer sequences extend it; ``position_ids`` must be less.
    base : float
        Base of the frequencies ``base ** (-2 * i / dim)``.
    interleaved : bool
        As for `aule.rope`.
    """

    def __init__(
        self,
        dim: int,
        max_positions: int = 2048,
        base: float = 10000.0,
        *,
        interleaved: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__()
        positions, self.dim, self.base = checked_frequencies(
            "nn.RotaryEmbedding", max_positions, dim, base, ("max_positions", "dim")
        )
        self.interleaved = interleaved
        self._fill(positions, device)

    def reset_parameters(self) -> None:
        """Recompute the table, for a module that was created on the device ``meta``."""
        self._fill(self.cos.shape[0], self.cos.device, self.cos.dtype)

    def _fill(self, positions: int, device: Any, dtype: Any = torch.float32) -> None:
        # NumPy computes it in float64, which angles need and Apple's GPUs lack.
        kind = "float64" if dtype == torch.float64 else "float32"
        with torch.inference_mode(False):  # the table outlives this call and may be used in training
            for name, table in zip(("cos", "sin"), frequencies(positions, self.dim, self.base), strict=True):
                self.register_buffer(name, torch.as_tensor(table.astype(kind), device=device), persistent=False)

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        """Convert the module. The table stays float32, or becomes float64 with it, and is recomputed, not converted.

        PyTorch calls this for every conversion.
        """
        before = self.cos
        super()._apply(*arguments, **options)
        dtype = torch.float64 if self.cos.dtype == torch.float64 else torch.float32
        if dtype != before.dtype or self.cos.dtype != dtype or before.is_meta:
            self._fill(before.shape[0], self.cos.device, dtype)
        return self

    def forward(self, q: Any, k: Any = None, position_ids: Any = None) -> Any:
        """Rotate heads.

        Parameters
        ----------
        q, k : Tensor
            ``[batch, heads, seq, head_dim]``; ``k`` is optional and may have other heads and another length.
        position_ids : Tensor, optional
            ``[seq]`` or ``[batch, seq]``; by default 0, 1, 2 ...

        Returns
        -------
        Tensor or (Tensor, Tensor)
            ``q``, or ``q`` and ``k``, rotated.
        """
        given = (q,) if k is None else (q, k)
        longest = max(x.shape[-2] for x in given)
        if longest > self.cos.shape[0]:
            self._fill(max(longest, 2 * self.cos.shape[0]), self.cos.device, self.cos.dtype)
        rotated = []
        for x in given:
            count("rope")
            rows = slice(None if position_ids is not None else x.shape[-2])
            options = {"interleaved": self.interleaved, "position_ids": position_ids, "rotary_dim": self.dim}
            rotated.append(rope(x, self.cos[rows], self.sin[rows], **options))
        return rotated[0] if k is None else tuple(rotated)

    def extra_repr(self) -> str:
        return f"{self.dim}, max_positions={self.cos.shape[0]}, base={self.base}, interleaved={self.interleaved}"
