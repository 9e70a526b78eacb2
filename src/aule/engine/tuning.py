"""Tiles measured on this machine: `aule tune` finds and keeps them, the forward pass takes them.

They are kept with the cache of kernels, by device, driver, type and head dimensions, and used where a call has no mask,
bias or strided rows, for which they were measured. What cannot be read is as if it were not there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from aule import settings, store
from aule.engine.probe import find_layout
from aule.engine.programs import program
from aule.errors import AuleError, InvalidArgumentError
from aule.ops.attention.forward import build_forward
from aule.ops.attention.plan import plan_forward
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.tiles import ENTRIES, OWN, choose_fragments, choose_shape, choose_warpgroups
from aule.runtime.base import Device
from aule.target import Target
from aule.tile.arrangement import SIZE, arrange
from aule.tile.fragment import fitted, multiplies
from aule.tile.fragment_shape import FragmentShape
from aule.tile.simt_shape import SimtShape, uses_subgroups
from aule.tile.warpgroup import has_warpgroups
from aule.view import TensorView

Shape = SimtShape | FragmentShape
_KINDS: dict[str, type[Shape]] = {"simt": SimtShape, "fragment": FragmentShape}
_GAIN = 1.03
"""How much faster than the table's choice tiles must be to be kept."""
_MAX_SUMS = 208
"""Registers of S, O and Q that one lane may hold on matrix units."""


@dataclass(frozen=True)
class Measured:
    """One way to cut attention up, and how it went: TFLOPS, or why there are none."""

    shape: Shape
    tflops: float
    refused: str = ""


# -- what was found ----------------------------------------------------------------------------------------------------


def tuned_shape(device: Device, problem: AttentionProblem) -> Shape | None:
    """The tiles that `tune` has kept for a problem's type and head dimensions; None when there are none."""
    known: dict[str, Shape] | None = vars(device).get("_tuned")
    if known is None:
        known = vars(device)["_tuned"] = _read(device.target)
    return known.get(_key(problem.dtype, problem.head_dim, problem.value_dim)) if known else None


def _key(dtype: str, head_dim: int, value_dim: int) -> str:
    return f"{dtype} {head_dim} {value_dim}"


def _name(target: Target) -> str:
    about = f"{target.backend} {target.name} {target.driver} {target.arch}"
    return f"tuned/{hashlib.sha256(about.encode()).hexdigest()[:32]}.json"


