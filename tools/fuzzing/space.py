"""The space of cases of `fuzz.py`: one definition, drawn by `random.Random` or by hypothesis.

A case is a dict of JSON values. It is drawn in two parts: a family, what a kernel is compiled for (types, dimensions,
which options are present), and a member, everything else (lengths, layouts, values). Neighbouring cases share a family,
so that kernels are compiled for a dozen cases and not for each. Plain values come first in every choice: hypothesis
shrinks towards them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Case = dict[str, Any]


class Draw(Protocol):
    """Where choices come from."""

    def choice(self, values: Sequence[T]) -> T: ...
    def integer(self, low: int, high: int) -> int: ...


class RandomDraw:
    """Choices of a `random.Random`."""

    def __init__(self, *seed: object) -> None:
        self.random = random.Random("/".join(map(str, seed)))

    def choice(self, values: Sequence[T]) -> T:
        return self.random.choice(values)

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)


class HypothesisDraw:
    """Choices of hypothesis; ``draw`` is that of ``st.data()``."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        from hypothesis import strategies

        self._draw, self._strategies = draw, strategies

    def choice(self, values: Sequence[T]) -> T:
        found: T = self._draw(self._strategies.sampled_from(values))
        return found

    def integer(self, low: int, high: int) -> int:
        found: int = self._draw(self._strategies.integers(low, high))
        return found


def one_in(draw: Draw, n: int) -> bool:
    """True once in ``n`` times."""
    return draw.integer(0, n - 1) == n - 1


def length(draw: Draw, most: int = 600) -> int:
    """A number of rows or keys: mostly below 100, often beside a power of two, rarely 0, sometimes up to ``most``."""
    kind = draw.integer(0, 19)
    if kind < 10:
        found = draw.integer(1, 40)
    elif kind < 15:
        found = draw.choice((1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129))
    elif kind < 18:
        found = draw.integer(40, 130)
    elif kind < 19:
        found = draw.integer(130, 600)
    else:
        found = draw.choice((1, 0))
    return min(found, most)


GPU_FLOATS = ("f32", "f16", "bf16")
HOST_BACKENDS = ("cpu", "numpy")
DIMS = (16, 64, 32, 8, 40, 128, 1, 24, 33, 80, 96, 256)
VALUES = ("normal", "normal", "normal", "large", "huge", "offset", "tiny", "constant", "zero", "nonfinite")
LAYOUTS = ("contiguous", "swapped", "gap", "step", "backward", "expanded")


def floats(draw: Draw, backend: str) -> str:
    """A dtype; float64 rarely, and still more rarely where it must be refused."""
    if one_in(draw, 8 if backend in HOST_BACKENDS else 60):
        return "f64"
    return draw.choice(GPU_FLOATS)


def front_end(draw: Draw, backend: str) -> str:
    """The kind of arrays."""
    return "torch" if backend == "cuda" or draw.integer(0, 1) else "numpy"


def common(draw: Draw, case: Case) -> Case:
    """What every case has."""
    return case | {"seed": draw.integer(0, 2**31), "twice": one_in(draw, 4)}


# -- attention ---------------------------------------------------------------------------------------------------------


def score_options(draw: Draw) -> Case:
    """Options of attention and of decoding that kernels are compiled for."""
    return {
        "causal": bool(draw.integer(0, 1)),
        "windowed": one_in(draw, 3),
        "softcap": draw.choice((None, None, None, 20.0, 5.0)),
        "alibi": draw.choice((None, None, None, "heads", "batch")),
        "sinks": one_in(draw, 4),
        "return_lse": bool(draw.integer(0, 1)),
    }


def additive(draw: Draw, name: str) -> Case | None:
    """A mask or a bias: its type, and the axes along which it is given in full."""
    if not one_in(draw, 3):
        return None
    dtype = draw.choice(("bool", "f32", "q")) if name == "mask" else draw.choice(("f32", "q"))
    axes = draw.choice(((1, 1, 1, 1), (0, 0, 1, 1), (1, 0, 0, 1), (0, 1, 1, 1), (1, 0, 1, 0), (0, 0, 0, 1)))
    return {"dtype": dtype, "axes": list(axes)}


