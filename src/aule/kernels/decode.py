"""The kernels of decoding as objects: the very ones that `aule.decode_attention` launches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from aule.codegen import target_for
from aule.errors import InvalidArgumentError, InvalidShapeError
from aule.ir import KernelIR
from aule.kernels.emitted import EmittedKernel
from aule.ops.decode.config import DecodeShape
from aule.ops.decode.plan import plan_decode
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.shapes import choose_decode_shape, subgroup_size
from aule.ops.step import Step
from aule.target import Target
from aule.view import TensorView

FLASH_DECODE_CHUNK_SIZE = 512
"""Keys of a part of a split sequence."""


@dataclass(frozen=True)
class IncrementalAttentionKernel(EmittedKernel):
    """One query token of one sequence against its cache, by one subgroup for each key head, without shared memory.

    The kernel's parameters are the buffers ``q_ptr``, ``k_ptr``, ``v_ptr``, ``lens_ptr`` (the keys that there are) and
    ``o_ptr``, and scalars, whose values `plan` gives for contiguous arrays ``[batch_size, heads, length, head_dim]``.

    Parameters
    ----------
    max_seq_len : int
        Keys that the cache has room for.
    head_dim : int
        1 to 256.
    num_heads, num_kv_heads : int
        ``num_heads`` is a multiple of ``num_kv_heads``, which is ``num_heads`` by default.
    scale : float
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    dtype : {"f32", "f16", "bf16"}
        Of q, k, v and o; sums are always fp32.

    Examples
    --------
    >>> kernel = IncrementalAttentionKernel(4096, 128, 32, 8)
    >>> kernel.shared_memory_bytes
    0
    >>> ptx = kernel.emit_ptx()
    """

    max_seq_len: int
    head_dim: int
    num_heads: int = 1
    num_kv_heads: int = 0
    batch_size: int = field(default=1, kw_only=True)
    scale: float = field(default=None, kw_only=True)  # type: ignore[assignment]  # never None once it is made
    dtype: str = field(default="f32", kw_only=True)

    name: ClassVar[str] = "incremental_attention"
    """Entry point of the emitted code."""

    def __post_init__(self) -> None:
        if self.num_kv_heads is None or (isinstance(self.num_kv_heads, int) and self.num_kv_heads == 0):
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        names = ("max_seq_len", "num_heads", "num_kv_heads", "batch_size")
        self._check_sizes(self.dtype, **{name: getattr(self, name) for name in names})
        self._check_heads(self.head_dim, self.num_heads, self.num_kv_heads)
        object.__setattr__(self, "scale", self._checked_scale(self.scale, self.head_dim))

    def with_scale(self, scale: float) -> Any:
        """The kernel with another factor of the scores."""
        return replace(self, scale=scale)

    @property
    def is_gqa(self) -> bool:
        """Whether query heads share key heads."""
        return self.num_heads != self.num_kv_heads

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of a workgroup on the default target."""
        config: Any = self.plan().config
        bytes_: int = config.shape.shared_bytes(self.head_dim)
        return bytes_

    def plan(self, target: str | Target | None = None) -> Step:
        """Configuration, grid and scalar arguments for contiguous arrays."""
        resolved = _resolved(target)
        problem = self._problem()
        return plan_decode(
            problem, self._views(), resolved, shape=self._shape(problem, resolved), splits=self._splits(), gather=False
        ).steps[0]

    def build(self, target: str | Target | None = None) -> KernelIR:
        """Trace the kernel.

        Parameters
        ----------
        target : str or Target, optional
            A device or a language. Default: ``aule.codegen.target_for("ptx")``.
        """
        resolved = _resolved(target)
        step = self.plan(resolved)
        return step.build(step.config, resolved, self.name)  # type: ignore[call-arg]

    def _problem(self) -> DecodeProblem:
        return DecodeProblem(
            self.batch_size, self.num_heads, self.num_kv_heads, 1, self.max_seq_len, self.head_dim, self.head_dim,
            self.dtype, self.dtype, self.scale,
        )  # fmt: skip

    def _views(self) -> dict[str, TensorView]:
        def view(heads: int, length: int) -> TensorView:
            step = length * self.head_dim
            shape = (self.batch_size, heads, length, self.head_dim)
            return TensorView(self.dtype, shape, (heads * step, step, self.head_dim, 1), "device", None)

        queries, keys = view(self.num_heads, 1), view(self.num_kv_heads, self.max_seq_len)
        lens = TensorView("i32", (self.batch_size,), (1,), "device", None)
        return {"q": queries, "k": keys, "v": keys, "o": queries, "lens": lens}

    def _shape(self, problem: DecodeProblem, target: Target) -> DecodeShape:
        usual = choose_decode_shape(problem, target, _run(self.head_dim, self.dtype))
        if subgroup_size(target):
            return replace(usual, subgroups=1)
        # Nobody to exchange with: a thread for each row, which holds whole keys.
        return replace(usual, rows=1, lanes=1, keys=1, subgroups=1)

    def _splits(self) -> int:
        return 1


