"""The kernels that `aule.decode_attention` launches, as objects."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from aule.codegen import target_for
from aule.errors import InvalidArgumentError, InvalidShapeError
from aule.ir import KernelIR
from aule.kernels.emitted import EmittedKernel, contiguous
from aule.ops.decode.config import DecodeShape
from aule.ops.decode.plan.decode import plan_decode
from aule.ops.decode.plan.shapes import choose_decode_shape, subgroup_size
from aule.ops.decode.problem import DecodeProblem
from aule.ops.shared.plan import Step
from aule.target import Target
from aule.view import TensorView

FLASH_DECODE_CHUNK_SIZE = 512
"""Default number of keys per chunk of a split sequence."""


@dataclass(frozen=True)
class IncrementalAttentionKernel(EmittedKernel):
    """Attention of one query token to the cache of its sequence. Uses one subgroup per key head and no shared memory.

    The kernel's parameters are the buffers ``q_ptr``, ``k_ptr``, ``v_ptr``, ``lens_ptr`` (the number of keys) and
    ``o_ptr``, and scalars. `plan` returns their values for contiguous arrays ``[batch_size, heads, length, head_dim]``.

    Parameters
    ----------
    max_seq_len : int
        Capacity of the cache in keys.
    head_dim : int
        1 to 576.
    num_heads, num_kv_heads : int
        ``num_heads`` is a multiple of ``num_kv_heads``, which is ``num_heads`` by default.
    scale : float
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    dtype : {"float32", "float16", "bfloat16"}
        Element type of q, k, v and o, in any spelling; sums are always float32. The attribute has the kernel
        language's name (``f32`` ...).

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
    scale: float = field(default=None, kw_only=True)  # type: ignore[assignment]  # never None after __post_init__
    dtype: str = field(default="float32", kw_only=True)

    name: ClassVar[str] = "incremental_attention"
    """Entry point of the emitted code."""

    def __post_init__(self) -> None:
        if self.num_kv_heads is None or (isinstance(self.num_kv_heads, int) and self.num_kv_heads == 0):
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        names = ("max_seq_len", "num_heads", "num_kv_heads", "batch_size")
        self._check_sizes(**{name: getattr(self, name) for name in names})
        self._check_heads(self.head_dim, self.num_heads, self.num_kv_heads)
        object.__setattr__(self, "scale", self._checked_scale(self.scale, self.head_dim))

    def with_scale(self, scale: float) -> Any:
        """Return the kernel with another factor of the scores."""
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
        """Return the kernel's configuration, grid and scalar arguments for contiguous arrays."""
        resolved = _resolved(target)
        problem = self._problem()
        shape, splits = self._shape(problem, resolved), self._splits()
        plan = plan_decode(problem, self._views(), resolved, shape=shape, splits=splits, combine="second_launch")
        return plan.steps[0]

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
        queries = contiguous(self.dtype, (self.batch_size, self.num_heads, 1, self.head_dim))
        keys = contiguous(self.dtype, (self.batch_size, self.num_kv_heads, self.max_seq_len, self.head_dim))
        lens = contiguous("i32", (self.batch_size,))
        return {"q": queries, "k": keys, "v": keys, "o": queries, "lens": lens}

    def _shape(self, problem: DecodeProblem, target: Target) -> DecodeShape:
        usual = choose_decode_shape(problem, target, _vector_elements(self.head_dim, self.dtype))
        if subgroup_size(target):
            return replace(usual, subgroups=1)
        # Without subgroups threads cannot exchange data: one thread per row holds full keys.
        return replace(usual, rows=1, lanes=1, keys=1, subgroups=1)

    def _splits(self) -> int:
        return 1


