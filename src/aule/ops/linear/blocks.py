"""Choice of a product's tiles on a target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from aule import tuning
from aule.errors import KernelError
from aule.ir.types import SCALARS
from aule.ops.linear.config import Blocks, DirectBlocks, FragmentBlocks, VectorBlocks, WarpgroupBlocks
from aule.target import Target
from aule.tile.common.matrix import QUAD
from aule.tile.fragment.arrangement import uniform
from aule.tile.fragment.engine import multiplies
from aule.tile.simt.shape import SimtShape
from aule.tile.vector.engine import has_pairs, vector_unit, work_type
from aule.tile.warpgroup.engine import has_warpgroups
from aule.tuning import model


def choose_blocks(
    target: Target,
    dtype: str,
    sizes: tuple[int, int, int],
    left_depth_major: bool,
    right_depth_major: bool,
    aligned: bool,
    plain: bool = False,
    packed: bool = False,
) -> Blocks:
    """Tiles for a product of ``sizes`` m, n and k: the largest that fit and leave no unit without one.

    ``aligned`` factors can be loaded in full runs; loaded one by one, elements take so many registers that only a small
    tile fits beside them. ``plain`` factors are multiplied as they are stored. With ``packed`` another launch packs the
    right factor.
    """
    m, n, k = sizes
    if target.host:
        return _choose_vectors(target, dtype, m, n, packed)
    if dtype in ("f16", "bf16") and multiplies(target, dtype) and uniform(target):
        depth = tuning.number(target, "linear.copied_depth")
        copies = aligned and k % depth == 0 and target.async_copies
        if copies and plain and has_warpgroups(target, dtype):
            found = _choose_warpgroups(target, m, n)
            if found is not None:
                return found
        direct = not copies and aligned and plain
        tiles = [*_plain_tiles(target, sizes, left_depth_major, right_depth_major)] if direct else []
        facts = {"copies": copies, "aligned": aligned}
        tiles += [FragmentBlocks(**record.use["shape"]) for record in tuning.matching(target, "linear.fragment", facts)]
        assert target.matrix_layout is not None
        tiles = [replace(blocks, lanes=1 << len(target.matrix_layout.lane_rows)) for blocks in tiles]
        majors = left_depth_major, right_depth_major
        fitting = [x for x in tiles if model.fits(target, x.threads, 2 * x.shared_elements(*majors))]
        for blocks in fitting:
            if -(-m // blocks.rows) * -(-n // blocks.cols) >= target.compute_units or blocks is fitting[-1]:
                return blocks
    for record in tuning.matching(target, "linear.simt", {"shorter_side": min(m, n)}):
        shape = SimtShape(**record.use["shape"])
        if model.fits(target, shape.threads, shape.shared_bytes(shape.chunk_k, QUAD, subgroups=True)):
            return shape
    raise KernelError(
        f"[layer_norm_linear] expected at least 10 KiB of shared memory and 128 threads, got {target.max_shared_bytes} "
        f"bytes and {target.max_threads} on {target.name}; use another backend"
    )


def _plain_tiles(
    target: Target, sizes: tuple[int, int, int], left_depth_major: bool, right_depth_major: bool
) -> Iterator[FragmentBlocks]:
    """Tiles for plain factors that are loaded through registers, if a product has full tiles.

    Direct tiles need a launch that puts the left factor into the order of fragments, which pays if ``sharing`` tiles
    share a row. Lines are runs of 128 bytes, of stored rows that run along the depth.
    """
    m, n, k = sizes
    for record in tuning.matching(target, "linear.direct", {}):
        tile = DirectBlocks(**record.use["shape"])
        # The grid must not be split: its excess workgroups would have no memory for their rows.
        workgroups = -(-m // tile.rows) * max(-(-n // tile.cols), tile.down * k // tile.depth)
        if k % tile.depth == 0 and n >= record.use["sharing"] * tile.cols and workgroups <= target.max_grid[0]:
            yield tile
    for record in tuning.matching(target, "linear.lines", {}):
        lines = FragmentBlocks(**record.use["shape"])
        full = k % lines.depth == 0 and m >= lines.rows and n >= lines.cols
        if full and not (left_depth_major and right_depth_major):
            yield lines


def steps_rows(target: Target) -> bool:
    """Whether tiles for plain factors step from row to row, and so need rows along one axis."""
    return bool(tuning.records(target, "linear.lines"))


def normalises_before(target: Target, blocks: Blocks, others: int) -> bool:
    """Whether a launch of its own normalises rows into a workspace. A product would normalise each row once for every
    tile along the result's other side, of ``others`` numbers."""
    if isinstance(blocks, FragmentBlocks):
        return bool(tuning.number(target, "linear.normalise_first", rows=blocks.rows, others=others))
    return isinstance(blocks, WarpgroupBlocks)


def packs(target: Target, m: int) -> bool:
    """Whether one launch packs the right factor for all tasks: on CPUs, if several would pack it."""
    return target.host and m > tuning.use(target, "linear.cpu.packed")["rows"]


def _choose_vectors(target: Target, dtype: str, m: int, n: int, packed: bool) -> VectorBlocks:
    """Tiles on a CPU: both factors' parts stay in the second-level cache, and packing is a small part of the work.
    Pairs of bf16 multiply faster, so their tiles have more rows, if there are enough. A packed right factor takes no
    memory of the task's own, so tiles are wider."""
    lanes = vector_unit(target, work_type(SCALARS[dtype])).lanes
    pairs, tasks = has_pairs(target, SCALARS[dtype]), model.tasks(target)
    plain = tuning.use(target, "linear.cpu")
    if packed:
        tile = tuning.use(target, "linear.cpu.packed")
        vectors = tile["vectors"]
        while vectors > plain["vectors"] and -(-m // tile["rows"]) * -(-n // (vectors * lanes)) < tasks:
            vectors //= 2
        return VectorBlocks(tile["rows"], vectors * lanes, tile["pair_depth"] if pairs else plain["depth"], lanes)
    rows = next((rows for rows, fewer in pairwise(plain["rows"]) if m > fewer), 1)
    tall = m // plain["pair_rows"] * (n // (plain["vectors"] * lanes))
    if pairs and tall >= tasks:
        rows = plain["pair_rows"]
    return VectorBlocks(rows, plain["vectors"] * lanes, plain["depth"], lanes)


def _choose_warpgroups(target: Target, m: int, n: int) -> WarpgroupBlocks | None:
    """The fastest tile of warpgroups; None if half of the units would have none."""
    best, least, units = None, 0.0, max(target.compute_units, 1)
    for record in tuning.matching(target, "linear.warpgroup", {}):
        blocks = WarpgroupBlocks(**record.use["shape"])
        tiles = -(-m // blocks.rows) * -(-n // blocks.cols)
        time = -(-tiles // units) * blocks.rows * blocks.cols * record.use["time"]
        fits = blocks.shared_bytes <= target.max_shared_bytes
        if fits and 2 * tiles >= units and (best is None or time < least):
            best, least = blocks, time
    return best
