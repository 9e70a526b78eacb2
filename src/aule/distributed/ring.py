"""Attention whose keys and values go round a ring of ranks, and its gradients, which go round with them.

On hop ``h`` a rank computes on the keys of the rank ``h`` places before it, while those of the next hop arrive. Partial
results are merged by their log-sum-exp in the order of the hops, so the same call gives the same bits every time. In
the backward pass keys and values make the same journey; their gradients follow one hop behind, and go home when no
rank further on adds to them. Keys that no rank further on keeps, by a causal mask or a window, are not sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aule.distributed import compute
from aule.distributed.compute import Call, Job
from aule.distributed.group import Messages, Ring, messaging
from aule.distributed.schedule import NOTHING, Hop, Span, schedule
from aule.engine import observe
from aule.frontends.torch.attention import Saved
from aule.frontends.torch.autograd.refuse import refuse_second
from aule.frontends.torch.passes import sink_gradient
from aule.frontends.torch.views import work_dtype


class Payload(NamedTuple):
    """Keys and values of a rank, from its key ``first`` on; None if nothing of it is here."""

    first: int
    k: Tensor | None
    v: Tensor | None

    def part(self, span: Span) -> list[Tensor]:
        """Keys and values of a span."""
        return _parts((self.k, self.v), span, self.first)

    def of(self, call: Call) -> tuple[Tensor, Tensor]:
        """Keys and values of a call."""
        assert self.k is not None and self.v is not None
        return call.keys(self.k, self.first), call.keys(self.v, self.first)


def _parts(tensors: Iterable[Tensor | None], span: Span, first: int) -> list[Tensor]:
    return [x[:, :, span[0] - first : span[1] - first] for x in tensors if x is not None]


class Journey:
    """Keys and values on their way round: `next` gives those of one hop and has those of the next hop sent."""

    def __init__(self, ring: Ring, hops: tuple[Hop, ...], k: Tensor, v: Tensor) -> None:
        self.ring, self.hops, self.like = ring, hops, k
        self.shapes = (*k.shape[:2], k.shape[3]), (*v.shape[:2], v.shape[3])
        self.here = Payload(0, k, v)
        self.messages = Messages(ring)

    def shapes_of(self, span: Span) -> list[tuple[int, ...]]:
        """Shapes of the keys and values of a span."""
        return [(batch, heads, span[1] - span[0], dim) for batch, heads, dim in self.shapes]

    def next(self, number: int) -> Payload:
        """The keys and values of a hop; while the caller computes on them, those of the next hop are exchanged."""
        self.messages.wait()
        here, hops = self.here, self.hops
        if number + 1 < len(hops):
            on, coming = hops[number].on, hops[number + 1].here
            if on != NOTHING:
                self.messages.send(here.part(on), 1)
            self.here = Payload(0, None, None)
            if coming != NOTHING:
                self.here = Payload(coming[0], *self.messages.receive(self.shapes_of(coming), self.like, -1))
            self.messages.start()
        return here


def attend(job: Job, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of this rank's rows, the latter in the type computed in."""
    state, hops = State(q, v), schedule(job.positions, job.ring.rank).hops
    journey = Journey(job.ring, hops, k, v)
    with messaging(job.ring):
        for number, hop in enumerate(hops):
            here = journey.next(number)
            for call in compute.calls(job, hop, *q.shape[:2]):
                state.merge(call, *compute.forward(job, call, q, *here.of(call)))
        journey.messages.wait()
    return state.result(sinks)


class State:
    """Output and log-sum-exp of this rank's rows over the keys seen so far."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self.dtype, work = q.dtype, work_dtype(q)
        self.out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=work)
        self.lse = q.new_full(q.shape[:3], -torch.inf, dtype=work)

    def merge(self, call: Call, out: Tensor, lse: Tensor) -> None:
        """Merge the result of a call."""
        mine, own = call.rows(self.out), call.rows(self.lse)
        both = torch.logaddexp(own, lse)
        level = torch.where(both == -torch.inf, 0, both)  # no keys yet: exp(-inf + inf) would be NaN
        mine.mul_(torch.exp(own - level)[..., None])
        mine.addcmul_(out.to(mine.dtype), torch.exp(lse - level)[..., None])
        own.copy_(both)

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output and log-sum-exp, with the sinks that take part in softmax once."""
        if sinks is not None:
            both = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[:, None].expand_as(self.lse))
            level = torch.where(both == -torch.inf, 0, both)
            self.out.mul_(torch.exp(self.lse - level)[..., None])
            self.lse = both
        return self.out.to(self.dtype), self.lse