@dataclass(frozen=True)
class MultiWarpIncrementalAttentionKernel(IncrementalAttentionKernel):
    """Attention of one query token, with several subgroups per key head that combine their results in shared memory.

    Parameters
    ----------
    max_seq_len, head_dim, num_heads, num_kv_heads, batch_size, scale, dtype
        As for `IncrementalAttentionKernel`.
    num_warps_per_head : int
        Subgroups of a workgroup, or equal parts of a workgroup on a device without subgroups.
    """

    num_warps_per_head: int = 4
    name: ClassVar[str] = "multi_warp_incremental_attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_sizes(num_warps_per_head=self.num_warps_per_head)

    def _shape(self, problem: DecodeProblem, target: Target) -> DecodeShape:
        usual = choose_decode_shape(problem, target, _vector_elements(self.head_dim, self.dtype))
        if target.backend == "cpu":  # a workgroup is one thread
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
    """Attention of one query token per sequence of a batch, in one launch. Each sequence has its own length."""

    batch_size: int = field(default=1, kw_only=False)
    name: ClassVar[str] = "batched_incremental_attention"

    def _shape(self, problem: DecodeProblem, target: Target) -> DecodeShape:
        return choose_decode_shape(problem, target, _vector_elements(self.head_dim, self.dtype))


@dataclass(frozen=True)
class FlashDecodingChunkKernel(BatchedIncrementalAttentionKernel):
    """Attention of one query token per sequence, with the keys of a sequence split over workgroups.

    This is for long caches. The kernel writes normalised partial results to ``part_ptr`` and their log-sum-exps
    (base 2) to ``part_lse_ptr``, both ``[batch_size, num_heads, num_chunks, ...]``. `FlashDecodingReduceKernel`
    combines them.
    """

    chunk_size: int = field(default=FLASH_DECODE_CHUNK_SIZE, kw_only=True)
    name: ClassVar[str] = "flash_decoding_chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_sizes(chunk_size=self.chunk_size)

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a sequence that fills the cache."""
        return -(-self.max_seq_len // self.chunk_size)

    def _splits(self) -> int:
        return max(self.num_chunks, 2)  # with one chunk there would be no partial results


@dataclass(frozen=True)
class FlashDecodingReduceKernel(EmittedKernel):
    """Combines the partial results of `FlashDecodingChunkKernel`, weighted by their log-sum-exps.

    Parameters
    ----------
    head_dim, num_heads, batch_size, dtype
        As for `FlashDecodingChunkKernel`.
    num_chunks : int
        Number of chunks per sequence.
    """

    head_dim: int
    num_heads: int = 1
    batch_size: int = 1
    num_chunks: int = field(default=2, kw_only=True)
    dtype: str = field(default="float32", kw_only=True)

    name: ClassVar[str] = "flash_decoding_reduce"

    def __post_init__(self) -> None:
        self._check_sizes(num_chunks=self.num_chunks)
        if self.num_chunks < 2:
            raise InvalidShapeError(
                f"[FlashDecodingReduceKernel] expected num_chunks >= 2, got {self.num_chunks}; one part is the result"
            )
        self._chunk_kernel()  # checks the other sizes

    def _chunk_kernel(self) -> FlashDecodingChunkKernel:
        length = self.num_chunks * FLASH_DECODE_CHUNK_SIZE
        return FlashDecodingChunkKernel(
            length, self.head_dim, self.num_heads, self.num_heads, self.batch_size, dtype=self.dtype
        )

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of a workgroup on the default target."""
        return self.artifact("ptx").shared_bytes

    def plan(self, target: str | Target | None = None) -> Step:
        """Return the kernel's configuration, grid and scalar arguments for contiguous arrays."""
        chunks = self._chunk_kernel()
        problem, views = chunks._problem(), chunks._views()
        return plan_decode(problem, views, _resolved(target), splits=self.num_chunks, combine="second_launch").steps[1]

    def build(self, target: str | Target | None = None) -> KernelIR:
        """Trace the kernel; default target: ``aule.codegen.target_for("ptx")``."""
        resolved = _resolved(target)
        step = self.plan(resolved)
        return step.build(step.config, resolved, self.name)  # type: ignore[call-arg]


def _resolved(target: str | Target | None) -> Target:
    return target if isinstance(target, Target) else target_for(target or "ptx")


def _vector_elements(head_dim: int, dtype: str) -> int:
    """Return how many elements of a contiguous row one vector load can read."""
    return math.gcd(head_dim, 4 if dtype == "f32" else 8)
