"""Tiles of the forward kernels, from the tuning tables: `aule.tuning` has the shapes, this file the rules by which a
shape fits a device and a problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from aule import tuning
from aule.errors import KernelError
from aule.ops.attention.plan.split import Wave
from aule.target import Target
from aule.tile.common.matrix import padded
from aule.tile.fragment.arrangement import arrange
from aule.tile.fragment.engine import factor_elem, fitted, multiplies
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape, uses_subgroups
from aule.tile.warpgroup.engine import MOST_COLUMNS, has_warpgroups
from aule.tuning import model

SIMT = "attention.forward.simt"
FRAGMENT = "attention.forward.fragment"
WARPGROUP = "attention.forward.warpgroup"

Use = Mapping[str, Any]
Modifier = Literal["nothing", "mask", "bias", "dropout"]
"""The step between the products that takes most registers: none, an added mask, a bias, or dropout."""


def choose_shape(target: Target, head_dim: int, value_dim: int, dtype: str = "f32", modifiers: int = 0) -> SimtShape:
    """Tiles of the simt kernel: the first record that fits the device and the head dimensions.

    The ``registers`` of a record are enough for fp32 without modifiers; anything more takes all there are, so that
    fewer workgroups are resident.
    """
    facts = {"dtype": dtype, **dims_facts(head_dim, value_dim), "modifiers": modifiers}
    found = [(record, narrowed(simt_shape(record.use), head_dim)) for record in tuning.matching(target, SIMT, facts)]
    fitting = [x for x in found if _fits(x[1], x[0].use, target, head_dim, value_dim, min(modifiers, 2))]
    if not fitting:
        need = min(shape.shared_bytes(head_dim, value_dim, uses_subgroups(target, shape)) for _, shape in found)
        raise KernelError(
            f"[flash_attention] expected a device with {need} bytes of shared memory and workgroups of 64, got "
            f"{target.max_shared_bytes} bytes and {target.max_threads} on {target.name}; use another backend"
        )
    first, chosen = fitting[0]
    if first not in tuning.own_records(target, SIMT) and tuning.number(target, f"{SIMT}.order") == "shuffles first":
        # Shuffles save two barriers per tile.
        chosen = next((shape for _, shape in fitting if uses_subgroups(target, shape)), chosen)
    return chosen if dtype == "f32" and not modifiers else replace(chosen, registers=255, late_values=False)


def choose_warpgroups(
    target: Target, dtype: str, head_dim: int, value_dim: int, modifier: Modifier = "nothing", length: int = 0,
    keys: int = 1 << 30, rows: int = 0,
) -> FragmentShape | None:  # fmt: skip
    """Tiles for products of warpgroups, whose factors are copied to shared memory as they are; None if the target has
    no such products. ``length`` is the number of rows and keys if every row attends to every key, and 0 otherwise;
    ``keys`` the number of keys, if known; ``rows`` the number of query rows of all heads if workgroups may stay for
    several blocks of them (`forward_slots.stays`), and 0 otherwise."""
    if not has_warpgroups(target, dtype) or not multiplies(target, dtype) or value_dim > MOST_COLUMNS:
        return None
    facts = {"dtype": dtype, **dims_facts(head_dim, value_dim), "modifier": modifier, "length": length, "keys": keys}

    def fits(shape: FragmentShape) -> bool:
        several = rows > shape.block_q * model.units(target)
        copies = shape.copies == "async" or target.tensor_maps
        room = shape.shared_bytes(head_dim, value_dim) <= target.max_shared_bytes
        return room and copies and (several or not shape.copiers)

    return first_fitting(target, WARPGROUP, facts, fits)


def choose_fragments(
    target: Target, dtype: str, head_dim: int, value_dim: int, masked: bool, strided: bool, rotated: bool = False
) -> FragmentShape | None:
    """Tiles on matrix units; None if there are none for the type, or their fragments' layout is not known.

    Parameters
    ----------
    masked : bool
        There is a mask or a bias, whose indices take registers.
    strided : bool
        Rows pass through registers into shared memory, element by element.
    rotated : bool
        Columns of Q are rotated while they are read, and so must stay together.
    """
    if not multiplies(target, dtype):
        return None
    rows = "strided" if strided else "masked" if masked else "rotated" if rotated else "plain"
    itemsize = factor_elem(dtype).bits // 8

    def fits(shape: FragmentShape) -> bool:
        if rotated and shape.depth_parts > 1:
            return False
        shared = shape.shared_bytes(head_dim, value_dim, itemsize)
        return runs(shape, target) and shared <= target.max_shared_bytes

    facts = {"dtype": dtype, **dims_facts(head_dim, value_dim), "value_dim": value_dim, "rows": rows}
    return first_fitting(target, FRAGMENT, facts, fits)


def first_fitting(
    target: Target, op: str, facts: Mapping[str, Any], fits: Callable[[FragmentShape], bool]
) -> FragmentShape | None:
    """The first shape on matrix units that the tables have for some facts and that fits, with the target's lanes."""
    shapes = (fitted(fragment_shape(record.use), target) for record in tuning.matching(target, op, facts))
    return next(filter(fits, shapes), None)


