"""Cases of ``aule bench`` on torch tensors, on the CPU, CUDA or ROCm, beside PyTorch's own functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import aule
from aule.cli._measure import Attention, Call, Case, Result, on_clock, race
from aule.errors import AuleError

VERSION: str = torch.__version__


def has_gpu(backend: str) -> bool:
    """Whether PyTorch's build has tensors of CUDA, or of ROCm for ``"hip"``, on this machine."""
    built = torch.version.hip if backend == "hip" else torch.version.cuda
    return built is not None and torch.cuda.is_available()


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FlashAttention": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_FLOOR = {"float32": 1e-5, "bfloat16": 8e-3}
"""Errors, relative to the largest value, below which a result counts as right whatever PyTorch's is."""


class TorchBench:
    """Measures on torch tensors of a device.

    Parameters
    ----------
    device : str
        ``"cpu"`` or ``"cuda:0"``.
    quick : bool
        Fewer and smaller cases.
    """

    def __init__(self, device: str, quick: bool, rounds: int) -> None:
        self._device = torch.device(device)
        self._gpu = self._device.type == "cuda"
        self._quick, self._rounds = quick, rounds
        self._generator = torch.Generator(device).manual_seed(0)

    def cases(self) -> Iterator[tuple[str, Callable[[], Result]]]:
        """Labels, and functions that measure."""
        for sizes in self._attention():
            yield f"forward {sizes.name}", partial(self._forward, sizes, "forward")
            yield f"backward {sizes.name}", partial(self._backward, sizes)
        for sizes in self._decode():
            yield f"decode {sizes.name}", partial(self._forward, sizes, "decode")
        for dtype in ("bfloat16",) if self._gpu else ("float32", "bfloat16"):
            for name in _ROWS:
                yield f"rows {name}", partial(self._rows, name, dtype)

    def _attention(self) -> Iterator[Attention]:
        if self._gpu:
            for dim in (64, 128):
                for seq in (2048,) if self._quick else (512, 2048, 8192):
                    for causal in (False, True):
                        heads = 2048 // dim
                        yield Attention(16384 // seq, heads, heads, seq, seq, dim, causal, "bfloat16")
            yield Attention(4, 32, 8, 4096, 4096, 128, True, "bfloat16")
            return
        for dtype in _DTYPES:
            for seq in (1024,) if self._quick else (512, 2048):
                for causal in (False, True):
                    yield Attention(1, 8, 8, seq, seq, 64, causal, dtype)
            yield Attention(1, 8, 2, 1024, 1024, 128, True, dtype)

    def _decode(self) -> Iterator[Attention]:
        keys = ((32, 4096), (1, 32768)) if self._gpu else ((1, 4096), (8, 4096))
        for batch, length in keys[: 1 if self._quick else None]:
            yield Attention(batch, 32, 8, 1, length, 128, False, "bfloat16" if self._gpu else "float32")

    # -- attention -----------------------------------------------------------------------------------------------------

    def _forward(self, sizes: Attention, group: str) -> Result:
        q, k, v = self._inputs(sizes)
        case = sizes.case(group)
        if group == "decode":  # reading K and V is what takes time
            case = Case(case.name, group, case.dtype, float(k.nbytes + v.nbytes), "GB/s")

        def ours() -> Tensor:
            out: Tensor = aule.flash_attention(q, k, v, causal=sizes.causal)
            return out

        peers = self._peers(lambda: _sdpa(q, k, v, sizes))
        with torch.no_grad():
            self._check(case, [ours()], [next(iter(peers.values()))()], [_exact((q, k, v), sizes)])
            return race(case, ours, peers, self._rounds, self._timed)

    def _backward(self, sizes: Attention) -> Result:
        q, k, v = (x.requires_grad_() for x in self._inputs(sizes))
        case = sizes.case("backward")
        dout = self._random(q.shape, sizes.dtype)
        out = aule.flash_attention(q, k, v, causal=sizes.causal)

        def ours() -> Any:
            return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        peers: dict[str, Call] = {}
        for name, theirs in self._outputs(lambda: _sdpa(q, k, v, sizes)).items():
            peers[name] = partial(torch.autograd.grad, theirs, (q, k, v), dout, retain_graph=True)
        exact = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
        wanted = torch.autograd.grad(_exact(exact, sizes), exact, dout.double())
        self._check(case, ours(), next(iter(peers.values()))(), wanted)
        return race(case, ours, peers, self._rounds, self._timed)

    def _inputs(self, sizes: Attention) -> tuple[Tensor, Tensor, Tensor]:
        q = self._random((sizes.batch, sizes.heads, sizes.seq_q, sizes.dim), sizes.dtype)
        k, v = (self._random((sizes.batch, sizes.heads_kv, sizes.seq_kv, sizes.dim), sizes.dtype) for _ in "kv")
        return q, k, v

    def _outputs(self, call: Call) -> dict[str, Tensor]:
        """The result of each of PyTorch's kernels that serves a call."""
        if not self._gpu:
            return {"PyTorch": call()}
        found = {}
        for name, backend in _BACKENDS.items():
            try:
                with sdpa_kernel(backend), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # PyTorch says at length why a kernel does not serve a call
                    found[name] = call()
            except RuntimeError:  # this GPU, dtype or shape has no such kernel
                continue
        return found or {"PyTorch": call()}

    def _peers(self, call: Call) -> dict[str, Call]:
        if not self._gpu:
            return {"PyTorch": call}

        def under(backend: SDPBackend) -> Tensor:
            with sdpa_kernel(backend):
                out: Tensor = call()
            return out

        served = self._outputs(call)
        return {name: partial(under, _BACKENDS[name]) for name in served if name in _BACKENDS} or {"PyTorch": call}

    # -- row operations ------------------------------------------------------------------------------------------------

    def _rows(self, name: str, dtype: str) -> Result:
        columns = 4096
        rows = 16384 if self._gpu else (512 if self._quick else 2048)
        x, y = (self._random((rows, columns), dtype) for _ in "xy")
        weight = self._random((columns,), dtype)
        ours, theirs, tensors = _ROWS[name]
        moved = float(tensors * x.nbytes)
        case = Case(f"{name} [{rows}, {columns}]", "rows", dtype, moved, "GB/s")
        with torch.no_grad():
            exact = theirs(x.double(), y.double(), weight.double())
            self._check(case, [ours(x, y, weight)], [theirs(x, y, weight)], [exact])
            peers: dict[str, Call] = {"PyTorch": lambda: theirs(x, y, weight)}
            return race(case, lambda: ours(x, y, weight), peers, self._rounds, self._timed)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _random(self, shape: Any, dtype: str) -> Tensor:
        return torch.randn(shape, device=self._device, generator=self._generator).to(_DTYPES[dtype])

    def _check(self, case: Case, ours: Any, peers: Any, exact: Any) -> None:
        """Refuse to time a result whose error is more than twice that of PyTorch's."""
        for mine, theirs, wanted in zip(ours, peers, exact, strict=True):
            size = wanted.abs().max()
            error, allowed = (float((x.double() - wanted).abs().max() / size) for x in (mine, theirs))
            allowed = max(2 * allowed, _FLOOR[case.dtype])
            if not error <= allowed:
                raise AuleError(
                    "AULE_ERROR_WRONG_RESULT",
                    f"[bench] expected an error of at most {allowed:.1e} for {case.group} {case.name}, got "
                    f"{error:.1e}; run `aule check`, and report this",
                )

    def _timed(self, call: Call, count: int) -> float:
        if not self._gpu:
            return on_clock(call, count)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def _sdpa(q: Tensor, k: Tensor, v: Tensor, sizes: Attention) -> Tensor:
    gqa = sizes.heads != sizes.heads_kv
    return F.scaled_dot_product_attention(q, k, v, is_causal=sizes.causal, enable_gqa=gqa)


def _exact(inputs: tuple[Tensor, ...], sizes: Attention) -> Tensor:
    """PyTorch's result in float64, computed head by head to save memory."""
    q, k, v = (x.double() for x in inputs)
    group = sizes.heads // sizes.heads_kv
    with sdpa_kernel(SDPBackend.MATH):
        heads = [
            F.scaled_dot_product_attention(
                q[:, h : h + 1], k[:, h // group, None], v[:, h // group, None], is_causal=sizes.causal
            )
            for h in range(sizes.heads)
        ]
    return torch.cat(heads, 1)


_ROWS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "rms_norm": (lambda x, y, w: aule.rms_norm(x, w), lambda x, y, w: F.rms_norm(x, w.shape, w, 1e-6), 2),
    "layer_norm": (lambda x, y, w: aule.layer_norm(x, w), lambda x, y, w: F.layer_norm(x, w.shape, w), 2),
    "swiglu": (lambda x, y, w: aule.swiglu(x, y), lambda x, y, w: F.silu(x) * y, 3),
    "softmax": (lambda x, y, w: aule.softmax_dropout(x), lambda x, y, w: F.softmax(x, -1), 2),
}
"""For each row operation aule's call, PyTorch's, and how many tensors of the input's size are read or written."""
