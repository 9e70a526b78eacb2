"""Tile configurations of devices, the shared memory they need, and checks that they fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Protocol

from aule import tuning
from aule.codegen import TARGETS
from aule.dtypes import usual_name
from aule.errors import InvalidArgumentError
from aule.ops.attention.plan.tiles import SIMT, choose_fragments, choose_shape, simt_shape
from aule.ops.shared.checks import checked_integer
from aule.target import Target
from aule.tile.common.matrix import padded
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import fitted, multiplies
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape, uses_subgroups
from aule.tuning.family import GENERIC, families

TILE_STEP = 8
"""Tiles are multiples of this: fewer rows or columns leave no work for a workgroup's threads."""

_THREADS = ((16, 8), (8, 16), (16, 16), (8, 8), (32, 8), (8, 32))
"""Columns and rows of threads, the preferred first. More than 256 threads would have too few registers for sums."""

LARGEST_SHARED = 227 * 1024
"""The most shared memory that a workgroup has on any device (NVIDIA sm_90)."""

MAX_ACCUMULATORS = 96
"""Most sums per thread for hand-chosen tiles: 64 + 32 leave room for operands below 255 registers."""

BY_RULE = "by rule, not measured"
"""Origin of a configuration that was not measured."""
_MEASURED_DIMS = (64, 128)
"""Head dimensions for which the tables were measured."""


class NeedsSharedMemory(Protocol):
    """A configuration or kernel that knows how much shared memory a workgroup uses."""

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of a workgroup."""


@dataclass(frozen=True)
class TileConfig:
    """The tiles of attention on one kind of device.

    Attributes
    ----------
    name : str
    target : Target
        The device that the tiles were chosen for.
    head_dim, value_dim : int
        Head dimensions that they were chosen for.
    shape : SimtShape or FragmentShape
        Blocks, threads and chunks; the latter for matrix units.
    origin : str
        How the choice was made: on which device it was measured, or ``"by rule, not measured"``.
    """

    name: str
    target: Target
    head_dim: int
    value_dim: int
    shape: SimtShape | FragmentShape
    origin: str = BY_RULE

    @property
    def tile_q(self) -> int:
        """Query rows of a workgroup."""
        return self.shape.block_q

    @property
    def tile_kv(self) -> int:
        """Keys of one step."""
        return self.shape.block_kv

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        return self.shape.threads

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of a workgroup on the target."""
        if isinstance(self.shape, FragmentShape):
            return self.shape.shared_bytes(self.head_dim, self.value_dim)
        return self.shape.shared_bytes(self.head_dim, self.value_dim, uses_subgroups(self.target, self.shape))

    def for_head_dim(self, head_dim: int, value_dim: int | None = None) -> TileConfig:
        """The configuration of this device for other head dimensions."""
        return config_for(self.target, head_dim, value_dim, self.name)


def config_for(target: Target, head_dim: int, value_dim: int | None = None, name: str | None = None) -> TileConfig:
    """The configuration that calls of `aule.flash_attention` use on a target."""
    values = head_dim if value_dim is None else value_dim
    shape = choose_shape(target, head_dim, values)
    origin = _origin(target, shape) if head_dim == values and head_dim in _MEASURED_DIMS else BY_RULE
    return TileConfig(name or target.name, target, head_dim, values, shape, origin)


def _origin(target: Target, shape: SimtShape) -> str:
    """Where a table's shape was measured, if on a device of the target's own family."""
    for record in tuning.family_records(families(target)[0], SIMT):
        if simt_shape(record.use) == shape and isinstance(record.measured, dict):
            return f"measured on {record.measured['device']} (docs/lab/{record.note})"
    return BY_RULE


