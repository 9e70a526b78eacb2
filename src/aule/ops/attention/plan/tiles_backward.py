"""Tiles of the backward kernels, from the tuning tables, as in `tiles.py`."""

from __future__ import annotations

from aule import tuning
from aule.errors import KernelError
from aule.ir.types import PANEL
from aule.ops.attention.plan.split import Wave
from aule.ops.attention.plan.tiles import dims_facts, first_fitting, known_wave, narrowed, runs, simt_shape
from aule.target import Target
from aule.tile.fragment.engine import multiplies
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape
from aule.tile.warpgroup.engine import has_warpgroups
from aule.tuning import model

SIMT = "attention.backward.simt"
FRAGMENT = "attention.backward.fragment"
WARPGROUP = "attention.backward.warpgroup"


def choose_backward_fragments(
    target: Target, dtype: str, head_dim: int, value_dim: int, of: str
) -> FragmentShape | None:
    """Tiles of a backward kernel on matrix units: of dQ ("queries"), of dK and dV ("keys"), or of dK and dV with atomic
    sums of dQ ("sums"); None if there are none."""
    if not multiplies(target, dtype):
        return None

    def fits(shape: FragmentShape) -> bool:
        # A thread loads what belongs to one of the other rows.
        if not runs(shape, target) or shape.threads < shape.block_kv:
            return False
        return shape.backward_bytes(head_dim, value_dim, sums=of == "sums") <= target.max_shared_bytes

    return first_fitting(target, FRAGMENT, {"dtype": dtype, **dims_facts(head_dim, value_dim), "of": of}, fits)


def choose_backward_wave(target: Target, shape: FragmentShape) -> Wave | None:
    """How many workgroups of keys run at a time; None if not measured, or if partial sums cannot be combined."""
    op = WARPGROUP if shape.warpgroups else FRAGMENT
    return known_wave(target, op, shape) if target.device_fence else None


def choose_backward_warpgroups(target: Target, dtype: str, head_dim: int, value_dim: int) -> FragmentShape | None:
    """Tiles of the kernel of dK and dV over warpgroups; None if there are none."""
    if not (multiplies(target, dtype) and has_warpgroups(target, dtype)):
        return None

    def fits(shape: FragmentShape) -> bool:
        # Warpgroups share dQ by panels of columns, of which each has at least one.
        enough = -(-head_dim // PANEL) >= shape.threads // 2 // shape.block_kv
        return enough and shape.backward_bytes(head_dim, value_dim, sums=True) <= target.max_shared_bytes

    return first_fitting(target, WARPGROUP, {"dtype": dtype, **dims_facts(head_dim, value_dim)}, fits)


def choose_backward_shape(
    target: Target, inner: int, results: tuple[int, ...], sums: bool = False, modifiers: int = 0
) -> SimtShape:
    """Tiles of a simt backward kernel, for the wider head dimension (``inner``) and the columns of each gradient
    (``results``); with ``sums`` the kernel sums dQ, too."""

    def fits(record: tuning.Record) -> bool:
        """``accumulators`` are the most registers of S, dP and the gradients (dQ's sums excepted) that a thread may
        hold without modifiers, and with any; unlimited without that field."""
        shape = narrowed(simt_shape(record.use), inner)
        held = shape.rows * (2 * shape.block_kv + sum(shape.value_cols(dim) for dim in results)) // shape.threads_x
        limits = record.use.get("accumulators")
        shared = shape.backward_bytes(inner, sums)
        room = model.fits(target, shape.threads, shared, record.use.get("resident", 1))
        return room and (limits is None or held <= limits[bool(modifiers)])

    facts = {"sums": sums, "head_dim": inner, "columns": sum(results), "modifiers": modifiers}
    record = tuning.find(target, SIMT, facts, fits)
    if record is not None:
        return narrowed(simt_shape(record.use), inner)
    raise KernelError(
        f"[flash_attention] expected a device with workgroups of 64 and 16 KiB of shared memory for gradients, got "
        f"{target.max_shared_bytes} bytes and {target.max_threads} on {target.name}; use another backend"
    )
