"""Attention over sequences whose rows are spread over the ranks of a process group."""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from aule.api.names import unknown_option
from aule.api.row_ops import rope as rotate
from aule.api.types import AttentionKeywords
from aule.distributed import dtensor
from aule.distributed.compute import Job
from aule.distributed.graphs import outside_graphs
from aule.distributed.group import Ring, agree, alone, device_of, mesh_rings, ring_of
from aule.distributed.positions import Positions, check_balance, check_length, order
from aule.distributed.ring import RingAttention, attend
from aule.distributed.schedule import schedule
from aule.distributed.sharding import held_rows
from aule.distributed.ulysses import Heads
from aule.dtypes import shown
from aule.errors import InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.frontends.torch.attention import Forward, gradient_device
from aule.frontends.torch.checks import checked_out, keyed, no_gradient, require_plain
from aule.frontends.torch.modes import autocast, grad_enabled
from aule.frontends.torch.seeds import seed_on
from aule.frontends.torch.views import view_on_device, view_on_host
from aule.ops.attention.precision import checked_precision
from aule.ops.attention.validate import window_sides
from aule.ops.rope.tables import rope_tables
from aule.ops.shared.checks import checked_deterministic, checked_dropout, checked_seed
from aule.ops.softmax.dropout import OCTET
from aule.options import AttentionOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention", "ring_attention", "ulysses_attention"]


class Keywords(AttentionKeywords, total=False):
    """Options of the functions below, besides those of the group."""

    return_lse: bool


@outside_graphs
def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    group: Any = None,
    balance: str = "zigzag",
    cu_seqlens: Any = None,
    **options: Unpack[Keywords],
) -> Any:
    """Compute attention over a sequence that is spread over ranks, passing keys and values round a ring.

    Every rank calls it with its shard of q, k and v and the same options, and gets its shard of the result. A rank
    holds keys of one other rank at a time, and receives the next ones while it computes. Ranks, options and shapes are
    compared before the first message: if they differ, every rank raises an error.

    Parameters
    ----------
    q, k, v : Tensor
        This rank's rows, as `shard` gives them: ``[batch, heads, rows, head_dim]``, with fewer axes in front, or a
        DTensor that is divided along the rows. All shards have the same shape.
    group : ProcessGroup or DeviceMesh, optional
        The ranks; a mesh of one axis. Default: all ranks, or the mesh of a DTensor.
    balance : {"zigzag", "contiguous", "striped"}
        Which rows a rank has. ``"zigzag"``: of ``2 * ranks`` chunks the one of its number and the one as far from the
        end, which divides the work of causal masks evenly. ``"contiguous"``: one chunk, which sends least with a short
        window. ``"striped"``: every ``ranks``-th row.
    cu_seqlens : int32 Tensor or sequence of int, optional
        ``[sequences + 1]``: where the packed sequences of the whole begin, and where the last one ends; q, k and v are
        then ``[rows, heads, head_dim]``. Not with ``"striped"``.
    **options
        All options of `aule.flash_attention`. Positions are those of the whole sequence. A mask or bias has this rank's
        query rows and all keys, ``[..., rows, seq_kv]``, in the order of the sequence. Tables of ``rope`` have all
        positions. Slopes and sinks are the same on all ranks; gradients of what all ranks share are those of this
        rank's rows, to be summed over the group. Without a seed the first rank draws one. Dropout needs keys in
        multiples of 8, and not ``"striped"``.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        This rank's rows of the result and, with ``return_lse``, of the log-sum-exp.

    Raises
    ------
    InvalidArgumentError, InvalidShapeError
        Arguments are wrong or differ between ranks.
    CommunicationError
        A rank was lost, or did not call the function within the time limit of the group.
    """
    op = "ring_attention"

    def run(tensors: tuple[Any, ...], found: Any, local: dict[str, Any]) -> Any:
        return _attention(op, tensors, (ring_of(op, found), alone(op)), balance, cu_seqlens, local)

    return dtensor.call(op, (q, k, v), group, dict(options), run, cu_seqlens is not None)


@outside_graphs
def ulysses_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    group: Any = None,
    balance: str = "contiguous",
    cu_seqlens: Any = None,
    **options: Unpack[Keywords],
) -> Any:
    """Compute attention over a sequence that is spread over ranks, exchanging heads for rows.

    Each rank computes some of the heads over all rows. It sends less than a ring does, all at once; the number of query
    heads limits the number of ranks, whereas key heads may be fewer than ranks.

    Parameters
    ----------
    q, k, v : Tensor
        This rank's rows, as for `ring_attention`. The number of query heads is a multiple of the number of ranks.
    group, cu_seqlens
        As for `ring_attention`.
    balance : {"contiguous", "zigzag", "striped"}
        Which rows a rank has. All do the same work.
    **options
        As for `ring_attention`. Gradients of slopes and sinks are those of this rank's heads.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        As `ring_attention` returns it.
    """
    op = "ulysses_attention"

    def run(tensors: tuple[Any, ...], found: Any, local: dict[str, Any]) -> Any:
        return _attention(op, tensors, (alone(op), ring_of(op, found)), balance, cu_seqlens, local)

    return dtensor.call(op, (q, k, v), group, dict(options), run, cu_seqlens is not None)


