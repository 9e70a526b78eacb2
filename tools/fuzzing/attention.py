"""Trials of attention: in full, packed, and through PyTorch's function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from aule.ops.attention.reference import Inputs, attention_reference, expect, to_f64
from aule.ops.attention.reference_backward import expect_gradients
from aule.ops.attention.validate import Operands, attention_problem
from aule.ops.attention.varlen import expect_varlen, expect_varlen_gradients, varlen_problem
from aule.ops.softmax.dropout import seed_words
from aule.view import TensorView, contiguous_strides
from fuzzing.bounds import HALF_EPS, Bounds, extra_gradients, marks, packed, reshaped, without_faint
from fuzzing.trial import Array, Buffer, Name, Step, Trial, Wanted, buffer, names

Case = dict[str, Any]
PRECISIONS = {"fp16": "f16", "bf16": "bf16", "tf32": "f16"}
LOWEST = {"f32": -3.4e38, "f64": -3.4e38, "bf16": -3.38e38, "f16": -65504.0}


def floats(rng: np.random.Generator, shape: tuple[int, ...], kind: str, dtype: str, name: str = "v") -> Array:
    """Random values of a kind; ``name`` says which of q, k and v they are."""
    values = rng.standard_normal(shape)
    if kind == "offset" and name == "k":
        values += 20.0
    elif kind == "tiny":
        values *= {"f16": 1e-6, "bf16": 1e-30, "f32": 1e-30, "f64": 1e-200}[dtype] if name == "v" else 1e-3
    elif kind == "constant":
        values[...] = 0.75
    elif kind == "zero":
        values[...] = 0.0
    return values


def factor(case: Case) -> float:
    """What q is multiplied by, so that scores have a standard deviation of 6 or 60."""
    spread = {"large": 6.0, "huge": 60.0}.get(case["values"])
    if spread is None:
        return 1.0
    root = case["dims"][0] ** 0.5
    scale = 1 / root if case["scale"] is None else abs(case["scale"]) or 1.0
    return spread / (scale * root)


def sprinkled(rng: np.random.Generator, arrays: dict[str, Array], case: Case) -> None:
    """Put a few values that are not finite into q, k or v; into v only if no weight is exactly zero, since nothing is
    promised about zero times infinity."""
    zeros = case["dropout"] or any(case[x] is not None and case[x]["fill"] == "lowest" for x in ("mask", "bias"))
    chosen = arrays["qkv"[int(rng.integers(2 if zeros else 3))]]
    if case["values"] == "nonfinite" and chosen.size:
        flat = chosen.reshape(-1)
        for i in rng.integers(0, chosen.size, 1 + int(rng.integers(3))):
            flat[i] = rng.choice([np.nan, np.inf, -np.inf])


def options_of(case: Case) -> Case:
    """Options of the public functions that are not arrays."""
    window = case["window"]
    return {
        "causal": case["causal"], "scale": case["scale"], "softcap": case["softcap"],
        "window": tuple(window) if isinstance(window, list) else window, "return_lse": case["return_lse"],
    }  # fmt: skip


def vectors(rng: np.random.Generator, case: Case, batch: int) -> dict[str, Buffer]:
    """Slopes and sinks."""
    found, heads = {}, case["heads"][0]
    if case["alibi"] is not None:
        shape = (heads,) if case["alibi"] == "heads" else (batch, heads)
        found["alibi_slopes"] = buffer(rng.uniform(0.01, 0.5, shape), "f32")
    if case["sinks"]:
        found["sinks"] = buffer(rng.standard_normal(heads), "f32")
    return found


def tables(rng: np.random.Generator, case: Case, batch: int, positions: int) -> dict[str, Buffer]:
    """Cosines and sines."""
    rope = case["rope"]
    if rope is None:
        return {}
    angles = rng.uniform(-3.0, 3.0, (positions + 2, rope["rotary"] // 2))
    if rope["tables"] == "batch":
        angles = rng.uniform(-3.0, 3.0, (batch, *angles.shape))
    elif rope["tables"] == "full":
        angles = np.concatenate([angles, angles], axis=-1)
    dtype = case["dtype"] if rope["dtype"] == "q" else "f32"
    return {"cos": buffer(np.cos(angles), dtype), "sin": buffer(np.sin(angles), dtype)}


def score_array(rng: np.random.Generator, case: Case, name: str, shape: tuple[int, ...], lead: int) -> Buffer:
    """A mask or a bias, with axes of length 1 where it is broadcast, and without the first ``lead``."""
    given = case[name]
    full = tuple(n if axis else 1 for n, axis in zip(shape, given["axes"], strict=True))
    dtype, fill = given["dtype"], given["fill"]
    if dtype == "bool":
        keep = rng.random(full) < 0.7
        if fill == "padding":
            keep = np.broadcast_to(np.arange(full[3]) < rng.integers(full[3] // 2, full[3] + 1), full).copy()
        elif fill == "empty rows" and full[2]:
            keep[..., rng.integers(full[2]), :] = False
        return buffer(keep.reshape(full[lead:]), "bool")
    dtype = case["dtype"] if dtype == "q" else "f32"
    values = rng.standard_normal(full)
    if fill != "normal":
        values[rng.random(full) < 0.3] = -np.inf if fill == "inf" else LOWEST[dtype]
    return buffer(values.reshape(full[lead:]), dtype)


# -- attention in full -------------------------------------------------------------------------------------------------


def storage(operands: Operands) -> dict[str, Array]:
    """Arrays by the names of the oracle."""
    known = ("q", "k", "v", "mask", "bias", "alibi", "sinks", "seed", "cos", "sin")
    return {name: getattr(operands, name).storage for name in known if getattr(operands, name) is not None}


def views_of(case: Case, arrays: dict[str, Buffer]) -> dict[str, Any]:
    """Arguments of the package's check that are arrays, and the words of a seed."""
    renamed = {"cos": "rope_cos", "sin": "rope_sin"}
    kept = ("q", "k", "v", "mask", "bias", "alibi_slopes", "sinks", "cos", "sin")
    views: dict[str, Any] = {renamed.get(name, name): one.view for name, one in arrays.items() if name in kept}
    if case["dropout"]:
        words = seed_words(case["seed"])
        views["seed"] = TensorView("u32", words.shape, contiguous_strides(words.shape), "host", words)
    return views


