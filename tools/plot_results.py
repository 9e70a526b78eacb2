"""Draws the plots of docs/images and writes the table of docs/performance.md, from the CSV files of benchmarks/results.

    python tools/plot_results.py           # both; needs matplotlib (extra docs)
    python tools/plot_results.py --check   # is the table what the files give? needs nothing

Of each kind of result the newest file counts. The SVG files have no time stamp: the same results give the same file.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
IMAGES = ROOT / "docs" / "images"
BEGIN, END = "<!-- results -->\n", "<!-- /results -->"
Rows = list[dict[str, str]]


def newest(name: str) -> Rows:
    """Rows of the newest file ``<date>-<name>.csv``."""
    path = sorted(RESULTS.glob(f"????-??-??-{name}.csv"))[-1]
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line of the table: how many times as fast as the peer, over several cases."""

    what: str
    by: str
    peer: str
    file: str
    ratio: Callable[[dict[str, str]], float]
    where: Callable[[dict[str, str]], bool] = lambda row: True


def quotient(ours: str, peers: str) -> Callable[[dict[str, str]], float]:
    return lambda row: float(row[ours]) / float(row[peers])


def number(column: str) -> Callable[[dict[str, str]], float]:
    return lambda row: float(row[column])


def of_pass(name: str, *, decode: bool = False) -> Callable[[dict[str, str]], bool]:
    """Rows of benchmarks/cpu.py: float32 cases of a pass, with decoding apart."""
    half = ("bf16", "fp16")
    return lambda row: (
        row["pass"] == name and not row["case"].startswith(half) and row["case"].startswith("decode") == decode
    )


def bf16(name: str) -> Callable[[dict[str, str]], bool]:
    return lambda row: row["pass"] == name and row["case"].startswith("bf16")


def quantised(row: dict[str, str]) -> bool:
    return row["case"].endswith(("-int8", "-fp8"))


def large(row: dict[str, str]) -> bool:
    """1 GiB, so that no cache of the GPU holds it."""
    return row["mib"] == "1024"


def op(name: str) -> Callable[[dict[str, str]], bool]:
    return lambda row: row["op"] == name


def timeable(name: str) -> Callable[[dict[str, str]], bool]:
    """Problems of benchmarks/sweep.py for which a peer takes long enough to be more than a launch."""
    return lambda row: bool(row[f"{name}_ratio"]) and float(row[f"{name}_peer_us"]) >= 15


def case(*words: str, without: str = "") -> Callable[[dict[str, str]], bool]:
    """Cases whose names hold all words and not another."""
    return lambda row: all(word in row["case"] for word in words) and not (without and without in row["case"])