@dataclass(frozen=True)
class MultiWarpIncrementalAttentionKernel(IncrementalAttentionKernel):
    """The same by several subgroups for each key head, whose results are put together in shared memory.

    Parameters
    ----------
    num_warps_per_head : int
        Subgroups of a workgroup; where a device has none, parts of a workgroup that take turns with keys.
    """

    num_warps_per_head: int = 4
    name: ClassVar[str] = "multi_warp_incremental_attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_sizes(self.dtype, num_warps_per_head=self.num_warps_per_head)

    def _shape(self, problem: DecodeProblem, target: Target) -> DecodeShape:
        usual = choose_decode_shape(problem, target, _run(self.head_dim, self.dtype))
        if target.backend == "cpu":  # where a workgroup is one thread
            return usual
        shape = replace(usual, subgroups=self.num_warps_per_head)
        need = shape.shared_bytes(self.head_dim)
        if shape.threads > target.max_threads or need > target.max_shared_bytes:
            raise InvalidArgumentError(
                f"[{type(self).__name__}] expected at most {target.max_threads} threads and {target.max_shared_bytes} "
                f"bytes of shared memory on {target.name}, got {shape.threads} and {need}; take fewer warps"
            )
        return shape


@dataclass(frozen=True)
class BatchedIncrementalAttentionKernel(IncrementalAttentionKernel):
    """One query token for each sequence of a batch, every sequence with its own length, in one launch."""

    batch_size: int = field(default=1, kw_only=False)
    name: ClassVar[str] = "batched_incremental_attention"

    def _shape(self, problem: DecodeProblem, target: Target) -> DecodeShape:
        return choose_decode_shape(problem, target, _run(self.head_dim, self.dtype))


@dataclass(frozen=True)
class FlashDecodingChunkKernel(BatchedIncrementalAttentionKernel):
    """The same with the keys of each sequence divided among workgroups, for caches longer than a few workgroups read
    quickly. It leaves normalised parts in ``part_ptr`` and their log-sum-exps (base 2) in ``part_lse_ptr``,
    ``[batch_size, num_heads, num_chunks, ...]``, for `FlashDecodingReduceKernel`."""

    chunk_size: int = field(default=FLASH_DECODE_CHUNK_SIZE, kw_only=True)
    name: ClassVar[str] = "flash_decoding_chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_sizes(self.dtype, chunk_size=self.chunk_size)

    @property
    def num_chunks(self) -> int:
        """Parts of a sequence that fills the cache."""
        return -(-self.max_seq_len // self.chunk_size)

    def _splits(self) -> int:
        return max(self.num_chunks, 2)  # one part alone would be a whole result


@dataclass(frozen=True)
class FlashDecodingReduceKernel(EmittedKernel):
    """Adds up the parts that `FlashDecodingChunkKernel` left, weighted by their log-sum-exps.

    Parameters
    ----------
    head_dim, num_heads, batch_size : int
        As of the first kernel.
    num_chunks : int
        Parts of each sequence.
    """

    head_dim: int
    num_heads: int = 1
    batch_size: int = 1
    num_chunks: int = field(default=2, kw_only=True)
    dtype: str = field(default="f32", kw_only=True)

    name: ClassVar[str] = "flash_decoding_reduce"

    def __post_init__(self) -> None:
        self._check_sizes(self.dtype, num_chunks=self.num_chunks)
        if self.num_chunks < 2:
            raise InvalidShapeError(
                f"[FlashDecodingReduceKernel] expected num_chunks >= 2, got {self.num_chunks}; one part is the result"
            )
        self._first()  # which refuses what it cannot have

    def _first(self) -> FlashDecodingChunkKernel:
        length = self.num_chunks * FLASH_DECODE_CHUNK_SIZE
        return FlashDecodingChunkKernel(
            length, self.head_dim, self.num_heads, self.num_heads, self.batch_size, dtype=self.dtype
        )

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of a workgroup on the default target."""
        return self.artifact("ptx").shared_bytes

    def plan(self, target: str | Target | None = None) -> Step:
        """Configuration, grid and scalar arguments for contiguous arrays."""
        first = self._first()
        problem, views = first._problem(), first._views()
        return plan_decode(problem, views, _resolved(target), splits=self.num_chunks, gather=False).steps[1]

    def build(self, target: str | Target | None = None) -> KernelIR:
        """Trace the kernel; default target: ``aule.codegen.target_for("ptx")``."""
        resolved = _resolved(target)
        step = self.plan(resolved)
        return step.build(step.config, resolved, self.name)  # type: ignore[call-arg]


def _resolved(target: str | Target | None) -> Target:
    return target if isinstance(target, Target) else target_for(target or "ptx")


def _run(head_dim: int, dtype: str) -> int:
    """Elements of a contiguous row that can be read at once."""
    return math.gcd(head_dim, 4 if dtype == "f32" else 8)
