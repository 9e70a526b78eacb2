"""The kernel language: types, operations, builder, verifier, printer and interpreter."""

from aule.ir.builder import Builder, Var
from aule.ir.kernel import KernelIR, Op, Value

__all__ = ["Builder", "KernelIR", "Op", "Value", "Var"]