def attention_family(draw: Draw, backend: str) -> Case:
    op = draw.choice(("flash_attention",) * 6 + ("varlen",) * 2 + ("sdpa",) * 2)
    dtype = floats(draw, backend)
    head_dim = draw.choice(DIMS)
    front = "torch" if op == "sdpa" else front_end(draw, backend)
    group = draw.choice((1, 2, 3, 6))
    family = {
        "op": op, "backend": backend, "front": front, "dtype": dtype,
        "dims": [head_dim, draw.choice((head_dim, head_dim, draw.choice((16, 24, 64)))) ],
        "group": group, **score_options(draw),
        "align": draw.choice(("bottom-right", "bottom-right", "top-left")),
        "mask": additive(draw, "mask"), "bias": additive(draw, "bias"),
        "dropout": draw.choice((0.0, 0.0, 0.0, 0.0, 0.25, 0.9)),
        "rope": None, "layout": draw.choice(LAYOUTS),
        "grad": front == "torch" and backend != "numpy" and bool(draw.integer(0, 1)),
        "deterministic": one_in(draw, 3),
        "precision": None,
    }  # fmt: skip
    if head_dim >= 8 and one_in(draw, 5):
        rotary = draw.choice((head_dim // 4 * 2, head_dim // 2 * 2, 2))
        tables = draw.choice(("half", "full", "batch"))
        if 2 * rotary <= head_dim:  # a wide table would be taken for one of more pairs
            tables = "batch" if tables == "full" else tables
        family["rope"] = {
            "rotary": rotary, "interleaved": tables != "full" and bool(draw.integer(0, 1)), "tables": tables,
            "dtype": draw.choice(("f32", "q")),
        }  # fmt: skip
    if dtype == "f32" and one_in(draw, 25):
        family["precision"] = draw.choice(("fp16", "bf16", "tf32"))
    if op == "varlen":
        family |= {"mask": None, "bias": None, "precision": None}
    elif op == "sdpa":
        family |= {
            "windowed": False, "softcap": None, "alibi": None, "sinks": False, "bias": None, "return_lse": False,
            "align": "top-left", "dropout": 0.0, "rope": None, "precision": None, "deterministic": False,
        }  # fmt: skip
        if family["mask"] is not None:
            family["causal"] = False
    return family


def window(draw: Draw) -> list[int | None] | int:
    kind = draw.integer(0, 3)
    if kind == 0:
        return draw.integer(1, 70)
    left, right = (draw.choice((None, -1, 0, draw.integer(1, 50))) for _ in range(2))
    return [left, right]


def attention_member(draw: Draw, family: Case) -> Case:
    case = dict(family)
    heads_kv = draw.choice((1, 1, 2, 3))
    case["heads"] = [heads_kv * case.pop("group"), heads_kv]
    case["window"] = window(draw) if case.pop("windowed") else None
    case["values"] = draw.choice(VALUES)
    case["scale"] = draw.choice((None, None, None, 0.3, 1.0, -0.2, 0.0))
    case["out"] = None
    if case["op"] == "varlen":
        count = draw.integer(1, 5) if not one_in(draw, 20) else 0
        case["lengths"] = [[length(draw, 150) for _ in range(count)] for _ in range(2)]
    else:
        case["seqs"] = [length(draw), length(draw)]
        case["batch"] = draw.choice((1, 1, 2, 3)) if not one_in(draw, 40) else 0
        case["rank"] = draw.choice((4, 4, 4, 3, 2))
        shrink_problem(case)
    if case["op"] != "sdpa" and not case["grad"]:
        case["out"] = draw.choice((None, None, None, "fresh", "gap", "q"))
    for name in ("mask", "bias"):
        if case[name] is not None:
            case[name] = case[name] | {"fill": draw.choice(FILLS[case[name]["dtype"] == "bool"])}
    if case["op"] == "flash_attention" and one_in(draw, 25):
        case["broken"] = draw.choice(BROKEN)
    return common(draw, case)


FILLS = {True: ("random", "padding", "empty rows"), False: ("normal", "inf", "lowest")}
"""Contents of boolean and of additive masks."""
BROKEN = ("k dim", "v length", "heads", "scale", "window", "dropout", "mask shape", "dtype", "sinks", "backend", "out")
"""Mistakes, each of which a call must refuse."""


def shrink_problem(case: Case) -> None:
    """Make a case with many scores smaller, since its oracle is slow."""
    batch, heads, group = case["batch"], case["heads"], case["heads"][0] // case["heads"][1]
    if case["rank"] < 4:
        case["batch"] = min(batch, 1)
    if case["rank"] == 2:
        case["heads"] = [1, 1]
    scores = case["batch"] * heads[0] * case["seqs"][0] * case["seqs"][1]
    if scores > 150_000:
        case["batch"], case["heads"] = min(batch, 1), case["heads"] if case["rank"] == 2 else [group, 1]
    if scores > 1_000_000:
        case["seqs"] = [min(n, 300) for n in case["seqs"]]


# -- decoding ----------------------------------------------------------------------------------------------------------


def decode_family(draw: Draw, backend: str) -> Case:
    dtype = draw.choice(GPU_FLOATS)
    head_dim = draw.choice(DIMS)
    paged = draw.choice((False, True, True))
    return {
        "op": "paged" if paged else "decode", "backend": backend, "front": front_end(draw, backend), "dtype": dtype,
        "dims": [head_dim, draw.choice((head_dim, head_dim, head_dim, 24))], "group": draw.choice((1, 2, 4, 7)),
        **score_options(draw),
        "cache": draw.choice(("", "", "", "i8", "e4m3")) if paged else "",
        "page": draw.choice((16, 1, 3, 32, 64, 256)) if paged else 0,
        "layout": draw.choice(("NHD", "HND")),
        "rows": draw.choice(("one", "one", "some", "packed")) if paged else draw.choice(("one", "some", "axis")),
    }  # fmt: skip


def decode_member(draw: Draw, family: Case) -> Case:
    case = dict(family)
    heads_kv = draw.choice((1, 2, 3))
    case["heads"] = [heads_kv * case.pop("group"), heads_kv]
    case["window"] = window(draw) if case.pop("windowed") else None
    case["values"] = draw.choice(VALUES[:-1])
    case["scale"] = draw.choice((None, None, 0.3, -0.2))
    count = draw.integer(1, 5)
    case["lens"] = [length(draw, 600) for _ in range(count)]
    rows = case["rows"]
    if rows == "packed":
        case["rows"] = [draw.choice((1, 1, 0, draw.integer(1, 40))) for _ in range(count)]
    else:
        case["rows"] = {"one": 0, "axis": 1, "some": draw.integer(2, 9)}[rows]
    case["out"] = draw.choice((None, None, "fresh", "gap"))
    return common(draw, case)


# -- caches ------------------------------------------------------------------------------------------------------------


def cache_family(draw: Draw, backend: str) -> Case:
    head_dim = draw.choice((16, 64, 32, 8, 40))
    quantize = draw.choice((None, None, "int8", "fp8"))
    return {
        "op": "cache", "backend": backend, "front": front_end(draw, backend), "dtype": draw.choice(GPU_FLOATS),
        "dims": [head_dim, draw.choice((head_dim, head_dim, 24))], "group": draw.choice((1, 2, 4)),
        "heads_kv": draw.choice((1, 2)), "page": draw.choice((4, 16, 1, 3)), "layout": draw.choice(("NHD", "HND")),
        "layers": draw.choice((1, 1, 2)), "quantize": quantize,
        "rope": quantize is None and one_in(draw, 3), "interleaved": bool(draw.integer(0, 1)),
        "softcap": draw.choice((None, None, 20.0)), "causal": not one_in(draw, 4),
    }  # fmt: skip


def cache_member(draw: Draw, family: Case) -> Case:
    """Calls on a cache. Sequences are numbered in the order in which they are made."""
    case = dict(family)
    case["heads"] = [case["heads_kv"] * case.pop("group"), case.pop("heads_kv")]
    lengths: list[int | None] = []
    calls: list[Any] = []
    for _ in range(draw.integer(2, 14)):
        living = [i for i, n in enumerate(lengths) if n is not None]
        kind = draw.choice(("append", "append", "append", "attend", "attend", "fork", "truncate", "allocate", "free"))
        if kind == "allocate" or not living:
            calls.append(["allocate"])
            lengths.append(0)
            continue
        at = draw.choice(living)
        if kind == "append":
            chosen = sorted({at, draw.choice(living)})
            counts = [draw.choice((1, 1, draw.integer(0, 20))) for _ in chosen]
            calls.append(["append", chosen, counts, draw.choice(("packed", "padded"))])
            for i, n in zip(chosen, counts, strict=True):
                lengths[i] = (lengths[i] or 0) + n
        elif kind == "attend":
            chosen = sorted({at, draw.choice(living)})
            rows = draw.choice((1, 1, draw.integer(1, 5)))
            calls.append(["attend", chosen, rows, one_in(draw, 3)])
        elif kind == "fork":
            calls.append(["fork", at])
            lengths.append(lengths[at])
        elif kind == "truncate":
            shorter = draw.integer(0, lengths[at] or 0)
            calls.append(["truncate", at, shorter])
            lengths[at] = shorter
        else:
            calls.append(["free", at])
            lengths[at] = None
    living = [i for i, n in enumerate(lengths) if n is not None]
    if living:
        if one_in(draw, 6):
            calls.append(["overfill", living[-1]])
        calls.append(["attend", living, 1, False])
    return common(draw, case | {"calls": calls})


# -- row operations ----------------------------------------------------------------------------------------------------

ROW_OPS = (
    "rms_norm", "layer_norm", "residual_rms_norm", "residual_layer_norm", "swiglu", "geglu", "rope", "rms_norm_rope",
    "softmax_dropout", "cross_entropy", "layer_norm_linear",
)  # fmt: skip
ROW_VALUES = ("normal", "normal", "normal", "large", "offset", "tiny", "constant", "zero", "nonfinite")


def rows_family(draw: Draw, backend: str) -> Case:
    op = draw.choice(ROW_OPS)
    columns = draw.choice((64, 1, 7, 33, 100, 128, 257, 1000, draw.integer(2, 600), draw.choice((4096, 5001))))
    front = front_end(draw, backend)
    family = {
        "op": op, "backend": backend, "front": front, "dtype": floats(draw, backend), "columns": columns,
        "layout": draw.choice(LAYOUTS), "without": [], "grad": front == "torch" and bool(draw.integer(0, 2)),
        "vector": draw.choice(("x", "x", "f32")), "options": {},
    }  # fmt: skip
    if op in ("swiglu", "geglu") and one_in(draw, 3):
        family["without"], family["columns"] = ["up"], 2 * columns
    optional = {"rms_norm": ("weight",), "residual_rms_norm": ("weight",), "rms_norm_rope": ("weight",)}
    optional |= dict.fromkeys(("layer_norm", "residual_layer_norm"), ("weight", "bias"))
    optional["layer_norm_linear"] = ("weight_norm", "bias_norm", "bias")
    for name in optional.get(op, ()):
        if one_in(draw, 3):
            family["without"] = [*family["without"], name]
    if "norm" in op:
        family["options"] = {"eps": draw.choice((1e-5, 1e-6, 0.5, 1e-3))}
    if op == "layer_norm_linear":
        family |= {"columns": min(columns, 600), "features": draw.choice((16, 1, 40, 130))}
    elif op == "geglu":
        family["options"] = {"approximate": draw.choice(("none", "tanh"))}
    elif op == "cross_entropy":
        family["options"] = {
            "label_smoothing": draw.choice((0.0, 0.1, 1.0)), "reduction": draw.choice(("mean", "sum", "none")),
            "ignore_index": draw.choice((-100, 0)),
        }  # fmt: skip
        family["ids"] = draw.choice(("i64", "i32"))
    elif op == "softmax_dropout":
        family["options"] = {
            "dropout_p": draw.choice((0.0, 0.0, 0.3, 0.9)), "causal": bool(draw.integer(0, 1)),
            "scale": draw.choice((1.0, 0.3, -2.0)),
        }  # fmt: skip
        family["mask"] = draw.choice((None, None, "bool", "f32", "x"))
    elif op in ("rope", "rms_norm_rope"):
        family["columns"] = columns = draw.choice((64, 8, 40, 33, 128, 2))
        pairs = draw.choice((columns // 2, max(columns // 4, 1)))
        family["options"] = family["options"] | {"interleaved": bool(draw.integer(0, 1))}
        family |= {"pairs": pairs, "ids": draw.choice((None, None, "i64", "i32")), "inplace": False}
        family["tables"] = draw.choice(("positions", "batch", "twice"))
        if op == "rope" and not family["grad"] and one_in(draw, 4):
            family |= {"inplace": True, "layout": draw.choice(("contiguous", "gap", "step", "expanded"))}
    return family


def rows_member(draw: Draw, family: Case) -> Case:
    case = dict(family)
    columns = case.pop("columns")
    rows = length(draw, 40_000 // columns + 1)
    if "rope" in case["op"]:
        shape = [draw.integer(1, 3), draw.integer(1, 4), min(rows, 60), columns]
        shape = shape[draw.choice((0, 0, 1, 2)) :]
    else:
        shape = draw.choice(([rows, columns], [rows, columns], [2, rows, columns], [columns]))
        if case["op"] == "softmax_dropout" and len(shape) == 2:
            shape = [draw.integer(1, 3), *shape]
    case["shape"] = shape
    case["values"] = draw.choice(ROW_VALUES)
    return common(draw, case)


GROUPS: dict[str, tuple[Callable[[Draw, str], Case], Callable[[Draw, Case], Case]]] = {
    "attention": (attention_family, attention_member),
    "rows": (rows_family, rows_member),
    "decode": (decode_family, decode_member),
    "cache": (cache_family, cache_member),
}


def numbered(seed: int, group: str, number: int, backend: str, together: int) -> Case:
    """Case ``number`` of a run with a seed; ``together`` neighbouring cases share a family."""
    family, member = GROUPS[group]
    kind = family(RandomDraw(seed, group, "family", number // together), backend)
    return member(RandomDraw(seed, group, number), kind)


def drawn(draw: Draw, group: str, backend: str) -> Case:
    """A case of one source of choices, for hypothesis."""
    family, member = GROUPS[group]
    return member(draw, family(draw, backend))