FORWARD, BACKWARD, DECODE = "h200-forward-bf16", "h200-backward-bf16", "h200-decode-bf16"
QUICK = "h200-bench-quick"
FUSED, LINEAR = "h200-fused-bf16", "h200-linear-bf16"
CPU, CPU_ROWS = "zen4-2core-cpu", "zen4-2core-fused-cpu"
SWEEP, FLEX, WIDE, PAGED = "h200-sweep", "h200-flex-functions-bf16", "h200-wide-bf16", "h200-paged-fa3-bf16"
EFFICIENT = "PyTorch (memory-efficient)"
LINES = (
    Line("forward, bfloat16", "CUDA", "cuDNN", FORWARD, quotient("cuda_tflops", "cudnn_tflops")),
    Line("forward, bfloat16", "CUDA", "FlashAttention-2", FORWARD, number("cuda_ratio")),
    Line("forward, bfloat16", "Vulkan", "FlashAttention-2", FORWARD, number("vulkan_ratio")),
    Line("backward, bfloat16", "CUDA", "cuDNN", QUICK, number("ratio"), lambda row: row["group"] == "backward"),
    Line("backward, bfloat16", "CUDA", "FlashAttention-2", BACKWARD, number("cuda_ratio")),
    Line("backward, bfloat16", "Vulkan", "FlashAttention-2", BACKWARD, number("vulkan_ratio")),
    Line("random shapes, forward", "CUDA", "PyTorch's fastest kernel", SWEEP, number("forward_ratio"),
         timeable("forward")),
    Line("random shapes, backward", "CUDA", "PyTorch's fastest kernel", SWEEP, number("backward_ratio"),
         timeable("backward")),
    Line("512 columns, forward", "CUDA", EFFICIENT, WIDE, number("ratio"), case("d512", "forward", without="vulkan")),
    Line("512 columns, forward", "Vulkan", EFFICIENT, WIDE, number("ratio"), case("d512", "forward", "vulkan")),
    Line("512 columns, backward", "CUDA", EFFICIENT, WIDE, number("ratio"), case("d512", "backward", without="vulkan")),
    Line("512 columns, backward", "Vulkan", EFFICIENT, WIDE, number("ratio"), case("d512", "backward", "vulkan")),
    Line("192 columns, values of 128", "CUDA", "cuDNN", WIDE, number("ratio"), case("prefill")),
    Line("latent attention, decoding", "CUDA", "FlashMLA", WIDE, number("ratio"), case("mla", without="kernel")),
    Line("vLLM's pages, decoding", "CUDA", "FlashAttention-3", PAGED, number("ratio"), lambda r: int(r["new"]) <= 4),
    Line("vLLM's pages, prefill", "CUDA", "FlashAttention-3", PAGED, number("ratio"), lambda r: int(r["new"]) > 4),
    Line("forward, float32", "CUDA", EFFICIENT, "h200-forward-fp32", number("cuda_ratio")),
    Line("forward, float32", "Vulkan", EFFICIENT, "h200-forward-fp32", number("vulkan_ratio")),
    Line("backward, float32", "CUDA", EFFICIENT, "h200-backward-fp32", number("cuda_ratio")),
    Line("backward, float32", "Vulkan", EFFICIENT, "h200-backward-fp32", number("vulkan_ratio")),
    Line("masks, bfloat16, forward", "CUDA", "FlexAttention, compiled", "h200-flex-bf16", number("ratio")),
    Line("your own functions, forward", "CUDA", "FlexAttention, compiled", FLEX, number("ratio"),
         lambda r: bool(r["ratio"])),
    Line("your own functions, backward", "CUDA", "FlexAttention, compiled", FLEX, number("backward_ratio"),
         lambda r: bool(r["backward_ratio"])),
    Line("decoding, bfloat16", "CUDA", "cuDNN", DECODE, number("sdpa_over_aule"), lambda r: not quantised(r)),
    Line("decoding, int8 and fp8 caches", "CUDA", "cuDNN in bfloat16", DECODE, number("sdpa_over_aule"), quantised),
    Line("row operations, forward", "CUDA", "torch.compile", FUSED, quotient("aule_forward", "compile_forward"), large),
    Line("row operations, backward", "CUDA", "torch.compile", FUSED, quotient("aule_backward", "compile_backward"),
         large),
    Line("cross entropy, forward", "CUDA", "torch.compile", LINEAR, number("ratio_forward"), op("cross_entropy")),
    Line("cross entropy, backward", "CUDA", "torch.compile", LINEAR, number("ratio_backward"), op("cross_entropy")),
    Line("LayerNorm + Linear, forward", "CUDA", "torch.compile", LINEAR, number("ratio_forward"),
         op("layer_norm_linear")),
    Line("LayerNorm + Linear, backward", "CUDA", "torch.compile", LINEAR, number("ratio_backward"),
         op("layer_norm_linear")),
    Line("forward, float32", "CPU", "PyTorch", CPU, number("ratio"), of_pass("forward")),
    Line("backward, float32", "CPU", "PyTorch", CPU, number("ratio"), of_pass("backward")),
    Line("forward, bfloat16", "CPU", "PyTorch", CPU, number("ratio"), bf16("forward")),
    Line("backward, bfloat16", "CPU", "PyTorch", CPU, number("ratio"), bf16("backward")),
    Line("decoding, float32", "CPU", "PyTorch", CPU, number("ratio"), of_pass("forward", decode=True)),
    Line("row operations, forward", "CPU", "PyTorch", CPU_ROWS, number("forward_ratio")),
    Line("row operations, backward", "CPU", "PyTorch", CPU_ROWS, number("backward_ratio")),
)  # fmt: skip


