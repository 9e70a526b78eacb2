"""Legalisation passes: rewrite a kernel to use only what a language and device support.

Each pass is tested against the interpreter.
"""

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
from aule.ir.passes.threads_in_turn import threads_in_turn
from aule.ir.passes.votes import votes
from aule.ir.passes.widen_int import widen_int
from aule.ir.types import Scalar, f16, i64, u64

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
    "threads_in_turn",
    "votes",
    "widen_int",
]


@dataclass(frozen=True)
class Legal:
    """Limits of a language and device; the defaults are no limits."""

    soft: frozenset[Scalar] = frozenset()
    """Floating-point types (f16, bf16) that registers cannot hold: replaced by u16 bits."""
    packed: frozenset[Scalar] = frozenset()
    """Element types that buffers cannot have: packed into words. Applied after ``soft``, which turns types into u16."""
    widened: frozenset[Scalar] = frozenset()
    """Integer types that registers cannot hold: widened to 32 bits."""
    int64: bool = True
    """64-bit integers are supported."""
    mulhi: bool = True
    """``mulhi`` is supported."""
    max_lanes: int = 16
    """Widest vector."""
    half_to_float: Convert | None = None
    """The language's own exact conversion of fp16 bits to f32, for ``soft`` f16 and ``rounded``."""
    float_to_bfloat: Convert | None = None
    """The language's own conversion of f32 to bf16 bits, for ``soft`` bf16."""
    rounded: bool = False
    """Numbers are rounded before they are cast to f16 in registers (`round_half`)."""
    pairs: bool = False
    """Vectors of ``soft`` bf16 are converted in words of two (`soft_half`)."""


def legalise(kernel: KernelIR, legal: Legal) -> KernelIR:
    """Rewrite a kernel to the limits of ``legal``. The bytes of its buffers and parameter block do not change."""
    if kernel.cluster > 1:
        raise KernelError(f"kernel {kernel.name}: expected no cluster, got one of {kernel.cluster}: PTX alone has them")
    # Passes that introduce small integers come before those that remove them. Memory is packed before wide vectors are
    # split, so that eight fp16 are still one load. A pass copies the kernel, so one with nothing to do is skipped.
    kernel = votes(hints(kernel))
    if legal.soft & kernel.elements():
        kernel = soft_half(kernel, legal.soft, legal.half_to_float, legal.float_to_bfloat, legal.pairs)
    if legal.rounded and f16 in kernel.elements():
        kernel = round_half(kernel, legal.half_to_float)
    if legal.packed & kernel.elements():
        kernel = pack_memory(kernel, legal.packed)
    if legal.widened & kernel.elements():
        kernel = widen_int(kernel, legal.widened)
    if not legal.int64 and {i64, u64} & kernel.elements():
        kernel = int64(kernel)
    if not legal.mulhi and any(op.opcode == "mulhi" for op in kernel.walk()):
        kernel = multiply_high(kernel)
    # Always runs, because it also folds constants: WGSL rejects constant expressions that wrap.
    kernel = narrow_vectors(kernel, legal.max_lanes)
    return dead_code(kernel)
