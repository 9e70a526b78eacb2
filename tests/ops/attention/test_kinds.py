"""One small problem for each kind of kernel, for tools that watch every access, such as compute-sanitizer.

`tools/check_device.py` runs those of CUDA under it. Results are compared with the reference, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import decode_cases
import devices
import fused_cases
import grid
import kvcache_cases
import numpy as np
import pytest
import test_decode
import test_fused
import test_kvcache
import test_linear_devices
from tuned import replace_records

from aule.engine import attention
from aule.engine.attention import backward_on_host, forward_on_host, prepare_forward
from aule.engine.memory import host_view
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.ops.attention.validate import attention_problem
from aule.ops.softmax.dropout import seed_words
from aule.runtime.base import Device
from aule.target import WARPGROUP_UNITS
from aule.tile.warpgroup.engine import has_warpgroups

pytestmark = pytest.mark.device


@dataclass(frozen=True)
class Kind:
    """Attention with its gradients. ``units`` are those that an sm_90 multiplies by, ``given`` the arrays beside q, k
    and v; the lengths end inside of tiles."""

    units: str
    dtype: str
    head_dim: int
    given: tuple[str, ...] = ()
    lengths: tuple[int, int] = (150, 210)
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        named = [name if value is True else f"{name}={value}" for name, value in self.options.items()]
        return "-".join([self.units, self.dtype, f"d{self.head_dim}", *self.given, *named]).replace(" ", "")


CAUSAL = {"causal": True}
FIXED = {"causal": True, "deterministic": True}
ATTENTION = [
    Kind("warpgroups", "bf16", 64, options=CAUSAL),
    Kind("warpgroups", "f16", 128),
    Kind("warpgroups", "bf16", 256, options=CAUSAL),
    Kind("warpgroups", "bf16", 64, options=FIXED),
    Kind("warpgroups", "f16", 128, options=FIXED),
    Kind("warpgroups", "f16", 64, ("mask",)),
    Kind("warpgroups", "bf16", 128, ("additive",), options=CAUSAL),
    Kind("warpgroups", "bf16", 64, ("bias",)),
    Kind("warpgroups", "bf16", 128, ("rope",), options=CAUSAL),
    Kind("warpgroups", "f16", 64, ("seed",), options={"dropout_p": 0.25}),
    Kind("warpgroups", "bf16", 128, ("alibi_slopes", "sinks"), options={"window": (40, 9), "softcap": 3.0}),
    Kind("subgroups", "bf16", 64, options=CAUSAL),
    Kind("subgroups", "f16", 128, ("mask", "bias", "sinks")),
    Kind("subgroups", "bf16", 64, ("rope",), options=FIXED),
    Kind("subgroups", "bf16", 256, ("seed",), options={"dropout_p": 0.25}),
    Kind("none", "f32", 64, options=CAUSAL),
    Kind("none", "f32", 128, options=FIXED),
    Kind("none", "f32", 64, ("mask", "bias", "rope", "seed"), options={"dropout_p": 0.25}),
]
ROWS = {case.op: case for case in fused_cases.CASES if case.dtype == "bf16"} | {
    "rms_norm over clusters": fused_cases.Case("rms_norm", (37, 8192), "bf16"),
    "rms_norm of long rows": next(case for case in fused_cases.CASES if case.shape == (3, 20001)),
    "swiglu of one matrix": next(case for case in fused_cases.CASES if case.without == ("up",)),
    "softmax of a mask": next(case for case in fused_cases.CASES if case.mask == "bool"),
}
DECODING = {case.id: case for case in decode_cases.cases() if case.id in ("pages", "int8", "fp8", "parts", "prefill")}
LINEAR = {
    "linear on warpgroups": ("bfloat16", (260, 128), 264),
    "linear on subgroups": ("float16", (33, 36), 130),
    "linear on none": ("float32", (2, 35, 50), 29),
}
CACHES = {str(case): case for case in kvcache_cases.CASES if case.quantize or case.heads_first}
KINDS: dict[str, Any] = {str(kind): kind for kind in ATTENTION} | ROWS | DECODING | LINEAR | CACHES


@pytest.fixture(params=["cuda", "vulkan"], scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    return devices.need(request.param)


@pytest.mark.parametrize("name", KINDS)
def test_kind(device: Device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.spare(device, list(KINDS).index(name), parts=20)
    kind = KINDS[name]
    if isinstance(kind, Kind):
        judge(kind, device, monkeypatch)
    elif isinstance(kind, fused_cases.Case):
        test_fused.check(kind, device)
    elif isinstance(kind, decode_cases.Case):
        test_decode.test_cases(device, kind)
    elif isinstance(kind, kvcache_cases.Case):
        test_kvcache.test_append(device, kind)
    else:  # as if it had few multiprocessors, which the tiles of warpgroups shall fill
        monkeypatch.setattr(device, "target", replace(device.target, compute_units=4))
        test_linear_devices.judge(device, *kind)


def arrays_of(kind: Kind) -> dict[str, np.ndarray]:
    """By the names of `attention_problem`."""
    rng = np.random.default_rng(kind.head_dim)
    (seq_q, seq_kv), dtype = kind.lengths, grid.NUMPY_DTYPES[kind.dtype]
    shapes = ((1, 2, seq_q, kind.head_dim), (1, 1, seq_kv, kind.head_dim), (1, 1, seq_kv, kind.head_dim))
    made = {name: rng.standard_normal(shape).astype(dtype) for name, shape in zip("qkv", shapes, strict=True)}
    angles = rng.uniform(-3.0, 3.0, (max(kind.lengths), kind.head_dim // 2))
    additive = np.where(rng.random((1, 1, seq_q, seq_kv)) < 0.3, -np.inf, rng.standard_normal((1, 1, seq_q, seq_kv)))
    further = {
        "mask": {"mask": rng.random((1, 1, seq_q, seq_kv)) < 0.7},
        "additive": {"mask": additive.astype(dtype)},
        "bias": {"bias": rng.standard_normal((1, 2, seq_q, seq_kv)).astype(np.float32)},
        "alibi_slopes": {"alibi_slopes": rng.uniform(0.01, 0.5, 2).astype(np.float32)},
        "sinks": {"sinks": rng.standard_normal(2).astype(np.float32)},
        "rope": {"rope_cos": np.cos(angles).astype(np.float32), "rope_sin": np.sin(angles).astype(np.float32)},
        "seed": {"seed": seed_words(12345)},
    }
    return made | {name: array for given in kind.given for name, array in further[given].items()}


def judge(kind: Kind, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = has_warpgroups(device.target, "bf16")
    if kind.units == "subgroups":
        fewer = tuple(unit for unit in device.target.matrix_units if unit not in WARPGROUP_UNITS)
        monkeypatch.setattr(device, "target", replace(device.target, matrix_units=fewer))
    # So that a small mask has the kernels of large ones.
    passes = ("forward", "backward")
    replace_records(monkeypatch, {f"attention.{name}.mask_prepass_scores": [{"value": 0}] for name in passes})
    launches: list[Any] = []
    monkeypatch.setattr(
        attention, "prepare_forward", lambda *args: launches.append(prepare_forward(*args)) or launches[-1]
    )
    arrays = arrays_of(kind)
    problem, operands = attention_problem(
        **{name: grid.view_of(array) for name, array in arrays.items()}, **kind.options, return_lse=True
    )
    out, lse = forward_on_host(problem, operands, device, exact_lse=True)
    names = {"alibi_slopes": "alibi", "rope_cos": "cos", "rope_sin": "sin"}
    known = {names.get(name, name): array for name, array in arrays.items()}
    verdict = compare(problem, out, lse, expect(problem, **known))
    assert verdict and lse is not None, verdict.message
    if hopper:
        config = launches[0].plan.steps[-1].config
        matrices = isinstance(config, FragmentConfig)
        assert kind.units == ("none" if not matrices else "warpgroups" if config.shape.warpgroups else "subgroups")
    dout = np.random.default_rng(1).standard_normal(problem.out_shape).astype(arrays["q"].dtype)
    stored = host_view(problem.dtype, dout.view(out.dtype))
    found = dict(zip(("dq", "dk", "dv"), backward_on_host(problem, operands, device, out, lse, stored), strict=True))
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **known))
    assert not wrong, wrong
