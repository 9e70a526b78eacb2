"""The picture of ``aule bench --plot``: bars for each case, in groups, fit for a slide."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from aule.cli._figures import digits, speed

SUFFIXES = (".svg", ".png", ".pdf")
"""What a picture may be."""

_GROUPS = {"forward": "Attention", "backward": "Attention, gradients", "decode": "Decoding", "rows": "Row operations"}
_COLOURS = {"float32": "#8fb8d8", "bfloat16": "#1f5a8a", "float16": "#4b8f6b"}
_INK, _PALE = "#20262c", "#6b7680"
_BAR, _GAP, _HEADING = 0.38, 0.30, 1.0
"""Height of a bar, space between cases, and height of a group's heading, in rows of the picture."""
_STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _PALE,
    "xtick.color": _PALE,
    "svg.hashsalt": "aule",  # the same picture for the same results
}


@dataclass(frozen=True)
class _Bar:
    """A bar: where it is, its result, and the name of its case, which only the first bar of a case has."""

    y: float
    result: dict[str, Any]
    name: str = ""


def plot(document: dict[str, Any], path: str) -> None:
    """Draw the speed of each case relative to PyTorch's, or its rate if there is no peer."""
    import matplotlib

    matplotlib.use("Agg")
    with matplotlib.rc_context(_STYLE):
        _draw(document, path)


def _draw(document: dict[str, Any], path: str) -> None:
    from matplotlib import pyplot

    bars, headings, height = _layout(document["results"])
    compared = all(bar.result["ratio"] is not None for bar in bars)
    figure, axes = pyplot.subplots(figsize=(10, 1.9 + 0.42 * height))
    for bar in bars:
        left, width = (1.0, bar.result["ratio"] - 1.0) if compared else (0.0, bar.result["rate"])
        axes.barh(bar.y, width, _BAR, left, color=_COLOURS.get(bar.result["dtype"], "#888888"), zorder=2)
    # The limits come before the labels, which are placed in units of the axis.
    (_relative if compared else _absolute)(axes, bars)
    for bar in bars:
        ratio = bar.result["ratio"] if compared else None
        end = bar.result["rate"] if ratio is None else max(ratio, 1.0)
        label = _label(bar.result, compared)
        axes.annotate(label, (end, bar.y), (5, 0), textcoords="offset points", va="center", size=9)
    axes.set_ylim(height - 0.2, -0.6)
    names = [bar for bar in bars if bar.name]
    axes.set_yticks([bar.y + _offset(bars, bar.name, bar.y) for bar in names], [bar.name for bar in names])
    axes.tick_params(left=False, labelcolor=_INK)
    for y, text in headings:
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(text, (0, y), (-8, 0), **place, weight="bold", ha="right", va="center")
    axes.spines[["top", "right", "left"]].set_visible(False)
    _legend(pyplot, axes, bars)
    _titles(axes, document, compared)
    figure.savefig(path, dpi=160, bbox_inches="tight", metadata={"Date": None} if path.endswith(".svg") else None)
    pyplot.close(figure)


def _layout(results: list[dict[str, Any]]) -> tuple[list[_Bar], list[tuple[float, str]], float]:
    """Place the bars of a case together, below the heading of its group; return them, headings and the height."""
    bars: list[_Bar] = []
    headings: list[tuple[float, str]] = []
    y = 0.0
    for group in dict.fromkeys(result["group"] for result in results):
        headings.append((y, _GROUPS.get(group, group)))
        y += _HEADING * 0.75
        cases: dict[str, list[dict[str, Any]]] = {}
        for result in results:
            if result["group"] == group:
                cases.setdefault(result["name"], []).append(result)
        for name, members in cases.items():
            for i, result in enumerate(members):
                bars.append(_Bar(y, result, name if i == 0 else ""))
                y += _BAR
            y += _GAP
        y += _GAP
    return bars, headings, y


def _offset(bars: list[_Bar], name: str, y: float) -> float:
    """Half of the distance from the first bar of a case to its last."""
    start = next(i for i, bar in enumerate(bars) if bar.name == name and bar.y == y)
    end = start
    while end + 1 < len(bars) and not bars[end + 1].name:
        end += 1
    return (bars[end].y - y) / 2


def _relative(axes: Any, bars: list[_Bar]) -> None:
    """A logarithmic axis with PyTorch at 1: twice as fast and half as fast are equally far from it."""
    ratios = [bar.result["ratio"] for bar in bars]
    low = min(-1, math.floor(math.log2(min(ratios)) - 0.1))
    high = max(1, math.ceil(math.log2(max(ratios)) + 0.1))
    axes.set_xscale("log", base=2)
    axes.set_xlim(2.0**low, 2.0 ** (high + 0.14 * (high - low)))  # room for the last label
    ticks = range(low, high + 1)
    axes.set_xticks([2.0**n for n in ticks], [f"{2**n}x" if n >= 0 else f"1/{2**-n}" for n in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color="#e3e7ea", zorder=0)
    axes.axvline(1.0, color=_INK, linewidth=1.2, zorder=3)
    axes.set_xlabel("slower  ←  PyTorch = 1  →  faster", color=_PALE)


def _absolute(axes: Any, bars: list[_Bar]) -> None:
    axes.set_xlim(0, 1.2 * max(bar.result["rate"] for bar in bars))
    axes.grid(axis="x", color="#e3e7ea", zorder=0)
    axes.set_xlabel(bars[0].result["unit"], color=_PALE)


def _label(result: dict[str, Any], compared: bool) -> str:
    rate = speed(result["rate"], result["unit"])
    if not compared:
        return rate
    peer = "" if result["peer"] in ("", "PyTorch") else f" {result['peer']}"
    return f"{digits(result['ratio'])}x{peer}  ({rate})"


def _legend(pyplot: Any, axes: Any, bars: list[_Bar]) -> None:
    dtypes = list(dict.fromkeys(bar.result["dtype"] for bar in bars))
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=_COLOURS.get(dtype, "#888888")) for dtype in dtypes]
    axes.legend(handles, dtypes, loc="lower right", bbox_to_anchor=(1, 1.0), ncols=len(dtypes), frameon=False)


def _titles(axes: Any, document: dict[str, Any], compared: bool) -> None:
    beside = f" beside PyTorch {document['torch']}" if compared else ""
    axes.set_title(f"aule {document['aule']}{beside}", loc="left", size=15, weight="bold", pad=30)
    under = "speed relative to PyTorch's fastest kernel" if compared else "speed"
    axes.annotate(
        f"{document['name']}: {under}", (0, 1), (0, 10), "axes fraction", "offset points", size=11, color=_PALE
    )
    busy = ", while other programs kept the machine busy" if document.get("busy") else ""
    axes.annotate(
        f"aule bench, {document['date']}{busy}", (1, 0), (0, -40), "axes fraction", "offset points", ha="right", size=8,
        color=_PALE,
    )  # fmt: skip
