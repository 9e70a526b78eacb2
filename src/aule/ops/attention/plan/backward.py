"""The plan of the gradients on a GPU: tiles, then the kernels' configurations, then scalars and grids. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from aule import tuning
from aule.ops.attention.config import BackwardConfig, DeltaConfig, FragmentBackwardConfig, RoundConfig
from aule.ops.attention.fragment.backward import build_backward_fragment
from aule.ops.attention.plan.layout import Layout, view_scalars
from aule.ops.attention.plan.scalars import (
    folded,
    problem_scalars,
    rotates_runs,
    row_scalars,
    score_options,
)
from aule.ops.attention.plan.split import SplitLastWave, split_last_wave
from aule.ops.attention.plan.tiles_backward import (
    choose_backward_fragments,
    choose_backward_shape,
    choose_backward_warpgroups,
    choose_backward_wave,
)
from aule.ops.attention.prepass.mask_prepass import MaskPrepass, function_prepass, lists_function, mask_prepass
from aule.ops.attention.prepass.rope_prepass import ROTATED, can_rotate_before, rope_prepass
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.simt.backward import build_backward
from aule.ops.attention.simt.backward_rows import build_delta, build_round
from aule.ops.attention.warpgroup.backward import build_backward_warpgroup
from aule.ops.shared.plan import Plan, Step, grid_of
from aule.target import Target
from aule.tile.common.math import LN2
from aule.tile.common.matrix import QUAD, padded
from aule.tile.fragment.arrangement import SIZE, added_together, arrange
from aule.tile.fragment.rope import exchange_bytes
from aule.tile.fragment.shape import RUN, FragmentShape
from aule.tile.simt.atomic_sums import TileSums
from aule.tile.simt.shape import SimtShape
from aule.view import TensorView

Shape = SimtShape | FragmentShape
_INPUTS = ("q", "k", "v", "do")
_LISTED = "attention.backward.mask_prepass_scores"
"""The number of scores from which on it pays to list the tiles that a mask leaves."""


def plan_backward(
    problem: AttentionProblem,
    views: dict[str, TensorView],
    target: Target,
    aligned_base: dict[str, bool] | None = None,
    shapes: tuple[Shape | None, Shape | None] | None = None,
) -> Plan:
    """Plan the gradients of q, k and v on a GPU, or of the scores alone if there is no view ``dq``.

    Parameters
    ----------
    views : dict
        As for the forward pass, and ``do``, ``dq``, ``dk``, ``dv``, the last three contiguous. The log-sum-exp of the
        forward pass is the buffer ``lse``. With ``ds``, fp32 ``[batch, heads_q, seq_q, seq_kv]`` and zero before, the
        gradient of what is added to the scores is stored there.
    aligned_base : dict, optional
        For q, k, v, o, do, mask, cos, sin: whether the memory starts at a multiple of 16 bytes (default: it does).
        Rows of a ``ds`` that is alone begin at multiples of 8 elements.
    shapes : pair of SimtShape or FragmentShape, optional
        Tiles of dQ and of dK and dV, to use instead of the table's.
    """
    if math.prod(problem.out_shape[:3]) == 0 or problem.key_rows == 0:
        return Plan(())
    layout = Layout(views, aligned_base or {})
    if "dq" not in views:
        return _plan_scores(problem, layout, target, shapes and shapes[0])
    tiles = _choose_tiles(problem, layout, target, shapes or (None, None))
    draft = _Draft(problem, layout, target, tiles)
    draft.add_delta()
    if tiles.scores is not None:
        draft.add_gradients("scores", tiles.scores)
    if tiles.queries is not None:
        draft.add_gradients("queries", tiles.queries)
    draft.add_gradients("keys", tiles.keys)
    if tiles.clear:
        draft.add_rounding()
    return Plan(tuple(draft.steps), draft.workspace, draft.scratch)


def _plan_scores(problem: AttentionProblem, layout: Layout, target: Target, shape: Shape | None) -> Plan:
    """Plan the gradients of what is added to the scores, without those of q, k and v."""
    dims = problem.head_dim, problem.value_dim
    shape = shape or _fragments(problem, target, "queries") or choose_backward_shape(target, max(dims), dims[:1])
    draft = _Draft(problem, layout, target, _Tiles(shape, shape, scores=shape))
    draft.add_delta()
    draft.add_gradients("scores", shape)
    return Plan(tuple(draft.steps), draft.workspace, draft.scratch)


# -- choose ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tiles:
    """Tiles of the kernels."""

    keys: Shape
    """Tiles of the kernel of dK and dV."""
    queries: Shape | None
    """Tiles of the kernel of dQ; None if the kernel of dK and dV computes dQ, too."""
    row_tiles: int = 0
    """Tiles of the sums of one head's dQ."""
    clear: int = 0
    """Elements of all sums of dQ, which are cleared first; none if one block has all keys."""
    scores: Shape | None = None
    """Tiles of a kernel of dS alone; None if that of dQ stores dS, or nobody wants it."""

    @property
    def sums(self) -> bool:
        """Whether the kernel of dK and dV computes dQ, too."""
        return self.queries is None


