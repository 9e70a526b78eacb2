"""From a problem and a target to a plan: which kernel, which grid, which numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from aule.errors import InvalidArgumentError
from aule.ops.attention.backward import build_backward
from aule.ops.attention.backward_fragment import build_backward_fragment
from aule.ops.attention.backward_rows import build_delta, build_round
from aule.ops.attention.backward_warpgroup import build_backward_warpgroup
from aule.ops.attention.config import (
    BackwardConfig,
    DeltaConfig,
    ForwardConfig,
    FragmentBackwardConfig,
    FragmentConfig,
    RoundConfig,
)
from aule.ops.attention.cut import cut_blocks
from aule.ops.attention.dropout import keep_scale, threshold
from aule.ops.attention.forward import build_forward
from aule.ops.attention.forward_whole import MOST_BLOCKS, reciprocals
from aule.ops.attention.mask_tiles import mask_steps
from aule.ops.attention.precision import refused
from aule.ops.attention.problem import UNBOUNDED, AttentionProblem
from aule.ops.attention.tail import cut_tail
from aule.ops.attention.tiles import (
    Doing,
    choose_fragments,
    choose_full,
    choose_shape,
    choose_warpgroups,
    choose_wave,
)
from aule.ops.attention.tiles_backward import (
    choose_backward_fragments,
    choose_backward_shape,
    choose_backward_slots,
    choose_backward_warpgroups,
)
from aule.ops.attention.turned import TURNED, can_turn, turned
from aule.ops.step import Step, StepPlan, grid_of
from aule.target import Target
from aule.tile.arrangement import SIZE, added_together, arrange
from aule.tile.fragment_shape import RUN, FragmentShape
from aule.tile.math import LN2, LOG2E
from aule.tile.matrix import QUAD, padded
from aule.tile.rotated_fragment import exchange_bytes
from aule.tile.simt_shape import SimtShape
from aule.tile.sums import TileSums
from aule.view import TensorView

FAR = 1 << 30
"""A window side that is as good as unlimited, small enough that sums with positions do not overflow."""


FEW_KEYS = 2048
"""Up to so many keys in a row's band, tiles at its edges are too many for a loop of their own (`FragmentConfig`). H200,
bf16, with one loop and with two, d64, ms: windows of 512 (S 4096) 0.117 and 0.128, of 1024 and 2048 (S 8192) 0.358 and
0.374, 0.627 and 0.618; causal, S 512 0.137 and 0.154, 1024 0.211 and 0.226, 2048 0.368 and 0.376, 4096 0.349 and 0.341.
d128, other tiles then: window of 512 0.231 and 0.271; causal, TFLOPS: S 2048 443 and 423 (d256 424 and 427), S 8192 555
and 583. Without a band 517 and 531."""

_MANY_SCORES = 1 << 23
"""From so many on it is worth two launches to look at a mask. H200, d128, batch 4, 16 heads: S 256 20 us without, 36
with them (the host's time), S 512 64 and 37."""


@dataclass(frozen=True)
class ForwardPlan:
    """How a forward problem is run on a device.

    Attributes
    ----------
    config : ForwardConfig or FragmentConfig
        The kernel.
    grid : tuple of int
        Workgroups; (0, 0, 0) when there is nothing to compute, or all of it is ``beside``.
    scalars : dict
        Every scalar parameter of the kernel, by name.
    before : tuple of Step
        Launches that come before.
    workspace : dict
        32-bit words of the memory that these leave their results in, by buffer name.
    renamed : dict
        Which memory stands for a buffer of the kernel where that has another name, as in `Step`.
    beside : Step or None
        A launch for some more of the blocks; neither waits for the other.
    leading : bool
        It is the first of the two.
    zeroed : dict
        32-bit words of further memory, as in `StepPlan`.
    """

    config: ForwardConfig | FragmentConfig
    grid: tuple[int, int, int]
    scalars: dict[str, int | float]
    before: tuple[Step, ...] = ()
    workspace: Mapping[str, int] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    beside: Step | None = None
    leading: bool = False
    zeroed: Mapping[str, int] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.grid[0] and self.beside is None


def plan_forward(
    problem: AttentionProblem,
    views: dict[str, TensorView],
    target: Target,
    aligned_base: dict[str, bool] | None = None,
    shape: SimtShape | FragmentShape | None = None,
    preferred: SimtShape | FragmentShape | None = None,
) -> ForwardPlan:
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
    preferred : SimtShape or FragmentShape, optional
        The same where there is no mask, bias, other modifier, rotation or strided row.
    """
    base_ok, chosen = aligned_base or {}, shape is None

    def aligned(run: int) -> tuple[bool, ...]:
        return tuple(aligned_rows(views[n], run) and base_ok.get(n, True) for n in "qkvo")

    dims = problem.head_dim, problem.value_dim
    masked = problem.mask is not None or problem.bias is not None
    strided = not all(aligned(RUN if isinstance(preferred, FragmentShape) else QUAD)[:3])
    if problem.precision is not None:
        # Rows are rounded in registers, as strided ones are put together there; the tiles of tf32 reckon with that.
        in_registers = problem.precision != "tf32" or not all(aligned(RUN)[:3])
        shape = shape or choose_fragments(target, problem.precision, *dims, masked, in_registers)
        if shape is None:
            raise refused(problem, target)
        if not rotates_runs(problem):
            raise InvalidArgumentError(
                f"[flash_attention] expected rope of whole runs of {RUN} columns on matrix units, got "
                f"{problem.rope and problem.rope.dim} rotated columns; precision=None computes in fp32"
            )
    elif not strided and problem.modifiers == 0 and problem.rope is None:
        shape = shape or preferred
    scores = problem.batch * problem.heads_q * problem.seq_q * problem.seq_kv
    copied = all(aligned(RUN)[:3] if problem.rope is None else [can_turn(problem), aligned(RUN)[2]])
    if shape is None and copied and (problem.mask is None or scores >= _MANY_SCORES):
        shape = choose_warpgroups(target, problem.dtype, *dims, _doing(problem), _length_of_all(problem))
    if shape is None and rotates_runs(problem):
        rotated = problem.rope is not None
        shape = choose_fragments(target, problem.dtype, *dims, masked, not all(aligned(RUN)[:3]), rotated)
    shape = shape or choose_shape(target, *dims, problem.dtype, problem.modifiers)
    before: tuple[Step, ...] = ()
    workspace: dict[str, int] = {}
    renamed: dict[str, str] = {}
    if isinstance(shape, FragmentShape) and shape.warpgroups and problem.rope is not None:
        before, workspace, made = turned(problem, views, target, base_ok)
        views = {name: made.get(name, view) for name, view in views.items() if name not in ("cos", "sin")}
        base_ok = {name: ok for name, ok in base_ok.items() if name not in made}
        problem, renamed = replace(problem, rope=None), TURNED
    run = RUN if isinstance(shape, FragmentShape) else QUAD
    memory: dict[str, Any] = rope_options(views, run, aligned_base) | {
        "aligned": aligned(run),
        "unit": tuple(views[n].strides[3] == 1 or views[n].shape[3] == 1 for n in "qkvo"),
        "index64": any(_extent(v) > 2**31 - 1 for v in views.values()),
    }
    blocks_q = -(-problem.seq_q // shape.block_q)
    blocks = blocks_q * problem.batch * problem.heads_q
    scalars = problem_scalars(problem) | view_scalars(views) | {"blocks_q": blocks_q, "blocks": blocks}
    config: ForwardConfig | FragmentConfig
    if isinstance(shape, FragmentShape):
        options = score_options(problem)
        if shape.warpgroups and problem.mask is not None:
            steps, space, found = mask_steps(
                problem, views["mask"], shape, target, False, options, scalars, base_ok.get("mask", True)
            )
            before, workspace = before + steps, workspace | space
            options |= listed(problem)
            memory["index64"] = memory["index64"] or max(space.values()) > 2**31 - 1
            scalars |= found
        if shape.warpgroups:
            memory["one_loop"] = masked or _few_keys(problem)
            memory["linear"] = problem.alibi and problem.limits[1] == 0 and not (problem.bias or problem.softcap > 0)
            memory["pairs"] = tuple(
                name for name in ("mask", "bias")
                if getattr(problem, name) not in (None, "bool") and _in_pairs(views[name], base_ok.get(name, True))
            )  # fmt: skip
        config = FragmentConfig(**options, **memory, shape=shape, folded=folded(problem), factor=problem.precision)
        if shape.ahead and _plain(config, problem) and _full_tiles(problem, shape, blocks):
            full = choose_full(target, shape) if chosen and shape is not preferred else shape
            config = replace(config, whole=True, shape=full)
            scalars |= reciprocals(problem, blocks_q)
    else:
        whole = shape.steady and all(memory["aligned"]) and _whole(problem, views, shape)
        config = ForwardConfig(**score_options(problem), **memory, shape=shape, whole=whole)
    wave = choose_wave(target, shape) if chosen and target.device_fence and _plain(config, problem) else None
    tail = None
    if wave is not None:
        tail = cut_tail(blocks, -(-problem.seq_kv // shape.block_kv), target.compute_units, wave)
    beside, zeroed = None, {}
    if tail is not None:
        grid = grid_of("flash_attention", tail.workgroups, target)
        beside = Step(replace(config, tail=True), build_forward, grid, scalars | tail.scalars)
        workspace |= tail.workspace(shape, problem.value_dim, target)
        zeroed["tickets"] = tail.blocks
        blocks = scalars["blocks"] = tail.first
    grid = grid_of("flash_attention", blocks, target)
    leading = wave is not None and wave.leading
    return ForwardPlan(config, grid, scalars, before, workspace, renamed, beside, leading, zeroed)


def _plain(config: ForwardConfig | FragmentConfig, problem: AttentionProblem) -> bool:
    """Whether all blocks of rows take as long, by a kernel that does no more than it must."""
    banded = config.left or config.right or problem.packed is not None
    return problem.modifiers == 0 and not banded and all(config.aligned)


def _full_tiles(problem: AttentionProblem, shape: FragmentShape, blocks: int) -> bool:
    """Whether a kernel for matrix units finds nothing but full tiles, of whole rows, as `FragmentConfig.whole` says."""
    lengths = problem.seq_q % shape.block_q == 0 and problem.seq_kv % shape.block_kv == 0 < problem.seq_kv
    dims = problem.head_dim % SIZE == 0 and problem.value_dim % SIZE == 0
    return lengths and dims and problem.rope is None and problem.precision is None and blocks < MOST_BLOCKS


_DELTA_THREADS = 64
_ROUND_THREADS = 256
_DELTA_LANES = 8
"""Lanes that read a row together where there are subgroups: neighbours then read neighbouring memory."""


def plan_backward(
    problem: AttentionProblem,
    views: dict[str, TensorView],
    target: Target,
    aligned_base: dict[str, bool] | None = None,
    shapes: tuple[SimtShape | FragmentShape | None, SimtShape | FragmentShape | None] | None = None,
) -> StepPlan:
    """Plan the gradients of q, k and v on a GPU.

    Parameters
    ----------
    views : dict
        As for the forward pass, and ``do``, ``dq``, ``dk``, ``dv``, the last three contiguous. The log-sum-exp of the
        forward pass is the buffer ``lse``. With ``ds``, fp32 ``[batch, heads_q, seq_q, seq_kv]`` and zero before, the
        gradient of what is added to the scores is stored there.
    aligned_base : dict, optional
        For q, k, v, o, do, mask, cos, sin: whether the memory starts at a multiple of 16 bytes (default: it does).
    shapes : pair of SimtShape or FragmentShape, optional
        Tiles of dQ and of dK and dV, to use instead of the table's.
    """
    rows = math.prod(problem.out_shape[:3])
    if rows == 0 or problem.key_rows == 0:
        return StepPlan(())
    base_ok = aligned_base or {}
    names = ("q", "k", "v", "do")

    def aligned(run: int, of: tuple[str, ...]) -> tuple[bool, ...]:
        return tuple(aligned_rows(views[n], run) and base_ok.get(n, True) for n in of)

    unit = {n: views[n].strides[3] == 1 or views[n].shape[3] == 1 for n in (*names, "o")}
    index64 = any(_extent(view) > 2**31 - 1 for view in views.values())
    dims = problem.head_dim, problem.value_dim
    numbers = problem_scalars(problem) | view_scalars(views) | {
        "rows": rows,
        "dq_factor": problem.scale,
        # dK is made with Q', which holds the scale and log2(e), or the scale over the cap.
        "dk_factor": problem.softcap if problem.softcap > 0 else LN2,
    }  # fmt: skip
    units = (unit["o"], unit["do"])
    adds = "ds" not in views and _can_add(problem, target)
    keys_shape = shapes[1] if shapes else None
    rotates = [can_turn(problem), *aligned(RUN, names[2:])]
    if all(aligned(RUN, names) if problem.rope is None else rotates):
        # Rows that are put together on their way take registers that this kernel does not have.
        keys_shape = keys_shape or choose_backward_warpgroups(target, problem.dtype, *dims)
    keys_shape = keys_shape or _backward_fragments(problem, target, "sums" if adds else "keys")
    keys_shape = keys_shape or choose_backward_shape(target, max(dims), dims, adds, problem.modifiers)
    row_tiles, tile_size = _sums_of_head(problem, keys_shape)
    clear = padded(problem.batch * problem.heads_q * row_tiles * tile_size, QUAD)
    sums = adds and 4 * clear <= target.max_buffer_bytes and _fits_sums(problem, target, keys_shape)
    index64 = index64 or (sums and clear > 2**31 - 1)  # they may be longer than dQ
    lanes = _DELTA_LANES if min(target.subgroup_sizes, default=target.subgroup_size) >= _DELTA_LANES else 1
    run = RUN if problem.dtype != "f32" and all(aligned(RUN, ("o", "do"))) else QUAD
    delta = DeltaConfig(
        problem.dtype, problem.value_dim, _DELTA_THREADS, lanes, units, aligned(run, ("o", "do")), index64, sums, run
    )
    blocks = -(-rows * lanes // _DELTA_THREADS)
    numbers |= {"row_tiles": row_tiles, "clear": clear}
    steps = [Step(delta, build_delta, grid_of("flash_attention", blocks, target), numbers | row_scalars(problem))]
    workspace = {"delta": rows}
    zeroed: dict[str, int] = {}
    of: Literal["queries", "keys"]
    for of, heads, length in (
        ("queries", problem.batch * problem.heads_q, problem.seq_q),
        ("keys", problem.batch * problem.heads_kv, problem.seq_kv),
    ):
        if sums and of == "queries":
            continue
        store_scores = of == "queries" and "ds" in views
        shape = keys_shape if of == "keys" else shapes[0] if shapes else None
        if shape is None and not store_scores:
            shape = _backward_fragments(problem, target, of)
        shape = shape or choose_backward_shape(target, max(dims), dims[:1])
        common = score_options(problem) | {
            "lse": False, "of": of, "shape": shape, "index64": index64, "unit": tuple(unit[n] for n in names),
        } | rope_options(views, RUN if isinstance(shape, FragmentShape) else QUAD, aligned_base)  # fmt: skip
        each = -(-length // shape.block_q)
        grid = grid_of("flash_attention", each * heads, target)
        scalars = numbers | {"blocks_each": each, "blocks": each * heads}
        wide = aligned(RUN, names)
        renamed: dict[str, str] = {}
        if isinstance(shape, FragmentShape) and shape.warpgroups and problem.rope is not None:
            before, space, rotated = turned(problem, views, target, base_ok)
            steps, workspace, renamed = [*steps, *before], workspace | space, TURNED
            wide = (True, True, *wide[2:])
            common |= {"turned": True, "unit": (True, True, unit["v"], unit["do"])}
            scalars |= view_scalars(rotated)
        if isinstance(shape, FragmentShape) and shape.warpgroups and problem.mask is not None:
            before, space, found = mask_steps(
                problem, views["mask"], shape, target, True, common, numbers, base_ok.get("mask", True)
            )
            steps, workspace = [*steps, *before], workspace | space
            common |= listed(problem) | {"index64": index64 or max(space.values()) > 2**31 - 1}
            scalars |= found
        if isinstance(shape, FragmentShape):
            config = FragmentBackwardConfig(**common, aligned=wide, folded=folded(problem), sums=sums)
            if of == "keys" and sums and config.keeps_all:
                slots = choose_backward_slots(target, shape)
                cut = cut_blocks(each * heads, -(-problem.seq_q // shape.block_kv), slots)
                if cut is not None:
                    config, grid = replace(config, cut=True), grid_of("flash_attention", cut.workgroups, target)
                    scalars, workspace = scalars | cut.scalars, workspace | cut.workspace(shape, dims)
                    zeroed["tickets"] = cut.blocks
            build = build_backward_warpgroup if shape.warpgroups else build_backward_fragment
            steps.append(Step(config, build, grid, scalars, renamed))
        else:
            plain = BackwardConfig(**common, aligned=aligned(QUAD, names), scores=store_scores, sums=sums)
            steps.append(Step(plain, build_backward, grid, scalars))
    if not sums:
        return StepPlan(tuple(steps), workspace, zeroed)
    added_by = None if isinstance(keys_shape, FragmentShape) else keys_shape
    blocks_alone = added_by is None and problem.rope is None and problem.head_dim % SIZE == 0
    quads, octets = blocks_alone and _in_quads(target), blocks_alone and _in_octets(target)
    finish = RoundConfig(
        problem.dtype, problem.head_dim, _ROUND_THREADS, index64, added_by, problem.rope,
        rope_options(views)["rope_unit"], quads, octets,
    )  # fmt: skip
    count = clear // QUAD if quads else clear // RUN if octets else rows * problem.head_dim // finish.run
    grid = grid_of("flash_attention", -(-count // (_ROUND_THREADS * (2 if quads or octets else 1))), target)
    numbers |= {"round_quads": clear // QUAD, "round_octets": clear // RUN}
    steps.append(Step(finish, build_round, grid, numbers))
    return StepPlan(tuple(steps), workspace | {"dq_sum": clear}, zeroed)


def _backward_fragments(problem: AttentionProblem, target: Target, of: str) -> FragmentShape | None:
    """Tiles of a backward kernel on matrix units; None where there are none, or where they cannot rotate."""
    shape = choose_backward_fragments(target, problem.dtype, problem.head_dim, problem.value_dim, of)
    if shape is None or problem.rope is None:
        return shape
    fits = exchange_bytes(shape.block_q, problem.head_dim) <= target.max_shared_bytes
    return shape if rotates_runs(problem) and fits else None


def _can_add(problem: AttentionProblem, target: Target) -> bool:
    """Whether dQ may be added up by the kernel of dK and dV, and the device can."""
    if problem.deterministic or problem.packed is not None:
        return False
    if math.prod(problem.out_shape[:3]) * problem.head_dim // (2 - problem.head_dim % 2) > 2**31 - 1:
        return False  # threads of `build_round` are counted in 32 bits
    return target.backend == "cuda" or "VK_EXT_shader_atomic_float" in target.extensions


def _in_quads(target: Target) -> bool:
    """Whether four components that are added together are two neighbours in each of two rows."""
    if added_together(target) != QUAD:
        return False
    way = arrange(target)
    return way.results.part_bits[:2] == ((0, 1), (SIZE // 2, 0)) and (way.height, way.width) == (SIZE, SIZE)


def _in_octets(target: Target) -> bool:
    """Whether eight neighbours of a row are components of four lanes that follow each other, two of each, and the next
    of these components are another subgroup's width away."""
    if added_together(target) != 1:
        return False
    way = arrange(target)
    lanes, parts = way.results.lane_bits, way.results.part_bits
    whole = (way.height, way.width) == (SIZE, SIZE)
    return whole and lanes[:2] == ((0, 2), (0, 4)) and (0, 1) in parts and (0, 8) in parts


def _sums_of_head(problem: AttentionProblem, shape: SimtShape | FragmentShape) -> tuple[int, int]:
    """How many tiles the sums of one head's dQ are, and the elements of each. The last may reach past the end."""
    tiles = -(-problem.seq_q // shape.block_kv)
    if isinstance(shape, FragmentShape):
        return tiles * shape.block_kv // SIZE, -(-problem.head_dim // SIZE) * SIZE * SIZE
    return tiles, TileSums(shape, problem.head_dim).tile_size


def _fits_sums(problem: AttentionProblem, target: Target, shape: SimtShape | FragmentShape) -> bool:
    """Whether a kernel of dK and dV with these tiles can add up dQ."""
    if isinstance(shape, FragmentShape):
        return shape.backward_bytes(problem.head_dim, problem.value_dim, sums=True) <= target.max_shared_bytes
    return shape.backward_bytes(max(problem.head_dim, problem.value_dim), sums=True) <= target.max_shared_bytes


def _whole(problem: AttentionProblem, views: Mapping[str, TensorView], shape: SimtShape) -> bool:
    """Whether rows follow each other in memory and are whole tiles, as `ForwardConfig.whole` says."""
    lengths = problem.seq_q % shape.block_q == 0 and problem.seq_kv % shape.block_kv == 0
    known = not problem.packed and problem.rope is None and problem.head_dim % shape.chunk_k == 0
    return lengths and known and all(views[n].strides[2:] == (views[n].shape[3], 1) for n in "qkvo")


def folded(problem: AttentionProblem) -> bool:
    """Whether the scale can wait until the exponent: it keeps the order of scores, and nothing is added to them."""
    added = problem.softcap > 0 or problem.bias or problem.alibi or problem.mask not in (None, "bool")
    return problem.scale > 0 and not added


def score_options(problem: AttentionProblem) -> dict[str, Any]:
    """The fields of a `ScoreConfig` that the problem alone decides."""
    left, right = problem.limits
    packed = problem.packed is not None
    return {
        "dtype": problem.dtype,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        # The band may reach beyond all keys (decoding has right = 0 at the last key): then no tile needs its mask code.
        # Of packed sequences that is not known here.
        "left": left != UNBOUNDED and (packed or problem.seq_q - 1 + problem.shift - left > 0),
        "right": right != UNBOUNDED and (packed or problem.shift + right + 1 < problem.seq_kv),
        "softcap": problem.softcap > 0,
        "mask": problem.mask,
        "bias": problem.bias,
        "alibi": problem.alibi,
        "sinks": problem.sinks,
        "lse": problem.return_lse,
        "dropout": problem.dropout_p > 0,
        "packed": packed,
        "rope": problem.rope,
    }


def listed(problem: AttentionProblem) -> dict[str, Any]:
    """The fields of a `ScoreConfig` where steps before the kernel have looked at the mask."""
    return {"listed": True, "mask": "bits" if problem.mask == "bool" else problem.mask}


def _doing(problem: AttentionProblem) -> Doing:
    if problem.dropout_p > 0:
        return "dropout"
    if problem.bias is not None:
        return "bias"
    return "nothing" if problem.mask in (None, "bool") else "mask"


def _length_of_all(problem: AttentionProblem) -> int:
    """How many rows and keys there are at least where every row keeps every key as it is; 0 elsewhere."""
    modified = problem.mask or problem.bias or problem.alibi or problem.softcap > 0 or problem.dropout_p > 0
    banded = problem.limits != (UNBOUNDED, UNBOUNDED)
    return 0 if modified or banded or problem.packed is not None else min(problem.seq_q, problem.seq_kv)


def _few_keys(problem: AttentionProblem) -> bool:
    """Whether a band leaves few keys to each row."""
    left, right = problem.limits
    band = left + right + 1 if left != UNBOUNDED and right != UNBOUNDED else problem.seq_kv
    limited = left != UNBOUNDED or right != UNBOUNDED
    return limited and min(band, problem.seq_kv) <= FEW_KEYS and max(problem.head_dim, problem.value_dim) <= 128


def rotates_runs(problem: AttentionProblem) -> bool:
    """Whether kernels for matrix units can rotate as the problem says: they do whole runs of columns."""
    rope = problem.rope
    return rope is None or (rope.dim if rope.interleaved else rope.half) % RUN == 0


def rope_options(
    views: Mapping[str, TensorView], run: int = QUAD, aligned_base: Mapping[str, bool] | None = None
) -> dict[str, Any]:
    """The fields of a `ScoreConfig` that the tables of cosines and sines decide; ``run`` elements travel together."""
    tables = {name: views[name] for name in ("cos", "sin") if name in views}
    base_ok = aligned_base or {}
    return {
        "rope_unit": all(view.strides[3] == 1 or view.shape[3] == 1 for view in tables.values()),
        "rope_aligned": bool(tables) and all(aligned_rows(v, run) and base_ok.get(n, True) for n, v in tables.items()),
    }


def problem_scalars(problem: AttentionProblem) -> dict[str, int | float]:
    """Scalar parameters of kernels that the problem alone decides."""
    left, right = problem.limits
    total_q, total_kv = problem.packed or (0, 0)
    return {
        "seq_q": problem.seq_q,
        "seq_kv": problem.seq_kv,
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "group": problem.group,
        "heads_together": _heads_together(problem),
        "key_heads_together": _key_heads_together(problem),
        "shift": problem.shift,
        "left": min(left, FAR),
        "right": min(right, FAR),
        # Scores are made in the log2 domain at once; with a softcap they go through tanh first.
        "scale": problem.scale / problem.softcap if problem.softcap > 0 else problem.scale * LOG2E,
        "softcap": problem.softcap * LOG2E,
        "dropout_limit": threshold(problem.dropout_p),
        "keep_scale": keep_scale(problem.dropout_p),
        "batches": problem.batch,
        "total_q": total_q,
        "total_kv": total_kv,
        "bottom_right": int(problem.causal_align == "bottom-right"),
    }


_CACHED = 32 << 20
"""Bytes that workgroups which run at the same time may read and still find in a GPU's cache: K and V, or in the kernel
of dK and dV Q, dO and dQ's sums. H200, the latter at d128, S 8192 and 2048 causal, fp16 through Vulkan, TFLOPS, heads
together: 4 and 16 255 and 218; 1 246 and 214, twice as many 256 and 217, all 254 and 182."""


def _heads_together(problem: AttentionProblem) -> int:
    """Query heads whose K and V are so many bytes; at most all there are."""
    each = problem.seq_kv * (problem.head_dim + problem.value_dim) * (4 if problem.dtype == "f32" else 2)
    return max(min(_CACHED * problem.group // max(each, 1), problem.batch * problem.heads_q), 1)


def _key_heads_together(problem: AttentionProblem) -> int:
    """Key heads whose query heads have so many bytes of Q, dO and dQ's sums."""
    row = (problem.head_dim + problem.value_dim) * (4 if problem.dtype == "f32" else 2) + 4 * problem.head_dim
    each = problem.group * problem.seq_q * row
    return max(min(_CACHED // max(each, 1), problem.batch * problem.heads_kv), 1)


def row_scalars(problem: AttentionProblem) -> dict[str, int | float]:
    """What kernels that go over rows without regard to sequences are told instead: packed ones are one sequence."""
    return {} if problem.packed is None else {"seq_q": problem.packed[0]}


def view_scalars(views: Mapping[str, TensorView]) -> dict[str, int | float]:
    """Offsets and strides of the operands, by parameter name."""
    scalars: dict[str, int | float] = {}
    for name, view in views.items():
        scalars[f"{name}_offset"] = view.offset
        if len(view.strides) == 4:
            scalars[f"{name}_row_stride"], scalars[f"{name}_col_stride"] = view.strides[2:]
            scalars[f"{name}_rows"] = view.shape[2]
        for axis, stride in enumerate(view.strides[:2]):
            scalars[f"{name}_stride{axis}"] = stride
    return scalars


def aligned_rows(view: TensorView, run: int = QUAD) -> bool:
    """Rows can be read in whole runs that start at multiples of their length."""
    steps = [s for n, s in zip(view.shape[:3], view.strides[:3], strict=True) if n > 1]
    return view.strides[3] == 1 and view.shape[3] % run == 0 and all(s % run == 0 for s in [*steps, view.offset])


def _in_pairs(view: TensorView, base_ok: bool) -> bool:
    """Whether neighbouring keys, the first of which has an even number, can be read together."""
    steps = [s for n, s in zip(view.shape[:3], view.strides[:3], strict=True) if n > 1]
    return base_ok and view.strides[3] == 1 and all(n % 2 == 0 for n in [*steps, view.offset, view.shape[3]])


def _extent(view: TensorView) -> int:
    """Largest element index, and room for the kernel to compute one tile of rows and columns past it."""
    rows = list(zip(view.shape, view.strides, strict=True))[-2:]
    return view.last_index + sum(256 * abs(stride) for n, stride in rows if n > 1)
