"""Failures of `fuzz.py`: made smaller, and written as scripts."""

from __future__ import annotations

import base64
import math
import time
import zlib
from typing import Any

import numpy as np

from fuzzing.trial import MAXIMA, SMALLEST, SPECIAL, Array, Buffer, Name, Step, Trial

# -- scripts -----------------------------------------------------------------------------------------------------------

_HEAD = '''"""{title}

{said}

Written by tools/fuzz.py from the case
{case}
"""

import base64
import zlib

import numpy as np
{imports}

def memory(dtype, text):
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).copy()


def check(name, found, wanted, limit, skip, loose):
    found = {numbers}
    assert found.shape == wanted.shape, f"{{name}}: shape {{found.shape}}, expected {{wanted.shape}}"
    with np.errstate(all="ignore"):
        error = np.where(found == wanted, 0.0, np.abs(found - wanted))
    if loose:
        error = np.where(~np.isfinite(wanted) & ~np.isfinite(found), 0.0, error)
    error = np.where(np.isnan(wanted) & np.isnan(found), 0.0, np.where(np.isnan(error), np.inf, error))
    bad = np.where(skip, 0.0, error) > limit
    said = f"{{bad.sum()}} of {{bad.size}} wrong, got {{found[bad][:4]}}, expected {{wanted[bad][:4]}}"
    assert not bad.any(), f"{{name}}: {{said}}"

'''


def script(trial: Trial, case: dict[str, Any], said: str) -> str:
    """A program that fails as the trial does."""
    torch = trial.front == "torch"
    imports = "\nimport aule\n" if not torch else "import torch\n\nimport aule\n"
    if not torch and any(one.dtype in SPECIAL for one in trial.arrays.values()):
        imports = "import ml_dtypes\n" + imports
    numbers = "found.detach().cpu().double().numpy()" if torch else "np.asarray(found).astype(np.float64)"
    title = f"{case['op']} on {case['backend']} fails."
    lines = [_HEAD.format(title=title, said=said, case=case, imports=imports, numbers=numbers)]
    lines += [_array_line(trial, name, one) for name, one in trial.arrays.items()]
    body = [_step_line(step) for step in trial.steps]
    if trial.refused:
        lines += ["try:", *("    " + line for line in body), "except aule.AuleError:", "    pass", "else:"]
        lines.append('    raise AssertionError("a call with a mistake was not refused")')
        return "\n".join(lines) + "\n"
    lines += body
    try:
        wanted = trial.wanted()
    except Exception as error:
        return "\n".join([*lines, f"# The oracle raised {type(error).__name__}."]) + "\n"
    for name, want in wanted.items():
        skip = want.skip | (np.isfinite(want.values) & (np.abs(want.values) >= 0.99 * MAXIMA[want.dtype]))
        given = ", ".join(
            (
                _literal(want.values),
                _literal(np.maximum(want.limit, SMALLEST.get(want.dtype, 0.0))),
                _literal(skip),
                repr(want.loose),
            )
        )
        lines.append(f"check({name!r}, {name}, {given})")
    return "\n".join(lines) + "\n"


def _literal(values: Any) -> str:
    array = np.asarray(values)
    if array.ndim == 0 and array.dtype.kind == "f" and math.isfinite(float(array)):
        return repr(float(array))
    if array.dtype == bool and not array.any():
        return "False"
    return f"{_memory(array)}.reshape({list(array.shape)})"


def _memory(array: Array) -> str:
    text = base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode()
    return f"memory({array.dtype.str!r}, {text!r})"


def _array_line(trial: Trial, name: str, one: Buffer) -> str:
    steps = tuple(step * one.flat.itemsize for step in one.strides)
    where = f"flat_{name}[{one.offset}:], {one.shape}, {steps}"
    first = f"flat_{name} = {_memory(one.flat)}\n"
    if 0 in one.shape:
        numpy = f"np.empty({one.shape}, flat_{name}.dtype)"
    else:
        numpy = f"np.lib.stride_tricks.as_strided({where})"
    if trial.front == "numpy":
        special = f".view(ml_dtypes.{SPECIAL[one.dtype]})" if one.dtype in SPECIAL else ""
        return f"{first}{name} = {numpy}{special}"
    bits = ".view(np.int16)" if one.dtype == "bf16" else ""
    special = f".view(torch.{SPECIAL[one.dtype]})" if one.dtype in SPECIAL else ""
    leaf = ".requires_grad_()" if name in trial.leaves else ""
    if any(step < 0 for step in one.strides):
        made = f"torch.from_numpy(np.ascontiguousarray({numpy}){bits}).to({trial.device!r}){special}"
    else:
        tensor = f"torch.from_numpy(flat_{name}{bits}).to({trial.device!r}){special}"
        made = f"torch.as_strided({tensor}, {one.shape}, {one.strides}, {one.offset})"
    return f"{first}{name} = {made}{leaf}"