def _choose_tiles(
    problem: AttentionProblem, layout: Layout, target: Target, given: tuple[Shape | None, Shape | None]
) -> _Tiles:
    dims, scores = (problem.head_dim, problem.value_dim), "ds" in layout.views
    # On matrix units dS has a kernel of its own: two products more, but then none needs plain arithmetic.
    own = _fragments(problem, target, "queries") if scores and problem.seq_kv % RUN == 0 else None
    scores = scores and own is None
    adds = not scores and _can_add(problem, target)
    queries, keys = given
    in_runs = layout.aligned(_INPUTS, RUN)
    copied = all(in_runs) if problem.rope is None else can_rotate_before(problem) and all(in_runs[2:])
    # Assembling rows in registers takes more of them than this kernel has; two launches list what a mask leaves.
    if copied and (problem.mask is None or problem.scores >= tuning.number(target, _LISTED, keys=problem.seq_kv)):
        keys = keys or choose_backward_warpgroups(target, problem.dtype, *dims)
    if not (any(given) or scores):
        alone = keys or _fragments(problem, target, "sums")
        if alone is not None and _one_block(problem, target, alone):
            return _Tiles(alone, None, scores=own)
    keys = keys or (_fragments(problem, target, "sums") if adds else None) or _fragments(problem, target, "keys")
    keys = keys or choose_backward_shape(target, max(dims), dims, adds, problem.modifiers)
    row_tiles, tile_size = _sums_of_head(problem, keys)
    clear = padded(problem.batch * problem.heads_q * row_tiles * tile_size, QUAD)
    if adds and 4 * clear <= target.max_buffer_bytes and _fits_sums(problem, target, keys):
        return _Tiles(keys, None, row_tiles, clear, own)
    if queries is None and not scores:
        queries = _fragments(problem, target, "queries")
    return _Tiles(keys, queries or choose_backward_shape(target, max(dims), dims[:1]), scores=own)


def _one_block(problem: AttentionProblem, target: Target, shape: Shape) -> bool:
    """Whether one block has all keys and can store dQ: all rows of tiles are visited, and none is rotated back."""
    if not isinstance(shape, FragmentShape) or problem.seq_kv > shape.block_q:
        return False
    listed = lists_function(problem) or (shape.warpgroups and problem.mask is not None)
    plain = not listed and problem.rope is None and problem.packed is None
    return plain and _fits_sums(problem, target, shape)


def _fragments(problem: AttentionProblem, target: Target, of: str) -> FragmentShape | None:
    """Tiles of a kernel on matrix units; None if there are none, or if they cannot rotate."""
    shape = choose_backward_fragments(target, problem.dtype, problem.head_dim, problem.value_dim, of)
    if shape is None or problem.rope is None:
        return shape
    exchanged = exchange_bytes(shape.block_q, shape.result_columns(problem.head_dim))
    shared = exchanged + 4 * (shape.partial_scores + shape.row_numbers)
    return shape if rotates_runs(problem) and shared <= target.max_shared_bytes else None


def _can_add(problem: AttentionProblem, target: Target) -> bool:
    """Whether the kernel of dK and dV may sum dQ, and the device can."""
    if problem.deterministic or problem.packed is not None:
        return False
    if math.prod(problem.out_shape[:3]) * problem.head_dim // (2 - problem.head_dim % 2) > 2**31 - 1:
        return False  # threads of `build_round` are counted in 32 bits
    return target.atomic_f32_add