def choose_full(target: Target, shape: FragmentShape) -> FragmentShape:
    """The shape that replaces one of the table if all tiles are full."""
    use = _use_of(target, FRAGMENT, shape)
    return replace(shape, **use.get("full", {}))


def choose_wave(target: Target, shape: SimtShape | FragmentShape) -> Wave | None:
    """How many workgroups of a table's shape run at a time; None if not measured."""
    if isinstance(shape, SimtShape):
        return known_wave(target, SIMT, shape)
    return known_wave(target, WARPGROUP if shape.warpgroups else FRAGMENT, shape)


def known_wave(target: Target, op: str, shape: SimtShape | FragmentShape) -> Wave | None:
    """The wave of the record that has a shape; None if it has none."""
    use = _use_of(target, op, shape)
    return Wave(**use["wave"]) if "wave" in use else None


def _use_of(target: Target, op: str, shape: SimtShape | FragmentShape) -> Use:
    """The record that has a shape; empty if none has."""
    make = fragment_shape if isinstance(shape, FragmentShape) else simt_shape
    return next((record.use for record in tuning.records(target, op) if make(record.use) == shape), {})


def dims_facts(head_dim: int, value_dim: int) -> dict[str, int]:
    """Facts about head dimensions: ``head_dim`` is the wider one."""
    return {"head_dim": max(head_dim, value_dim), "narrow_dim": min(head_dim, value_dim)}


def simt_shape(use: Use) -> SimtShape:
    """The shape of a simt record."""
    return SimtShape(**use["shape"])


def fragment_shape(use: Use) -> FragmentShape:
    """The shape of a record for matrix units."""
    return FragmentShape(**use["shape"])


def runs(shape: FragmentShape, target: Target) -> bool:
    """Whether the device has such workgroups, and its fragments divide such rows evenly."""
    rows = shape.rows // shape.score_cut[0]
    return shape.threads <= target.max_threads and rows % arrange(target).height == 0


def narrowed(shape: SimtShape, head_dim: int) -> SimtShape:
    """The shape with steps of 8 columns if 16 would compute on more padding (8 and 16 both avoid bank conflicts)."""
    return replace(shape, chunk_k=8) if padded(head_dim, 8) < padded(head_dim, shape.chunk_k) else shape


def _fits(shape: SimtShape, use: Use, target: Target, head_dim: int, value_dim: int, modifiers: int) -> bool:
    """Whether the device has room for a shape, and a thread does not spill: ``accumulators`` are the most elements of S
    and O that it may hold without modifiers, with one, and with several; unlimited without that field."""
    shared = shape.shared_bytes(head_dim, value_dim, uses_subgroups(target, shape))
    limits = use.get("accumulators")
    held = limits is None or shape.accumulators(value_dim) <= limits[modifiers]
    return held and model.fits(target, shape.threads, shared, use.get("resident", 1))
