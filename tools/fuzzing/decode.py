"""Trials of decoding: over contiguous and paged caches, and sequences of calls on a `KVCache`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from aule.ops.attention.reference import Expected, expect, lse_tolerance, to_f64, tolerance
from aule.ops.attention.validate import attention_problem
from aule.ops.decode.sequences import E4M3, expect_decode
from aule.ops.decode.validate import decode_problem
from aule.ops.kvcache.numpy_append import quantised
from aule.ops.rope.tables import Rope, rotate
from fuzzing.attention import factor, floats, options_of, vectors
from fuzzing.bounds import Bounds, reshaped
from fuzzing.trial import Array, Buffer, Name, Step, Trial, Wanted, buffer, names

Case = dict[str, Any]
NOWHERE = (-7, 10**6)
"""Page numbers in unused entries of block tables."""
DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def decode(case: Case) -> Trial:
    """`aule.decode_attention` or `aule.flash_attention_paged`."""
    rng = np.random.default_rng(case["seed"])
    batch, (heads, _), (dim, value_dim), rows = len(case["lens"]), case["heads"], case["dims"], case["rows"]
    packed = isinstance(rows, list)
    shape: tuple[int, ...] = (sum(rows), heads) if packed else (batch, heads) if rows == 0 else (batch, heads, rows)
    q = floats(rng, (*shape, dim), case["values"], case["dtype"], "q") * factor(case)
    arrays = {"q": buffer(q, case["dtype"]), "context_lens": buffer(np.array(case["lens"]), "i32")}
    arrays |= vectors(rng, case, batch) | (paged(rng, case) if case["page"] else contiguous(rng, case))
    plain = options_of(case)
    given: Case = plain | {"backend": case["backend"]}
    given |= {x: Name(x) for x in ("alibi_slopes", "sinks", "k_scale", "v_scale", "context_lens") if x in arrays}
    if packed:
        arrays["cu_seqlens_q"] = buffer(np.cumsum([0, *rows]), "i32")
        given["cu_seqlens_q"] = Name("cu_seqlens_q")
    call = "aule.decode_attention"
    if case["page"]:
        call = "aule.flash_attention_paged"
        given |= {"block_tables": Name("block_tables"), "layout": case["layout"]}
    out_shape = (*shape, value_dim)
    written: tuple[str, ...] = ()
    if case["out"] is not None:
        layout = "gap" if case["out"] == "gap" else "contiguous"
        arrays["target"] = buffer(np.full(out_shape, np.nan), case["dtype"], layout)
        given["out"], written = Name("target"), ("target",)
    results = ("out", "lse") if case["return_lse"] else ("out",)
    trial = Trial(arrays, [Step(results, call, tuple(names("qkv")), given)], dict, case["front"], case["backend"])
    trial.written = written

    def wanted() -> dict[str, Wanted]:
        views = {name: one.view for name, one in arrays.items() if name != "target"}
        more = {"layout": case["layout"]} if case["page"] else {}
        problem, operands = decode_problem(call[5:], **views, **plain, **more)
        judged, expected = expect_decode(problem, operands)
        finite = {"q": operands.q.storage, "k": np.zeros(1), "v": np.zeros(1)}
        bounds = Bounds(case, judged, finite)
        if bounds.problem and case["values"] in ("huge", "offset"):
            size = {"huge": 5.0, "offset": 25.0}[case["values"]]
            largest = float(np.max(np.abs(to_f64(operands.q.storage, case["dtype"])), initial=0.0))
            bounds.slack = 4 * 2.0**-23 * largest * size * dim**0.5 * abs(judged.scale)
            bounds.largest = 5.0
        found = bounds.results(expected)
        if packed:
            found["out"] = replace(found["out"], values=found["out"].values[0].swapaxes(0, 1), skip=False)
        lse_shape = (heads, sum(rows)) if packed else shape
        kept = {"out": reshaped(replace(found["out"], skip=False), out_shape), "lse": reshaped(found["lse"], lse_shape)}
        return {name: kept[name] for name in results}

    trial.wanted = wanted
    return trial


def contiguous(rng: np.random.Generator, case: Case) -> dict[str, Buffer]:
    """A cache with NaN behind the end of each sequence, as a transposed view or not."""
    heads, longest, found = case["heads"][1], max(case["lens"]) + 3, {}
    for name, dim in zip("kv", case["dims"], strict=True):
        values = floats(rng, (len(case["lens"]), heads, longest, dim), case["values"], case["dtype"], name)
        for n, length in enumerate(case["lens"]):
            values[n, :, length:] = np.nan
        found[name] = buffer(values, case["dtype"], "swapped" if case["layout"] == "NHD" else "contiguous")
    return found


def paged(rng: np.random.Generator, case: Case) -> dict[str, Buffer]:
    """A pool of pages with NaN wherever nothing may be read, and its block table."""
    page, lens = case["page"], case["lens"]
    used = [-(-n // page) for n in lens]
    pages = sum(used) + 2
    order = list(rng.permutation(pages))
    table = rng.choice(NOWHERE, (len(lens), max(used) + 1))
    covered = np.zeros((pages, page), bool)
    for n, count in enumerate(used):
        table[n, :count] = [order.pop() for _ in range(count)]
        for i, number in enumerate(table[n, :count]):
            covered[number, : min(lens[n] - i * page, page)] = True
    found = {"block_tables": buffer(table, "i32")}
    for name, dim in zip("kv", case["dims"], strict=True):
        pool = floats(rng, (pages, page, case["heads"][1], dim), case["values"], case["dtype"], name)
        if case["cache"]:
            bits, scales = quantised(
                np.ascontiguousarray(pool, np.float32), {"i8": "int8", "e4m3": "fp8"}[case["cache"]]
            )
            scales[~covered] = np.nan
            found[f"{name}_scale"] = buffer(_laid(scales, case), "f32")
            found[name] = buffer(_laid(bits, case), case["cache"])
        else:
            pool[~covered] = np.nan
            found[name] = buffer(_laid(pool, case), case["dtype"])
    return found


def _laid(pool: Array, case: Case) -> Array:
    return pool.swapaxes(1, 2) if case["layout"] == "HND" else pool


# -- KVCache -----------------------------------------------------------------------------------------------------------


class CacheModel:
    """A cache as lists of token numbers, while the steps of a trial are written."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = np.random.default_rng(case["seed"])
        self.tokens: list[list[int] | None] = []
        self.k: list[Array] = []
        """Keys of each token, layer by layer, as they are appended."""
        self.v: list[Array] = []
        self.arrays: dict[str, Buffer] = {}
        self.steps: list[Step] = []
        self.attended: list[tuple[str, str, list[list[int]], int]] = []
        """Result, queries, tokens of each sequence and layer of each call of attend."""
        need = sum(sum(call[2]) // case["page"] + 2 * len(call[1]) for call in case["calls"] if call[0] == "append")
        forks = sum(call[0] == "fork" for call in case["calls"])
        longest = sum(sum(call[2]) for call in case["calls"] if call[0] == "append")
        self.pages = need + forks * (longest // case["page"] + 2) + 2
        self.positions = longest + 1
        self.steps.append(Step(("cache",), "aule.KVCache", (), self._made()))
        if case["rope"]:
            angles = self.rng.uniform(-3.0, 3.0, (self.positions, case["dims"][0] // 2))
            self.arrays |= {"cos": buffer(np.cos(angles), "f32"), "sin": buffer(np.sin(angles), "f32")}

    def _made(self) -> Case:
        case = self.case
        made = {
            "num_pages": self.pages, "heads_kv": case["heads"][1], "head_dim": case["dims"][0],
            "value_dim": case["dims"][1], "page_size": case["page"], "dtype": DTYPES[case["dtype"]],
            "layers": case["layers"], "layout": case["layout"], "quantize": case["quantize"],
        }  # fmt: skip
        if case["front"] == "torch":
            made["device"] = "cuda" if case["backend"] == "cuda" else "cpu"
        return made | {"backend": None if case["backend"] == "cuda" else case["backend"]}

    def rope(self) -> Case:
        if not self.case["rope"]:
            return {}
        return {"rope": (Name("cos"), Name("sin")), "interleaved": self.case["interleaved"]}

    def sequence(self, index: int) -> list[int]:
        found = self.tokens[index]
        assert found is not None
        return found

    def add(self, call: list[Any]) -> None:
        kind = call[0]
        if kind == "allocate":
            self.steps.append(Step((f"s{len(self.tokens)}",), "cache.allocate"))
            self.tokens.append([])
        elif kind == "fork":
            self.steps.append(Step((f"s{len(self.tokens)}",), "cache.fork", (Name(f"s{call[1]}"),)))
            self.tokens.append(list(self.sequence(call[1])))
        elif kind == "free":
            self.steps.append(Step((), "cache.free", (Name(f"s{call[1]}"),)))
            self.tokens[call[1]] = None
        elif kind == "truncate":
            self.steps.append(Step((), "cache.truncate", (Name(f"s{call[1]}"), call[2])))
            self.tokens[call[1]] = self.sequence(call[1])[: call[2]]
        elif kind == "append":
            self.append(call[1], call[2], call[3] == "padded")
        elif kind == "overfill":
            count = self.pages * self.case["page"] + 1
            rows = buffer(np.zeros((count, self.case["heads"][1], self.case["dims"][0])), self.case["dtype"])
            values = buffer(np.zeros((count, self.case["heads"][1], self.case["dims"][1])), self.case["dtype"])
            self.arrays |= {"too_many_k": rows, "too_many_v": values}
            given = (Name(f"s{call[1]}"), Name("too_many_k"), Name("too_many_v"))
            self.steps.append(Step((), "cache.append", given, raises="CacheFullError"))
        else:
            self.attend(*call[1:])

    def append(self, chosen: list[int], counts: list[int], padded: bool) -> None:
        total, first, case = sum(counts), len(self.k), self.case
        heads, (dim, value_dim) = case["heads"][1], case["dims"]
        keys, values = (self.rng.standard_normal((total, case["layers"], heads, n)) for n in (dim, value_dim))
        starts = np.cumsum([0, *counts])
        for layer in range(case["layers"]):
            for name, rows in (("k", keys[:, layer]), ("v", values[:, layer])):
                if padded:
                    room = np.full((len(chosen), heads, max(counts), rows.shape[-1]), 7.0)
                    for i, count in enumerate(counts):
                        room[i, :, max(counts) - count :] = rows[starts[i] : starts[i + 1]].swapaxes(0, 1)
                    rows = room
                self.arrays[f"{name}{len(self.steps)}_{layer}"] = buffer(rows, case["dtype"])
            given = [Name(f"{name}{len(self.steps)}_{layer}") for name in "kv"]
            at = [Name(f"s{i}") for i in chosen]
            more = {"layer": layer, "lengths": counts, **self.rope()}
            self.steps.append(Step((), "cache.append", (at, *given), more))
        for token in range(total):
            self.k.append(to_f64(buffer(keys[token], case["dtype"]).view.storage, case["dtype"]))
            self.v.append(to_f64(buffer(values[token], case["dtype"]).view.storage, case["dtype"]))
        for i, seq in enumerate(chosen):
            self.sequence(seq).extend(range(first + int(starts[i]), first + int(starts[i + 1])))

    def attend(self, chosen: list[int], rows: int, cascade: bool) -> None:
        case = self.case
        if min(len(self.sequence(i)) for i in chosen) < rows:
            return  # queries would stand before the first key, where nothing is promised for rotated ones
        for layer in range(case["layers"]):
            out = f"out{len(self.attended)}"
            q = self.rng.standard_normal((len(chosen), case["heads"][0], rows, case["dims"][0]))
            self.arrays[f"q_{out}"] = buffer(q, case["dtype"])
            given = {"layer": layer, "causal": case["causal"], "softcap": case["softcap"], "cascade": cascade}
            seqs = [Name(f"s{i}") for i in chosen]
            self.steps.append(Step((out,), "cache.attend", (Name(f"q_{out}"), seqs), given | self.rope()))
            self.attended.append((out, f"q_{out}", [list(self.sequence(i)) for i in chosen], layer))

    def stored_rows(self, rows: list[Array], dtype: str, rotate_by: Array | None) -> Array:
        """Rows ``[tokens, heads, dim]`` as the cache gives them back, in float64."""
        values = np.stack(rows)
        case = self.case
        if rotate_by is not None:
            values = self.rotated(values, rotate_by)
            values = to_f64(buffer(values, dtype).view.storage, dtype)
        if case["quantize"] is not None:
            bits, scales = quantised(np.ascontiguousarray(values, np.float32), case["quantize"])
            values = (E4M3[bits] if case["quantize"] == "fp8" else bits).astype(np.float64) * scales[..., None]
        return values

    def rotated(self, values: Array, positions: Array) -> Array:
        """Rows ``[tokens, heads, dim]``, rotated in float64."""
        cos, sin = (self.arrays[x].view.storage.astype(np.float64)[positions][:, None] for x in ("cos", "sin"))
        return rotate(Rope("f32", self.case["dims"][0], self.case["interleaved"]), values, cos, sin)

    def wanted(self) -> dict[str, Wanted]:
        case, found = self.case, {}
        for out, name, sequences, layer in self.attended:
            q = to_f64(self.arrays[name].view.storage, case["dtype"])
            parts, limit = [], 0.0
            for i, tokens in enumerate(sequences):
                part, allowed = self._alone(q[i : i + 1], tokens, layer)
                parts.append(part.out)
                limit = max(limit, allowed)
            found[out] = Wanted(np.concatenate(parts), limit, case["dtype"])
        return found

    def _alone(self, q: Array, tokens: list[int], layer: int) -> tuple[Expected, float]:
        case, positions = self.case, np.arange(len(tokens))
        k, v = ([rows[t][layer] for t in tokens] for rows in (self.k, self.v))
        keys = self.stored_rows(k, case["dtype"], positions if case["rope"] else None)
        values = self.stored_rows(v, case["dtype"], None)
        if case["rope"]:
            rows = q.shape[2]
            q = self.rotated(q[0].swapaxes(0, 1), positions[len(tokens) - rows :]).swapaxes(0, 1)[None]
        given = {"q": q, "k": keys.swapaxes(0, 1)[None], "v": values.swapaxes(0, 1)[None]}
        views = {name: buffer(array, "f64").view for name, array in given.items()}
        problem, _ = attention_problem(**views, causal=case["causal"], softcap=case["softcap"])
        problem = replace(problem, dtype=case["dtype"])
        found = expect(problem, **given)
        limit = tolerance(problem, found.out, found.twin) + lse_tolerance(problem)
        if case["rope"] and case["dtype"] != "f32":
            limit *= 2  # q and k are rounded once more
        if case["quantize"] is not None:  # a tie may be rounded to the step beside
            limit += float(np.max(np.abs(values))) * {"int8": 1 / 127, "fp8": 1 / 16}[case["quantize"]]
        return found, limit


def cache(case: Case) -> Trial:
    """Calls on a `aule.KVCache`, compared with lists of tokens."""
    model = CacheModel(case)
    for call in case["calls"]:
        model.add(call)
    return Trial(model.arrays, model.steps, model.wanted, case["front"], case["backend"])
