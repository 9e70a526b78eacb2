"""Which tiles a device gets. Every number says where it was measured; see docs/performance.md for the alternatives."""

from __future__ import annotations

from dataclasses import replace

from aule.errors import KernelError
from aule.target import Target
from aule.tile.simt import SimtShape, padded, uses_subgroups

SHAPES: tuple[SimtShape, ...] = (
    #         block_q, block_kv, threads_x, threads_y, chunk_k, chunk_v, resident_q
    SimtShape(64, 64, 16, 8, 16, 16, True),
    SimtShape(64, 64, 16, 8, 16, 16, False),
    SimtShape(32, 64, 16, 8, 16, 16, False),
    SimtShape(32, 64, 16, 8, 16, 8, False),
    SimtShape(64, 64, 8, 16, 16, 16, True),
    SimtShape(64, 64, 8, 16, 16, 8, False),
    SimtShape(32, 32, 8, 8, 16, 8, False),
    SimtShape(32, 32, 8, 8, 8, 4, False),
)
"""Alternatives in order of preference; the first that fits a device is taken."""

MAX_ACCUMULATORS = 96
"""Registers of S and O that one thread may hold: 64 + 32 leave room for operands below 255 registers."""


def choose_shape(target: Target, head_dim: int, value_dim: int) -> SimtShape:
    """The first of `SHAPES` that fits the device and the head dimensions."""
    shapes = [_narrowed(s, head_dim) for s in SHAPES]
    fitting = [s for s in shapes if _fits(s, target, head_dim, value_dim)]
    if not fitting:
        need = min(s.shared_bytes(head_dim, value_dim, uses_subgroups(target, s)) for s in shapes)
        raise KernelError(
            f"[flash_attention] expected a device with {need} bytes of shared memory and workgroups of 64, got "
            f"{target.max_shared_bytes} bytes and {target.max_threads} on {target.name}; use another backend"
        )
    # Shuffles spare two barriers per tile: a shape whose rows fit into a subgroup goes before one whose rows do not.
    return next((s for s in fitting if uses_subgroups(target, s)), fitting[0])


def _narrowed(shape: SimtShape, head_dim: int) -> SimtShape:
    """Steps of 8 columns where 16 would compute on more padding (8 and 16 both keep rows off each other's banks)."""
    return replace(shape, chunk_k=8) if padded(head_dim, 8) < padded(head_dim, shape.chunk_k) else shape


def _fits(shape: SimtShape, target: Target, head_dim: int, value_dim: int) -> bool:
    rows = shape.block_q // shape.threads_y
    held = rows * (shape.block_kv + shape.value_cols(value_dim)) // shape.threads_x
    small = shape.block_q * shape.block_kv <= 32 * 32
    return (
        shape.threads <= target.max_threads
        and shape.shared_bytes(head_dim, value_dim, uses_subgroups(target, shape)) <= target.max_shared_bytes
        and (held <= MAX_ACCUMULATORS or small)
    )