@outside_graphs
def attention(
    q: Any, k: Any, v: Any, *, mesh: Any = None, balance: str = "zigzag", cu_seqlens: Any = None,
    **options: Unpack[Keywords],
) -> Any:  # fmt: skip
    """Compute attention over a sequence that is spread over a mesh of ranks, by a ring of Ulysses groups.

    Along the second axis of the mesh heads are exchanged for rows (`ulysses_attention`), along the first keys and
    values pass round (`ring_attention`). A mesh of one axis is a ring.

    Parameters
    ----------
    q, k, v : Tensor
        This rank's rows, as ``shard(x, group=mesh)`` gives them.
    mesh : DeviceMesh
        Of one or two axes; by default that of a DTensor.
    balance : {"zigzag", "contiguous", "striped"}
        How rows are divided along the first axis; within each share they are contiguous along the second.
    cu_seqlens, **options
        As for `ring_attention`.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        As `ring_attention` returns it.
    """
    op = "attention"

    def run(tensors: tuple[Any, ...], found: Any, local: dict[str, Any]) -> Any:
        return _attention(op, tensors, mesh_rings(op, found), balance, cu_seqlens, local)

    return dtensor.call(op, (q, k, v), mesh, dict(options), run, cu_seqlens is not None)


# -- one call ----------------------------------------------------------------------------------------------------------


def _attention(
    op: str, tensors: tuple[Any, ...], rings: tuple[Ring, Ring], balance: str, cu_seqlens: Any, options: Any
) -> Any:
    call = _Call(op, tensors, rings, balance, cu_seqlens)
    drawn = int(torch.randint(2**63 - 1, (1,), dtype=torch.int64)) if options.get("dropout_p") else None
    seed = agree(rings[::-1], device_of(tensors[0]), lambda: call.check(options), drawn)
    return call.run(seed)