def _step_line(step: Step) -> str:
    given = [_text(value) for value in step.args]
    given += [f"{name}={_text(value)}" for name, value in step.kwargs.items()]
    call = f"{step.call}({', '.join(given)})"
    if step.raises is not None:
        return f"try:\n    {call}\nexcept aule.{step.raises}:\n    pass"
    many = len(step.to) > 1 or step.call == "torch.autograd.grad"
    return f"{', '.join(step.to)}{',' if many and len(step.to) == 1 else ''} = {call}" if step.to else call


def _text(value: Any) -> str:
    if isinstance(value, Name):
        return str(value)
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


# -- reducing ----------------------------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {
    "twice": False, "window": None, "softcap": None, "alibi": None, "sinks": False, "mask": None, "bias": None,
    "rope": None, "dropout": 0.0, "return_lse": False, "deterministic": False, "out": None, "scale": None,
    "align": "bottom-right", "causal": False, "values": "normal", "layout": "contiguous", "without": [], "grad": False,
    "front": "numpy", "dtype": "f32", "quantize": None, "cache": "", "precision": None, "layers": 1,
}  # fmt: skip
"""What a field is replaced by first, to see whether the failure needs it."""
SIZES = ("seqs", "heads", "dims", "batch", "lens", "lengths", "shape", "rows", "features", "pairs", "page")


def reduced(case: dict[str, Any], said: str, judged: Any, seconds: float) -> tuple[dict[str, Any], str]:
    """The smallest case found in some time that still fails, and what is wrong with it."""
    kind, ends = kind_of(said), time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for smaller in candidates(case):
            if time.monotonic() > ends:
                return case, said
            found = str(judged(smaller))
            if found and kind_of(found) == kind:
                case, said, progress = smaller, found, True
                break
    return case, said


def kind_of(said: str) -> str:
    """The part of a message that stays the same while a failure is made smaller."""
    for words in ("second run", "wrong at", "has shape"):
        if words in said:
            return words
    return ":".join(said.split(":")[:2])


def candidates(case: dict[str, Any]) -> Any:
    """Simpler cases, the boldest first."""
    for name, plain in PLAIN.items():
        usual = "swapped" if name == "layout" and case.get("layout") in ("NHD", "HND") else plain
        if name in case and case[name] != usual and usual != "swapped":
            if name == "front" and (case.get("grad") or case["op"] == "sdpa" or case["backend"] == "cuda"):
                continue
            yield case | {name: plain}
    if "calls" in case:
        for i in range(len(case["calls"]) - 1, -1, -1):
            yield case | {"calls": case["calls"][:i] + case["calls"][i + 1 :]}
    for i in range(len(case.get("lens", ()))):
        if len(case["lens"]) > 1:
            smaller = case | {"lens": case["lens"][:i] + case["lens"][i + 1 :]}
            if isinstance(case["rows"], list):
                smaller["rows"] = case["rows"][:i] + case["rows"][i + 1 :]
            yield smaller
    for i in range(len(case.get("lengths", ((),))[0])):
        yield case | {"lengths": [row[:i] + row[i + 1 :] for row in case["lengths"]]}
    for name in SIZES:
        if name in case:
            for smaller in _halved(case[name]):
                yield case | {name: smaller}


def _halved(size: Any) -> Any:
    """A number halved or less by one; a list with one of its numbers so."""
    if isinstance(size, list):
        for i, one in enumerate(size):
            for smaller in _halved(one):
                yield [*size[:i], smaller, *size[i + 1 :]]
    elif isinstance(size, int) and size > 1:
        yield size // 2
        yield size - 1