def table() -> str:
    text = "| what | by | beside | slowest | median | fastest | slower cases | measured |\n"
    text += "|---|---|---|---|---|---|---|---|\n"
    for line in LINES:
        rows = [row for row in newest(line.file) if line.where(row)]
        found = sorted(line.ratio(row) for row in rows)
        shown = " | ".join(f"{x:.2f}" for x in (found[0], statistics.median(found), found[-1]))
        slower = sum(round(x, 2) < 1 for x in found)
        text += f"| {line.what} | {line.by} | {line.peer} | {shown} | {slower} of {len(found)} | {rows[0]['date']} |\n"
    return text


def page_with(table: str) -> str:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


# -- the plots ---------------------------------------------------------------------------------------------------------

AULE, VULKAN, CUDNN, FLASH, TORCH = "#1f6feb", "#8ab8ff", "#424a53", "#8c959f", "#c0c6cc"
STYLE = {
    "svg.hashsalt": "aule", "font.family": "DejaVu Sans", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": "#8c959f", "axes.titlesize": 10, "axes.titleweight": "bold",
    "text.color": "#1f2328", "axes.labelcolor": "#1f2328", "xtick.color": "#1f2328", "ytick.color": "#57606a",
    "axes.axisbelow": True, "axes.grid": True, "axes.grid.axis": "y", "grid.color": "#e4e8ec", "legend.frameon": False,
    "xtick.bottom": False, "ytick.left": False, "figure.facecolor": "white",
}  # fmt: skip
Series = Sequence[tuple[str, str, Sequence[float]]]
"""Name, colour, values."""


def bars(axes: Any, labels: Sequence[str], series: Series, unit: str, title: str) -> None:
    """Groups of bars; those of aule say their value."""
    width = 0.8 / len(series)
    for i, (name, colour, values) in enumerate(series):
        places = [x + (i - (len(series) - 1) / 2) * width for x in range(len(labels))]
        drawn = axes.bar(places, values, width * 0.92, color=colour, label=name)
        if colour == AULE:
            texts = [f"{value:.0f}" if value >= 20 else f"{value:.2f}" for value in values]
            axes.bar_label(drawn, texts, fontsize=7.5, padding=1.5, color=AULE, fontweight="bold")
    axes.set_xticks(range(len(labels)), labels)
    axes.margins(y=0.1)
    axes.set_title(title, loc="left")
    axes.set_ylabel(unit)


def figure(plt: Any, panels: int, size: tuple[float, float], about: str, **options: Any) -> tuple[Any, Any]:
    fig, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False, **options)
    fig.supxlabel(about, fontsize=8, color="#57606a")
    return fig, axes[0]


def legend(fig: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=9)


def save(plt: Any, fig: Any, name: str) -> None:
    fig.savefig(IMAGES / f"{name}.svg", metadata={"Date": None, "Creator": "tools/plot_results.py"})
    plt.close(fig)


def of(rows: Rows, column: str) -> list[float]:
    return [float(row[column]) for row in rows]


def shape(row: dict[str, str]) -> str:
    return f"d{row['head_dim']}\n{int(row['seq']) // 1024}k"


def attention(plt: Any, file: str, name: str, others: Callable[[Rows], Series], peers: str) -> None:
    rows = newest(file)
    about = f"NVIDIA H200, {rows[0]['date']}, bfloat16, 16384 tokens, 2048 features; beside {peers}"
    fig, axes = figure(plt, 2, (8, 3.5), about, sharey=True)
    for side, causal in zip(axes, ("False", "True"), strict=True):
        some = [row for row in rows if row["causal"] == causal]
        series = [("aule, CUDA", AULE, of(some, "cuda_tflops")), *others(some)]
        title = f"{name}, {'causal' if causal == 'True' else 'not causal'}"
        bars(side, [shape(row) for row in some], series, "TFLOPS" if side is axes[0] else "", title)
    legend(fig, axes[0])
    save(plt, fig, name)


