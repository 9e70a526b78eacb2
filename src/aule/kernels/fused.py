"""Forward kernels of the ops other than attention, as objects, for contiguous arrays.

>>> from aule.kernels import SwiGLUKernel
>>> kernel = SwiGLUKernel(4096, 11008, dtype="bfloat16")
>>> kernel.name
'swiglu'
>>> wgsl = kernel.emit("wgsl")
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from aule.codegen import target_for
from aule.engine.row_ops import result_views
from aule.ir import KernelIR
from aule.kernels.emitted import EmittedKernel, contiguous
from aule.ops.catalogue import CATALOGUE
from aule.ops.shared.checks import checked_dropout
from aule.ops.shared.plan import Step
from aule.target import Target


class FusedKernel(EmittedKernel):
    """The forward kernel of an op of the catalogue.

    Its parameters are the buffers of the op's operands and outputs, ``x_ptr`` and so on, and scalars. `plan` returns
    the scalars' values for contiguous arrays.
    """

    op: str
    """Name of the op in the catalogue."""
    dtype: str

    @abstractmethod
    def operands(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the dtype and shape of each operand, by name."""

    def options(self) -> dict[str, Any]:
        """Return the options that differ from the op's defaults."""
        return {}

    @property
    def name(self) -> str:
        """The kernel's entry point."""
        return self.build().name

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of a workgroup on the default target; 0 if one subgroup is enough for a row."""
        return self.build().shared_bytes

    def plan(self, target: str | Target | None = None) -> Step:
        """Return the kernel's configuration, grid and scalar arguments for contiguous arrays."""
        return self.steps(target)[-1]

    def steps(self, target: str | Target | None = None) -> tuple[Step, ...]:
        """Return all launches of the op. The last one is this kernel."""
        spec = CATALOGUE[self.op]
        views = {name: contiguous(dtype, shape) for name, (dtype, shape) in self.operands().items()}
        options = {option.name: option.default for option in spec.options} | self.options()
        call = spec.call(views, options)
        return spec.plan(call.problem, dict(call.views) | result_views(call), self._target(target)).steps

    def build(self, target: str | Target | None = None) -> KernelIR:
        """Trace the kernel.

        Parameters
        ----------
        target : str or Target, optional
            A device or a language. Default: ``aule.codegen.target_for("wgsl")``, whose limits every device meets.
        """
        step = self.plan(target)
        return step.build(step.config, self._target(target))

    @staticmethod
    def _target(target: str | Target | None) -> Target:
        return target if isinstance(target, Target) else target_for(target or "wgsl")


@dataclass(frozen=True)
class _RowsKernel(FusedKernel):
    """A kernel on arrays ``[rows, length]``."""

    rows: int
    length: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        self._check_sizes(rows=self.rows, length=self.length)


class _GatedKernel(_RowsKernel):
    def operands(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return dict.fromkeys(("gate", "up"), (self.dtype, (self.rows, self.length)))


@dataclass(frozen=True)
class SwiGLUKernel(_GatedKernel):
    """``y = silu(gate) * up`` on ``[rows, length]``."""

    op = "swiglu"


@dataclass(frozen=True)
class GeGLUKernel(_GatedKernel):
    """``y = gelu(gate) * up`` on ``[rows, length]``; ``approximate`` is ``"none"`` or ``"tanh"``."""

    approximate: str = "none"
    op = "geglu"

    def options(self) -> dict[str, Any]:
        return {"approximate": self.approximate}


@dataclass(frozen=True)
class ResidualLayerNormKernel(_RowsKernel):
    """``h = x + residual`` and its LayerNorm ``y``, on ``[rows, length]``, with weight and bias."""

    eps: float = 1e-5
    op = "residual_layer_norm"

    def operands(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        rows = dict.fromkeys(("x", "residual"), (self.dtype, (self.rows, self.length)))
        return rows | dict.fromkeys(("weight", "bias"), (self.dtype, (self.length,)))

    def options(self) -> dict[str, Any]:
        return {"eps": self.eps}


@dataclass(frozen=True)
class LayerNormLinearKernel(FusedKernel):
    """``y = layer_norm(x) @ weight.T + bias`` on ``[rows, length]``, with a weight of ``[features, length]``.

    The normalisation has a weight and a bias too. The kernel is the product, on matrix units if the target has them.
    The first of `steps` computes the statistics of each row, three float32 numbers in ``statistics_ptr``. On CPUs with
    many rows, the second of three steps packs the weight into ``packed_ptr``, which the kernel then reads instead.
    """

    rows: int
    length: int
    features: int
    dtype: str = "float32"
    eps: float = 1e-5
    op = "layer_norm_linear"

    def __post_init__(self) -> None:
        self._check_sizes(rows=self.rows, length=self.length, features=self.features)

    def operands(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        vectors = dict.fromkeys(("weight_norm", "bias_norm"), (self.dtype, (self.length,)))
        weight = {"weight": (self.dtype, (self.features, self.length)), "bias": (self.dtype, (self.features,))}
        return {"x": (self.dtype, (self.rows, self.length)), **vectors, **weight}

    def options(self) -> dict[str, Any]:
        return {"eps": self.eps}


@dataclass(frozen=True)
class RMSNormRoPEKernel(FusedKernel):
    """RMSNorm of heads, then rotary position embedding, on ``[batch_size, num_heads, seq_len, head_dim]``.

    The tables ``cos`` and ``sin`` are float32 ``[seq_len, head_dim / 2]``.
    """

    seq_len: int
    head_dim: int
    num_heads: int = 1
    batch_size: int = 1
    dtype: str = "float32"
    eps: float = 1e-6
    interleaved: bool = False
    op = "rms_norm_rope"

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("seq_len", "head_dim", "num_heads", "batch_size")}
        self._check_sizes(**sizes)

    def operands(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        shape = (self.batch_size, self.num_heads, self.seq_len, self.head_dim)
        found: dict[str, tuple[str, tuple[int, ...]]] = {"x": (self.dtype, shape)}
        found["weight"] = (self.dtype, (self.head_dim,))
        return found | dict.fromkeys(("cos", "sin"), ("f32", (self.seq_len, self.head_dim // 2)))

    def options(self) -> dict[str, Any]:
        return {"eps": self.eps, "interleaved": self.interleaved}


@dataclass(frozen=True)
class SoftmaxDropoutKernel(_RowsKernel):
    """Softmax of rows with dropout, on ``[rows, length]``; ``seed_ptr`` holds the two words of the seed."""

    dropout_p: float = 0.1
    causal: bool = False
    op = "softmax_dropout"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dropout_p", checked_dropout("SoftmaxDropoutKernel", self.dropout_p))

    def operands(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        found: dict[str, tuple[str, tuple[int, ...]]] = {"x": (self.dtype, (self.rows, self.length))}
        return found | ({"seed": ("u32", (2,))} if self.dropout_p else {})

    def options(self) -> dict[str, Any]:
        return {"dropout_p": self.dropout_p, "causal": self.causal}
