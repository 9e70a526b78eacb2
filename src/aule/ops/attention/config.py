"""ForwardConfig: everything about a forward kernel that is fixed while it is traced.

What is not here (lengths, strides, scale, window sizes) is a parameter of the kernel, so that one kernel serves all.
"""

from __future__ import annotations

from dataclasses import dataclass

from aule.tile.simt import SimtShape


@dataclass(frozen=True)
class ForwardConfig:
    """A forward kernel.

    Attributes
    ----------
    aligned : tuple of bool
        For q, k, v, o: rows can be read or written as vectors of four.
    unit : tuple of bool
        For q, k, v, o: the head dimension has stride 1.
    index64 : bool
        Element indices need 64 bits.
    """

    dtype: str
    head_dim: int
    value_dim: int
    shape: SimtShape
    left: bool = False
    right: bool = False
    softcap: bool = False
    mask: str | None = None
    bias: str | None = None
    alibi: bool = False
    sinks: bool = False
    lse: bool = False
    aligned: tuple[bool, ...] = (True, True, True, True)
    unit: tuple[bool, ...] = (True, True, True, True)
    index64: bool = False

    @property
    def everywhere(self) -> bool:
        """Every tile may have dropped keys."""
        return self.mask is not None or self.bias is not None
