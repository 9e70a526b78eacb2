"""Cases of ``aule bench`` on memory of any device, without PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.api.context import Aule, Tensor
from aule.api.decode import decode_attention
from aule.api.row_ops import layer_norm, rms_norm, softmax_dropout, swiglu
from aule.backends import registry
from aule.cli._measure import Attention, Call, Case, Result, on_clock, race
from aule.engine.decode import prepare_decode
from aule.engine.row_ops import prepare_row_op
from aule.engine.run import PreparedCall
from aule.errors import AuleError
from aule.ops.catalogue import CATALOGUE
from aule.ops.decode.plan.decode import decode_views
from aule.ops.decode.validate import decode_problem
from aule.view import TensorView

Array = npt.NDArray[Any]

_DTYPES = ("float32", "float16")
_ALLOWED = {"float32": 2e-5, "float16": 4e-3}
"""Errors, relative to the largest value: some roundings of it."""
_ROWS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "rms_norm": (rms_norm, ("x", "weight")),
    "layer_norm": (layer_norm, ("x", "weight", "bias")),
    "swiglu": (swiglu, ("gate", "up")),
    "softmax_dropout": (softmax_dropout, ("x",)),
}
"""Row operations: the public function, which computes the expected result, and its operands."""
_COLUMNS = 4096


class DeviceBench:
    """Measures on memory of a device.

    Parameters
    ----------
    device : str
        As ``backend=`` takes it.
    quick : bool
        Fewer cases.
    """

    def __init__(self, device: str, quick: bool, rounds: int) -> None:
        self._context, self._name = Aule(device), device
        self._quick, self._rounds = quick, rounds
        self._slow = self._context.get_device_info()["software"]

    def cases(self) -> Iterator[tuple[str, Callable[[], Result]]]:
        """Labels, and functions that measure."""
        for sizes in self._attention():
            yield f"forward {sizes.name}", partial(self._measure, sizes, "forward")
            yield f"backward {sizes.name}", partial(self._measure, sizes, "backward")
        for sizes in self._decode():
            yield f"decode {sizes.name}", partial(self._decoding, sizes)
        for name, dtype, rows in self._row_operations():
            yield f"rows {name}", partial(self._rows, name, dtype, rows)

    def _attention(self) -> Iterator[Attention]:
        seq = 256 if self._slow else 2048
        for dtype in _DTYPES:
            for dim in (64,) if self._quick else (64, 128):
                for causal in (False, True):
                    yield Attention(1, 2 if self._slow else 16, 2 if self._slow else 16, seq, seq, dim, causal, dtype)

    def _decode(self) -> Iterator[Attention]:
        heads, keys = (4, 512) if self._slow else (32, 4096)
        for dtype in _DTYPES:
            yield Attention(1, heads, heads // 4, 1, keys, 128, False, dtype)

    def _row_operations(self) -> Iterator[tuple[str, str, int]]:
        for dtype in _DTYPES:
            for name in _ROWS:
                yield name, dtype, 128 if self._slow else 8192

    # -- cases ---------------------------------------------------------------------------------------------------------

    def _measure(self, sizes: Attention, group: str) -> Result:
        gpu, shape = self._context, (sizes.batch, sizes.heads, sizes.seq_q, sizes.dim)
        arrays = [_random(shape, sizes.dtype, seed) for seed in range(4)]
        q, k, v, dout = map(self._uploaded, arrays)
        out, lse = gpu.tensor(shape, sizes.dtype), gpu.tensor(shape[:3])
        gpu.attention_forward_with_lse(q, k, v, out, lse, causal=sizes.causal)
        ours = partial(gpu.attention_gpu, q, k, v, out, causal=sizes.causal)
        results = [out]
        if group == "backward":
            results = [gpu.tensor(shape, sizes.dtype) for _ in "qkv"]
            ours = partial(gpu.attention_backward, q, k, v, out, lse, dout, *results, causal=sizes.causal)
        ours()
        expected = _attention_of_one_head([x[-1, -1].astype(np.float64) for x in arrays], sizes.causal)
        found = [tensor.download()[-1, -1] for tensor in results]
        _check(sizes.case(group), found, expected[1:] if group == "backward" else expected[:1])
        return race(sizes.case(group), ours, {}, self._rounds, self._timed)

    def _decoding(self, sizes: Attention) -> Result:
        shapes = {
            "q": (sizes.batch, sizes.heads, 1, sizes.dim),
            "k": (sizes.batch, sizes.heads_kv, sizes.seq_kv, sizes.dim),
            "v": (sizes.batch, sizes.heads_kv, sizes.seq_kv, sizes.dim),
        }
        arrays = {name: _random(shape, sizes.dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}
        tensors = {name: self._uploaded(array) for name, array in arrays.items()}
        problem, operands = decode_problem("decode_attention", *(x.view() for x in tensors.values()))
        out = self._context.tensor(problem.out_shape, sizes.dtype)
        views = decode_views(operands, out.view())
        prepared = prepare_decode("decode_attention", problem, views, self._device())
        ours = _on_memory(prepared, views)
        ours()
        expected = decode_attention(*(x.astype(np.float64) for x in arrays.values()), backend="numpy")
        # Reading K and V is what takes time.
        moved = float(arrays["k"].nbytes + arrays["v"].nbytes)
        case = Case(sizes.name, "decode", sizes.dtype, moved, "GB/s")
        _check(case, [out.download()], [expected])
        return race(case, ours, {}, self._rounds, self._timed)

    def _rows(self, name: str, dtype: str, rows: int) -> Result:
        function, operands = _ROWS[name]
        shapes = [(_COLUMNS,) if each in ("weight", "bias") else (rows, _COLUMNS) for each in operands]
        arrays = [_random(shape, dtype, seed) for seed, shape in enumerate(shapes)]
        tensors = [self._uploaded(array) for array in arrays]
        spec = CATALOGUE[name]
        options = {option.name: option.default for option in spec.options}
        call = spec.call({each: x.view() for each, x in zip(operands, tensors, strict=True)}, options)
        (result,) = call.outputs
        out = self._context.tensor((rows, _COLUMNS), dtype)
        views = {**call.views, result: out.view()}
        ours = _on_memory(prepare_row_op(spec, call, views, self._device()), views)
        ours()
        expected = function(*(x.astype(np.float64) for x in arrays), backend="numpy")
        moved = float(arrays[0].nbytes * (1 + sum(x.shape == arrays[0].shape for x in arrays)))
        case = Case(f"{name.removesuffix('_dropout')} [{rows}, {_COLUMNS}]", "rows", dtype, moved, "GB/s")
        _check(case, [out.download()], [expected])
        return race(case, ours, {}, self._rounds, self._timed)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _device(self) -> Any:
        return registry.find(self._name)

    def _uploaded(self, array: Array) -> Tensor:
        return self._context.tensor(array.shape, array.dtype.name).upload(array)

    def _timed(self, call: Call, count: int) -> float:
        self._context.synchronize()

        def finished() -> None:
            for _ in range(count):
                call()
            self._context.synchronize()

        return on_clock(finished, 1)


def _random(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype)


def _on_memory(prepared: PreparedCall, views: dict[str, TensorView]) -> Call:
    return partial(prepared.run, {name: view.storage for name, view in views.items()})


def _attention_of_one_head(arrays: list[Array], causal: bool) -> list[Array]:
    """The output and the gradients of q, k and v in float64, from q, k, v and the gradient of the output."""
    q, k, v, dout = arrays
    scale = 1 / math.sqrt(q.shape[1])
    scores = q @ k.T * scale
    if causal:
        scores = np.where(np.tri(*scores.shape) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights @ v
    dscores = weights * (dout @ v.T - (dout * out).sum(-1, keepdims=True)) * scale
    return [out, dscores @ k, dscores.T @ q, weights.T @ dout]


def _check(case: Case, found: Sequence[Array], expected: Sequence[Array]) -> None:
    """Refuse to time a wrong result."""
    for mine, wanted in zip(found, expected, strict=True):
        error = float(np.abs(mine - wanted).max() / np.abs(wanted).max())
        if not error <= _ALLOWED[case.dtype]:
            raise AuleError(
                "AULE_ERROR_WRONG_RESULT",
                f"[bench] expected an error of at most {_ALLOWED[case.dtype]:.1e} for {case.group} {case.name}, got "
                f"{error:.1e}; run `aule check`, and report this",
            )
