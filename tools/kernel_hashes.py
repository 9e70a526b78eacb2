"""Renders a fixed list of kernels for many devices and compares their hashes with `tests/kernel_hashes.txt`.

    python tools/kernel_hashes.py --check            # lists what changed, was added or removed; exit code 1 if any
    python tools/kernel_hashes.py --write            # writes the list again, after an intended change
    python tools/kernel_hashes.py --only h200-cuda   # print the lines whose names contain a text

No device is needed. `kernel_targets.py` has the devices, `kernel_problems.py` the problems. A line has a name (the
problem and the launch's place in the plan), the hash of the rendered kernel with everything passed to the driver, and
the hash of its launch: grid, scalars in the order of the kernel's parameters, memory. Neither hash depends on the name
of a module, a class or a field of a configuration: a commit that only moves and renames keeps every line.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), *([str(ROOT / "src")] if __name__ == "__main__" else [])]

from kernel_problems import LANGUAGES, OBJECTS, Problem, objects, problems  # noqa: E402
from kernel_targets import TARGETS  # noqa: E402

from aule.artifact import Artifact  # noqa: E402
from aule.backends import registry  # noqa: E402
from aule.errors import AuleError  # noqa: E402
from aule.ir.verify import verify  # noqa: E402
from aule.target import Target  # noqa: E402
from aule.view import TensorView, contiguous_strides  # noqa: E402

LIST = ROOT / "tests" / "kernel_hashes.txt"
REFUSED = "refused"
"""Stands for the hash where the planner or the renderer refuses a problem."""

Views = dict[str, TensorView]


@dataclass(frozen=True)
class Launch:
    """One launch of a plan, in the words of this tool."""

    config: Any
    """With the target, decides what the kernel is."""
    build: Callable[[], Any]
    """Traces the kernel."""
    grid: tuple[int, ...]
    scalars: Mapping[str, Any]
    memory: Callable[[str], str]
    """The name of the memory that a buffer parameter of the kernel stands for."""


@dataclass(frozen=True)
class Plan:
    """The launches of a problem, and the sizes of the further memory that they share, by name."""

    launches: Sequence[Launch]
    workspace: Mapping[str, int] = field(default_factory=dict)
    scratch: Mapping[str, int] = field(default_factory=dict)


# -- ADAPTERS: the only place that knows the planners. Change these when plans change ----------------------------------


def attention_launches(problem: Problem, target: Target) -> Plan:
    """Attention, forward and backward."""
    from aule.ops.attention.cpu import plan as cpu
    from aule.ops.attention.plan import backward, forward

    asked, views = _attention_call(problem)
    base = dict.fromkeys("qkvo", False) if "base" in problem.flags else None
    if problem.op == "backward":
        if target.backend == "cpu":
            return _of_steps(cpu.plan_backward(asked, views, target), target)
        return _of_steps(backward.plan_backward(asked, views, target, base), target)
    if target.backend == "cpu":
        return _of_steps(cpu.plan_forward(asked, views, target), target)
    plan = forward.plan_forward(asked, views, target, base, None if asked.mask else _given_tiles(problem, target))
    return _of_steps(plan, target)


def decode_launches(problem: Problem, target: Target) -> Plan:
    """Decoding, contiguous and paged, and prefill against pages."""
    from aule.ops.decode.cpu import plan as cpu
    from aule.ops.decode.plan import decode as gpu

    asked, operands = _decode_call(problem)
    views = gpu.decode_views(operands, _view(asked.dtype, asked.out_shape))
    if target.backend == "cpu":
        return _of_steps(cpu.plan_decode(asked, views, target), target)
    base = dict.fromkeys("qkvo", False) if "base" in problem.flags else None
    return _of_steps(gpu.plan_decode(asked, views, target, base), target)


def row_launches(problem: Problem, target: Target) -> Plan:
    """An op of the catalogue, or its gradient."""
    from aule.engine.row_ops import result_views
    from aule.ops.catalogue import CATALOGUE

    spec = CATALOGUE[problem.op]
    options = {option.name: option.default for option in spec.options} | _row_options(problem)
    operands = _row_operands(problem)
    if "gradient" not in problem.flags:
        call = spec.call(operands, options)
    else:
        forward = spec.call(operands, options, spec.results if "kept" in problem.flags else spec.outputs)
        results = result_views(forward)
        known = operands | results | {f"d{name}": view for name, view in results.items()}
        gradient = spec.gradient
        assert gradient is not None
        wanted = {operand.name for operand in gradient.operands}
        if "kept" not in problem.flags:
            wanted -= {operand.name for operand in gradient.operands if operand.spares or operand.stands_for}
        call = gradient.call({name: view for name, view in known.items() if name in wanted}, options)
        spec = gradient
    return _of_steps(spec.plan(call.problem, {**call.views, **result_views(call)}, target), target)


def append_launches(problem: Problem, target: Target) -> Plan:
    """New rows into a cache."""
    from aule.ops.kvcache.plan import plan_append
    from aule.ops.kvcache.problem import append_problem

    views = _append_views(problem)
    asked = append_problem("append", views, interleaved="rope-interleaved" in problem.flags)
    return _of_steps(plan_append(asked, views, target), target)


def copy_launches(problem: Problem, target: Target) -> Plan:
    """Pages of a cache to others."""
    from aule.ops.kvcache.plan import plan_copy

    (count,), (size,), (layers,) = (problem.numbers(letter, (1,)) for letter in "nel")
    bits = {"i8": "u8", "bf16": "f16", "f32": "u32"}[problem.dtype]
    views = {"k": _view(bits, (layers, 50, size)), "v": _view(bits, (layers, 50, size))}
    if problem.dtype == "i8":
        views |= {"k_scale": _view("u32", (layers, 50, 16)), "v_scale": _view("u32", (layers, 50, 16))}
    return _of_steps(plan_copy(count, views, target), target)


def object_launches(problem: Problem, target: Target) -> Plan:
    """A public kernel object, as `emit` gives it in a language."""
    kind, fields = OBJECTS[problem.op]
    kernel = getattr(importlib.import_module("aule.kernels"), kind)(**fields)
    plan = kernel.plan(target)
    build = functools.partial(kernel.build, target)
    return Plan([Launch((kind, problem.op), build, plan.grid, plan.scalars, _plain_name)])


def _of_steps(plan: Any, target: Target) -> Plan:
    """An `aule.ops.shared.plan.Plan`."""
    return Plan([_of_step(step, target) for step in plan.steps], plan.workspace, plan.scratch)


def _of_step(step: Any, target: Target) -> Launch:
    build = functools.partial(step.build, step.config, target)
    return Launch(step.config, build, step.grid, step.scalars, step.memory_of)


ADAPTERS: dict[str, Callable[[Problem, Target], Plan]] = {
    "attention": attention_launches,
    "decode": decode_launches,
    "rows": row_launches,
    "append": append_launches,
    "copy": copy_launches,
    "object": object_launches,
}


def _plain_name(parameter: str) -> str:
    return parameter.removesuffix("_ptr")


# -- from words to views -----------------------------------------------------------------------------------------------


def _view(dtype: str, shape: tuple[int, ...], layout: Iterable[str] = ()) -> TensorView:
    """A view of a device's memory: ``columns`` has every other column, ``odd`` rows of which none is aligned, ``rows``
    every other row, ``bshd`` and ``heads`` have the last but one axis before the one in front of it."""
    words = frozenset(layout)
    strides = list(contiguous_strides(shape))
    if "columns" in words:
        strides = [2 * step for step in strides]
    if "rows" in words:
        strides[:-1] = [2 * step for step in strides[:-1]]
    if words & {"bshd", "heads"} and len(shape) > 2:
        strides[-2], strides[-3] = shape[-3] * shape[-1], shape[-1]
    if "odd" in words:
        strides[:-1] = [step // shape[-1] * (shape[-1] + 1) for step in strides[:-1]]
    return TensorView(dtype, shape, tuple(strides), "device", None, offset=1 if "odd" in words else 0)


def _attention_call(problem: Problem) -> tuple[Any, Views]:
    """The problem of attention, and views of its operands, its result and, backward, their gradients."""
    from aule.engine.attention import attention_views
    from aule.ops.attention.validate import attention_problem
    from aule.ops.attention.varlen import varlen_problem

    flags, dtype = problem.flags, problem.dtype
    (batch,), (heads, heads_kv) = problem.numbers("b", (1,)), problem.numbers("h", (4, 4))
    (rows,), (keys,) = problem.numbers("q", (256,)), problem.numbers("k", (256,))
    dim, *more = problem.numbers("d", (64,))
    value_dim = more[0] if more else dim
    options = _score_options(problem, (batch, heads, rows, keys), dim)
    if "packed" in flags:
        total_q, total_k = batch * rows * 3 // 4, batch * keys * 3 // 4
        asked, operands = varlen_problem(
            _view(dtype, (total_q, heads, dim)), _view(dtype, (total_k, heads_kv, dim)),
            _view(dtype, (total_k, heads_kv, value_dim)), _view("i32", (batch + 1,)), _view("i32", (batch + 1,)),
            rows, keys, **options,
        )  # fmt: skip
    else:
        layout = flags & {"bshd", "columns", "odd"}
        asked, operands = attention_problem(
            _view(dtype, (batch, heads, rows, dim), layout), _view(dtype, (batch, heads_kv, keys, dim), layout),
            _view(dtype, (batch, heads_kv, keys, value_dim), layout), **options,
        )  # fmt: skip
    views = attention_views(operands, _view(dtype, asked.out_shape))
    if problem.op == "backward":
        views["do"] = _view(dtype, asked.out_shape, flags & {"columns", "odd"})
        views |= {f"d{name}": _view(dtype, views[name].shape) for name in "qkv"}
        if "ds" in flags:
            views["ds"] = _view("f64" if dtype == "f64" else "f32", (batch, heads, rows, keys))
    return asked, views


def _score_options(problem: Problem, shape: tuple[int, int, int, int], dim: int) -> dict[str, Any]:
    """Options of attention and of decoding, by the names of the functions that check them."""
    flags = problem.flags
    batch, heads, rows, keys = shape
    found: dict[str, Any] = {name: True for name in ("causal", "deterministic") if name in flags}
    found |= {"return_lse": True} if "lse" in flags else {}
    found |= {"causal_align": "top-left"} if "top-left" in flags else {}
    found |= {"window": 100} if "window" in flags else {}
    found |= {"window": (70, None)} if "window-left" in flags else {}
    found |= {"softcap": 20.0} if "softcap" in flags else {}
    masks = {
        "mask-bool": ("bool", (1, 1, rows, keys)),
        "mask-full": ("bool", shape),
        "mask-add": ("f32", (batch, 1, rows, keys)),
        "mask-keys": ("bool", (batch, 1, 1, keys)),
        "mask-odd": ("bool", (1, 1, rows, keys), ("odd",)),
    }
    for flag in flags & masks.keys():
        found["mask"] = _view(*masks[flag])
    biases = {"bias": problem.dtype, "bias-f32": "f32"}
    for flag in flags & biases.keys():
        found["bias"] = _view(biases[flag], (1, heads, rows, keys))
    found |= {"alibi_slopes": _view("f32", (heads,))} if "alibi" in flags else {}
    found |= {"alibi_slopes": _view("f32", (batch, heads))} if "alibi-batch" in flags else {}
    found |= {"sinks": _view("f32", (heads,))} if "sinks" in flags else {}
    found |= {"dropout_p": 0.1, "seed": _view("u32", (2,))} if "dropout" in flags else {}
    rope = next((flag for flag in flags if flag.startswith("rope")), None)
    if rope is not None:
        pairs = 16 if rope == "rope-part" else dim // 2
        tables = (batch, max(rows, keys), pairs) if rope == "rope-batch" else (max(rows, keys), pairs)
        kind, layout = "f16" if rope == "rope-f16" else "f32", ("columns",) if rope == "rope-columns" else ()
        found |= {name: _view(kind, tables, layout) for name in ("rope_cos", "rope_sin")}
        found["rope_interleaved"] = rope == "rope-interleaved"
    precision = next((flag for flag in flags if flag.startswith("precision-")), None)
    return found | ({"precision": precision.removeprefix("precision-")} if precision else {})


def _given_tiles(problem: Problem, target: Target) -> Any:
    """Tiles that a person gives, instead of the tables'."""
    from aule.tile.fragment.engine import fitted
    from aule.tile.fragment.shape import FragmentShape
    from aule.tile.simt.shape import SimtShape

    if "tile-fragment" in problem.flags:
        return fitted(FragmentShape(64, 32, 4, 1, False), target)
    return SimtShape(32, 32, 8, 16, 8, 8, True) if "tile-simt" in problem.flags else None


