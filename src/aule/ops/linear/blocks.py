"""How a product is cut up on a target."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from aule.errors import KernelError
from aule.ir.types import SCALARS
from aule.ops.linear.config import Blocks, DirectBlocks, FragmentBlocks, VectorBlocks, WarpgroupBlocks
from aule.target import Target
from aule.tile.arrangement import uniform
from aule.tile.fragment import multiplies
from aule.tile.matrix import QUAD
from aule.tile.simt_shape import SimtShape
from aule.tile.stages import copies_past_registers
from aule.tile.vector import has_pairs, vector_unit, work_type
from aule.tile.warpgroup import has_warpgroups

COPIED = (
    FragmentBlocks(128, 256, 64, down=2, along=4, stages=3),
    FragmentBlocks(128, 128, 64, down=2, along=2, stages=3),
    FragmentBlocks(128, 128, 32, down=2, along=2, stages=3),
    FragmentBlocks(64, 64, 64, down=2, along=2, stages=3),
)
"""With asynchronous copies, largest first: a warp's 64 x 64 of the result read each number from shared memory for 64
products, and 256 columns share the work of normalising their rows."""
COPIED_DEPTH = 64
"""Of which the summed dimension is a multiple then."""
WARPGROUPS = ((WarpgroupBlocks(128, 256), 1.0), (WarpgroupBlocks(128, 128), 1.5))
"""Products of warpgroups, and what an element of the result takes in the time of the first one's (H200, bf16, 4096 x
4096 x 4096, both factors as they are: 192 and 286 us)."""
CARRIED = (
    FragmentBlocks(128, 128, 32, down=2, along=2, stages=2),
    FragmentBlocks(64, 64, 32, down=2, along=2, stages=2),
)
"""Through registers."""
LINES = FragmentBlocks(128, 128, 64, down=2, along=2, stages=1)
"""Through registers, as they are and in lines of 128 bytes, where stored rows of a factor lie along the depth (H200,
Vulkan, bf16, 4096 x 4096 x 4096, TFLOPS of the first of `CARRIED` and of this: forward 256 and 332, dX 296 and 333; dW,
whose lines are whole either way, 327 and 317)."""
DIRECT = (
    DirectBlocks(256, 128, 64, down=4, along=2, stages=1),
    DirectBlocks(128, 128, 64, down=2, along=2, stages=1),
)
"""The left factor straight into registers, in the order of fragments, to which a launch before has brought it (same
problem, TFLOPS of the product alone, in turns: forward 395 and 389, dX 401 and 408, dW 411 and 413; with 12288 features
403 and 398, 424 and 415, 411 and 411)."""
_DIRECT_SHARING = 8
"""Tiles that must share a row for that launch to pay. It takes 19 us for 4096 x 4096 numbers, and spares the product 70
to 80 of 410 with 32 such tiles."""
_SHARING = 4
"""Tiles that must share a row for it to be normalised before."""
_SIMT = tuple(
    SimtShape(size, size, x, 16, chunk_k=depth, chunk_v=QUAD, resident_q=False, block_p=QUAD)
    for size, x, depth in ((128, 16, 16), (64, 8, 16), (64, 8, 8))
)
_CPU_ROWS = (192, 48, 12, 4, 1)
_CPU_VECTORS, _CPU_DEPTH = 8, 128
"""Both factors' parts stay in the second-level cache, and bringing them there is a small part of the work."""
_CPU_PAIR_ROWS = 384
"""Where there are so many rows and products are of pairs, of which bringing the factors together is a larger part: a
quarter of the time with 192 rows (Zen 4, bf16, 1024 x 2048 x 2048, one thread: 157-163 -> 168-174 GFLOP/s). A processor
that has pairs has a second level of 1 MiB at least."""
_CPU_PACKED_ROWS, _CPU_PACKED_VECTORS, _CPU_PACKED_PAIRS = 96, 32, 256
"""Rows and vectors of a tile whose right factor has been packed, and its depth with pairs of bf16. That factor takes no
room of a task's own, so tiles are wider, and the left one, which each of them normalises or copies, is brought less
often (Zen 4, bf16, 512 x 1024 x 1024 and 2048 x 1024 x 1024, one thread, beside oneDNN: 192 x 8 vectors 0.88 and 0.93,
192 x 32 0.92 and 1.01, 96 x 32 0.93 and 0.97, all with a depth of 128; with 256 0.96 and 1.01; 48 x 32, 96 x 64, 144 x
32 and a depth of 512 no better. fp32, 512 x 1024 x 1024, 192 x 8: 0.97; 96 x 32: 1.00)."""


