"""How rows lie in kernels with sums of columns: gradients of norms."""

from __future__ import annotations

from aule import tuning
from aule.ops.rows.hints import SumTuning, Work
from aule.target import Target
from aule.tuning import model


def choose_sums(target: Target, length: int, work: Work, rows: int = 0) -> SumTuning:
    """How a kernel with sums of columns lays out rows of ``length`` columns."""
    facts = {
        "length": length,
        "sums": work.sums,
        "arrays": len(work.copied),
        "mixed": len(set(work.copied)) > 1,
        "bytes": max(work.copied, default=0),
        "exchanged": work.exchanged,
        "rows": rows,
        "rows_per_unit": rows // model.units(target),
        "cluster": target.max_cluster,
        "copies": target.async_copies,
    }
    return SumTuning(**tuning.use(target, "rows.sums", **facts))
