"""Plans decoding of latents on matrix units: one tile of keys in shared memory serves both products. Pure.

Records of ``decode.latent`` choose the shape, and the type of the shape the kernel. Splits and their combination are
those of every decoding kernel (`plan/decode.py`).
"""

from __future__ import annotations

from dataclasses import replace

from aule import tuning
from aule.ir.types import PANEL
from aule.ops.attention.plan.layout import Layout
from aule.ops.attention.plan.scalars import folded
from aule.ops.attention.problem import UNBOUNDED
from aule.ops.decode.config import AnyLatentShape, LatentShape, LatentWarpgroupShape
from aule.ops.decode.problem import DecodeProblem
from aule.target import Target
from aule.tile.fragment.arrangement import arrange
from aule.tile.fragment.engine import multiplies
from aule.tile.fragment.shape import RUN
from aule.tile.warpgroup.engine import MOST_COLUMNS, has_warpgroups
from aule.tuning import model

OP = "decode.latent"

SHAPES: dict[str, type[AnyLatentShape]] = {"fragment": LatentShape, "warpgroup": LatentWarpgroupShape}
"""Types of shapes by the ``kind`` of a record."""


def choose_latent(problem: DecodeProblem, layout: Layout, target: Target) -> AnyLatentShape | None:
    """Choose the shape of a workgroup: the first record that fits. None if the values are not the first columns of the
    keys, if these are not aligned, or if no record fits."""
    if not problem.latent or not multiplies(target, problem.dtype):
        return None
    if not all(layout.aligned("k", RUN)):
        return None
    dims = problem.head_dim, problem.value_dim

    def shape_of(record: tuning.Record) -> AnyLatentShape:
        shape = SHAPES[record.use["kind"]](**record.use["shape"])
        return replace(shape, lanes=arrange(target).lanes) if isinstance(shape, LatentShape) else shape

    def fits(record: tuning.Record) -> bool:
        shape = shape_of(record)
        if isinstance(shape, LatentShape):
            suits = shape.possible
        else:
            suits = _suits_warpgroups(problem, layout, target, shape.rows)
        return suits and model.fits(target, shape.threads, shape.shared_bytes(*dims))

    facts = {
        "dtype": problem.dtype,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "page": problem.page,
        "rows": problem.group * max(problem.seq_q, 1),
        "functions": problem.score_mod is not None or problem.mask_mod is not None,
        "async_copies": target.async_copies and not problem.quantised,  # which are converted on their way
    }
    record = tuning.find(target, OP, facts, fits)
    return None if record is None else shape_of(record)


def _suits_warpgroups(problem: DecodeProblem, layout: Layout, target: Target, rows: int) -> bool:
    """Whether the kernel over warpgroups serves a problem: rows of Q and of the cache can be copied, columns fill
    panels, nothing is added to scores, and all rows of a workgroup keep the same keys."""
    attention = problem.alone(problem.seq_q, problem.seq_kv)
    columns = problem.head_dim % PANEL == 0 and problem.value_dim % (2 * PANEL) == 0
    columns = columns and problem.value_dim <= 2 * MOST_COLUMNS
    left, right = problem.limits
    same_keys = right == UNBOUNDED or problem.seq_q == 1 or problem.group % rows == 0
    plain = folded(attention) and not problem.sinks and left == UNBOUNDED and problem.mask_mod is None
    copied = target.async_copies and all(layout.aligned("q", RUN)) and problem.total_q is None and not problem.quantised
    return has_warpgroups(target, problem.dtype) and columns and same_keys and plain and copied
