"""The plan of the launches before a kernel that classify the tiles of a mask, for all heads that share it.

A tile in which everything is dropped is skipped, and one in which nothing is dropped runs without mask code. For the
others a boolean mask becomes bits, an eighth of its memory; a mask function is evaluated again. One kernel classifies
each tile (`mask_kernels`, `function_tiles`); another lists the remaining tiles of each block of rows and takes the band
into account. The main kernel reads the list (`tile_list`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aule.ops.attention.prepass.function_tiles import FunctionTilesConfig, build_function_tiles
from aule.ops.attention.prepass.mask_kernels import MaskTilesConfig, TileOrderConfig, build_order, build_tiles
from aule.ops.attention.prepass.tile_list import HEADER, LANES, words
from aule.ops.attention.problem import AttentionProblem
from aule.ops.scores.functions.program import ScoreFunction
from aule.ops.shared.plan import Step, grid_of
from aule.target import Target
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape
from aule.view import ITEMSIZE, TensorView

_FAR = 2**31 - 1
"""Larger indices need 64 bits."""


@dataclass(frozen=True)
class MaskPrepass:
    """Steps before a kernel, and what they change about it."""

    steps: tuple[Step, ...]
    workspace: dict[str, int]
    """32-bit words of memory for the results of the steps, by name."""
    scalars: dict[str, int]
    """Scalars by which the kernel finds the results."""
    options: dict[str, Any]
    """Fields of the kernel's configuration."""


def mask_prepass(
    problem: AttentionProblem,
    view: TensorView,
    shape: FragmentShape,
    target: Target,
    transposed: bool,
    options: Mapping[str, Any],
    scalars: Mapping[str, int | float],
    base_aligned: bool,
) -> MaskPrepass:
    """Plan the launches before a kernel, which is ``transposed`` if it computes dK and dV.

    Parameters
    ----------
    options, scalars : mapping
        Fields of the kernel's configuration, and the scalars of the problem and its views.
    base_aligned : bool
        The mask starts at a multiple of 16 bytes.
    """
    varies = [n > 1 and stride != 0 for n, stride in zip(view.shape, view.strides, strict=True)]
    found = tile_maps(problem, shape, transposed, varies)
    workspace = _workspace(found)
    if view.dtype == "bool":
        workspace["mask_bits"] = found["looked_at"] * (shape.block_q // SIZE) * words(shape.block_kv) * LANES
    index64 = max(workspace.values()) > _FAR or view.last_index > _FAR
    run = 16 // ITEMSIZE[view.dtype]
    steps = [s for n, s in zip(view.shape[:3], view.strides[:3], strict=True) if n > 1]
    full_runs = problem.seq_kv >= SIZE and problem.seq_kv % SIZE == 0
    vectors = base_aligned and full_runs and view.strides[3] == 1 and all(s % run == 0 for s in [*steps, view.offset])
    sizes = shape.block_q, shape.block_kv, transposed
    classify = MaskTilesConfig(view.dtype, *sizes, vectors, index64)
    order = TileOrderConfig(*sizes, options["left"], options["right"], problem.bias is not None, index64)
    numbers = {**scalars, **found}
    launches = [
        Step(classify, build_tiles, grid_of("flash_attention", found["looked_at"], target), numbers),
        Step(order, build_order, grid_of("flash_attention", found["listed"], target), numbers),
    ]
    fields = {
        "tiles_listed": True,
        "mask": "bits" if problem.mask == "bool" else problem.mask,
        "index64": options["index64"] or max(workspace.values()) > _FAR,
    }
    return MaskPrepass(tuple(step for step in launches if step.grid[0]), workspace, found, fields)


def lists_function(problem: AttentionProblem) -> bool:
    """Whether the tiles of the user's mask function are listed: not beside a mask, whose tiles may be listed."""
    return problem.mask_mod is not None and problem.mask is None and problem.packed is None


def function_varies(problem: AttentionProblem) -> list[bool]:
    """Whether the mask function gives batches maps of their own, and heads."""
    assert problem.mask_mod is not None
    program, sizes = problem.mask_mod.program, {"batch": problem.batch, "head": problem.heads_q}
    return [n > 1 and program.depends_on(program.results[0], name) for name, n in sizes.items()]


def _may_drop_alone(problem: AttentionProblem) -> bool:
    """Whether keys may be dropped in tiles of which the mask function keeps everything."""
    return problem.bias is not None or (problem.score_mod is not None and problem.score_mod.program.may_drop)


def function_prepass(
    problem: AttentionProblem,
    shape: SimtShape | FragmentShape,
    target: Target,
    transposed: bool,
    options: Mapping[str, Any],
    scalars: Mapping[str, int | float],
) -> MaskPrepass:
    """Plan the launches that list the tiles of the user's mask function; parameters as for `mask_prepass`."""
    assert problem.mask_mod is not None
    program: ScoreFunction = problem.mask_mod.program
    found = tile_maps(problem, shape, transposed, [*function_varies(problem), True, True])
    workspace = _workspace(found)
    index64 = bool(options["index64"]) or max(workspace.values()) > _FAR
    sizes = shape.block_q, shape.block_kv, transposed
    on_units = isinstance(shape, FragmentShape)
    # These kernels have one loop for all tiles then, which calls the function in each.
    everywhere = on_units and not transposed and _may_drop_alone(problem)
    subgroups = isinstance(shape, FragmentShape) and shape.warpgroups
    classify = FunctionTilesConfig(program, *sizes, index64)
    order = TileOrderConfig(*sizes, options["left"], options["right"], everywhere, index64, subgroups)
    numbers = {**scalars, **found}
    launches = [
        Step(classify, build_function_tiles, grid_of("flash_attention", found["looked_at"], target), numbers),
        Step(order, build_order, grid_of("flash_attention", found["listed"], target), numbers),
    ]
    fields = {"tiles_listed": True, "index64": index64}
    return MaskPrepass(tuple(step for step in launches if step.grid[0]), workspace, found, fields)


class Blocks(Protocol):
    """Rows of a block, and keys of a tile; the other way round for a kernel that passes over rows."""

    @property
    def block_q(self) -> int: ...

    @property
    def block_kv(self) -> int: ...


def tile_maps(problem: AttentionProblem, shape: Blocks, transposed: bool, varies: Sequence[bool]) -> dict[str, int]:
    """Numbers of maps, blocks and tiles, by scalar. Where the mask does not vary along an axis (batch, head, row, key),
    one map of classified tiles serves several batches, heads, blocks or tiles."""
    lengths = (problem.seq_kv, problem.seq_q) if transposed else (problem.seq_q, problem.seq_kv)
    blocks, tiles = (-(-n // size) for n, size in zip(lengths, (shape.block_q, shape.block_kv), strict=True))
    along = (varies[3], varies[2]) if transposed else (varies[2], varies[3])
    heads = problem.heads_q if varies[1] else 1
    maps = heads * (problem.batch if varies[0] else 1)
    map_blocks, map_tiles = (n if each else 1 for n, each in zip((blocks, tiles), along, strict=True))
    return {
        "map_batch": heads * varies[0], "map_head": int(varies[1]), "map_heads": heads,
        "map_blocks": map_blocks, "map_tiles": map_tiles, "block_step": int(along[0]), "tile_step": int(along[1]),
        "own_blocks": blocks, "other_tiles": tiles, "looked_at": maps * map_blocks * map_tiles, "listed": maps * blocks,
    }  # fmt: skip


def _workspace(found: Mapping[str, int]) -> dict[str, int]:
    return {"mask_tiles": found["looked_at"], "mask_order": found["listed"] * (found["other_tiles"] + HEADER)}