def _read(target: Target) -> dict[str, Shape]:
    body = store.read(_name(target))
    if body is None:
        return {}
    try:
        return {key: _KINDS[kind](**numbers) for key, (kind, numbers) in json.loads(body).items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _keep(device: Device, key: str, shape: Shape | None) -> None:
    known = _read(device.target)
    known.pop(key, None)
    if shape is not None:
        known[key] = shape
    kinds = {type_: kind for kind, type_ in _KINDS.items()}
    body = {name: (kinds[type(shape)], asdict(shape)) for name, shape in known.items()}
    store.write(_name(device.target), json.dumps(body).encode())
    vars(device)["_tuned"] = known


# -- finding it --------------------------------------------------------------------------------------------------------


def candidates(target: Target, dtype: str, head_dim: int) -> list[Shape]:
    """Ways to cut attention up on a device, the table's own first."""
    table = choose_warpgroups(target, dtype, head_dim, head_dim)
    table = table or choose_fragments(target, dtype, head_dim, head_dim, False, False)
    shapes: list[Shape] = [table or choose_shape(target, head_dim, head_dim, dtype)]
    if multiplies(target, dtype):
        shapes += _fragments(target, head_dim)
        if has_warpgroups(target, dtype):
            shapes += _warpgroups(head_dim)
    else:
        own = (*OWN.get(target.backend, ()), *OWN.get(target.vendor, ()))
        shapes += [entry.shape for entry in (*own, *ENTRIES)]
    fitting = [shape for shape in shapes if _shared(shape, target, head_dim) <= target.max_shared_bytes]
    return [shape for shape in dict.fromkeys(fitting) if shape.threads <= target.max_threads]


def _fragments(target: Target, head_dim: int) -> Iterator[FragmentShape]:
    columns = -(-head_dim // SIZE) * SIZE
    ways = itertools.product(((128, 4), (64, 4), (128, 8), (64, 2)), (16, 32, 48, 64, 96), (1, 2), (True, False))
    for (block_q, subgroups), block_kv, stages, resident in ways:
        shape = fitted(FragmentShape(block_q, block_kv, subgroups, stages, resident), target)
        held = shape.rows * (block_kv + columns + (columns // 2 if resident else 0)) // shape.lanes
        if held <= _MAX_SUMS and shape.rows % arrange(target).height == 0:
            yield shape


def _warpgroups(head_dim: int) -> Iterator[FragmentShape]:
    columns = -(-head_dim // SIZE) * SIZE
    for subgroups, registers in ((4, 255), (8, 255), (12, 168)):
        for block_kv in (32, 48, 64, 96, 128, 160):
            # O, S and P, and what else a thread needs.
            if (columns + block_kv) // 2 + block_kv // 4 <= registers - 40:
                yield FragmentShape(SIZE * subgroups, block_kv, subgroups, 2, False, registers, warpgroups=True)


def _shared(shape: Shape, target: Target, head_dim: int) -> int:
    if isinstance(shape, FragmentShape):
        return shape.shared_bytes(head_dim, head_dim)
    return shape.shared_bytes(head_dim, head_dim, uses_subgroups(target, shape))


def tune(
    device: Device, dtype: str, head_dim: int, seq_len: int = 2048, causal: bool = False, seconds: float = 0.2
) -> tuple[list[Measured], Shape | None]:
    """Measure the ways to cut attention up on a device, and keep the fastest where it beats the table's.

    Parameters
    ----------
    seconds : float
        Launches go on for this long before any of one way is timed, so that the clocks are up.

    Returns
    -------
    list of Measured
        All of them, the table's own first.
    shape : SimtShape or FragmentShape or None
        What was kept; None when nothing is 3% faster than the table's choice.

    Raises
    ------
    InvalidArgumentError
        The device has no tiles to choose, or nothing could be kept because the disk cache is turned off.
    """
    if device.target.backend == "cpu":
        raise InvalidArgumentError(
            "[tune] expected a GPU, got the CPU, whose blocks follow from its registers and caches; name another "
            "device with --backend"
        )
    if not settings.disk_cache():
        raise InvalidArgumentError(
            "[tune] expected a disk cache to keep the result in, got AULE_DISK_CACHE=0; turn it on"
        )
    if dtype != "f32":
        find_layout(device)
    with _Bench(device, dtype, head_dim, seq_len, causal) as bench:
        measured = [bench.measure(shape, seconds) for shape in candidates(device.target, dtype, head_dim)]
    own = measured[0].tflops
    best = max(measured, key=lambda m: m.tflops)
    kept = best.shape if best.tflops > _GAIN * own else None
    _keep(device, _key(dtype, head_dim, head_dim), kept)
    return measured, kept


class _Bench:
    """One problem on the device, with heads enough to fill it, and the result that all ways must give."""

    def __init__(self, device: Device, dtype: str, head_dim: int, seq_len: int, causal: bool) -> None:
        heads = 2 if device.target.software else 64
        self.device = device
        self.problem = AttentionProblem(
            1, heads, heads, seq_len, seq_len, head_dim, head_dim, dtype, head_dim**-0.5, causal=causal
        )
        self.shape = (1, heads, seq_len, head_dim)
        self.memory: dict[str, Any] = {}
        self.expected: Any = None

    def __enter__(self) -> _Bench:
        rng = np.random.default_rng(0)
        for name in "qkvo":
            x = rng.standard_normal(self.shape, np.float32)
            if self.problem.dtype == "f16":
                x = x.astype(np.float16)
            elif self.problem.dtype == "bf16":
                x = (x.view(np.uint32) >> 16).astype(np.uint16)
            self.memory[name] = self.device.alloc(x.nbytes)
            self.device.upload(self.memory[name], x)
        self.stored = x.dtype
        return self

    def __exit__(self, *exc: object) -> None:
        for allocation in self.memory.values():
            self.device.free(allocation)

    def measure(self, shape: Shape, seconds: float) -> Measured:
        device = self.device
        strides = tuple(int(np.prod(self.shape[i + 1 :])) for i in range(4))
        views = {n: TensorView(self.problem.dtype, self.shape, strides, "device", m) for n, m in self.memory.items()}
        try:
            plan = plan_forward(self.problem, views, device.target, shape=shape)
            loaded = program(device, plan.config, lambda: build_forward(plan.config, device.target))
            values = {f"{name}_ptr": m for name, m in self.memory.items()} | plan.scalars
            args = [values[p.name] for p in loaded.artifact.params]
            start = time.perf_counter()
            device.time_launch(loaded, plan.grid, args)
            while time.perf_counter() - start < seconds:
                device.time_launch(loaded, plan.grid, args)
            times = [device.time_launch(loaded, plan.grid, args) for _ in range(5)]
            wrong = self._differs()
        except AuleError as error:
            return Measured(shape, 0.0, error.message)
        if wrong:
            return Measured(shape, 0.0, "another result than the table's tiles give")
        return Measured(shape, self.problem.flops / float(np.median(times)) / 1e12)

    def _differs(self) -> bool:
        out = np.empty(self.shape, self.stored)
        self.device.download(self.memory["o"], out)
        if self.problem.dtype == "bf16":
            out = (out.astype(np.uint32) << 16).view(np.float32)
        found = out.astype(np.float32)
        if self.expected is None:
            self.expected = found
        limit = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}[self.problem.dtype] * float(np.abs(self.expected).max())
        return not bool(np.abs(found - self.expected).max() <= limit)
