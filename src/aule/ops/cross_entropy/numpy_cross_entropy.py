"""Cross entropy and its gradient in NumPy, in the arrays' precision: the reference for float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from aule.ops.cross_entropy.problem import CrossEntropyProblem
from aule.ops.shared.elements import Array


def cross_entropy(
    problem: CrossEntropyProblem, arrays: Mapping[str, Array], wanted: tuple[str, ...]
) -> dict[str, Array]:
    """``loss``; and per row ``most``, its largest logit, and ``above``, the log-sum-exp minus that, or the largest
    finite number if the row is ignored."""
    logits = arrays["logits"]
    counts, inside, column = _targets(problem, arrays["target"])
    most = np.max(logits, axis=-1)
    above = np.log(np.sum(np.exp(logits - most[..., None]), axis=-1))
    picked = np.take_along_axis(logits, column[..., None], axis=-1)[..., 0]
    loss = above + (1 - problem.label_smoothing) * (most - picked)
    if problem.label_smoothing:
        loss = loss + problem.label_smoothing * np.mean(most[..., None] - logits, axis=-1)
    loss = np.where(counts, np.where(inside, loss, np.nan), 0).astype(logits.dtype)
    if problem.reduction != "none":
        loss = np.sum(loss)
    if problem.reduction == "mean":
        loss = loss / logits.dtype.type(np.count_nonzero(counts))
    results = {"loss": np.asarray(loss), "most": np.where(counts, most, 0).astype(logits.dtype)}
    results["above"] = np.where(counts, above, np.finfo(logits.dtype).max)
    return {name: results[name] for name in wanted}


def cross_entropy_gradient(
    problem: CrossEntropyProblem, arrays: Mapping[str, Array], wanted: tuple[str, ...]
) -> dict[str, Array]:
    """``dlogits``."""
    logits, kind = arrays["logits"], arrays["logits"].dtype.type
    counts, inside, column = _targets(problem, arrays["target"])
    scale = arrays["dloss"] / kind(np.count_nonzero(counts)) if problem.reduction == "mean" else arrays["dloss"]
    scale = np.where(counts, np.where(inside, scale, np.nan), 0).astype(logits.dtype)[..., None]
    dlogits = np.exp(logits - arrays["most"][..., None] - arrays["above"][..., None]) * scale
    dlogits -= kind(problem.label_smoothing / problem.length) * scale
    hot = np.take_along_axis(dlogits, column[..., None], axis=-1) - kind(1 - problem.label_smoothing) * scale
    np.put_along_axis(dlogits, column[..., None], hot, axis=-1)
    return {name: np.where(counts[..., None], dlogits, 0) for name in wanted}


def _targets(problem: CrossEntropyProblem, target: Array) -> tuple[Array, Array, Array]:
    """Which rows count, which targets are columns, and a valid column for each row."""
    inside = (target >= 0) & (target < problem.length)
    return target != problem.ignore_index, inside, np.where(inside, target, 0).astype(np.int64)
