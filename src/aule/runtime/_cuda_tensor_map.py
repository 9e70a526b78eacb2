"""Tensor maps of CUDA kernels: the 128 bytes by which tensor copies know a buffer's address, sizes and strides."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

from aule.artifact import SCALAR_FORMATS, Artifact, TensorMap
from aule.runtime._stream_driver import DEV, INT, PTR, UINT
from aule.runtime._stream_kernel import Parameters

_BYTES = 128
_ITEMSIZE = 2
_TYPES = {"f16": 6, "bf16": 9}
"""CUtensorMapDataType by element type."""
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""CUtensorMapSwizzle by bytes."""
_NOT_INTERLEAVED, _FILL_ZERO, _PROMOTE_128 = 0, 0, 2
_MOST_KNOWN = 64
"""Encoded maps that a launch keeps of a buffer: allocators hand out the same addresses again and again."""
_ANY_STRIDE = 16
"""Bytes from one element to the next along an axis that has only one; the driver takes multiples of 16 only."""


class TensorMaps:
    """The tensor maps of a kernel's launch, in the table of its parameters after all others.

    The driver copies them during the launch call, like the parameters, so a captured launch keeps its own.
    """

    __slots__ = ("_maps",)

    def __init__(self, encode: Callable[..., int], artifact: Artifact, parameters: Parameters) -> None:
        first = len(artifact.params)
        self._maps = [_Map(encode, artifact, x, parameters, first + i) for i, x in enumerate(artifact.maps)]

    def forget(self) -> None:
        """Encode all maps again, since scalars may have changed."""
        for each in self._maps:
            each.forget()

    def refresh(self) -> int:
        """Replace the maps whose buffers have other addresses than before; return the driver's result."""
        for each in self._maps:
            address = each.storage[each.at]
            if address != each.current:
                code = each.replace(address)
                if code:
                    return code
        return 0


class _Map:
    """One tensor map: those encoded so far, and the arguments of cuTensorMapEncodeTiled for others.

    Attributes
    ----------
    storage, at
        The values of the parameters, and the place of the buffer's address among them.
    current : int or None
        The address for which the launch has a map.
    """

    __slots__ = (
        "_address", "_call", "_encode", "_encoded", "_entry", "_offset", "_parameters", "_place", "_scalars", "_sizes",
        "_strides", "_tensor", "at", "current", "storage",
    )  # fmt: skip

    def __init__(
        self, encode: Callable[..., int], artifact: Artifact, tensor: TensorMap, parameters: Parameters, entry: int
    ) -> None:
        rank = len(tensor.box)
        self._encode, self._tensor, self._parameters, self._entry = encode, tensor, parameters, entry
        self._scalars = [(p.name, SCALAR_FORMATS[p.dtype]) for p in artifact.scalars]
        self.storage = parameters.storage
        self.at = next(i for i, p in enumerate(artifact.buffers) if p.name == tensor.buffer)
        self._sizes, self._strides = (ctypes.c_uint64 * rank)(), (ctypes.c_uint64 * rank)()
        self._place, self._offset, self._address = PTR(), 0, DEV()
        self._call = (
            self._place, INT(_TYPES[artifact.buffers[self.at].dtype]), UINT(rank), self._address, self._sizes,
            self._strides, (UINT * rank)(*tensor.box), (UINT * rank)(*[1] * rank), INT(_NOT_INTERLEAVED),
            INT(_SWIZZLES[tensor.swizzle]), INT(_PROMOTE_128), INT(_FILL_ZERO),
        )  # fmt: skip
        self.forget()

    def forget(self) -> None:
        """Drop all maps."""
        self._encoded: dict[int, tuple[int, object]] = {}
        """Places of encoded maps, with the memory that holds them, by address."""
        self.current: int | None = None

    def replace(self, address: int) -> int:
        """Put the map for an address into the table of parameters; return the driver's result."""
        known = self._encoded.get(address)
        if known is None:
            if not self._encoded:
                self._describe()
            elif len(self._encoded) == _MOST_KNOWN:
                self._encoded.clear()
            block = (ctypes.c_char * (2 * _BYTES))()
            place = -(-ctypes.addressof(block) // _BYTES) * _BYTES
            self._place.value, self._address.value = place, address + self._offset
            code = self._encode(*self._call)
            if code:
                return code
            known = self._encoded[address] = place, block
        self._parameters.table[self._entry] = known[0]
        self.current = address
        return 0

    def _describe(self) -> None:
        """Take offset, sizes and strides from the scalars."""
        start = self._parameters.scalars_at
        values = {
            name: struct.unpack_from("<" + code, self.storage, start + 8 * i)[0]
            for i, (name, code) in enumerate(self._scalars)
        }
        offset, sizes, strides = self._tensor.described(values)
        self._offset, self._sizes[:] = offset * _ITEMSIZE, list(sizes)
        for i, (size, stride) in enumerate(zip(sizes[1:], strides[1:], strict=True)):
            self._strides[i] = stride * _ITEMSIZE if size > 1 else _ANY_STRIDE
