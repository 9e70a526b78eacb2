"""Names of element types: the usual ones (``float32``), those of kernels (``f32``), and spellings that are accepted."""

from __future__ import annotations

KERNEL_NAMES = {
    "float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64", "bool": "bool", "int8": "i8",
    "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64",
    "float8_e4m3fn": "e4m3",
}  # fmt: skip
"""The kernel language's name of each element type."""

_USUAL = {short: name for name, short in KERNEL_NAMES.items()}
_SPELLINGS = {
    **_USUAL, "fp32": "float32", "single": "float32", "fp16": "float16", "half": "float16", "double": "float64",
    "fp64": "float64", "bool_": "bool", "fp8": "float8_e4m3fn", "float8_e4m3": "float8_e4m3fn",
}  # fmt: skip
# "float" and "int" are missing because they have 32 bits in PyTorch and 64 in NumPy.


def usual_name(kernel_name: str) -> str:
    """Return the name that messages use: ``float32`` for ``f32``."""
    return _USUAL.get(kernel_name, kernel_name)


def dtype_name(dtype: object) -> str | None:
    """Return the usual name of a dtype: text in any spelling, or a type of NumPy, ml_dtypes or PyTorch.

    None if it is not known.
    """
    text = dtype if isinstance(dtype, str) else str(getattr(dtype, "__name__", dtype))
    name = text.strip().lower().rpartition(".")[2]
    return name if name in KERNEL_NAMES else _SPELLINGS.get(name)


def shown(dtype: object) -> str:
    """Return the usual name of any dtype for messages; of one that kernels lack, its own without its package."""
    return dtype_name(dtype) or str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")


def either(names: tuple[str, ...]) -> str:
    """Return names as messages list them: ``float32, float16 or bfloat16``."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
