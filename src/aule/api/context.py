"""Aule: one device, and tensors that live on it until the context is closed."""

from __future__ import annotations

import contextlib
import math
import operator
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from aule import settings
from aule.api.names import unknown_option
from aule.backends import registry
from aule.dtypes import KERNEL_NAMES, dtype_name, either, shown, usual_name
from aule.engine.attention import attention_views, forward_on_device, gradients_on_device
from aule.engine.memory import STORED, reports_shortage
from aule.errors import (
    BackendUnavailableError,
    ClosedError,
    DeviceMismatchError,
    InvalidArgumentError,
    InvalidDtypeError,
    InvalidShapeError,
)
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands, attention_problem
from aule.ops.rope.tables import rope_tables
from aule.ops.shared.checks import checked_dropout, checked_seed
from aule.ops.softmax.dropout import fresh_seed, seed_words
from aule.runtime.base import Allocation, Device
from aule.view import ITEMSIZE, TensorView, contiguous_strides

_ARRAYS = ("mask", "bias", "alibi_slopes", "sinks", "rope_cos", "rope_sin")
_OPTIONS = (
    "causal", "scale", "window", "softcap", "mask", "bias", "alibi_slopes", "sinks", "rope", "rope_interleaved",
    "dropout_p", "seed", "causal_align", "deterministic", "precision",
)  # fmt: skip
"""Options of `aule.flash_attention`; results have arguments of their own."""
_DTYPES = ("float32", "float16", "bfloat16", "bool")


