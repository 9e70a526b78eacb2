"""The plan of the forward pass on a GPU: tiles, then the kernel's configuration, then scalars and grid. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from aule import tuning
from aule.errors import InvalidArgumentError
from aule.ops.attention.build import build_forward
from aule.ops.attention.config import ForwardConfig, FragmentConfig
from aule.ops.attention.fragment.forward_full_tiles import MOST_BLOCKS, reciprocals
from aule.ops.attention.plan.layout import Layout, view_scalars
from aule.ops.attention.plan.scalars import folded, problem_scalars, rotates_runs, score_options
from aule.ops.attention.plan.split import SplitBlocks, SplitLastWave, lane_words, split_blocks, split_last_wave
from aule.ops.attention.plan.tiles import (
    Modifier,
    choose_fragments,
    choose_full,
    choose_shape,
    choose_warpgroups,
    choose_wave,
)
from aule.ops.attention.precision import refused
from aule.ops.attention.prepass.mask_prepass import function_prepass, lists_function, mask_prepass
from aule.ops.attention.prepass.rope_prepass import ROTATED, can_rotate_before, rope_prepass
from aule.ops.attention.problem import UNBOUNDED, AttentionProblem
from aule.ops.shared.plan import Plan, Step, grid_of
from aule.target import Target
from aule.tile.common.matrix import QUAD
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.shape import RUN, FragmentShape
from aule.tile.simt.shape import SimtShape
from aule.tile.warpgroup.engine import has_warpgroups
from aule.tuning import model
from aule.view import TensorView

_LISTED = "attention.forward.mask_prepass_scores"
"""The number of scores from which on it pays to list the tiles that a mask leaves."""

Shape = SimtShape | FragmentShape
Config = ForwardConfig | FragmentConfig


def plan_forward(
    problem: AttentionProblem,
    views: dict[str, TensorView],
    target: Target,
    aligned_base: dict[str, bool] | None = None,
    shape: Shape | None = None,
) -> Plan:
    """Plan a forward pass.

    Parameters
    ----------
    views : dict
        The operands by parameter name (``q``, ``k``, ``v``, ``o`` and, where present, ``mask``, ``bias``, ``alibi``,
        ``sinks``, ``seed``, ``cos``, ``sin``): four-dimensional, with device strides and offsets.
    aligned_base : dict, optional
        For q, k, v, o, mask, bias, cos, sin: whether the memory starts at a multiple of 16 bytes (default: it does).
    shape : SimtShape or FragmentShape, optional
        Tiles to use instead of the table's.
    """
    slices = [] if shape is not None else _slices(problem, views, target, aligned_base)
    if slices:
        return _in_turn([plan_forward(part, own, target, aligned_base) for part, own in slices])
    draft = _Draft(problem, Layout(views, aligned_base or {}), target)
    tiles = shape or _choose_shape(problem, draft.layout, target)
    if problem.precision is not None and not rotates_runs(problem):
        raise InvalidArgumentError(
            f"[flash_attention] expected rope of full runs of {RUN} columns on matrix units, got "
            f"{problem.rope and problem.rope.dim} rotated columns; precision=None computes in float32"
        )
    if problem.batch * problem.heads_q * problem.seq_q == 0:
        return Plan(())
    if isinstance(tiles, SimtShape):
        config: Config = draft.simt_config(tiles)
    else:
        draft.rotate(tiles)
        config = draft.fragment_config(tiles, own_full_tiles=shape is None)
    return draft.launched(config, tiles, _split(draft.problem, config, tiles, target) if shape is None else None)


# -- choose ------------------------------------------------------------------------------------------------------------


def _choose_shape(problem: AttentionProblem, layout: Layout, target: Target) -> Shape:
    """The engine and its tiles: warpgroups, other matrix units, or none."""
    dims = problem.head_dim, problem.value_dim
    masked = problem.mask is not None or problem.bias is not None or problem.has_functions
    in_runs = layout.aligned("qkv", RUN)
    if problem.precision is not None:
        # Rows are rounded in registers, where strided rows are assembled; the tiles of tf32 allow for that.
        in_registers = problem.precision != "tf32" or not all(in_runs)
        rounded = choose_fragments(target, problem.precision, *dims, masked, in_registers)
        if rounded is None:
            raise refused(problem, target)
        return rounded
    found: FragmentShape | None = None
    copied = all(in_runs) if problem.rope is None else can_rotate_before(problem) and in_runs[2]
    if copied and (problem.mask is None or problem.scores >= tuning.number(target, _LISTED, keys=problem.seq_kv)):
        lengths = _unmodified_length(problem), problem.seq_kv
        rows = math.prod(problem.out_shape[:3]) if _stays(problem) else 0
        # Rotated copies of q and k always fit tensor maps.
        known = target if layout.tensors("qkv" if problem.rope is None else "v") else replace(target, tensor_maps=False)
        found = choose_warpgroups(known, problem.dtype, *dims, _modifier(problem), *lengths, rows)
    if found is None and rotates_runs(problem):
        rotated = problem.rope is not None
        found = choose_fragments(target, problem.dtype, *dims, masked, not all(in_runs), rotated)
    return found or choose_shape(target, *dims, problem.dtype, problem.modifiers)


def _modifier(problem: AttentionProblem) -> Modifier:
    if problem.dropout_p > 0:
        return "dropout"
    if problem.bias is not None or problem.has_functions:
        return "bias"
    return "nothing" if problem.mask in (None, "bool") else "mask"


def _stays(problem: AttentionProblem) -> bool:
    """Whether workgroups may stay for several blocks, as `forward_slots.stays` says of a configuration. Without
    modifiers, since the kernel was timed without them."""
    return problem.modifiers == 0 and problem.packed is None and problem.value_dim <= problem.head_dim


def _unmodified_length(problem: AttentionProblem) -> int:
    """The smaller of the numbers of rows and keys if every row keeps every key unmodified; otherwise 0."""
    modified = problem.mask or problem.bias or problem.alibi or problem.softcap > 0 or problem.dropout_p > 0
    modified = modified or problem.has_functions
    banded = problem.limits != (UNBOUNDED, UNBOUNDED)
    return 0 if modified or banded or problem.packed is not None else min(problem.seq_q, problem.seq_kv)


# -- values in slices --------------------------------------------------------------------------------------------------

Slice = tuple[AttentionProblem, dict[str, TensorView]]
"""A problem with some columns of the values, and its views."""


def _slices(
    problem: AttentionProblem, views: dict[str, TensorView], target: Target, aligned_base: dict[str, bool] | None
) -> list[Slice]:
    """Divide values that are too wide for one workgroup's registers, for one launch each. Empty if one launch takes
    all, or if slices would not run on matrix units: only those make up for computing the scores again."""
    facts = {"rotated": problem.rope is not None, "warpgroups": has_warpgroups(target, problem.dtype)}
    widest = int(tuning.number(target, "attention.forward.widest_values", **facts))
    if problem.value_dim <= widest:
        return []
    slices = [_slice(problem, views, first, widest) for first in range(0, problem.value_dim, widest)]
    part, own = slices[0]
    on_units = isinstance(_choose_shape(part, Layout(own, aligned_base or {}), target), FragmentShape)
    return slices if on_units else []


def _slice(problem: AttentionProblem, views: dict[str, TensorView], first: int, width: int) -> Slice:
    """At most ``width`` columns of the values; the first slice stores the log-sum-exp."""
    width = min(width, problem.value_dim - first)
    own = {
        name: replace(view, shape=(*view.shape[:3], width), offset=view.offset + first * view.strides[3])
        for name, view in views.items()
        if name in ("v", "o")
    }
    return replace(problem, value_dim=width, return_lse=problem.return_lse and first == 0), {**views, **own}


def _in_turn(plans: list[Plan]) -> Plan:
    """Plans one after the other, in the same memory."""
    steps = tuple(step for plan in plans for step in plan.steps)
    return Plan(steps, _largest(plan.workspace for plan in plans), _largest(plan.scratch for plan in plans))


def _largest(sizes: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The largest of the sizes of each name."""
    largest: dict[str, int] = {}
    for each in sizes:
        largest |= {name: max(size, largest.get(name, 0)) for name, size in each.items()}
    return largest