def _sums_of_head(problem: AttentionProblem, shape: Shape) -> tuple[int, int]:
    """The number of tiles of the sums of one head's dQ, and the elements of each; the last may reach past the end."""
    tiles = -(-problem.seq_q // shape.block_kv)
    if isinstance(shape, FragmentShape):
        return tiles * shape.block_kv // SIZE, -(-problem.head_dim // SIZE) * SIZE * SIZE
    return tiles, TileSums(shape, problem.head_dim).tile_size


def _fits_sums(problem: AttentionProblem, target: Target, shape: Shape) -> bool:
    """Whether a kernel of dK and dV with these tiles has room to sum dQ."""
    if isinstance(shape, FragmentShape):
        return shape.backward_bytes(problem.head_dim, problem.value_dim, sums=True) <= target.max_shared_bytes
    return shape.backward_bytes(max(problem.head_dim, problem.value_dim), sums=True) <= target.max_shared_bytes


# -- configure, with scalars and grids ---------------------------------------------------------------------------------


@dataclass
class _Kernel:
    """A kernel of gradients in the making: fields of its configuration, its scalars and the names of its memory."""

    options: dict[str, Any]
    scalars: dict[str, int | float]
    renamed: dict[str, str] = field(default_factory=dict)


class _Draft:
    """A plan in the making."""

    def __init__(self, problem: AttentionProblem, layout: Layout, target: Target, tiles: _Tiles) -> None:
        self.problem, self.layout, self.target, self.tiles = problem, layout, target, tiles
        self.rows = math.prod(problem.out_shape[:3])
        self.steps: list[Step] = []
        self.stores_scores = None
        if "ds" in layout.views:
            self.stores_scores = "queries" if tiles.scores is None else "scores"
        self.workspace = {"delta": self.rows}
        self.scratch: dict[str, int] = {}
        # Sums of dQ may be longer than dQ.
        self.index64 = layout.index64 or (tiles.sums and tiles.clear > 2**31 - 1)
        self.scalars: dict[str, int | float] = problem_scalars(problem, target) | view_scalars(layout.views) | {
            "rows": self.rows,
            "dq_factor": problem.scale,
            # dK is made with Q', which holds the scale and log2(e), or the scale over the cap.
            "dk_factor": problem.softcap if problem.softcap > 0 else LN2,
            "row_tiles": tiles.row_tiles,
            "clear": tiles.clear,
        }  # fmt: skip

    def add_delta(self) -> None:
        """Add the step that computes delta of each row and clears the sums of dQ."""
        problem, results = self.problem, ("o", "do")
        lanes = self.target.subgroup_sizes or (self.target.subgroup_size,)
        use = tuning.use(self.target, "attention.backward.delta")
        threads = use["threads"]
        # Lanes read a row together where there are subgroups: neighbours then read neighbouring memory.
        together = use["lanes"] if min(lanes) >= use["lanes"] else 1
        run = RUN if problem.dtype != "f32" and all(self.layout.aligned(results, RUN)) else QUAD
        config = DeltaConfig(
            problem.dtype, problem.value_dim, threads, together, self.layout.unit(results),
            self.layout.aligned(results, run), self.index64, self.tiles.clear > 0, run, "dlse" in self.layout.views,
        )  # fmt: skip
        blocks = -(-self.rows * together // threads)
        self._add(config, build_delta, blocks, self.scalars | row_scalars(problem))

    def add_gradients(self, of: Literal["queries", "keys", "scores"], shape: Shape) -> None:
        """Add the step of dQ, that of dK and dV, or that of dS, and the steps before it."""
        problem = self.problem
        heads, length = (problem.heads_kv, problem.seq_kv) if of == "keys" else (problem.heads_q, problem.seq_q)
        each = -(-length // shape.block_q)
        blocks = each * problem.batch * heads
        on_units = isinstance(shape, FragmentShape)
        options = score_options(problem) | {
            "lse": False, "of": of, "shape": shape, "index64": self.index64,
            "sums": self.tiles.sums and of == "keys",
            "unit": self.layout.unit(_INPUTS), "aligned": self.layout.aligned(_INPUTS, RUN if on_units else QUAD),
        } | self.layout.rope_options(RUN if on_units else QUAD)  # fmt: skip
        kernel = _Kernel(options, self.scalars | {"blocks_each": each, "blocks": blocks})
        if lists_function(problem):
            self._use(kernel, function_prepass(problem, shape, self.target, of == "keys", options, self.scalars))
        if isinstance(shape, FragmentShape):
            self._add_on_units(kernel, shape, blocks)
        else:
            config = BackwardConfig(**kernel.options, scores=of == self.stores_scores)
            self._add(config, build_backward, blocks, kernel.scalars)

    def _add_on_units(self, kernel: _Kernel, shape: FragmentShape, blocks: int) -> None:
        problem = self.problem
        if shape.warpgroups and problem.rope is not None:
            self._rotate(kernel)
        if shape.warpgroups and problem.mask is not None:
            mask, aligned = self.layout.views["mask"], self.layout.starts_aligned("mask")
            self._use(
                kernel, mask_prepass(problem, mask, shape, self.target, True, kernel.options, self.scalars, aligned)
            )
        one_block = self.tiles.sums and not self.tiles.clear
        config = FragmentBackwardConfig(**kernel.options, folded=folded(problem), one_block=one_block)
        split = self._split(config, shape, blocks)
        if split is not None:
            config, blocks = replace(config, shared_blocks=True), split.workgroups
            kernel.scalars |= split.scalars | {"pass_tiles": -(-problem.seq_q // shape.block_kv)}
            columns = sum(shape.result_columns(dim) for dim in (problem.head_dim, problem.value_dim))
            self.workspace |= split.workspace(shape.block_q * columns)
            self.scratch["tickets"] = split.blocks
        build = build_backward_warpgroup if shape.warpgroups else build_backward_fragment
        self._add(config, build, blocks, kernel.scalars, kernel.renamed)

    def _split(self, config: FragmentBackwardConfig, shape: FragmentShape, blocks: int) -> SplitLastWave | None:
        """How blocks of keys are split if they leave much of the device idle; None if they do not."""
        problem, units = self.problem, self.target.compute_units
        wave = choose_backward_wave(self.target, shape) if config.of == "keys" and problem.packed is None else None
        # Blocks of a band differ in length, so that their last wave is not one.
        if wave is None or not (config.keeps_all or blocks < wave.resident * units):
            return None
        each = -(-problem.seq_q // shape.block_kv)
        if each**2 > 2**31 - 1:  # `Passes` multiplies such numbers in 32 bits
            return None
        return split_last_wave(blocks, each * problem.group, units, wave)

    def _rotate(self, kernel: _Kernel) -> None:
        """Rotate q and k in steps of their own, since the kernel copies rows past registers."""
        steps, space, rotated = rope_prepass(self.problem, self.layout.views, self.target, self.layout.aligned_base)
        self.steps += steps
        self.workspace |= space
        kernel.renamed = ROTATED
        kernel.scalars |= view_scalars(rotated)
        for name in ("unit", "aligned"):
            kernel.options[name] = (True, True, *kernel.options[name][2:])
        kernel.options["rope_prepass"] = True

    def _use(self, kernel: _Kernel, found: MaskPrepass) -> None:
        """Add the steps that list a kernel's tiles. The kernels of dQ and of dK and dV use the same memory in turn."""
        self.steps += found.steps
        self.workspace |= {name: max(n, self.workspace.get(name, 0)) for name, n in found.workspace.items()}
        kernel.scalars |= found.scalars
        kernel.options |= found.options

    def add_rounding(self) -> None:
        """Add the step that rounds the sums of dQ."""
        problem, clear = self.problem, self.tiles.clear
        threads = tuning.use(self.target, "attention.backward.round")["threads"]
        added_by = None if isinstance(self.tiles.keys, FragmentShape) else self.tiles.keys
        in_blocks = added_by is None and problem.rope is None and problem.head_dim % SIZE == 0
        quads, octets = in_blocks and _in_quads(self.target), in_blocks and _in_octets(self.target)
        config = RoundConfig(
            problem.dtype, problem.head_dim, threads, self.index64, added_by, problem.rope,
            self.layout.rope_options(QUAD)["rope_unit"], quads, octets,
        )  # fmt: skip
        count = clear // QUAD if quads else clear // RUN if octets else self.rows * problem.head_dim // config.run
        blocks = -(-count // (threads * (2 if quads or octets else 1)))
        counts = {"round_quads": clear // QUAD, "round_octets": clear // RUN}
        self.workspace["dq_sum"] = clear
        self._add(config, build_round, blocks, self.scalars | counts)

    def _add(
        self, config: Any, build: Any, blocks: int, scalars: dict[str, Any], renamed: dict[str, str] | None = None
    ) -> None:
        grid = grid_of("flash_attention", blocks, self.target)
        self.steps.append(Step(config, build, grid, scalars, renamed or {}))


def _in_quads(target: Target) -> bool:
    """Whether four components that are added together are two neighbours in each of two rows."""
    if added_together(target) != QUAD:
        return False
    arrangement = arrange(target)
    square = (arrangement.height, arrangement.width) == (SIZE, SIZE)
    return square and arrangement.results.part_bits[:2] == ((0, 1), (SIZE // 2, 0))


def _in_octets(target: Target) -> bool:
    """Whether eight neighbours of a row are components of four lanes that follow each other, two of each, and the next
    of these components are another subgroup's width away."""
    if added_together(target) != 1:
        return False
    arrangement = arrange(target)
    lanes, parts = arrangement.results.lane_bits, arrangement.results.part_bits
    square = (arrangement.height, arrangement.width) == (SIZE, SIZE)
    return square and lanes[:2] == ((0, 2), (0, 4)) and (0, 1) in parts and (0, 8) in parts
