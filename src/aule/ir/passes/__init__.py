"""Passes that bring a kernel down to what a language or device can say. Each is proven against the interpreter."""

from __future__ import annotations

from dataclasses import dataclass

from aule.errors import KernelError
from aule.ir.kernel import KernelIR
from aule.ir.passes.dead_code import dead_code
from aule.ir.passes.hints import hints
from aule.ir.passes.int64 import int64
from aule.ir.passes.multiply_high import multiply_high
from aule.ir.passes.narrow_vectors import narrow_vectors
from aule.ir.passes.pack_memory import pack_memory
from aule.ir.passes.round_half import round_half
from aule.ir.passes.soft_half import Convert, soft_half
from aule.ir.passes.votes import votes
from aule.ir.passes.widen_int import widen_int
from aule.ir.types import Scalar, element, f16, i64, u64

__all__ = [
    "Legal",
    "dead_code",
    "hints",
    "int64",
    "legalise",
    "multiply_high",
    "narrow_vectors",
    "pack_memory",
    "round_half",
    "soft_half",
    "votes",
    "widen_int",
]


@dataclass(frozen=True)
class Legal:
    """What a language and device can say; the defaults say everything."""

    soft: frozenset[Scalar] = frozenset()
    """Floating-point types (f16, bf16) that no register can have: kept as u16 bits."""
    packed: frozenset[Scalar] = frozenset()
    """Elements that buffers cannot have: kept in words. Judged after ``soft``: soft elements are u16."""
    widened: frozenset[Scalar] = frozenset()
    """Integer types that no register can have: kept in 32 bits."""
    int64: bool = True
    """64-bit integers exist."""
    mulhi: bool = True
    """The high word of a product can be had."""
    max_lanes: int = 16
    """Widest vector."""
    half_to_float: Convert | None = None
    """The language's own exact conversion of fp16 bits, for soft f16 and rounded ones."""
    float_to_bfloat: Convert | None = None
    """The language's own conversion to bf16 bits, for soft bf16."""
    rounded: bool = False
    """What becomes f16 in registers is rounded before (`round_half`); where there are such registers."""
    pairs: bool = False
    """Vectors of soft bf16 are read as words of two (`soft_half`)."""
    waits: bool = False
    """Workgroups can wait for what others leave."""


_WAITING = frozenset({"peek", "post", "repeat"})


def legalise(kernel: KernelIR, legal: Legal) -> KernelIR:
    """The same kernel within the limits of ``legal``. The bytes of its buffers and parameter block stay the same."""
    if kernel.cluster > 1:
        raise KernelError(f"kernel {kernel.name}: expected no cluster, got one of {kernel.cluster}: PTX alone has them")
    waiting = None if legal.waits else next((op for op in kernel.walk() if op.opcode in _WAITING), None)
    if waiting is not None:
        raise KernelError(
            f"kernel {kernel.name}: expected workgroups that do not wait for others, got {waiting.opcode} "
            f"({waiting.where}): PTX and SPIR-V alone have it"
        )
    # First what adds small integers, then what removes them; whole words are packed before wide vectors are cut, so
    # that eight fp16 are still one load. A pass with nothing to do is left out: each copies the kernel.
    kernel = votes(hints(kernel))
    if legal.soft & _elements(kernel):
        kernel = soft_half(kernel, legal.soft, legal.half_to_float, legal.float_to_bfloat, legal.pairs)
    if legal.rounded and f16 in _elements(kernel):
        kernel = round_half(kernel, legal.half_to_float)
    if legal.packed & _elements(kernel):
        kernel = pack_memory(kernel, legal.packed)
    if legal.widened & _elements(kernel):
        kernel = widen_int(kernel, legal.widened)
    if not legal.int64 and {i64, u64} & _elements(kernel):
        kernel = int64(kernel)
    if not legal.mulhi and any(op.opcode == "mulhi" for op in kernel.walk()):
        kernel = multiply_high(kernel)
    # Always, because it folds constants as well: WGSL refuses those that wrap.
    kernel = narrow_vectors(kernel, legal.max_lanes)
    return dead_code(kernel)


def _elements(kernel: KernelIR) -> set[Scalar]:
    """Elements of all registers, buffers and arrays."""
    values = (*kernel.values.values(), *kernel.shared, *(op.result for op in kernel.walk() if op.result is not None))
    return {element(value.type) for value in values}