class Tensor:
    """A C-contiguous array in device memory; made by `Aule.tensor`."""

    def __init__(self, context: Aule, shape: tuple[int, ...], dtype: str) -> None:
        self.shape = shape
        self.dtype = dtype
        self._context = context
        self._elem = KERNEL_NAMES[dtype]
        self.nbytes = math.prod(shape) * ITEMSIZE[self._elem]
        self._allocation: Allocation | None = None
        self._allocation = context._open().alloc(max(self.nbytes, 16))

    @reports_shortage
    def upload(self, array: npt.ArrayLike) -> Tensor:
        """Copy a host array of the same shape in, converting its dtype; returns the tensor."""
        allocation = self._memory()
        try:
            source = np.asarray(array)
        except (RuntimeError, TypeError, ValueError) as error:  # uneven lists; tensors elsewhere, or of types of torch
            raise InvalidDtypeError(
                f"[upload] expected an array in host memory, got {type(array).__name__} ({error}); convert it to NumPy"
            ) from error
        if source.dtype.kind not in "biuf" and source.dtype.name != "bfloat16":
            raise InvalidDtypeError(
                f"[upload] expected an array of numbers, got {shown(source.dtype)}; convert with .astype"
            )
        if source.shape != self.shape:
            raise InvalidShapeError(f"[upload] expected shape {self.shape}, got {source.shape}; reshape the array")
        data = np.ascontiguousarray(self._stored(source))
        if data.size:
            allocation.device.upload(allocation, data)
        return self

    @reports_shortage
    def download(self) -> npt.NDArray[Any]:
        """Copy to the host, after all work on the device.

        bfloat16 comes as ml_dtypes' type if that is installed, else as its bits in uint16.
        """
        allocation = self._memory()
        data = np.empty(self.shape, np.uint8 if self._elem == "bool" else STORED[self._elem])
        if data.size:
            allocation.device.download(allocation, data)
        if self._elem == "bool":
            return data.view(np.bool_)
        if self._elem == "bf16":
            from aule.frontends.numpy import bfloat16  # imported late: `import aule` is to be quick

            return data.view(bfloat16() or np.uint16)
        return data

    def free(self) -> None:
        """Free the memory now. Idempotent."""
        if self._allocation is not None:
            self._allocation.device.free(self._allocation)
            self._allocation = None

    def __del__(self) -> None:
        # The driver may be gone, at the interpreter's end or in a forked child: then there is nothing to free.
        with contextlib.suppress(Exception):
            self.free()

    def view(self) -> TensorView:
        """A view of the tensor for the engine."""
        device = self._context.device_name
        return TensorView(self._elem, self.shape, contiguous_strides(self.shape), device, self._memory())

    def _memory(self) -> Allocation:
        self._context._open()
        if self._allocation is None:
            raise ClosedError("[tensor] expected a live tensor, got one that was freed; make a new one with .tensor()")
        return self._allocation

    def _stored(self, source: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self._elem == "bool":
            return source.astype(np.bool_).view(np.uint8)
        if self._elem != "bf16":
            return source.astype(STORED[self._elem], copy=False)
        if source.dtype == np.uint16:
            return source
        if source.dtype.name == "bfloat16":
            return source.view(np.uint16)
        bits = np.ascontiguousarray(source, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40  # rounding could carry a NaN into infinity
        return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).astype(np.uint16)

    def __repr__(self) -> str:
        state = "freed" if self._allocation is None else self._context.device_name
        return f"Tensor(shape={self.shape}, dtype={self.dtype}, {state})"


class Aule:
    """A device to compute on, without copies to the host between calls.

    Parameters
    ----------
    backend : str, optional
        ``"cuda"``, ``"vulkan:1"`` ...; default: the best device; a software one if there is no other.

    Examples
    --------
    >>> shape = (1, 8, 128, 64)
    >>> host = np.ones(shape, np.float32)
    >>> with Aule() as gpu:
    ...     q, k, v = (gpu.tensor(shape).upload(host) for _ in range(3))
    ...     out = gpu.tensor(shape)
    ...     gpu.attention_gpu(q, k, v, out, causal=True)
    ...     result = out.download()
    """

    def __init__(self, backend: str | None = None) -> None:
        device = registry.choose(backend)
        if device is None and backend is None:
            software = [d for found in registry.available().values() for d in found]
            device = software[0] if software else None
        if device is None:
            got = "numpy, which has none" if backend or settings.backend() else "none"
            raise BackendUnavailableError(
                "device",
                f"[Aule] expected a device, got {got}; aule.print_backend_info() says which there are and why others "
                "were refused, and aule.flash_attention(q, k, v) takes NumPy arrays without one",
            )
        self._device: Device | None = device
        self._tensors: weakref.WeakSet[Tensor] = weakref.WeakSet()

    @property
    def device_name(self) -> str:
        """The name that ``backend=`` takes: ``"vulkan:0"``."""
        device = self._open()
        return f"{device.target.backend}:{device.index}"

    def get_device_info(self) -> dict[str, Any]:
        """The properties of the device."""
        target = self._open().target
        return {
            **target.to_dict(),
            "device_name": target.name,
            "amd_optimized": target.vendor == "amd",
            "fp16": target.f16,
            "shared_memory_bytes": target.max_shared_bytes,
        }

    def tensor(self, shape: Sequence[int], dtype: object = "float32") -> Tensor:
        """A tensor of undefined contents, of float32, float16, bfloat16 or bool in any spelling."""
        name = dtype_name(dtype) or ""
        if name not in _DTYPES:
            raise InvalidDtypeError(f"[tensor] expected dtype {either(_DTYPES)}, got {dtype!r}; choose one")
        try:
            dims = tuple(operator.index(n) for n in shape)
        except TypeError:
            raise InvalidShapeError(
                f"[tensor] expected a shape of integers, got {shape!r}; pass a tuple such as (1, 8, 256, 64)"
            ) from None
        if any(n < 0 for n in dims):
            raise InvalidShapeError(f"[tensor] expected a shape without negative lengths, got {dims}; correct it")
        made = Tensor(self, dims, name)
        self._tensors.add(made)
        return made

    def attention_gpu(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, **options: Any) -> None:
        """Attention from tensors into a tensor: no host copy, no allocation, asynchronous.

        Options are those of `aule.flash_attention`; ``mask``, ``bias``, ``alibi_slopes``, ``sinks`` and the two of
        ``rope`` are tensors. ``causal`` is False by default. With ``dropout_p`` a few bytes are allocated for the seed.
        """
        self._attention(q, k, v, out, None, options)

    def attention_forward_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any
    ) -> None:
        """Attention as in `attention_gpu`, and its log-sum-exp into a float32 tensor ``[batch, heads_q, seq_q]``."""
        self._attention(q, k, v, out, lse, options)

    def attention_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        **options: Any,
    ) -> None:
        """Gradients of q, k and v into tensors of their shapes: no host copy; asynchronous on a GPU.

        ``out`` and ``lse`` are those of `attention_forward_with_lse` with the same options (with ``dropout_p`` also the
        same ``seed``), ``dout`` the gradient of ``out``. ``deterministic=True`` gives the same bits every time; without
        it dQ may be summed in any order. Memory for a few numbers per row, and for sums of dQ, is allocated and freed.
        """
        results = {"out": out, "lse": lse, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
        problem, operands = self._problem(q, k, v, results, options, True)
        shapes = {"out": operands.out_shape, "dout": operands.out_shape, "dq": q.shape, "dk": k.shape, "dv": v.shape}
        for name, shape in shapes.items():
            self._require(name, results[name], shape, problem.dtype)
        self._require("lse", lse, operands.lse_shape, "f32")
        if problem.seq_q == 0 or problem.seq_kv == 0:
            for tensor in (dq, dk, dv):
                tensor.upload(np.zeros(tensor.shape, np.float32))
            return
        views = attention_views(operands, _lifted(out.view()))
        views |= {
            "do" if name == "dout" else name: _lifted(results[name].view()) for name in ("dout", "dq", "dk", "dv")
        }
        with self._seed_for(operands) as seeded:
            if seeded.seed is not None:
                views["seed"] = seeded.seed
            gradients_on_device(problem, views, self._open(), lse._memory())

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, options: dict[str, Any]
    ) -> None:
        results = {"out": out} if lse is None else {"out": out, "lse": lse}
        problem, operands = self._problem(q, k, v, results, options, lse is not None)
        self._require("out", out, operands.out_shape, problem.dtype)
        if lse is not None:
            self._require("lse", lse, operands.lse_shape, "f32")
        memory = None if lse is None else lse._memory()
        with self._seed_for(operands) as seeded:
            forward_on_device(problem, seeded, self._open(), _lifted(out.view()), memory)

    def _problem(
        self, q: Tensor, k: Tensor, v: Tensor, results: dict[str, Tensor], options: dict[str, Any], return_lse: bool
    ) -> tuple[AttentionProblem, Operands]:
        device = self._open()
        unknown = {name: value for name, value in options.items() if name not in _OPTIONS}
        if unknown:
            raise unknown_option(_OPTIONS, unknown, "attention_gpu")
        options["rope_cos"], options["rope_sin"] = rope_tables("attention_gpu", options.pop("rope", None))
        arrays = {name: options.pop(name) for name in _ARRAYS if options.get(name) is not None}
        given: dict[str, Tensor] = {"q": q, "k": k, "v": v, **arrays}
        for name, tensor in (given | results).items():
            if isinstance(tensor, Tensor):
                tensor._memory()  # a closed one is refused as such
            if not isinstance(tensor, Tensor) or tensor._context._device is not device:
                got = tensor if isinstance(tensor, Tensor) else type(tensor).__name__
                raise DeviceMismatchError(
                    f"[attention_gpu] expected {name} to be a tensor of this context, got {got}; make it with .tensor()"
                )
        views: dict[str, Any] = {name: tensor.view() for name, tensor in given.items()}
        seed = checked_seed("attention_gpu", options.pop("seed", None))
        if checked_dropout("attention_gpu", options.get("dropout_p", 0.0)):
            if seed is None and "dout" in results:
                raise InvalidArgumentError(
                    "[attention_backward] expected the seed of the forward pass with dropout_p > 0, got None; "
                    "pass the same seed= to both"
                )
            words = seed_words(fresh_seed() if seed is None else seed)
            views["seed"] = TensorView("u32", words.shape, (1,), self.device_name, words)
        return attention_problem(**views, **options, return_lse=return_lse, op="attention_gpu")

    @contextlib.contextmanager
    def _seed_for(self, operands: Operands) -> Iterator[Operands]:
        """The operands with the seed in device memory, which is freed after the work that reads it."""
        if operands.seed is None:
            yield operands
            return
        device = self._open()
        memory = device.alloc(16)
        try:
            device.upload(memory, operands.seed.storage)
            yield replace(operands, seed=replace(operands.seed, storage=memory))
        finally:
            device.free(memory)

    def _require(self, name: str, tensor: Tensor, shape: tuple[int, ...], elem: str) -> None:
        if tensor.shape != shape or tensor._elem != elem:
            raise InvalidShapeError(
                f"[attention_gpu] expected {name} of shape {shape} and {usual_name(elem)}, got {tensor.shape} and "
                f"{tensor.dtype}; make it with .tensor()"
            )

    def synchronize(self) -> None:
        """Wait until all work on the device is done."""
        self._open().synchronize()

    def close(self) -> None:
        """Free every tensor of the context. Idempotent; the device itself stays open for other users."""
        if self._device is None:
            return
        for tensor in list(self._tensors):
            tensor.free()
        self._device = None

    def _open(self) -> Device:
        if self._device is None:
            raise ClosedError("[Aule] expected an open context, got one that was closed; make a new one")
        return self._device

    def __enter__(self) -> Aule:
        self._open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _lifted(view: TensorView) -> TensorView:
    """A contiguous view with leading axes of length 1, so that there are four."""
    shape = (1,) * (4 - len(view.shape)) + view.shape
    return replace(view, shape=shape, strides=contiguous_strides(shape))
