"""Train on a sequence that does not fit one process: rows are divided over several, attention goes round a ring.

    python examples/long_context_training.py [--ranks 4] [--rows 8192] [--steps 4] [--limit 8] [--balance zigzag]

Starts 2 to 8 gloo processes on this machine. Each may hold at most ``--limit`` MiB of keys, values, activations and
logits of one layer, as if that were the memory of a device: the program first shows that one process alone would need
more, then trains with every rank below the limit. The model is a GPT of two layers that predicts the next token of a
random sequence whose second half repeats the first, so attention looks back over all ranks. Needs torch and the CPU
engine (``pip install "aule-attention[cpu]"``).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import aule.distributed as distributed

WIDTH, HEADS, LAYERS, VOCABULARY = 64, 4, 2, 64


class Layer(nn.Module):
    """Attention by PyTorch's own function, which `context_parallel` takes over, and a small MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Every part but attention works on single rows, and so on shards, if it gets their positions."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(rows, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(tokens) + self.positions(positions)))


def sequence(rows: int) -> Tensor:
    """Random tokens whose first half is repeated in the second."""
    make = torch.Generator().manual_seed(0)
    half = torch.randint(VOCABULARY, (1, rows // 2), generator=make)
    return torch.cat([half, half], 1)


def needed(rows: int) -> int:
    """Bytes of float32 that a process with so many rows keeps for one layer: q, k, v, output, MLP, and logits."""
    return 4 * rows * (3 * WIDTH + 2 * WIDTH + 4 * WIDTH + VOCABULARY)


def check_memory(rows: int, limit: float) -> None:
    """Refuse more rows than the memory of one process allows."""
    if needed(rows) > limit * 2**20:
        raise MemoryError(f"{rows} rows need {needed(rows) / 2**20:.1f} MiB in one process; the limit is {limit} MiB")


def train(rank: int, store: str, args: argparse.Namespace, losses: Any) -> None:
    """One process of the group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, args.ranks), rank=rank, world_size=args.ranks)
    check_memory(args.rows // args.ranks, args.limit)
    torch.manual_seed(0)  # the same weights everywhere
    model = Model(args.rows)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    positions = distributed.shard_positions(args.rows, balance=args.balance)[None]
    whole = sequence(args.rows)
    tokens, targets = (distributed.shard(x, dim=1, balance=args.balance) for x in (whole, torch.roll(whole, -1, 1)))
    for step in range(args.steps):
        distributed.reset_counters()
        with distributed.context_parallel(balance=args.balance):
            logits = model(tokens, positions)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / args.rows
            optimizer.zero_grad()
            loss.backward()
        for weight in model.parameters():  # each rank has the gradients of its own rows
            dist.all_reduce(weight.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        work = distributed.counters()
        counts = torch.tensor([work.flops, work.bytes_sent], dtype=torch.float64)
        all_counts = [torch.empty_like(counts) for _ in range(args.ranks)]
        dist.all_gather(all_counts, counts)
        if rank == 0:
            losses.put(float(total))
            flops = [float(x[0]) for x in all_counts]
            even = max(flops) * args.ranks / sum(flops)
            sent = max(float(x[1]) for x in all_counts) / 2**20
            print(f"step {step}: loss {float(total):.4f}, busiest rank {even:.2f} of the mean, {sent:.1f} MiB sent")
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Run the example; returns the losses."""
    parser = argparse.ArgumentParser(description="Train on a sequence that is divided over processes.")
    parser.add_argument("--ranks", type=int, default=4, choices=range(2, 9))
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit", type=float, default=8.0, help="MiB for the rows of one process")
    parser.add_argument("--balance", default="zigzag", choices=("zigzag", "contiguous", "striped"))
    args = parser.parse_args(arguments)
    try:
        check_memory(args.rows, args.limit)
        print(f"one process: {args.rows} rows fit {args.limit} MiB; try more rows or a lower limit")
    except MemoryError as error:
        print(f"one process: {error}")
    here = needed(args.rows // args.ranks) / 2**20
    print(f"{args.ranks} processes: {args.rows // args.ranks} rows each, {here:.1f} MiB")
    context = torch.multiprocessing.get_context("spawn")
    losses = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        torch.multiprocessing.spawn(train, (store, args, losses), args.ranks)
    found = []
    while not losses.empty():
        found.append(losses.get())
    return found


if __name__ == "__main__":
    main()