def _decode_call(problem: Problem) -> tuple[Any, Any]:
    """The problem of decoding, and its operands."""
    from aule.ops.decode.validate import decode_problem

    flags, dtype = problem.flags, problem.dtype
    (batch,), (heads, heads_kv) = problem.numbers("b", (1,)), problem.numbers("h", (4, 4))
    (keys,), (tokens,) = problem.numbers("n", (512,)), problem.numbers("t", (1,))
    dim, *more = problem.numbers("d", (64,))
    value_dim = more[0] if more else dim
    page = next((int(flag.removeprefix("page")) for flag in flags if flag.startswith("page")), 0)
    kind = next((flag for flag in flags if flag in ("i8", "e4m3")), dtype)
    layout = flags & {"columns", "odd"}
    options = _score_options(problem, (batch, heads, tokens, keys), dim)
    options |= {"causal": False} if "no-causal" in flags else {}
    options |= {} if "no-lens" in flags else {"context_lens": _view("i32", (batch,))}
    if "packed" in flags:  # a prompt among sequences of few tokens
        total = tokens + 3 * (batch - 1)
        q = _view(dtype, (total, heads, dim))
        options |= {"cu_seqlens_q": _view("i32", (batch + 1,)), "max_seqlen_q": tokens}
    else:
        q = _view(dtype, (batch, heads, tokens, dim), layout)
    leading: tuple[int, ...] = (batch, heads_kv, keys)
    if page:
        each = -(-keys // page)
        leading = (batch * each, heads_kv, page) if "hnd" in flags else (batch * each, page, heads_kv)
        options |= {"block_tables": _view("i32", (batch, each)), "layout": "HND" if "hnd" in flags else "NHD"}
    if kind != dtype:
        options |= {name: _view("f32", leading) for name in ("k_scale", "v_scale")}
    k, v = (_view(kind, (*leading, columns), layout) for columns in (dim, value_dim))
    if "latent" in flags:
        v, options = replace(k, shape=v.shape), options | {"latent": True}
    op = "flash_attention_paged" if page else "decode_attention"
    found: tuple[Any, Any] = decode_problem(op, q, k, v, **options)
    return found


def _append_views(problem: Problem) -> Views:
    flags, dtype = problem.flags, problem.dtype
    pages, page = 200_000 if "large" in flags else 20, 16
    (batch,), (heads,), (tokens,) = (problem.numbers(letter, (1,)) for letter in "bht")
    dims = problem.numbers("d", (64,))
    stored = next((flag for flag in flags if flag in ("i8", "e4m3")), dtype)
    layout = ("heads",) if "hnd" in flags else flags & {"odd"}
    found = {"places": _view("i32", (2, batch * tokens))}
    for name, dim in (("k", dims[0]), ("v", dims[-1])):
        if not dim:
            continue
        found[name] = _view(dtype, (batch, tokens, heads, dim), layout)
        found[f"{name}_cache"] = _view(stored, (pages, page, heads, dim), layout)
        if stored != dtype:
            found[f"{name}_scale"] = _view("f32", (pages, page, heads))
    if any(flag.startswith("rope") for flag in flags):
        found |= {name: _view("f32", (400, dims[0] // 2)) for name in ("cos", "sin")}
    return found


def _row_operands(problem: Problem) -> Views:
    """Operands of an op over rows."""
    flags, dtype = problem.flags, problem.dtype
    shape = tuple(map(int, problem.sizes.split()[1].split("x")))
    layout = flags & {"rows", "columns", "odd", "heads"}
    weights = "f32" if "weights-f32" in flags else dtype
    if problem.op == "layer_norm_linear":
        *rows, length, features = shape if len(shape) > 2 else (*shape, 64)
        found = {"x": _view(dtype, (*rows, length), layout), "weight": _view(dtype, (features, length))}
        if "bare" not in flags:
            found |= {name: _view(weights, (length,)) for name in ("weight_norm", "bias_norm")}
            found["bias"] = _view(weights, (features,))
        return found
    if problem.op == "cross_entropy":
        ids = "i32" if "ids-i32" in flags else "i64"
        return {"logits": _view(dtype, shape, layout), "target": _view(ids, shape[:-1])}
    if problem.op in ("swiglu", "geglu"):
        return {name: _view(dtype, shape, layout) for name in (("gate",) if "one" in flags else ("gate", "up"))}
    found = {"x": _view(dtype, shape, layout)}
    if problem.op.startswith("residual"):
        found["residual"] = _view(dtype, shape, layout)
    if "norm" in problem.op and "bare" not in flags:
        vectors = ("weight", "bias") if "layer_norm" in problem.op else ("weight",)
        found |= {name: _view(weights, shape[-1:]) for name in vectors}
    if "rope" in problem.op:
        pairs = shape[-1] // (4 if "part" in flags else 2)
        found |= {name: _view("f32", (shape[-2], pairs)) for name in ("cos", "sin")}
        ids = next((flag.removeprefix("ids-") for flag in flags if flag.startswith("ids")), None)
        found |= {"position_ids": _view(ids, (shape[0], 1, shape[-2]))} if ids else {}
    if problem.op == "softmax_dropout":
        found |= {"mask": _view("bool", shape[-2:])} if "mask-bool" in flags else {}
        found |= {"mask": _view("f32", shape[-1:])} if "mask-f32" in flags else {}
        found |= {"seed": _view("u32", (2,))} if "dropout" in flags else {}
    return found


def _row_options(problem: Problem) -> dict[str, Any]:
    flags = problem.flags
    found: dict[str, Any] = {name: True for name in ("interleaved", "inplace", "causal", "wide") if name in flags}
    found |= {"approximate": "tanh"} if "tanh" in flags else {}
    found |= {"dropout_p": 0.25} if "dropout" in flags else {}
    found |= {"scale": 0.3} if "scale" in flags else {}
    found |= {"label_smoothing": 0.1} if "smoothing" in flags else {}
    for name in flags & {"sum", "none"}:
        found["reduction"] = name
    return found


# -- hashes ------------------------------------------------------------------------------------------------------------

_rendered: dict[Any, Artifact] = {}


def render(launch: Launch, target: Target) -> Artifact:
    """The kernel of a launch in the target's language, made once, as `engine.programs` makes it."""
    key = (launch.config, target)
    if key not in _rendered:
        kernel = launch.build()
        verify(kernel)
        if target.backend != "cpu" and kernel.shared_bytes > target.max_shared_bytes:
            raise ValueError(f"{kernel.name} takes {kernel.shared_bytes} bytes of shared memory on {target.name}")
        _rendered[key] = registry.backend(target.backend).render(kernel, target)
    return _rendered[key]


def kernel_hash(artifact: Artifact) -> str:
    """Digest of a rendered kernel and of everything else that a driver is told."""
    params = [(p.name, p.kind, p.dtype, p.access, p.evict_last) for p in artifact.params]
    told = (
        artifact.language, artifact.entry, params, artifact.workgroup, artifact.shared_bytes, artifact.dynamic_shared,
        artifact.subgroup_size, artifact.uses_subgroups, artifact.dependent_launch, artifact.extensions,
    )  # fmt: skip
    return _digest(repr(told).encode() + artifact.code)


def plan_hash(plan: Plan, launch: Launch, artifact: Artifact) -> str:
    """Digest of a launch: its grid, its scalars and its memory in the order of the kernel's parameters. Memory that the
    plan asks for counts by its size and place in the plan, other memory by its name."""
    sizes = {name: ("workspace", size) for name, size in plan.workspace.items()}
    # "zeroed" and False are words of earlier plans: other ones would change every line of the list.
    sizes |= {name: ("zeroed", size) for name, size in plan.scratch.items()}
    order = list(sizes)
    told: list[Any] = [tuple(launch.grid), False]
    for p in artifact.params:
        if p.kind == "scalar":
            told.append(float(launch.scalars[p.name]) if p.dtype[0] == "f" else int(launch.scalars[p.name]))
        else:
            name = launch.memory(p.name)
            told.append((order.index(name), *sizes[name]) if name in sizes else name)
    return _digest(repr(told).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def lines_of(problem: Problem, where: str) -> list[str]:
    """The lines of a problem, one for each launch; ``where`` is a target's name, or a language for an object."""
    name = name_of(problem, where)
    try:
        target = _target(where)
        plan = ADAPTERS[problem.kind](problem, target)
        lines = []
        for place, launch in enumerate(plan.launches):
            artifact = render(launch, target)
            lines.append(f"{name}#{place} {kernel_hash(artifact)} {plan_hash(plan, launch, artifact)}")
        return lines
    except AuleError as error:
        return [f"{name}#0 {REFUSED} {type(error).__name__}"]
    except Exception as error:
        error.add_note(f"in {name}")
        raise


def _target(where: str) -> Target:
    from aule.codegen import target_for

    return TARGETS[where] if where in TARGETS else target_for(where)


PLACES = (*TARGETS, *LANGUAGES)
"""Targets, and languages for the public kernel objects."""


def listed(where: str) -> list[Problem]:
    """All problems of a target, or all objects in a language."""
    return problems(where) if where in TARGETS else objects(where)


def name_of(problem: Problem, where: str) -> str:
    """The name of a problem in the list."""
    return f"object/{problem.op}/{where}" if problem.kind == "object" else problem.name(where)


# -- command line ------------------------------------------------------------------------------------------------------


def _job(task: tuple[str, list[Problem]]) -> list[str]:
    where, some = task
    return [line for problem in some for line in lines_of(problem, where)]


def compute(only: str = "", processes: int = 1) -> list[str]:
    """All lines, sorted, of problems whose names contain a text."""
    tasks = []
    for where in PLACES:
        by_op: dict[str, list[Problem]] = {}
        for problem in listed(where):
            if only in name_of(problem, where):
                by_op.setdefault(f"{problem.kind} {problem.op}", []).append(problem)
        tasks += [(where, some) for some in by_op.values()]
    tasks.sort(key=lambda task: -len(task[1]))
    if processes == 1:
        found = [_job(task) for task in tasks]
    else:
        with multiprocessing.Pool(processes) as pool:
            found = list(pool.imap_unordered(_job, tasks))
    return sorted(line for lines in found for line in lines)


def known(only: str = "") -> list[str]:
    """The lines of the committed list whose names contain a text."""
    return [line for line in LIST.read_text().splitlines() if only in line.split("#")[0]]


def differences(found: Iterable[str], expected: Iterable[str]) -> list[str]:
    """What changed, was added and was removed, a name to a line."""
    new, old = ({line.split()[0]: line.split()[1:] for line in lines} for lines in (found, expected))
    said = []
    for name in sorted(new.keys() | old.keys()):
        if name not in old:
            said.append(f"added    {name}")
        elif name not in new:
            said.append(f"removed  {name}")
        elif new[name] != old[name]:
            what = [kind for kind, a, b in zip(("kernel", "launch"), new[name], old[name], strict=True) if a != b]
            said.append(f"changed  {name} ({' and '.join(what)})")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the list; exit code 1 if it differs")
    parser.add_argument("--write", action="store_true", help="write the list")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="problems whose names contain it")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="processes (default 2)")
    chosen = parser.parse_args()
    found = compute(chosen.only, chosen.j)
    if chosen.check:
        said = differences(found, known(chosen.only))
        print("\n".join(said) if said else f"{len(found)} launches as they were")
        return int(bool(said))
    if chosen.write:
        rest = [line for line in known() if chosen.only not in line.split("#")[0]] if chosen.only else []
        LIST.write_text("\n".join(sorted({*rest, *found})) + "\n")
    else:
        print("\n".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