class _Call:
    """A call in the making: `check` reads all arguments, and `run` computes it."""

    def __init__(
        self, op: str, tensors: tuple[Any, ...], rings: tuple[Ring, Ring], balance: str, cu_seqlens: Any
    ) -> None:
        self.op, self.tensors, (self.ring, self.across) = op, tensors, rings
        self.balance, self.cu_seqlens = balance, cu_seqlens
        self.ranks = self.ring.ranks * self.across.ranks

    # -- arguments -----------------------------------------------------------------------------------------------------

    def check(self, options: dict[str, Any]) -> dict[str, object]:
        """Check the arguments; returns what must be the same on all ranks."""
        op = self.op
        check_balance(op, self.balance)
        self.options = _read(op, options)
        for name, x in zip("qkv", self.tensors, strict=True):
            require_plain(x, name, op)
        self.sequences = _offsets(op, self.cu_seqlens)
        self.axes = self.tensors[0].ndim
        self.q, self.k, self.v = (self._lifted(x) for x in autocast(*self.tensors))
        self.options = self._checked_options()
        self.positions = self._positions()
        self._check_dropout()
        self._check_gradients()
        facts: dict[str, object] = {"call": op, "balance": self.balance, "cu_seqlens": self.sequences}
        for name, x in (("q", self.q), ("k", self.k), ("v", self.v), *self.options.arrays().items()):
            facts[name] = f"{list(x.shape)} of {x.dtype}".replace("torch.", "")
        facts |= self.options.plain() | {"seed": self.options.seed, "gradients": self.differentiates}
        return facts | {"ranks": self.ranks}

    def _lifted(self, x: Tensor) -> Tensor:
        """``[batch, heads, rows, dim]``."""
        if self.sequences:
            if x.ndim != 3:
                raise InvalidShapeError(
                    f"[{self.op}] expected [rows, heads, head_dim] with cu_seqlens, got {list(x.shape)}; pack the "
                    "sequences along the first axis"
                )
            return x.transpose(0, 1)[None]
        return x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x

    def _checked_options(self) -> AttentionOptions:
        """Check everything that does not depend on other ranks as `aule.flash_attention` does."""
        op, given = self.op, self.options
        simple = given._replace(mask=None, bias=None, rope_cos=None, rope_sin=None, seed=None, out=None, dropout_p=0.0)
        call = Forward(self.q, self.k, self.v, simple)
        call.op = op
        call.problem(view_on_host if self.q.is_cpu else view_on_device)
        heads, n, m = self.q.shape[1], self.q.shape[2], self.k.shape[2]
        if heads % self.across.ranks:
            raise InvalidShapeError(
                f"[{op}] expected a multiple of {self.across.ranks} query heads, one share for each rank, got {heads}; "
                "use fewer ranks, or ring_attention"
            )
        for name, length in (("q", n), ("k", m)):
            check_length(op, name, length * self.across.ranks, self.ring.ranks, self.balance)
            if self.ring.ranks == 1:
                check_length(op, name, length, self.across.ranks, self.balance)
        for name, x in (("mask", given.mask), ("bias", given.bias)):
            if x is not None:
                require_plain(x, name, op)
                shape, whole = tuple(x.shape), m * self.ranks
                fits = 2 <= len(shape) <= 4 and shape[-1] in (1, whole) and shape[-2] in (1, n)
                if not fits or any(a not in (1, b) for a, b in zip(shape[-3::-1], (heads, len(self.q)), strict=False)):
                    raise InvalidShapeError(
                        f"[{op}] expected {name} of this rank's rows and all keys, broadcastable to "
                        f"{[len(self.q), heads, n, whole]}, got {list(shape)}; shard it along its rows only"
                    )
                if self.sequences:
                    raise InvalidArgumentError(f"[{op}] expected no {name} with cu_seqlens, got one; leave it out")
        if given.out is not None:
            checked_out(given.out, (*self.tensors[0].shape[:-1], self.tensors[2].shape[-1]), self.tensors[0], op)
        return given

    def _positions(self) -> Positions:
        op, given = self.op, self.options
        n, m = self.q.shape[2] * self.across.ranks, self.k.shape[2] * self.across.ranks
        sides = window_sides(op, given.window, bool(given.causal))
        left, right = (None if side < 0 else side for side in sides)
        if given.causal:
            right = 0
        if self.sequences:
            total = self.k.shape[2] * self.ranks
            if n != m or self.sequences[-1] != total:
                raise InvalidShapeError(
                    f"[{op}] expected cu_seqlens up to {total}, the rows of all ranks, and as many keys, got "
                    f"{self.sequences[-1]} and {n} rows with {m} keys on a rank; pass those of the whole batch"
                )
            if self.balance == "striped" and self.ring.ranks > 1:
                raise InvalidArgumentError(
                    f"[{op}] expected balance 'zigzag' or 'contiguous' with cu_seqlens, got 'striped'; shard otherwise"
                )
        shift = (m - n) * self.ring.ranks if given.causal_align == "bottom-right" else 0
        exact = given.mask is not None or given.bias is not None or given.alibi_slopes is not None
        return Positions(
            self.balance, self.ring.ranks, n, m, shift, left, right, exact or bool(given.dropout_p),
            given.alibi_slopes is not None, self.sequences, bool(given.dropout_p),
        )  # fmt: skip

    def _check_dropout(self) -> None:
        if not self.options.dropout_p or self.ring.ranks == 1:
            return
        hops = schedule(self.positions, self.ring.rank).hops
        starts = [block.k.start for hop in hops for block in hop.blocks]
        if self.balance == "striped" or any(start % OCTET for start in starts):
            raise InvalidArgumentError(
                f"[{self.op}] expected chunks of a multiple of {OCTET} keys and balance 'zigzag' or 'contiguous' with "
                f"dropout, got {self.balance!r} and chunks from keys {sorted(set(starts))[:4]}; pad the sequences, or "
                "use ulysses_attention"
            )

    def _check_gradients(self) -> None:
        given = self.options
        tensors = (self.q, self.k, self.v, given.mask, given.bias, given.sinks)
        self.differentiates = grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        for name in ("alibi_slopes", "rope_cos", "rope_sin", "out"):
            if getattr(getattr(given, name), "requires_grad", False):
                raise no_gradient(name, f"detach {name}, which has no gradient here", self.op)
        if self.differentiates and given.out is not None:
            raise no_gradient("out=", "leave out= out, or call it under torch.no_grad()", self.op)
        if self.q.is_cpu:  # refuses NumPy, which has no gradients, and a backend that is missing here
            gradient_device(self.q, given.backend, self.differentiates, False)

    # -- computing -----------------------------------------------------------------------------------------------------

    def run(self, seed: int | None) -> Any:
        """Compute the call; ``seed`` is drawn by the first rank."""
        given = self.options
        q, k, v = self._rotated()
        rows, permutation = q.shape[2], None
        if self.ring.ranks == 1 and self.across.ranks > 1 and self.balance != "contiguous":
            permutation = torch.from_numpy(order(self.balance, self.across.ranks, rows))
        heads, key_heads = Heads(self.across, q.shape[1], k.shape[1], permutation), None
        if k.shape[2] != rows and permutation is not None:
            permutation = torch.from_numpy(order(self.balance, self.across.ranks, k.shape[2]))
            key_heads = Heads(self.across, q.shape[1], k.shape[1], permutation)
        words = None
        if given.dropout_p:
            words = seed_on(seed if given.seed is None else given.seed, q.device)
        sinks = heads.own(given.sinks)
        options = given._replace(
            mask=heads.scores(given.mask, rows), bias=heads.scores(given.bias, rows), sinks=None, seed=words,
            return_lse=True, rope_cos=None, rope_sin=None, alibi_slopes=heads.own(given.alibi_slopes), out=None,
        )  # fmt: skip
        job = Job(self.ring, self.positions, options, (heads.first, q.shape[1]), self.differentiates)
        q, k, v = heads.rows(q), (key_heads or heads).keys(k), (key_heads or heads).keys(v)
        if self.differentiates:
            out, lse = RingAttention.apply(q, k, v, options.mask, options.bias, sinks, job)
        else:
            out, lse = attend(job, q, k, v, sinks)
        out = self._given_shape(heads.heads(out), True)
        if given.out is not None:
            out = given.out.copy_(out)
        if not given.return_lse:
            return out
        with torch.no_grad():
            return out, self._given_shape(heads.heads(lse.float()), False)

    def _rotated(self) -> tuple[Tensor, Tensor, Tensor]:
        given, shift = self.options, self.positions.shift
        if given.rope_cos is None:
            return self.q, self.k, self.v
        made = []
        for x, start in ((self.q, max(shift, 0)), (self.k, max(-shift, 0))):
            places = (self._positions_of(x.shape[2]) + start).to(x.device)
            tables = (table.index_select(-2, places) for table in (given.rope_cos, given.rope_sin))
            made.append(rotate(x, *tables, interleaved=given.rope_interleaved, backend=given.backend))
        return made[0], made[1], self.v

    def _positions_of(self, length: int) -> Tensor:
        """Positions of this rank's rows in their sequences."""
        at = held_rows(self.ring, self.across, self.balance, length)
        if self.sequences:
            starts = np.array(self.sequences)
            at = at - starts[np.searchsorted(starts, at, side="right") - 1]
        return torch.from_numpy(at)

    def _given_shape(self, x: Tensor, tokens: bool) -> Tensor:
        """A result with the caller's axes; ``tokens`` if it has an axis of columns."""
        if self.sequences:
            return x[0].transpose(0, 1) if tokens else x[0]
        return x[(0,) * (4 - self.axes)] if self.axes < 4 else x


