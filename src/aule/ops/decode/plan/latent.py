"""Plans decoding of latents on matrix units: one tile of keys in shared memory serves both products. Pure.

Records of ``decode.latent`` choose the shape, and the type of the shape the kernel. Splits and their combination are
those of every decoding kernel (`plan/decode.py`).
"""

from __future__ import annotations

from dataclasses import replace

from aule import tuning
from aule.ops.attention.plan.layout import Layout
from aule.ops.decode.config import LatentShape
from aule.ops.decode.problem import DecodeProblem
from aule.target import Target
from aule.tile.fragment.arrangement import arrange
from aule.tile.fragment.engine import multiplies
from aule.tile.fragment.shape import RUN
from aule.tuning import model

OP = "decode.latent"

SHAPES = {"fragment": LatentShape}
"""Types of shapes by the ``kind`` of a record."""


def choose_latent(problem: DecodeProblem, layout: Layout, target: Target) -> LatentShape | None:
    """Choose the shape of a workgroup: the first record that fits. None if the values are not the first columns of the
    keys, if these are not aligned, or if no record fits."""
    if not problem.latent or not multiplies(target, problem.dtype):
        return None
    if not all(layout.aligned("k", RUN)):
        return None
    dims = problem.head_dim, problem.value_dim

    def shape_of(record: tuning.Record) -> LatentShape:
        return replace(SHAPES[record.use["kind"]](**record.use["shape"]), lanes=arrange(target).lanes)

    def fits(record: tuning.Record) -> bool:
        shape = shape_of(record)
        return shape.possible and model.fits(target, shape.threads, shape.shared_bytes(*dims))

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
