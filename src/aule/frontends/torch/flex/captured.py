"""Gradients of tensors that a score function captured.

They are sums of dS, the gradient of the modified scores, times the derivative of the modified score by an element that
was loaded. dS is computed for a part of the scores at a time, in memory of limited size. Where the index of an element
differs only along one axis of the scores (the row, the key, or the difference of the two), dS is first summed along the
others; the sums, few by then, are added to the elements at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from aule.frontends.torch.attention import Saved
from aule.frontends.torch.devices.base import Route
from aule.frontends.torch.flex.calls import PADDING, ScoreGradients
from aule.frontends.torch.flex.evaluate import Evaluator, inside
from aule.frontends.torch.functions import Functions
from aule.ops.scores.functions.differentiate import derivatives
from aule.ops.scores.functions.emit import MASK_FUNCTION, SCORE_FUNCTION
from aule.ops.scores.functions.parts import Along, kept_differences, part_of, spreads, together
from aule.ops.scores.functions.program import BoundFunction, ScoreFunction
from aule.options import AttentionOptions

KEYS, ROWS = 1024, 4096
"""Keys of a part, and rows unless there are few heads."""


def most_scores(q: Tensor, each: bool) -> int:
    """Scores of a part: as many as fill a GPU; fewer where they are worked on one by one in ``each``, as that takes
    several times the memory."""
    return 1 << (22 if q.is_cpu else 24 if each else 26)


def captured_gradients(
    where: Route,
    saved: Saved,
    dlse: Tensor | None,
    options: AttentionOptions,
    functions: Functions,
    wanted: Sequence[str],
) -> dict[str, Tensor]:
    """Gradients of captured tensors, by buffer name.

    Parameters
    ----------
    wanted : sequence of str
        Buffer names of captured tensors.
    """
    sums = _Sums(saved, options, functions, wanted)
    for part in _parts(saved, most_scores(saved.q, sums.of_each), functions.mask_mod):
        (ds,) = where.compute(part.call(saved, dlse, options, functions))
        assert ds is not None
        sums.add(part, ds)
    return sums.finish()


def first_call(
    saved: Saved, options: AttentionOptions, functions: Functions, wanted: Sequence[str]
) -> ScoreGradients | None:
    """The call that computes the first part of dS; None if there are no scores."""
    sums = _Sums(saved, options, functions, wanted)
    part = next(_parts(saved, most_scores(saved.q, sums.of_each), functions.mask_mod), None)
    return None if part is None else part.call(saved, None, options, functions)


# -- parts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A part of the scores: batches, heads of keys, query rows and keys; and its first element along each axis, query
    heads instead, as a tensor."""

    batch: slice
    heads: slice
    rows: slice
    keys: slice
    starts: Tensor

    def call(
        self, saved: Saved, dlse: Tensor | None, options: AttentionOptions, functions: Functions
    ) -> ScoreGradients:
        """The call that computes the part of dS."""
        q, k, v, out, lse, dout = saved
        own, other = (self.batch, self.query_heads(saved), self.rows), (self.batch, self.heads, self.keys)
        part = Saved(q[own], k[other], v[other], out[own].contiguous(), lse[own].contiguous(), dout[own])
        of_lse = None if dlse is None else dlse[own].contiguous()
        return ScoreGradients(part, options, _functions_of_part(functions, self.starts), of_lse)

    def query_heads(self, saved: Saved) -> slice:
        group = saved.q.shape[1] // saved.k.shape[1]
        return slice(self.heads.start * group, self.heads.stop * group)


def _functions_of_part(functions: Functions, starts: Tensor) -> Functions:
    """The functions, called with indices that count from the start of a part."""
    parts: dict[str, BoundFunction | None] = {}
    captured = dict(functions.captured)
    for name, function in ((SCORE_FUNCTION, functions.score_mod), (MASK_FUNCTION, functions.mask_mod)):
        parts[name] = None if function is None else BoundFunction(part_of(function.program), function.numbers)
        if function is not None:
            captured[f"{name}{len(function.program.arrays)}"] = starts
    return Functions(parts[SCORE_FUNCTION], parts[MASK_FUNCTION], captured)