def _read(op: str, given: dict[str, Any]) -> AttentionOptions:
    """The options as given, with plain numbers; refuses unknown ones."""
    known = {name for name in AttentionOptions._fields if not name.startswith("rope_")} | {"rope", "rope_interleaved"}
    unknown = {name: x for name, x in given.items() if name not in known}
    if unknown:
        group = "mesh" if op == "attention" else "group"
        raise unknown_option(["q", "k", "v", group, "balance", "cu_seqlens", *sorted(known)], unknown, op)
    cos, sin = rope_tables(op, given.get("rope"))
    plain = {name: x for name, x in given.items() if name != "rope"}
    options = keyed(op, AttentionOptions(**plain)._replace(rope_cos=cos, rope_sin=sin))
    p, seed = checked_dropout(op, options.dropout_p), checked_seed(op, options.seed)
    return options._replace(
        dropout_p=p, seed=seed if p else None, deterministic=checked_deterministic(op, options.deterministic),
        precision=checked_precision(op, options.precision),
    )  # fmt: skip


def _offsets(op: str, offsets: Any) -> tuple[int, ...]:
    """``cu_seqlens`` as numbers; those on a device are waited for."""
    if offsets is None:
        return ()
    try:
        found = tuple(map(operator.index, offsets.tolist() if isinstance(offsets, Tensor) else offsets))
    except TypeError:
        raise InvalidDtypeError(
            f"[{op}] expected cu_seqlens as an int32 tensor or integers, got "
            f"{shown(offsets.dtype) if isinstance(offsets, Tensor) else type(offsets).__name__}; convert it"
        ) from None
    if len(found) < 2 or found[0] != 0 or any(y < x for x, y in pairwise(found)):
        raise InvalidArgumentError(
            f"[{op}] expected cu_seqlens that begin at 0 and do not fall, got {list(found[:8])}; pass the offsets of "
            "the whole batch"
        )
    return found
