"""Train a tiny character-level GPT twice, with PyTorch's attention and with aule's, and compare the loss curves.

    python examples/train_tiny_gpt.py [--steps 1000] [--plot train_tiny_gpt.svg]

Both runs start from the same seed and see the same batches, on the CPU; about a minute on two cores. Needs torch and
aule's extra ``cpu``. The text it learns is at the end of this file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import aule

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 3, 16


class Block(nn.Module):
    """Attention and a small network, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_network = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # aule's while it is installed
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.network(self.before_network(x))


class TinyGPT(nn.Module):
    """Characters in, scores of the next character out."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.read = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.read(self.blocks(self.token(ids) + self.place(places)))


def train(steps: int, seed: int = 0) -> list[float]:
    """Losses of a training run with whatever attention function is in place."""
    torch.manual_seed(seed)
    alphabet = sorted(set(TEXT))
    data = torch.tensor([alphabet.index(c) for c in TEXT])
    model = TinyGPT(len(alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - CONTEXT, (BATCH,))
        window = torch.stack([data[i : i + CONTEXT + 1] for i in starts.tolist()])
        scores = model(window[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plot(path: Path, curves: dict[str, list[float]]) -> None:
    """Write the curves as an SVG file; a later curve is dashed, so that one below it shows."""
    width, height, edge = 640, 400, 50
    steps = max(len(losses) for losses in curves.values())
    top = max(max(losses) for losses in curves.values())

    def at(step: float, loss: float) -> str:
        x = edge + (width - 2 * edge) * step / max(steps - 1, 1)
        return f"{x:.1f},{height - edge - (height - 2 * edge) * loss / top:.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<polyline points="{at(0, top)} {at(0, 0)} {at(steps - 1, 0)}" fill="none" stroke="black"/>',
        f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">step (0 to {steps - 1})</text>',
        f'<text x="{edge - 6}" y="{edge + 4}" text-anchor="end">{top:.1f}</text>',
        f'<text x="{edge - 6}" y="{height - edge + 4}" text-anchor="end">0</text>',
        f'<text x="{edge}" y="{edge - 14}">loss (nats per character)</text>',
    ]
    styles = ('stroke="#e08214" stroke-width="5"', 'stroke="#2d004b" stroke-width="1.5" stroke-dasharray="6 4"')
    for i, (name, losses) in enumerate(curves.items()):
        points = " ".join(at(step, loss) for step, loss in enumerate(losses))
        key = f"{width - 190},{edge + 20 * i} {width - 150},{edge + 20 * i}"
        lines.append(f'<polyline points="{points}" fill="none" {styles[i]}/>')
        lines.append(f'<polyline points="{key}" fill="none" {styles[i]}/>')
        lines.append(f'<text x="{width - 142}" y="{edge + 4 + 20 * i}">{name}</text>')
    path.write_text("\n".join([*lines, "</svg>", ""]), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Train twice, print and plot; give back both curves."""
    parser = argparse.ArgumentParser(description="Loss curves of a tiny GPT with PyTorch's attention and with aule's.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--plot", type=Path, default=Path("train_tiny_gpt.svg"))
    options = parser.parse_args(arguments)

    began = time.perf_counter()
    curves = {"PyTorch": train(options.steps)}
    between = time.perf_counter()
    aule.reset_dispatch_stats()
    with aule.installed():
        curves["aule"] = train(options.steps)
    done = time.perf_counter()
    stats = aule.dispatch_stats()

    print(f"{'step':>5} {'PyTorch':>9} {'aule':>9} {'difference':>11}")
    shown = [*range(0, options.steps, max(options.steps // 12, 1)), options.steps - 1]
    for step in dict.fromkeys(shown):
        theirs, ours = curves["PyTorch"][step], curves["aule"][step]
        print(f"{step:5} {theirs:9.4f} {ours:9.4f} {ours - theirs:+11.1e}")
    print(f"PyTorch {between - began:.1f} s, aule {done - between:.1f} s (with building its kernels the first time)")
    print(f"aule served {stats['served']} calls and passed on {stats['passed_on']}")
    plot(options.plot, curves)
    print(f"plot: {options.plot}")
    return curves


TEXT = """\
The lamp at the end of the pier was lit every evening by a woman named Ode. She had done it for so long that the boats
no longer looked for the light itself; they looked for her, a small dark shape against the last of the day, climbing
the nine iron steps with a can of oil in one hand and a rag in the other. When the shape was there, the harbour was
there. When the harbour was there, a person could sleep.

One winter the council sent a letter. The letter said that lamps could light themselves now. It said that a wire would
come along the pier and a clock would stand at the end of it, and that the clock would know the hour of every sunset
for the next hundred years. It thanked her for the oil. It thanked her for the steps. It did not say what she should do
with her evenings.

The men came with the wire in the spring. They were kind, and they were quick, and they asked her where the wind was
worst and where the stones were loose, and she told them, for she saw no sense in a bad lamp. They put up the clock.
They closed the little door. On the first evening the light came on by itself, clean and white and on the minute, and
everyone who stood on the shore clapped their hands, and Ode clapped too.

But out on the water the boats went past the harbour. They saw the light, and did not know it. They looked for the
shape on the steps and it was not there, and one after another they turned and stood out to sea again, and waited for
the morning with their engines low. On the shore they counted the boats that had not come, and counted them again.

Ode put on her coat. She took the can, which was empty, and the rag, which was clean, and she walked to the end of the
pier and climbed the nine iron steps. She stood there against the last of the day. She wiped the glass, though it did
not need it. And far out, small and low, one light turned, and then another, and then all of them, and they came in by
the one thing they knew.

After that she went every evening. The clock lit the lamp, and Ode lit the clock, as the children used to say. The
council never wrote again. The oil can stood by her door and rusted, and was painted, and rusted, and was painted red.
When people asked her what she did out there, with a lamp that lit itself, she said that a light tells you where the
harbour is, but somebody has to tell you that it is yours.

She grew old, and the steps grew steep. A girl from the boats began to walk behind her, first to carry the rag, then to
carry the can, then to carry the lantern for the way back. Nobody had asked the girl. Nobody asked her, later, why she
went alone. There was the shape on the steps, a small dark shape against the last of the day, with a can in one hand and
a rag in the other. When the shape was there, the harbour was there. When the harbour was there, a person could sleep.
"""

if __name__ == "__main__":
    main()