def _parts(saved: Saved, most: int, mask: BoundFunction | None) -> Iterator[_Part]:
    """Parts of at most about ``most`` scores each, without those of which a mask is known to keep nothing."""
    (batch, heads_q, rows), (_, heads, keys) = saved.q.shape[:3], saved.k.shape[:3]
    if not (batch and heads_q and rows and keys):
        return
    group = heads_q // heads
    part_keys = min(keys, KEYS)
    # Rather many heads than many rows, of which a mask may drop all.
    part_rows = min(rows, ROWS, max(most // (part_keys * group) // PADDING, 1) * PADDING)
    part_heads = min(heads, max(most // (part_keys * part_rows * group), 1))
    part_batch = min(batch, max(most // (part_keys * part_rows * heads_q), 1)) if part_heads == heads else 1
    each = part_keys * part_heads * group * part_batch
    part_rows = min(rows, max(most // each // PADDING * PADDING, part_rows))
    sizes, steps = (batch, heads, rows, keys), (part_batch, part_heads, part_rows, part_keys)
    ranges = [range(0, size, step) for size, step in zip(sizes, steps, strict=True)]
    # Made on the device, so that nothing waits for it.
    firsts = [torch.arange(0, size, step, device=saved.q.device) for size, step in zip(sizes, steps, strict=True)]
    firsts[1] = firsts[1] * group
    starts = torch.cartesian_prod(*firsts).to(torch.int32)
    kept = None if mask is None else kept_differences(mask, rows, keys)
    for number, begin in enumerate(product(*ranges)):
        if kept is not None:
            # Keys begin[3] ... and rows begin[2] ... differ by the first of these differences up to the last.
            first, last = rows - min(begin[2] + part_rows, rows), rows - 1 - begin[2]
            if kept[first + begin[3]] == kept[last + min(begin[3] + part_keys, keys)]:
                continue
        of_batch, of_heads, of_rows, of_keys = (
            slice(x, min(x + step, size)) for x, step, size in zip(begin, steps, sizes, strict=True)
        )
        yield _Part(of_batch, of_heads, of_rows, of_keys, starts[number])


# -- sums --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Load:
    """An element that the score function loads, of a captured tensor that has a gradient.

    Attributes
    ----------
    name : str
        Buffer name of the tensor.
    indices : tuple of int
        Nodes of the function.
    factor : int
        The node of the program of derivatives by which dS is multiplied.
    along : Along
        How the sums of dS are made.
    factor_of_each : bool
        dS is multiplied before it is summed; else the sums are.
    """

    name: str
    indices: tuple[int, ...]
    factor: int
    along: Along
    factor_of_each: bool


class _Sums:
    """Sums of dS for all captured tensors."""

    def __init__(self, saved: Saved, options: AttentionOptions, functions: Functions, wanted: Sequence[str]) -> None:
        assert functions.score_mod is not None
        self.saved, self.captured = saved, functions.captured
        self.program, numbers = functions.score_mod.program, functions.score_mod.numbers
        self.evaluator = Evaluator(SCORE_FUNCTION, self.captured, numbers, saved.q.device)
        self.scale = saved.q.shape[-1] ** -0.5 if options.scale is None else options.scale
        self.partial, self.loads = _loads(self.program, frozenset(wanted))
        lse, (batch, heads, rows), keys = saved.lse, saved.q.shape[:3], saved.k.shape[2]
        self.totals = {name: lse.new_zeros(self.captured[name].shape).reshape(-1) for name in wanted}
        lengths = {"none": 1, "query": rows, "key": keys, "difference": max(rows + keys - 1, 0)}
        self.sums = {
            load: lse.new_zeros((batch, heads, lengths[load.along])) for load in self.loads if load.along != "all"
        }

    @property
    def of_each(self) -> bool:
        """Whether scores are worked on one by one."""
        return any(load.factor_of_each or load.along == "all" for load in self.loads)

    def add(self, part: _Part, ds: Tensor) -> None:
        """Add a part of dS, as `ScoreGradients` gives it."""
        rows, keys = part.rows.stop - part.rows.start, part.keys.stop - part.keys.start
        heads = part.query_heads(self.saved)
        plain = ds[:, :, :rows, :keys]
        inputs: dict[str, Tensor] | None = None
        for load in self.loads:
            found, padded = plain, ds
            if load.factor_of_each or load.along == "all":
                inputs = inputs or self._inputs(part)
            if load.factor_of_each:
                assert inputs is not None
                found = _times(plain, self._value(self.partial, (load.factor,), inputs)[0])
                if load.along == "difference":
                    padded = torch.zeros_like(ds)
                    padded[:, :, :rows, :keys] = found
            if load.along == "all":
                assert inputs is not None
                self._scatter(load, self._value(self.program, load.indices, inputs), found)
                continue
            total = self.sums[load][part.batch, heads]
            if load.along == "none":
                total += found.sum((2, 3))[..., None]
            elif load.along == "query":
                total[..., part.rows] += found.sum(3)
            elif load.along == "key":
                total[..., part.keys] += found.sum(2)
            else:
                first = part.keys.start - (part.rows.stop - 1) + (self.saved.q.shape[2] - 1)
                total[..., first : first + rows + keys - 1] += _diagonal_sums(padded, rows, keys)

    def finish(self) -> dict[str, Tensor]:
        """The gradients, by buffer name."""
        (batch, heads, rows), keys = self.saved.q.shape[:3], self.saved.k.shape[2]
        for load, found in self.sums.items():
            inputs = dict(zip(("batch", "head"), self._counts(batch, heads, 0), strict=True))
            query, key = self._count(0, rows), self._count(0, keys)
            if load.along == "difference":
                # Any row and key of a difference stand for all.
                apart = self._count(1 - rows, keys)
                query, key = (-apart).clamp(min=0), apart.clamp(min=0)
            inputs |= {"query": query[:1] if load.along in ("none", "key") else query}
            inputs |= {"key": key[:1] if load.along in ("none", "query") else key}
            if not load.factor_of_each:
                found = _times(found, self._value(self.partial, (load.factor,), inputs)[0])
            self._scatter(load, self._value(self.program, load.indices, inputs), found)
        return {
            name: x.view(self.captured[name].shape).to(self.captured[name].dtype) for name, x in self.totals.items()
        }

    def _inputs(self, part: _Part) -> dict[str, Tensor]:
        """Inputs of the functions for a part."""
        heads = part.query_heads(self.saved)
        query, key = self._count(part.rows.start, part.rows.stop), self._count(part.keys.start, part.keys.stop)
        batch, head = self._count(part.batch.start, part.batch.stop), self._count(heads.start, heads.stop)
        inputs = {"batch": batch[:, None, None, None], "head": head[:, None, None], "query": query[:, None], "key": key}
        if any(node.op == "score" for node in self.partial.nodes):
            q, k = self.saved.q[part.batch, heads, part.rows], self.saved.k[part.batch, part.heads, part.keys]
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            inputs["score"] = (q.to(self.saved.lse.dtype) @ k.to(self.saved.lse.dtype).transpose(2, 3)) * self.scale
        return inputs

    def _counts(self, batch: int, heads: int, first: int) -> tuple[Tensor, Tensor]:
        return self._count(first, batch)[:, None, None], self._count(first, heads)[:, None]

    def _count(self, first: int, end: int) -> Tensor:
        return torch.arange(first, max(first, end), device=self.saved.q.device, dtype=torch.int32)

    def _value(self, program: ScoreFunction, roots: Sequence[int], inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Values of some nodes of a program."""
        return self.evaluator.values(program, roots, inputs)

    def _scatter(self, load: _Load, indices: Sequence[Tensor], added: Tensor) -> None:
        """Add to elements of a captured tensor, which may occur many times."""
        at = torch.zeros((), dtype=torch.int64, device=added.device)
        for index, size in zip(indices, self.captured[load.name].shape, strict=True):
            at = at * size + inside(index, size)
        # In a fixed order if PyTorch is asked for that.
        self.totals[load.name].scatter_add_(0, at.expand(added.shape).reshape(-1), added.reshape(-1))


@functools.lru_cache(maxsize=256)
def _loads(program: ScoreFunction, wanted: frozenset[str]) -> tuple[ScoreFunction, tuple[_Load, ...]]:
    """The program of derivatives, and the elements whose gradients are ``wanted``."""
    numbers = {int(name.removeprefix(SCORE_FUNCTION)) for name in wanted}
    nodes = tuple(i for i, node in enumerate(program.nodes) if node.op == "load" and node.value in numbers)
    partial = derivatives(program, nodes)
    of_values, of_factors = spreads(program), spreads(partial)
    loads = []
    for i, factor in zip(nodes, partial.results[1:], strict=True):
        node = program.nodes[i]
        along: Along = "none"
        for argument in node.args:
            along = together(along, of_values[argument])
        both = together(along, of_factors[factor])
        loads.append(
            _Load(
                f"{SCORE_FUNCTION}{node.value}",
                node.args,
                factor,
                along if both == "all" else both,
                both == "all" and not _is_one(partial, factor),
            )
        )
    return partial, tuple(loads)


def _is_one(program: ScoreFunction, i: int) -> bool:
    node = program.nodes[i]
    return node.op == "literal" and node.value == 1.0


def _times(ds: Tensor, factor: Tensor) -> Tensor:
    # Where the key is dropped the derivative may be infinite.
    return torch.where(ds == 0, 0.0, ds * factor)


def _diagonal_sums(ds: Tensor, rows: int, keys: int) -> Tensor:
    """Sums of ``ds[..., i, j]`` of each difference ``j - i``, from ``1 - rows`` to ``keys - 1``.

    In a view with one more element from row to row, diagonals are columns. The zeros behind each row make place for
    `PADDING` of them; sums of so many rows are then added in the same manner.
    """
    batch, heads, padded_rows, width = ds.shape
    blocks = padded_rows // PADDING
    sizes, steps = (batch, heads, blocks), (*ds.stride()[:2], PADDING * width, width + 1, 1)
    # Differences from 0 on, and those below, which row 0 does not have.
    above = ds.as_strided((*sizes, PADDING, width - PADDING), steps).sum(3)
    below = ds.as_strided((*sizes, PADDING - 1, PADDING - 1), steps, width + 1 - (PADDING - 1)).sum(3)
    parts = torch.cat((below, above), 3).flip(2)
    length = parts.shape[3] + (blocks - 1) * PADDING
    parts = torch.nn.functional.pad(parts, (0, length - parts.shape[3]))
    found = parts.as_strided(
        (batch, heads, blocks, length), (heads * blocks * length, blocks * length, length - PADDING, 1)
    ).sum(2)
    return found[..., blocks * PADDING - rows :][..., : rows + keys - 1]
