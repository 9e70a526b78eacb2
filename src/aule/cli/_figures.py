"""Times, speeds and counts as text, with digits that say something on slow devices and fast ones."""

from __future__ import annotations

_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}


def duration(seconds: float) -> str:
    """A time, as ``950 us``, ``12.3 ms`` or ``4.56 s``."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} us"
    return f"{digits(1e3 * seconds)} ms" if seconds < 10 else f"{digits(seconds)} s"


def speed(rate: float, unit: str) -> str:
    """Work per second with the prefix that suits it: 0.0004 ``TFLOPS`` is ``400 MFLOPS``."""
    rate, unit = rate * _PREFIXES[unit[0]], unit[1:]
    for prefix, size in _PREFIXES.items():
        if rate >= size:
            return f"{digits(rate / size)} {prefix}{unit}"
    return f"{digits(rate)} {unit}"


def digits(value: float) -> str:
    """A number with three digits, or all of those before the point."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def counted(number: int, what: str) -> str:
    """A number of things, as ``1 file`` or ``2 files``."""
    return f"{number} {what}{'' if number == 1 else 's'}"