def choose_blocks(
    target: Target,
    dtype: str,
    sizes: tuple[int, int, int],
    left_across: bool,
    right_across: bool,
    aligned: bool,
    plain: bool = False,
    packed: bool = False,
) -> Blocks:
    """Tiles for a product of ``sizes`` m, n and k: the largest that fit and leave no unit without one.

    ``aligned`` says that both factors can be read in whole runs: elements that come one by one take so many registers
    that only a small tile has room beside them. ``plain`` says that they are multiplied as they are, ``packed`` that
    the right factor will have been packed.
    """
    m, n, k = sizes
    if target.backend == "cpu":
        lanes = vector_unit(target, work_type(SCALARS[dtype])).lanes
        if packed:
            return _packed(target, dtype, m, n, lanes)
        rows = next((rows for rows, fewer in pairwise(_CPU_ROWS) if m > fewer), 1)
        tall = m // _CPU_PAIR_ROWS * (n // (_CPU_VECTORS * lanes))
        if has_pairs(target, SCALARS[dtype]) and tall >= 4 * max(target.compute_units, 1):
            rows = _CPU_PAIR_ROWS
        return VectorBlocks(rows, _CPU_VECTORS * lanes, _CPU_DEPTH, lanes)
    if dtype in ("f16", "bf16") and multiplies(target, dtype) and uniform(target):
        copies = aligned and k % COPIED_DEPTH == 0 and copies_past_registers(target)
        table = COPIED if copies else CARRIED if aligned else CARRIED[-1:]
        if copies and plain and has_warpgroups(target, dtype):
            found = _choose_warpgroups(target, m, n)
            if found is not None:
                return found
        if not copies and aligned and plain and target.vulkan_on_nvidia:
            table = (*_for_nvidia(target, sizes, left_across, right_across), *table)
        assert target.matrix_layout is not None
        tiles = [replace(blocks, lanes=1 << len(target.matrix_layout.lane_rows)) for blocks in table]
        fitting = [
            blocks
            for blocks in tiles
            if blocks.threads <= target.max_threads
            and 2 * blocks.shared_elements(left_across, right_across) <= target.max_shared_bytes
        ]
        for blocks in fitting:
            if -(-m // blocks.rows) * -(-n // blocks.cols) >= target.compute_units or blocks is fitting[-1]:
                return blocks
    for shape in _SIMT:
        shared = shape.shared_bytes(shape.chunk_k, QUAD, subgroups=True)
        fills = shape.block_q <= 64 or min(m, n) > 64
        if fills and shape.threads <= target.max_threads and shared <= target.max_shared_bytes:
            return shape
    raise KernelError(
        f"[layer_norm_linear] expected at least 10 KiB of shared memory and 128 threads, got {target.max_shared_bytes} "
        f"bytes and {target.max_threads} on {target.name}; use another backend"
    )


def _for_nvidia(
    target: Target, sizes: tuple[int, int, int], left_across: bool, right_across: bool
) -> list[FragmentBlocks]:
    """Tiles through Vulkan for factors as they are, as far as a product has whole ones."""
    m, n, k = sizes
    found: list[FragmentBlocks] = []
    for tile in DIRECT:
        # No workgroup may be one too many, as where a grid has to be cut: there would be no memory for its rows.
        workgroups = -(-m // tile.rows) * max(-(-n // tile.cols), tile.down * k // tile.depth)
        if k % tile.depth == 0 and n >= _DIRECT_SHARING * tile.cols and workgroups <= target.max_grid[0]:
            found.append(tile)
    if k % LINES.depth == 0 and m >= LINES.rows and n >= LINES.cols and not (left_across and right_across):
        found.append(LINES)
    return found


def normalises_before(target: Target, blocks: Blocks, others: int) -> bool:
    """Whether rows are normalised by a launch of their own, into a workspace, and not on their way into a product.

    There each is normalised once for every tile along the result's other side, of ``others`` numbers. H200, Vulkan,
    bf16, 4096 x 4096 x 4096, TFLOPS of the product with the first of `CARRIED`: on the way 178 forward and 197 for dW,
    before 256 and 327; that is 7 or 9 us for each of 32 tiles, where the launch takes 35.
    """
    if isinstance(blocks, FragmentBlocks):
        return target.vulkan_on_nvidia and blocks.rows >= LINES.rows and others >= _SHARING * LINES.cols
    return isinstance(blocks, WarpgroupBlocks)


def packs(target: Target, m: int) -> bool:
    """Whether a right factor is packed once for all tasks: on CPUs, where it would be brought more than once."""
    return target.backend == "cpu" and m > _CPU_PACKED_ROWS


def _packed(target: Target, dtype: str, m: int, n: int, lanes: int) -> VectorBlocks:
    vectors, rows = _CPU_PACKED_VECTORS, -(-m // _CPU_PACKED_ROWS)
    while vectors > _CPU_VECTORS and rows * -(-n // (vectors * lanes)) < 4 * max(target.compute_units, 1):
        vectors //= 2
    depth = _CPU_PACKED_PAIRS if has_pairs(target, SCALARS[dtype]) else _CPU_DEPTH
    return VectorBlocks(_CPU_PACKED_ROWS, vectors * lanes, depth, lanes)


def _choose_warpgroups(target: Target, m: int, n: int) -> WarpgroupBlocks | None:
    """The tile of warpgroups that takes least time; None where half of the units would be without one."""
    best, least, units = None, 0.0, max(target.compute_units, 1)
    for blocks, weight in WARPGROUPS:
        tiles = -(-m // blocks.rows) * -(-n // blocks.cols)
        time = -(-tiles // units) * blocks.rows * blocks.cols * weight
        fits = blocks.shared_bytes <= target.max_shared_bytes
        if fits and 2 * tiles >= units and (best is None or time < least):
            best, least = blocks, time
    return best