# -- configure ---------------------------------------------------------------------------------------------------------


class _Draft:
    """A plan in the making: steps before the kernel, their workspace, and scalars of the kernel.

    ``problem`` and ``layout`` are those of the kernel, after the steps before it.
    """

    def __init__(self, problem: AttentionProblem, layout: Layout, target: Target) -> None:
        self.problem, self.layout, self.target = problem, layout, target
        self.before: list[Step] = []
        self.workspace: dict[str, int] = {}
        self.renamed: dict[str, str] = {}
        self.scalars: dict[str, int | float] = {}

    def rotate(self, shape: FragmentShape) -> None:
        """Rotate q and k in steps of their own if the kernel copies rows past registers."""
        if not shape.warpgroups or self.problem.rope is None:
            return
        steps, self.workspace, made = rope_prepass(
            self.problem, self.layout.views, self.target, self.layout.aligned_base
        )
        self.before += steps
        self.layout = self.layout.rotated(made)
        self.problem, self.renamed = replace(self.problem, rope=None), ROTATED

    def _count(self, shape: Shape) -> int:
        """Collect scalars; returns the number of blocks of rows."""
        problem = self.problem
        blocks_q = -(-problem.seq_q // shape.block_q)
        blocks = blocks_q * problem.batch * problem.heads_q
        counts = {"blocks_q": blocks_q, "blocks": blocks}
        self.scalars = problem_scalars(problem, self.target) | view_scalars(self.layout.views) | counts
        return blocks

    def _options(self, run: int) -> dict[str, Any]:
        """Fields of every configuration."""
        return score_options(self.problem) | self.layout.rope_options(run) | {
            "aligned": self.layout.aligned("qkvo", run),
            "unit": self.layout.unit("qkvo"),
            "index64": self.layout.index64,
        }  # fmt: skip

    def simt_config(self, shape: SimtShape) -> ForwardConfig:
        """The kernel without matrix units."""
        self._count(shape)
        options = self._options(QUAD)
        self._list_tiles(shape, options)
        full_tiles = (
            shape.full_tiles and all(options["aligned"]) and _dense_full_tiles(self.problem, self.layout, shape)
        )
        return ForwardConfig(**options, shape=shape, full_tiles=full_tiles)

    def fragment_config(self, shape: FragmentShape, own_full_tiles: bool) -> FragmentConfig:
        """The kernel on matrix units; ``own_full_tiles``: the kernel of full tiles may have other ones."""
        problem, blocks = self.problem, self._count(shape)
        options = self._options(RUN)
        self._list_tiles(shape, options)
        if shape.warpgroups:
            options |= self._warpgroup_options()
        if shape.copies == "tma" and not (self.target.tensor_maps and self.layout.tensors("qkv")):
            raise InvalidArgumentError(
                f"[flash_attention] expected a device with tensor maps, and q, k and v whose strides and start are "
                f"multiples of 16 bytes, for tiles with copies='tma', got {self.target.name}; use copies='async'"
            )
        config = FragmentConfig(**options, shape=shape, folded=folded(problem), factor=problem.precision)
        if shape.prefetch_scores and _plain(config, problem) and _full_tiles(problem, shape, blocks):
            full = choose_full(self.target, shape) if own_full_tiles else shape
            config = replace(config, full_tiles=True, shape=full)
            self.scalars |= reciprocals(problem, -(-problem.seq_q // shape.block_q))
        return config

    def _list_tiles(self, shape: Shape, options: dict[str, Any]) -> None:
        """List the tiles that the mask leaves in steps of their own, if the kernel can skip the others."""
        if lists_function(self.problem):
            found = function_prepass(self.problem, shape, self.target, False, options, self.scalars)
        elif self.problem.mask is not None and isinstance(shape, FragmentShape) and shape.warpgroups:
            mask, aligned = self.layout.views["mask"], self.layout.starts_aligned("mask")
            found = mask_prepass(self.problem, mask, shape, self.target, False, options, self.scalars, aligned)
        else:
            return
        self.before += found.steps
        self.workspace |= found.workspace
        self.scalars |= found.scalars
        options |= found.options

    def _warpgroup_options(self) -> dict[str, Any]:
        problem = self.problem
        everywhere = problem.mask is not None or problem.bias is not None or problem.has_functions
        others = problem.bias or problem.softcap > 0 or problem.has_functions
        added = (name for name in ("mask", "bias") if getattr(problem, name) not in (None, "bool"))
        return {
            "one_loop": everywhere or _few_keys(problem, self.target),
            "linear": problem.alibi and problem.limits[1] == 0 and not others,
            "pairs": tuple(name for name in added if self.layout.in_pairs(name)),
        }

    # -- scalars and grid ----------------------------------------------------------------------------------------------

    def launched(self, config: Config, shape: Shape, split: SplitBlocks | SplitLastWave | None) -> Plan:
        """The plan of the steps before and of the kernel, whose blocks may be split along the keys."""
        blocks, scratch = int(self.scalars["blocks"]), {}
        if split is not None:
            config, blocks = replace(config, pieces=True), split.workgroups
            self.scalars |= split.scalars
            if isinstance(split, SplitBlocks):
                self.workspace |= split.workspace(shape, self.problem.value_dim, self.target)
            else:
                assert isinstance(shape, FragmentShape)
                self.workspace |= split.workspace(lane_words(shape, self.problem.value_dim, self.target))
            scratch["tickets"] = split.blocks
        if isinstance(shape, FragmentShape) and shape.copiers:
            blocks = min(blocks, model.units(self.target))  # workgroups stay for several blocks
        grid = grid_of("flash_attention", blocks, self.target)
        step = Step(config, build_forward, grid, self.scalars, self.renamed)
        return Plan((*self.before, step), self.workspace, scratch)


def _split(
    problem: AttentionProblem, config: Config, shape: Shape, target: Target
) -> SplitBlocks | SplitLastWave | None:
    """How blocks are split along the keys if they leave much of the device idle; None if they do not."""
    wave = choose_wave(target, shape) if target.device_fence else None
    if wave is None or config.packed:
        return None
    blocks, units = -(-problem.seq_q // shape.block_q) * problem.batch * problem.heads_q, target.compute_units
    if isinstance(shape, FragmentShape) and shape.warpgroups:
        # Blocks of a band differ in length, so that their last wave is not one.
        if not (config.keeps_all or blocks < wave.resident * units):
            return None
        return split_last_wave(blocks, -(-_most_keys(problem, shape) // shape.block_kv), units, wave)
    if not _plain(config, problem):
        return None
    return split_blocks(blocks, -(-problem.seq_kv // shape.block_kv), units, wave)


def _most_keys(problem: AttentionProblem, shape: Shape) -> int:
    """The most keys that the rows of a block keep together."""
    left, right = problem.band
    end = min(problem.seq_kv, max(problem.seq_q + problem.shift + right, 0))
    return min(end, left + right + shape.block_q)


def _plain(config: Config, problem: AttentionProblem) -> bool:
    """Whether rows are aligned, keep all keys and modify no scores, so that all blocks take equally long."""
    banded = config.left or config.right or problem.packed is not None
    return problem.modifiers == 0 and not banded and all(config.aligned)


def _full_tiles(problem: AttentionProblem, shape: FragmentShape, blocks: int) -> bool:
    """Whether a kernel on matrix units has only full tiles (`FragmentConfig.full_tiles`)."""
    lengths = problem.seq_q % shape.block_q == 0 and problem.seq_kv % shape.block_kv == 0 < problem.seq_kv
    dims = problem.head_dim % SIZE == 0 and problem.value_dim % SIZE == 0
    return lengths and dims and problem.rope is None and problem.precision is None and blocks < MOST_BLOCKS


def _dense_full_tiles(problem: AttentionProblem, layout: Layout, shape: SimtShape) -> bool:
    """Whether rows are dense in memory and fill all tiles (`ForwardConfig.full_tiles`)."""
    lengths = problem.seq_q % shape.block_q == 0 and problem.seq_kv % shape.block_kv == 0
    known = not problem.packed and problem.rope is None and problem.head_dim % shape.chunk_k == 0
    views = layout.views
    return lengths and known and all(views[n].strides[2:] == (views[n].shape[3], 1) for n in "qkvo")


def _few_keys(problem: AttentionProblem, target: Target) -> bool:
    """Whether a band leaves so few keys to each row that edge tiles are too many for a loop of their own."""
    left, right = problem.limits
    band = left + right + 1 if left != UNBOUNDED and right != UNBOUNDED else problem.seq_kv
    limited = left != UNBOUNDED or right != UNBOUNDED
    few = tuning.number(target, "attention.forward.one_loop_keys", head_dim=max(problem.head_dim, problem.value_dim))
    return limited and min(band, problem.seq_kv) <= few