def forward(plt: Any) -> None:
    def others(rows: Rows) -> Series:
        flash = ("FlashAttention-2", FLASH, of(rows, "peer_tflops"))
        vulkan = ("aule, Vulkan", VULKAN, of(rows, "vulkan_tflops"))
        return [vulkan, ("cuDNN", CUDNN, of(rows, "cudnn_tflops")), flash]

    attention(plt, FORWARD, "forward", others, "cuDNN and FlashAttention-2 of PyTorch 2.11")


def backward(plt: Any) -> None:
    def others(rows: Rows) -> Series:
        flash = ("FlashAttention-2", FLASH, of(rows, "peer_tflops"))
        return [("aule, Vulkan", VULKAN, of(rows, "vulkan_tflops")), flash]

    attention(plt, BACKWARD, "backward", others, "FlashAttention-2 of PyTorch 2.11; cuDNN is in the table below")


CASES = {
    "short": "512", "1k": "1k", "4k": "4k", "32k-1": "32k\npaged", "32k-1-int8": "32k\nint8", "32k-1-fp8": "32k\nfp8",
    "long": "64k", "long-paged": "64k\npaged", "batch32": "32 x 4k", "batch32-paged": "32 x 4k\npaged",
    "32k": "4 x 32k\npaged",
}  # fmt: skip
"""Of benchmarks/decode.py: sequences, keys of each."""


def decode(plt: Any) -> None:
    rows = {row["case"]: row for row in newest(DECODE)}
    some = [rows[case] for case in CASES]
    about = (
        f"NVIDIA H200, {some[0]['date']}, bfloat16, 32 query and 8 key heads of 128; beside cuDNN of PyTorch 2.11, "
        "always contiguous"
    )
    fig, (axes,) = figure(plt, 1, (8, 3.3), about)
    series = [
        ("aule, CUDA", AULE, of(some, "sdpa_over_aule")),
        ("aule, Vulkan", VULKAN, [float(row["sdpa_us"]) / float(row["vulkan_us"]) for row in some]),
    ]
    bars(axes, list(CASES.values()), series, "times cuDNN's speed", "decoding one token per sequence, by keys")
    axes.axhline(1, color=CUDNN, linewidth=1.2, label="cuDNN")
    legend(fig, axes)
    save(plt, fig, "decode")


def row_operations(plt: Any) -> None:
    rows = [row for row in newest(FUSED) if row["mib"] == "1024" and row["length"] == "4096"]
    about = f"NVIDIA H200, {rows[0]['date']}, bfloat16, rows of 4096, 1 GiB; beside PyTorch 2.11, compiled and eager"
    fig, axes = figure(plt, 2, (8, 3.8), about, sharey=True)
    for side, direction in zip(axes, ("forward", "backward"), strict=True):
        series = [
            ("aule, CUDA", AULE, of(rows, f"aule_{direction}")),
            ("aule, Vulkan", VULKAN, of(rows, f"vulkan_{direction}")),
            ("torch.compile", FLASH, of(rows, f"compile_{direction}")),
            ("PyTorch, eager", TORCH, of(rows, f"eager_{direction}")),
        ]
        names = [row["op"] for row in rows]
        bars(side, names, series, "TB/s" if side is axes[0] else "", f"row operations, {direction}")
        side.set_xticklabels(names, rotation=30, ha="right", fontsize=7.5)
        for text in side.texts:
            text.set_visible(False)  # of so many bars that their numbers would overlap
        copy = statistics.median(of(rows, "copy"))
        side.axhline(copy, color=CUDNN, linewidth=1, linestyle=":", label="a plain copy")
    legend(fig, axes[0])
    save(plt, fig, "row-operations")


def cpu_rows(wanted: Sequence[tuple[str, str]]) -> Rows:
    rows = {(row["case"], row["pass"]): row for row in newest(CPU)}
    return [rows[key] for key in wanted]


def cpu_bars(axes: Any, wanted: Sequence[tuple[str, str]], labels: Sequence[str], title: str) -> Rows:
    rows = cpu_rows(wanted)
    ours = of(rows, "gflops")
    peer = [float(r["gflops"]) / float(r["ratio"]) for r in rows]
    bars(axes, labels, [("aule, CPU", AULE, ours), ("PyTorch, CPU", TORCH, peer)], "GFLOPS", title)
    return rows