def main_arrays(rng: np.random.Generator, case: Case, shapes: dict[str, tuple[int, ...]]) -> dict[str, Buffer]:
    """q, k and v."""
    made = {name: floats(rng, shape, case["values"], case["dtype"], name) for name, shape in shapes.items()}
    made["q"] *= factor(case)
    sprinkled(rng, made, case)
    return {name: buffer(array, case["dtype"], case["layout"]) for name, array in made.items()}


def finish(case: Case, trial: Trial, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """Add what all kinds of attention have: ``out=``, the gradient's step, what is refused."""
    step = trial.steps[-1]
    if case["out"] == "q" and trial.arrays["q"].shape == shape and 0 not in trial.arrays["q"].strides:
        step.kwargs["out"], trial.written = Name("q"), ("q",)
    elif case["out"] in ("fresh", "gap"):
        layout = "gap" if case["out"] == "gap" else "contiguous"
        trial.arrays["target"] = buffer(np.full(shape, np.nan), case["dtype"], layout)
        step.kwargs["out"], trial.written = Name("target"), ("target",)
    if trial.leaves:
        trial.arrays["dout"] = buffer(rng.standard_normal(shape), case["dtype"])
        results = tuple(f"d{name}" for name in trial.leaves)
        trial.steps.append(Step(results, "torch.autograd.grad", (Name("out"), names(trial.leaves), Name("dout"))))
    on_host = case["backend"] in ("cpu", "numpy")
    trial.refused = trial.refused or (case["dtype"] == "f64" and not on_host)
    trial.same_bits = on_host or not trial.leaves or bool(case["deterministic"])


def differentiable(case: Case) -> bool:
    """Whether gradients of a case are compared: none are promised where inputs are not finite."""
    lowest = any(case[name] is not None and case[name].get("fill") == "lowest" for name in ("mask", "bias"))
    return case["grad"] and case["values"] != "nonfinite" and not lowest and case["precision"] is None


def flash_attention(case: Case) -> Trial:
    """`aule.flash_attention`, or PyTorch's function with aule installed."""
    rng = np.random.default_rng(case["seed"])
    batch, (heads, heads_kv), (rows, keys), (dim, value_dim) = case["batch"], case["heads"], case["seqs"], case["dims"]
    shapes = {
        "q": (batch, heads, rows, dim), "k": (batch, heads_kv, keys, dim), "v": (batch, heads_kv, keys, value_dim),
    }  # fmt: skip
    out_shape = (batch, heads, rows, value_dim)
    lead = 4 - case["rank"] if batch == 1 else 0
    arrays = main_arrays(rng, case, {name: shape[lead:] for name, shape in shapes.items()})
    arrays |= vectors(rng, case, batch) | tables(rng, case, batch, max(rows, keys))
    for name in ("mask", "bias"):
        if case[name] is not None:
            arrays[name] = score_array(rng, case, name, (batch, heads, rows, keys), lead if case["op"] == "sdpa" else 0)
    leaves: tuple[str, ...] = ()
    if differentiable(case):
        leaves = ("q", "k", "v")
        leaves += tuple(x for x in ("mask", "bias", "sinks") if x in arrays and arrays[x].dtype != "bool")
    trial = Trial(arrays, [], dict, case["front"], case["backend"], leaves)
    plain = options_of(case) | {"causal_align": case["align"], "deterministic": case["deterministic"]}
    plain |= {"dropout_p": case["dropout"], "precision": case["precision"]}
    if case["op"] == "sdpa":
        given: Case = {"is_causal": case["causal"], "scale": case["scale"], "enable_gqa": heads != heads_kv}
        if "mask" in arrays:
            given["attn_mask"] = Name("mask")
        trial.steps.append(Step((), "aule.install", (case["backend"],)))
        trial.steps.append(
            Step(("out",), "torch.nn.functional.scaled_dot_product_attention", tuple(names("qkv")), given)
        )
    else:
        given = plain | {"backend": case["backend"], "seed": case["seed"] if case["dropout"] else None}
        given |= {name: Name(name) for name in ("mask", "bias", "alibi_slopes", "sinks") if name in arrays}
        if case["rope"] is not None:
            given |= {"rope": (Name("cos"), Name("sin")), "rope_interleaved": case["rope"]["interleaved"]}
        results = ("out", "lse") if case["return_lse"] else ("out",)
        trial.steps.append(Step(results, "aule.flash_attention", tuple(names("qkv")), given))
    finish(case, trial, out_shape[lead:], rng)
    if case["precision"] is not None:
        trial.may_refuse = "precision"
    if case.get("broken"):
        break_call(case, trial)

    def wanted() -> dict[str, Wanted]:
        more = {"rope_interleaved": case["rope"]["interleaved"]} if case["rope"] is not None else {}
        problem, operands = attention_problem(**views_of(case, arrays), **plain, **more)
        given = storage(operands)
        if case["precision"] is not None:
            problem = replace(problem, dtype=PRECISIONS[case["precision"]], precision=None)
            given |= {x: buffer(to_f64(given[x], "f32"), problem.dtype).view.storage for x in "qkv"}
        bounds = Bounds(case, problem, given)
        results = bounds.results(expect(problem, **given))
        nonfinite = marks(given["v"], problem.dtype)
        if nonfinite is not None:
            results = without_faint(results, attention_reference(problem, **(given | {"v": nonfinite}))[0])
        if case["precision"] is not None:
            results = {name: replace(one, dtype="f32", limit=one.limit + 1e-3) for name, one in results.items()}
        results = {name: reshaped(one, one.values.shape[lead:]) for name, one in results.items()}
        if not case["return_lse"] or case["op"] == "sdpa":
            del results["lse"]
        if leaves:
            dout = trial.arrays["dout"].view.storage
            dout = dout.reshape(out_shape)
            found = bounds.gradients(expect_gradients(problem, dout, **given), dout)
            found = {name: reshaped(one, trial.arrays[name[1:]].shape) for name, one in found.items()}
            results |= found | extra_gradients(trial, problem, Inputs(**given), dout)
        return results

    trial.wanted = wanted
    return trial


def break_call(case: Case, trial: Trial) -> None:
    """Make a mistake that must be refused."""
    broken, arrays, given = case["broken"], trial.arrays, trial.steps[0].kwargs
    k, v = arrays["k"].shape, arrays["v"].shape
    plain = {"scale": float("nan"), "window": (-5, 0), "dropout": 1.5, "backend": "fortran"}
    if broken in plain:
        given["dropout_p" if broken == "dropout" else broken] = plain[broken]
    elif broken == "k dim":
        arrays["k"] = buffer(np.zeros((*k[:-1], k[-1] + 1)), case["dtype"])
    elif broken == "v length":
        arrays["v"] = buffer(np.zeros((*v[:-2], v[-2] + 1, v[-1])), case["dtype"])
    elif broken == "dtype":
        arrays["k"] = buffer(np.zeros(k), "f16" if case["dtype"] == "f32" else "f32")
    elif broken == "heads":
        arrays["q"] = buffer(np.zeros((case["batch"], 2 * case["heads"][1] + 1, 3, case["dims"][0])), case["dtype"])
        arrays["k"] = buffer(np.zeros((case["batch"], 2 * case["heads"][1], 3, case["dims"][0])), case["dtype"])
        arrays["v"] = arrays["k"]
    else:
        name, shape = {"mask shape": ("mask", (9, 1, 1)), "sinks": ("sinks", (99,)), "out": ("out", (3, 3))}[broken]
        arrays[f"bad_{name}"] = buffer(np.zeros(shape), case["dtype"] if name == "out" else "f32")
        if name == "mask" and case["heads"][0] == 9:
            return
        given[name] = Name(f"bad_{name}")
    trial.refused = True


# -- packed sequences --------------------------------------------------------------------------------------------------


def varlen(case: Case) -> Trial:
    """`aule.flash_attention_varlen`."""
    rng = np.random.default_rng(case["seed"])
    (heads, heads_kv), (dim, value_dim), (rows, keys) = case["heads"], case["dims"], case["lengths"]
    total_q, total_k, batch = sum(rows), sum(keys), len(rows)
    shapes = {"q": (total_q, heads, dim), "k": (total_k, heads_kv, dim), "v": (total_k, heads_kv, value_dim)}
    if case["layout"] == "expanded":
        case = case | {"layout": "contiguous"}
    arrays = main_arrays(rng, case, shapes)
    longest = max([*rows, *keys], default=0)
    arrays |= vectors(rng, case, batch) | tables(rng, case, batch, longest)
    for name, lengths in (("cu_q", rows), ("cu_k", keys)):
        arrays[name] = buffer(np.cumsum([0, *lengths]), "i32")
    leaves = ("q", "k", "v") if differentiable(case) else ()
    plain = options_of(case) | {"causal_align": case["align"], "deterministic": case["deterministic"]}
    plain["dropout_p"] = case["dropout"]
    given = plain | {"backend": case["backend"], "seed": case["seed"] if case["dropout"] else None}
    given |= {name: Name(name) for name in ("alibi_slopes", "sinks") if name in arrays}
    if case["rope"] is not None:
        given |= {"rope": (Name("cos"), Name("sin")), "rope_interleaved": case["rope"]["interleaved"]}
    results = ("out", "lse") if case["return_lse"] else ("out",)
    call = Step(results, "aule.flash_attention_varlen", tuple(names(("q", "k", "v", "cu_q", "cu_k"))), given)
    trial = Trial(arrays, [call], dict, case["front"], case["backend"], leaves)
    finish(case, trial, (total_q, heads, value_dim), rng)

    def wanted() -> dict[str, Wanted]:
        views = views_of(case, arrays) | {"cu_q": arrays["cu_q"].view, "cu_k": arrays["cu_k"].view}
        more = {"rope_interleaved": case["rope"]["interleaved"]} if case["rope"] is not None else {}
        problem, operands = varlen_problem(**views, max_q=None, max_k=None, **plain, **more)
        bounds = Bounds(case, problem, {x: getattr(operands, x).storage for x in "qkv"})
        found = bounds.results(expect_varlen(problem, operands))
        nonfinite = marks(operands.v.storage, problem.dtype)
        if nonfinite is not None:
            marked = replace(operands, v=replace(operands.v, storage=nonfinite))
            found = without_faint(found, expect_varlen(problem, marked).out)
        results = {"out": packed(found["out"])}
        if case["return_lse"] and not (case["rope"] is not None and case["dtype"] in HALF_EPS):
            results["lse"] = reshaped(found["lse"], (heads, total_q))
        if leaves:
            dout = trial.arrays["dout"].view.storage.swapaxes(0, 1)[None]
            grads = bounds.gradients(expect_varlen_gradients(problem, operands, dout), dout)
            results |= {name: packed(one) for name, one in grads.items()}
        return results

    trial.wanted = wanted
    return trial