def tensor_core_config(target: Target, head_dim: int, dtype: str, tiles: tuple[int, int] | None) -> TileConfig:
    """The configuration of a kernel on matrix units: the table's, or one for tiles that a person chose.

    Raises
    ------
    InvalidArgumentError
        The target has no matrix units for the type, or the tiles do not suit them.
    """
    if not multiplies(target, dtype):
        raise InvalidArgumentError(
            f"[tensor_core] expected a target whose matrix units take {usual_name(dtype)} and whose fragments are "
            f"known, got {target.name}; take target_for('ptx'), or the target of a device that aule has opened"
        )
    if tiles is None:
        shape = choose_fragments(target, dtype, head_dim, head_dim, False, False)
        if shape is None:
            raise InvalidArgumentError(
                f"[tensor_core] expected a device with enough shared memory for head_dim {head_dim}, got "
                f"{target.max_shared_bytes} bytes on {target.name}; choose smaller tiles with .with_tiles(q, kv)"
            )
        return TileConfig(target.name, target, head_dim, head_dim, shape)
    tile_q, tile_kv = tiles
    for name, size in (("tile_q", tile_q), ("tile_kv", tile_kv)):
        if size % SIZE:
            raise InvalidArgumentError(
                f"[with_tiles] expected {name} to be a multiple of {SIZE} on matrix units, got {size}; "
                f"take {padded(size, SIZE)}"
            )
    rows = 2 * SIZE if tile_q % (2 * SIZE) == 0 else SIZE
    shape = fitted(FragmentShape(tile_q, tile_kv, tile_q // rows, 1, False), target)
    config = TileConfig(target.name, target, head_dim, head_dim, shape, "chosen by hand")
    validate_config(config, target)
    return config


def required_shared_memory(config: NeedsSharedMemory) -> int:
    """Bytes of shared memory that a workgroup needs.

    Parameters
    ----------
    config : TileConfig or AttentionKernel
        One of `tuned_configs`, or a kernel.

    Returns
    -------
    int
        The number of bytes.
    """
    need = getattr(config, "shared_memory_bytes", None)
    if not isinstance(need, int):
        raise InvalidArgumentError(
            f"[required_shared_memory] expected a configuration or a kernel, got {type(config).__name__}; take one of "
            "tuned_configs, or an AttentionKernel"
        )
    return need


def validate_config(config: NeedsSharedMemory, limit: int | Target) -> None:
    """Refuse a configuration that does not fit a device.

    Parameters
    ----------
    config : TileConfig or AttentionKernel
    limit : int or Target
        Bytes of shared memory that a workgroup may use, or the device.

    Raises
    ------
    InvalidArgumentError
        Naming the need, the limit and the remedy.
    """
    allowed = (
        limit.max_shared_bytes
        if isinstance(limit, Target)
        else checked_integer("validate_config", "limit", limit, "pass bytes, or a Target")
    )
    need = required_shared_memory(config)
    if need > allowed:
        raise InvalidArgumentError(
            f"[validate_config] expected at most {allowed} bytes of shared memory, got a need of {need}; "
            "take smaller tiles with .with_tiles(q, kv), or tuned_configs['fallback']"
        )
    if isinstance(limit, Target) and isinstance(config, TileConfig) and config.threads > limit.max_threads:
        raise InvalidArgumentError(
            f"[validate_config] expected workgroups of at most {limit.max_threads} threads, got {config.threads}; "
            "take smaller tiles with .with_tiles(q, kv), or tuned_configs['fallback']"
        )


def shape_for_tiles(target: Target, tile_q: int, tile_kv: int, head_dim: int, value_dim: int) -> SimtShape:
    """Threads and chunks for tiles that a person chose.

    A shape of the table with these tiles comes first. Otherwise it is the first layout of threads that fits the device
    and keeps a thread's sums in registers; resident Q, rows within a subgroup and long chunks are preferred.

    Raises
    ------
    InvalidArgumentError
        Naming the need, the limit and the remedy.
    """
    check_tiles(tile_q, tile_kv)
    candidates = list(_candidates(tile_q, tile_kv, head_dim))
    allowed = [s for s in candidates if s.threads <= target.max_threads]
    possible = [s for s in allowed if s.accumulators(value_dim) <= MAX_ACCUMULATORS]
    if not possible:
        most = max(allowed, key=lambda s: s.threads, default=candidates[-1])
        raise InvalidArgumentError(
            f"[with_tiles] expected tiles of which one thread holds at most {MAX_ACCUMULATORS} sums, got {tile_q} x "
            f"{tile_kv} with {most.accumulators(value_dim)} in workgroups of {most.threads} ({target.name} allows "
            f"{target.max_threads} threads); take a smaller tile_q"
        )
    fitting = [s for s in possible if _shared(s, target, head_dim, value_dim) <= target.max_shared_bytes]
    if not fitting:
        need = min(_shared(s, target, head_dim, value_dim) for s in possible)
        raise InvalidArgumentError(
            f"[with_tiles] expected tiles that fit {target.max_shared_bytes} bytes of shared memory on {target.name}, "
            f"got {tile_q} x {tile_kv} with head_dim {head_dim}, which need {need}; take smaller tiles or a "
            "target that has more"
        )
    return next((s for s in fitting if uses_subgroups(target, s)), fitting[0])


def check_tiles(tile_q: int, tile_kv: int) -> None:
    """Refuse tiles that no device can have."""
    for name, size in (("tile_q", tile_q), ("tile_kv", tile_kv)):
        if size < TILE_STEP or size % TILE_STEP:
            raise InvalidArgumentError(
                f"[with_tiles] expected {name} to be a positive multiple of {TILE_STEP}, got {size}; "
                f"take {max(padded(size, TILE_STEP), TILE_STEP)}"
            )
    scores = 4 * tile_q * tile_kv  # P passes through shared memory in fp32
    if scores > LARGEST_SHARED:
        raise InvalidArgumentError(
            f"[with_tiles] expected tiles whose scores fit {LARGEST_SHARED} bytes of shared memory, the most of any "
            f"device, got {tile_q} x {tile_kv}, which need {scores}; take smaller tiles"
        )


def _candidates(tile_q: int, tile_kv: int, head_dim: int) -> Iterator[SimtShape]:
    """All layouts of threads over tiles, the preferred first."""
    # 8 columns a step where 16 would compute on more padding, as the table's own shapes do.
    longest = 8 if padded(head_dim, 8) < padded(head_dim, 16) else 16
    for known in (simt_shape(record.use) for record in tuning.family_records(GENERIC, SIMT)):
        if (known.block_q, known.block_kv) == (tile_q, tile_kv):
            yield replace(known, chunk_k=min(known.chunk_k, longest))
    for resident_q, (chunk_k, chunk_v) in product((True, False), ((16, 16), (16, 8), (8, 8), (8, 4))):
        for threads_x, threads_y in _THREADS:
            if tile_q % threads_y == 0 and tile_kv % threads_x == 0 and tile_kv % chunk_v == 0:
                yield SimtShape(tile_q, tile_kv, threads_x, threads_y, min(chunk_k, longest), chunk_v, resident_q)


def _shared(shape: SimtShape, target: Target, head_dim: int, value_dim: int) -> int:
    return shape.shared_bytes(head_dim, value_dim, uses_subgroups(target, shape))


_HEAD_DIM = 128

_TUNED = {
    "ampere": replace(TARGETS["ptx"], name="NVIDIA Ampere"),
    "hopper": replace(TARGETS["ptx"], name="NVIDIA Hopper", arch="sm_90", max_shared_bytes=LARGEST_SHARED),
    "rdna3": replace(
        TARGETS["spirv"],
        name="AMD RDNA3",
        vendor="amd",
        subgroup_size=64,
        subgroup_sizes=(32, 64),
        max_threads=1024,
        max_shared_bytes=65536,
    ),
    "apple": replace(TARGETS["msl"], name="Apple GPU"),
    "fallback": replace(TARGETS["wgsl"], name="any GPU"),
}

tuned_configs: Mapping[str, TileConfig] = MappingProxyType(
    {name: config_for(target, _HEAD_DIM, name=name) for name, target in _TUNED.items()}
)
"""Configurations for ``ampere``, ``hopper``, ``rdna3``, ``apple`` and a ``fallback`` with what every GPU has.

They are those that `aule.flash_attention` uses there, read from the tables in `aule.tuning`, for head
dimension 128 (`TileConfig.for_head_dim` gives others). ``target`` says which device each was chosen for, ``origin``
whether by measurement.
"""