class Gradients:
    """Gradients of this rank's rows, and of keys and values on their way round."""

    def __init__(self, job: Job, saved: Saved, wanted: tuple[bool, ...]) -> None:
        self.job, self.saved, self.wanted = job, saved, wanted
        work = work_dtype(saved.q)
        self.dq = torch.zeros_like(saved.q, dtype=work, memory_format=torch.contiguous_format)
        self.dk, self.dv = (torch.zeros(x.shape, dtype=work, device=x.device) for x in (saved.k, saved.v))
        given = (job.options.mask, job.options.bias)
        self.added = [
            torch.zeros(x.shape, dtype=work, device=x.device) if x is not None and want else None
            for x, want in zip(given, wanted, strict=True)
        ]
        self.following, self.home = Messages(job.ring), Messages(job.ring)
        self.arrived: list[Tensor] = []
        self.returned: list[tuple[Span, list[Tensor]]] = []

    def run(self) -> None:
        """All hops."""
        ring, saved = self.job.ring, self.saved
        plan = schedule(self.job.positions, ring.rank)
        journey = Journey(ring, plan.hops, saved.k, saved.v)
        for number, hop in enumerate(plan.hops):
            here = journey.next(number)
            sums = self._hop(hop, here)
            self.following.wait()
            if self.arrived and sums:
                sums = [x.add_(y) for x, y in zip(self.arrived, sums, strict=True)]
            coming = plan.hops[number + 1].here if number + 1 < len(plan.hops) else NOTHING
            self._pass_on(hop, here.first, sums, journey.shapes_of(coming) if coming != NOTHING else None)
            self._send_home(number, hop, here.first, sums)
            for span in plan.own[number]:
                self._receive_own(number, span, sums, journey.shapes_of(span))
            self.home.start()
        for messages in (journey.messages, self.following, self.home):
            messages.wait()
        for span, grads in self.returned:
            for total, grad in zip((self.dk, self.dv), grads, strict=True):
                total[:, :, slice(*span)] = grad

    def _hop(self, hop: Hop, here: Payload) -> list[Tensor]:
        """Compute a hop; the gradients of its keys and values, if there are any."""
        if here.k is None or here.v is None:
            return []
        work = self.dq.dtype
        sums = [torch.zeros(x.shape, dtype=work, device=x.device) for x in (here.k, here.v)]
        for call in compute.calls(self.job, hop, *self.saved.q.shape[:2]):
            dq, dk, dv, ds = compute.backward(self.job, call, self.saved, *here.of(call), scores=any(self.wanted))
            call.rows(self.dq).add_(dq)
            for total, grad in zip(sums, (dk, dv), strict=True):
                call.keys(total, here.first).add_(grad)
            for total in self.added:
                part = compute.columns(total, call)
                if part is not None and ds is not None:
                    part.add_(ds.sum_to_size(part.shape))
        return sums

    def _pass_on(self, hop: Hop, first: int, sums: list[Tensor], shapes: list[tuple[int, ...]] | None) -> None:
        """Send gradients that the next rank adds to, and receive those that this rank adds to on its next hop."""
        if hop.on != NOTHING:
            self.following.send(_parts(sums, hop.on, first), 1)
        self.arrived = [] if shapes is None else self.following.receive(shapes, self.dk, -1)
        self.following.start()

    def _send_home(self, number: int, hop: Hop, first: int, sums: list[Tensor]) -> None:
        """Send complete gradients to the rank whose keys they belong to."""
        for span in hop.going_home if number and hop.here != NOTHING else ():
            self.home.send(_parts(sums, span, first), -number)

    def _receive_own(self, number: int, span: Span, sums: list[Tensor], shapes: list[tuple[int, ...]]) -> None:
        """Receive complete gradients of this rank's keys, which it has itself if they never left."""
        found = self.home.receive(shapes, self.dk, number) if number else _parts(sums, span, 0)
        self.returned.append((span, found))


class RingAttention(torch.autograd.Function):  # type: ignore[misc]
    """Attention of a ring with gradients of q, k, v, mask, bias and sinks."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
        job: Job,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Compute the output and the log-sum-exp."""
        out, lse = attend(job, q, k, v, sinks)
        options = job.options
        # Tensors are saved as such, so that autograd sees changes in place and may offload them.
        bare = options._replace(mask=None, bias=None, alibi_slopes=None, seed=None)
        ctx.job, ctx.caller = replace(job, options=bare), observe.caller.get()
        ctx.save_for_backward(q, k, v, out, lse, mask, bias, sinks, options.alibi_slopes, options.seed)
        shown = lse.to(torch.float32) if lse.dtype != torch.float32 else lse.clone()
        ctx.mark_non_differentiable(shown)
        return out, shown

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Compute all gradients."""
        inputs = ctx.saved_tensors
        q, k, v, out, lse, mask, bias, sinks, slopes, seed = inputs
        options = ctx.job.options._replace(mask=mask, bias=bias, alibi_slopes=slopes, seed=seed)
        saved = Saved(q, k, v, out, lse, dout.resolve_neg())
        with torch.no_grad(), observe.called_by(ctx.caller):
            made = Gradients(replace(ctx.job, options=options), saved, tuple(ctx.needs_input_grad[3:5]))
            with messaging(ctx.job.ring):
                made.run()
            of_sinks = sink_gradient(saved, sinks) if ctx.needs_input_grad[5] else None
        found: list[Tensor | None] = [x.to(like.dtype) for x, like in ((made.dq, q), (made.dk, k), (made.dv, v))]
        for grad, like in zip(made.added, (mask, bias), strict=True):
            found.append(None if grad is None else grad.to(like.dtype))
        return (*refuse_second((*found, of_sinks), dout, *inputs, op=ctx.job.ring.op), None)