def cpu(plt: Any) -> None:
    about = (
        "AMD EPYC (Zen 4), two cores with AVX-512, {date}; float32 and head dimension 64 unless said otherwise; beside "
        "PyTorch 2.13"
    )
    fig, axes = figure(plt, 2, (8, 3.5), "", gridspec_kw={"width_ratios": [1.5, 1]})
    cases = ("d64 S512 causal", "d64 S2048 full", "d64 S2048 causal", "d128 S2048 full", "bf16 d64 S2048 full")
    labels = ["512\ncausal", "2k", "2k\ncausal", "2k\nd128", "2k\nbfloat16"]
    wanted = [(case, direction) for case in cases for direction in ("forward", "backward")]
    rows = cpu_bars(axes[0], wanted[::2], labels, "attention, forward")
    cpu_bars(axes[1], wanted[1::2], labels, "attention, backward")
    fig.supxlabel(about.format(date=rows[0]["date"]), fontsize=8, color="#57606a")
    legend(fig, axes[0])
    save(plt, fig, "cpu")


def speed(plt: Any) -> None:
    """The picture of the README, 900 x 360."""
    fast = [row for row in newest(FORWARD) if (row["causal"], row["seq"]) == ("True", "8192")]
    back = [row for row in newest(QUICK) if row["group"] == "backward" and row["name"].endswith("causal")]
    fig, axes = figure(plt, 3, (9.375, 3.75), "", gridspec_kw={"width_ratios": [3, 2, 3.2]})
    labels = [f"d{row['head_dim']}" for row in fast]
    series = [
        ("aule", AULE, of(fast, "cuda_tflops")),
        ("cuDNN", CUDNN, of(fast, "cudnn_tflops")),
        ("FlashAttention-2", FLASH, of(fast, "peer_tflops")),
    ]
    bars(axes[0], labels, series, "TFLOPS", "H200, forward")
    ours = [rate / 1e3 for rate in of(back, "rate")]
    cudnn = [rate / ratio for rate, ratio in zip(ours, of(back, "ratio"), strict=True)]
    labels = ["{2}\n{3}".format(*row["name"].split(", ")) for row in back]
    bars(axes[1], labels, [("aule", AULE, ours), ("cuDNN", CUDNN, cudnn)], "", "H200, backward")
    for side in axes[:2]:
        side.set_ylim(0, 1.1 * max(of(fast, "cuda_tflops") + of(fast, "cudnn_tflops")))
    wanted = [
        ("d64 S2048 causal", "forward"), ("d64 S2048 causal", "backward"), ("bf16 d64 S2048 full", "forward"),
        ("bf16 d64 S2048 full", "backward"),
    ]  # fmt: skip
    names = ["float32\nforward", "float32\nbackward", "bfloat16\nforward", "bfloat16\nbackward"]
    rows = cpu_bars(axes[2], wanted, names, "CPU, two cores")
    axes[2].set_xticklabels(names, fontsize=7.5)
    handles, texts = axes[0].get_legend_handles_labels()
    fig.legend([*handles, axes[2].containers[1]], [*texts, "PyTorch"], loc="outside upper center", ncols=4, fontsize=9)
    about = (
        f"Higher is better. GPU: bfloat16, causal, peers of PyTorch 2.11; forward 8192 tokens, {fast[0]['date']}, "
        f"backward {back[0]['date']}. CPU: Zen 4, 2048 tokens, {rows[0]['date']}, PyTorch 2.13."
    )
    fig.supxlabel(about, fontsize=7.5, color="#57606a")
    save(plt, fig, "speed")


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    IMAGES.mkdir(exist_ok=True)
    with plt.rc_context(STYLE):
        for plot in (forward, backward, decode, row_operations, cpu, speed):
            plot(plt)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the plots and write the table of docs/performance.md.")
    parser.add_argument("--check", action="store_true", help="only say whether the table is what the files give")
    args = parser.parse_args(argv)
    wanted = page_with(table())
    if args.check:
        same = PAGE.read_text(encoding="utf-8") == wanted
        print(f"{PAGE.name}: {'up to date' if same else 'differs; run python tools/plot_results.py'}")
        return 0 if same else 1
    PAGE.write_text(wanted, encoding="utf-8")
    draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
