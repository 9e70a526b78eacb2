"""`AttentionKernel`: the forward kernel of one attention layer, as an object."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aule.codegen import target_for
from aule.errors import InvalidArgumentError, InvalidDtypeError
from aule.ir import KernelIR
from aule.kernels.emitted import EmittedKernel, contiguous
from aule.kernels.tiles import TileConfig, check_tiles, config_for, shape_for_tiles, tensor_core_config
from aule.ops.attention.build import KERNEL_NAME, build_forward
from aule.ops.attention.config import ForwardConfig
from aule.ops.attention.cpu import forward as cpu_forward
from aule.ops.attention.cpu.plan import plan_alone
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.problem import AttentionProblem
from aule.ops.shared.checks import checked_flag, checked_integer
from aule.ops.shared.plan import Step
from aule.target import Target


@dataclass(frozen=True, init=False)
class AttentionKernel(EmittedKernel):
    """FlashAttention's forward kernel for ``[batch_size, num_heads, seq_len, head_dim]``.

    Objects are immutable: the ``with_`` methods return changed copies. The kernel's parameters are the buffers
    ``q_ptr``, ``k_ptr``, ``v_ptr`` and ``o_ptr``, and scalars. `plan` returns their values for contiguous arrays.

    Parameters
    ----------
    seq_len : int
        Number of queries and of keys.
    head_dim : int
        1 to 576.
    num_heads, num_kv_heads, batch_size : int
        ``num_heads`` is a multiple of ``num_kv_heads``, which is ``num_heads`` by default.
    scale : float
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    causal : bool
        Row i attends to keys 0..i.
    dtype : {"float32", "float16", "bfloat16"}
        Element type of q, k, v and o, in any spelling; sums are always float32. The attribute has the kernel
        language's name (``f32`` ...).
    tiles : (int, int), optional
        Query rows per workgroup and keys per step. Default: what `aule.flash_attention` uses on the target.
    use_tensor_cores : bool
        Compute products on matrix units (see `tensor_core`). `aule.flash_attention` does so for float16 and bfloat16
        if the device has them and their layout is known.

    Examples
    --------
    >>> kernel = AttentionKernel(2048, 64).with_causal().with_tiles(32, 32)
    >>> source = kernel.emit("wgsl")
    >>> kernel.plan(target_for("wgsl")).grid
    (64, 1, 1)
    """

    seq_len: int
    head_dim: int
    num_heads: int
    num_kv_heads: int
    batch_size: int
    scale: float
    causal: bool
    dtype: str
    tiles: tuple[int, int] | None
    use_tensor_cores: bool

    def __init__(
        self,
        seq_len: int,
        head_dim: int,
        *,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        batch_size: int = 1,
        scale: float | None = None,
        causal: bool = False,
        dtype: str = "float32",
        tiles: tuple[int, int] | None = None,
        use_tensor_cores: bool = False,
    ) -> None:
        fields = {
            "seq_len": seq_len,
            "head_dim": head_dim,
            "num_heads": num_heads,
            "num_kv_heads": num_heads if num_kv_heads is None else num_kv_heads,
            "batch_size": batch_size,
            "causal": checked_flag("AttentionKernel", "causal", causal),
            "dtype": dtype,
            "tiles": None if tiles is None else _pair(tiles),
            "use_tensor_cores": checked_flag("AttentionKernel", "use_tensor_cores", use_tensor_cores),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._check()
        object.__setattr__(self, "scale", self._checked_scale(scale, head_dim))

    def _check(self) -> None:
        names = ("seq_len", "num_heads", "num_kv_heads", "batch_size")
        self._check_sizes(**{name: getattr(self, name) for name in names})
        self._check_heads(self.head_dim, self.num_heads, self.num_kv_heads)
        if self.use_tensor_cores and self.dtype not in ("f16", "bf16"):
            raise InvalidDtypeError(
                "[AttentionKernel] expected dtype float16 or bfloat16 for tensor cores, got float32; leave "
                "use_tensor_cores out"
            )
        if self.tiles is not None:
            check_tiles(*self.tiles)

    @classmethod
    def tensor_core(cls, seq_len: int, head_dim: int, *, dtype: str = "float16", **options: Any) -> AttentionKernel:
        """Make the kernel for matrix units, which multiply float16 or bfloat16 and sum in float32.

        Parameters
        ----------
        seq_len, head_dim, dtype, **options
            As for `AttentionKernel`.
        """
        return cls(seq_len, head_dim, dtype=dtype, use_tensor_cores=True, **options)

    # -- variants --------------------------------------------------------------------------------------------------

    def with_causal(self, causal: bool = True) -> AttentionKernel:
        """Return the kernel in which row i attends to keys 0..i."""
        return replace(self, causal=causal)

    def with_tiles(self, q: int, kv: int) -> AttentionKernel:
        """Return the kernel with tiles of ``q`` query rows and ``kv`` keys, both multiples of 8.

        Raises
        ------
        InvalidArgumentError
            No device supports these tiles. `build` raises if only its target does not support them.
        """
        return replace(self, tiles=(q, kv))

    def with_scale(self, scale: float) -> AttentionKernel:
        """Return the kernel with another factor of the scores."""
        return replace(self, scale=scale)

    # -- properties ------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Entry point of the emitted code."""
        engine = "_tensor_core" if self.use_tensor_cores else ""
        return f"{KERNEL_NAME}{engine}{'_causal' if self.causal else ''}"

    @property
    def tile_q(self) -> int:
        """Query rows per workgroup: those chosen, else those of the default target."""
        return self.config().tile_q

    @property
    def tile_kv(self) -> int:
        """Keys per step: those chosen, else those of the default target."""
        return self.config().tile_kv

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of a workgroup on the default target; for others use ``config(target).shared_memory_bytes``."""
        return self.config().shared_memory_bytes

    def config(self, target: str | Target | None = None) -> TileConfig:
        """Return the tiles on a GPU.

        Parameters
        ----------
        target : str or Target, optional
            As for `build`.

        Raises
        ------
        InvalidArgumentError
            The target is a CPU, or the tiles do not fit it.
        """
        resolved = self._target(target)
        if resolved.backend == "cpu":
            raise InvalidArgumentError(
                "[AttentionKernel] expected a GPU, got the CPU, which has no tiles in shared memory; plan() says how "
                "the kernel is cut up there"
            )
        if self.use_tensor_cores:
            return tensor_core_config(resolved, self.head_dim, self.dtype, self.tiles)
        if self.tiles is None:
            return config_for(resolved, self.head_dim)
        shape = shape_for_tiles(resolved, *self.tiles, self.head_dim, self.head_dim)
        return TileConfig(resolved.name, resolved, self.head_dim, self.head_dim, shape, "chosen by hand")

    def plan(self, target: str | Target | None = None) -> Step:
        """Return the kernel's configuration, grid and scalar arguments for contiguous arrays.

        Parameters
        ----------
        target : str or Target, optional
            As for `build`.

        Raises
        ------
        InvalidArgumentError
            The tiles do not fit the target.
        """
        resolved = self._target(target)
        if resolved.backend == "cpu" and self.tiles is not None:
            raise InvalidArgumentError(
                f"[AttentionKernel] expected no tiles for the CPU, got {self.tiles}; leave them out, its blocks follow "
                "from its registers and caches"
            )
        problem = AttentionProblem(
            self.batch_size,
            self.num_heads,
            self.num_kv_heads,
            self.seq_len,
            self.seq_len,
            self.head_dim,
            self.head_dim,
            self.dtype,
            self.scale,
            self.causal,
        )
        queries, keys = (
            contiguous(self.dtype, (self.batch_size, heads, self.seq_len, self.head_dim))
            for heads in (self.num_heads, self.num_kv_heads)
        )
        views = {"q": queries, "k": keys, "v": keys, "o": queries}
        if resolved.backend == "cpu":
            return plan_alone(problem, views, resolved)
        (step,) = plan_forward(problem, views, resolved, shape=self.config(resolved).shape).steps
        if isinstance(step.config, ForwardConfig):  # the emitted kernel accepts other lengths and strides too
            step = replace(step, config=replace(step.config, full_tiles=False))
        return step

    def build(self, target: str | Target | None = None) -> KernelIR:
        """Trace the kernel.

        Parameters
        ----------
        target : str or Target, optional
            A device or a language. Default: ``aule.codegen.target_for("wgsl")``, whose limits every device meets;
            ``target_for("ptx")`` when the tiles were chosen by hand and need more.

        Raises
        ------
        InvalidArgumentError
            The tiles do not fit the target.
        """
        resolved = self._target(target)
        build = cpu_forward.build_forward if resolved.backend == "cpu" else build_forward
        return build(self.plan(resolved).config, resolved, self.name)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _target(self, target: str | Target | None) -> Target:
        if isinstance(target, Target):
            return target
        if target is not None:
            return target_for(target)
        portable, large = target_for("wgsl"), target_for("ptx")
        if self.use_tensor_cores:
            return large
        if self.tiles is None:
            return portable
        try:
            shape_for_tiles(portable, *self.tiles, self.head_dim, self.head_dim)
        except InvalidArgumentError:
            return large
        return portable


def _pair(tiles: Any) -> tuple[int, int]:
    if not isinstance(tiles, (tuple, list)) or len(tiles) != 2:
        raise InvalidArgumentError(
            f"[AttentionKernel] expected tiles as (q, kv), got {tiles!r}; leave them out for those of the target"
        )
    q, kv = (checked_integer("with_tiles", name, x, "take 8") for name, x in zip(("q", "kv"), tiles, strict=True))
    return q, kv
