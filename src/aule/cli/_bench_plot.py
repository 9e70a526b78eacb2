"""The picture of ``aule bench --plot``: a bar for each case."""

from __future__ import annotations

from typing import Any

_COLOURS = {"forward": "#2f6f9f", "backward": "#3f8f6f", "decode": "#b07030", "rows": "#7f5f9f"}
SUFFIXES = (".svg", ".png", ".pdf")
"""What a picture may be."""


def plot(document: dict[str, Any], path: str) -> None:
    """Draw the speed of each case beside PyTorch's, or its rate where there is no peer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = document["results"]
    compared = all(r["ratio"] is not None for r in results)
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.3 * len(results)))
    values = [r["ratio"] if compared else r["rate"] for r in results]
    names = [f"{r['name']}, {r['dtype']}" for r in results]
    bars = axes.barh(range(len(results)), values, color=[_COLOURS[r["group"]] for r in results], height=0.7)
    labels = [f"{r['ratio']:.2f}x" if compared else f"{r['rate']:.3g} {r['unit']}" for r in results]
    axes.bar_label(bars, labels, padding=3)
    axes.set_yticks(range(len(results)), names, fontsize=8)
    axes.invert_yaxis()
    if compared:
        axes.axvline(1.0, color="black", linewidth=1)
        axes.set_xlabel(f"speed, PyTorch {document['torch']} = 1")
    else:
        axes.set_xlabel("speed")
    axes.set_xlim(0, 1.15 * max(values))
    axes.set_title(f"aule {document['aule']} on {document['name']}, {document['date']}", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    groups = list(dict.fromkeys(r["group"] for r in results))
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=_COLOURS[group]) for group in groups]
    axes.legend(handles, groups, loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=160)
    pyplot.close(figure)
