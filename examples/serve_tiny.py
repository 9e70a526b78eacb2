"""Serve many prompts of different lengths with one tiny model and a paged cache: continuous batching.

    python examples/serve_tiny.py [--prompts 24] [--tokens 48] [--pages 96] [--quantize int8] [--device cuda]

Every step is one forward pass over one row of tokens: the next token of each running sequence, and whole prompts of
those that were just admitted, behind each other. A prompt is admitted as soon as there are pages for all that it may
become; a sequence that ends gives its pages back, and the next prompt takes them. All prompts begin with the same
sentence, which is computed once: each is a fork of the sequence that holds it.

The model is a Llama of two layers with random weights, so that what it says is noise, but the same noise every time. At
the end each result is compared with what ``generate`` gives for that prompt alone. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import aule
from aule.integrations import transformers as integration
from aule.integrations.transformers_cache import AuleCache

CONFIG: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "initializer_range": 0.3,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
PAGE = 16
COMMON = 40
"""Tokens that all prompts begin with."""


@dataclass
class Request:
    """A prompt, and what became of it."""

    prompt: list[int]
    wanted: int
    seq: int | None = None
    result: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.result) == self.wanted


class Server:
    """A model, a pool of pages, and the sequences that run."""

    def __init__(self, model: Any, pool: aule.KVCache, common: list[int]) -> None:
        self.model, self.pool = model, pool
        self.running: list[Request] = []
        self.common = pool.allocate()
        self.step([(self.common, common)])

    def step(self, batch: list[tuple[int, list[int]]]) -> list[int]:
        """New tokens of some sequences through the model, in one row; the next token of each."""
        device = self.model.device
        lengths = [len(tokens) for _, tokens in batch]
        ids = torch.tensor([[token for _, tokens in batch for token in tokens]], device=device)
        starts = [self.pool.length(seq) for seq, _ in batch]
        places = [start + i for start, n in zip(starts, lengths, strict=True) for i in range(n)]
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        cache = AuleCache.over(self.pool, [seq for seq, _ in batch], lengths)
        positions = torch.tensor([places], device=device)
        scores = self.model(ids, position_ids=positions, past_key_values=cache, logits_to_keep=last).logits
        return scores[0].argmax(-1).tolist()  # type: ignore[no-any-return]

    def pages(self, request: Request) -> int:
        """Pages that a request may need beside those it shares."""
        total = len(request.prompt) + request.wanted
        return -(-total // PAGE) - self.pool.length(self.common) // PAGE

    def admit(self, waiting: list[Request]) -> list[Request]:
        """Take as many of the waiting as there is room for, in their order."""
        promised = sum(self.pages(r) - self._held(r) for r in self.running)
        admitted: list[Request] = []
        while waiting and promised + self.pages(waiting[0]) <= self.pool.pages_free:
            request = waiting.pop(0)
            promised += self.pages(request)
            request.seq = self.pool.fork(self.common)
            admitted.append(request)
        return admitted

    def _held(self, request: Request) -> int:
        assert request.seq is not None
        return -(-self.pool.length(request.seq) // PAGE) - self.pool.length(self.common) // PAGE

    def advance(self, admitted: list[Request]) -> None:
        """One step for all: a token of those that run, the rest of the prompt of those that were admitted."""
        done = self.pool.length(self.common)
        new = [(r.seq, r.prompt[done:]) for r in admitted]
        going = [(r.seq, r.result[-1:]) for r in self.running]
        self.running += admitted
        for request, token in zip(self.running, self.step(going + new), strict=True):  # type: ignore[arg-type]
            request.result.append(token)
        for request in [r for r in self.running if r.done]:
            assert request.seq is not None
            self.pool.free(request.seq)
            self.running.remove(request)


def show(server: Server, waiting: int, finished: int, rate: float, live: bool) -> None:
    """A line of where things stand, over the last one on a terminal."""
    used, total = server.pool.pages_in_use, server.pool.num_pages
    bar = "#" * round(30 * used / total)
    text = f"{rate:7.0f} tokens/s  pages {used:4}/{total} [{bar:30}]  running {len(server.running):3}"
    end = "\r" if live else "\n"
    print(f"{text}  waiting {waiting:3}  finished {finished:3}", end=end, flush=True)


def main(arguments: Sequence[str] | None = None) -> list[Request]:
    """Serve, compare, and give back the requests with their results."""
    parser = argparse.ArgumentParser(description="Continuous batching with a tiny model and a paged cache.")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of a prompt, at most")
    parser.add_argument("--pages", type=int, default=96, help="pages of 16 tokens")
    parser.add_argument("--quantize", choices=("int8", "fp8"), help="how the pages store keys and values")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)

    integration.register()
    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG)
    model = LlamaForCausalLM._from_config(config, attn_implementation="aule").eval().to(options.device)
    draw = torch.Generator().manual_seed(1)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    common = [number(2, 511) for _ in range(COMMON)]
    requests = [
        Request(
            common + [number(2, 511) for _ in range(number(1, 90))], number(1 + options.tokens // 4, options.tokens)
        )
        for _ in range(options.prompts)
    ]
    pool = aule.KVCache(
        options.pages, config.num_key_value_heads, config.head_dim, page_size=PAGE, layers=config.num_hidden_layers,
        device=options.device, quantize=options.quantize,
    )  # fmt: skip
    live = sys.stdout.isatty()
    with torch.no_grad():
        server = Server(model, pool, common)
        waiting, steps, most = list(requests), 0, 0
        began = time.perf_counter()
        while waiting or server.running:
            admitted = server.admit(waiting)
            if not admitted and not server.running:
                needed = server.pages(waiting[0])
                raise SystemExit(f"a prompt needs {needed} pages, and {pool.pages_free} are free; raise --pages")
            server.advance(admitted)
            steps, most = steps + 1, max(most, pool.pages_in_use)
            produced = sum(len(r.result) for r in requests)
            if live or steps % 16 == 0:
                finished = sum(r.done for r in requests)
                show(server, len(waiting), finished, produced / (time.perf_counter() - began), live)
        seconds = time.perf_counter() - began
        print(f"\n{produced} tokens of {len(requests)} prompts in {steps} steps and {seconds:.2f} s: "
              f"{produced / seconds:.0f} tokens/s, {produced / steps:.1f} to a step, at most {most} pages")  # fmt: skip
        server.pool.free(server.common)
        assert pool.pages_in_use == 0
        same = sum(alone(model, r, options.quantize) == r.result for r in requests)
    print(f"{same} of {len(requests)} results are what generate() gives for the prompt alone")
    return requests


def alone(model: Any, request: Request, quantize: str | None) -> list[int]:
    """What the model says to a prompt by itself: with transformers' own cache, or a quantised one of its own."""
    cache = None
    if quantize is not None:  # rounds keys and values, so that another token may win: compare like with like
        pages = -(-(len(request.prompt) + request.wanted) // PAGE)
        cache = AuleCache(model.config, pages, page_size=PAGE, quantize=quantize)
    ids = torch.tensor([request.prompt], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.wanted, do_sample=False, past_key_values=cache
    )
    return out[0, len(request.prompt) :].tolist()  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
