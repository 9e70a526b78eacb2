"""What AMD's instruction sets can do, by their names (``gfx942``): the part of a Target that no driver tells."""

from __future__ import annotations

from dataclasses import replace

from aule.target import CDNA_LAYOUTS, RDNA3_LAYOUTS, RDNA4_LAYOUTS, FragmentLayout, Target

DEFAULT = "gfx942"
"""The instruction set that kernels are shown for without a device."""
_LDS = 64 << 10
_MATRIX = ("gfx908", "gfx90a", "gfx942", "gfx950")
_FLUSHES = "gfx90a:f16"
"""Its matrix units set subnormal numbers to zero (AMD, "MI200 MFMA behavior"): weights below 2^-14 would be lost."""
_ADDS_FLOATS = ("gfx90a", "gfx942", "gfx950")
"""Instruction sets of gfx9 with an atomic addition of fp32 that returns the old number."""
_LARGE_FILE = ("gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201")
"""RDNA chips with 1536 instead of 1024 registers of a lane."""


def known(arch: str) -> bool:
    """Whether kernels can be rendered for an instruction set."""
    name = arch.partition(":")[0]
    return name.startswith("gfx") and name[3:-2].isdigit() and 9 <= int(name[3:-2]) <= 12


def chip(arch: str) -> Target:
    """The capabilities of an instruction set, with the fragments' layouts that AMD documents.

    A runtime removes those layouts, so that they are probed, and adds what its driver tells: name, memory, units.
    """
    name = arch.partition(":")[0]  # without features, as in gfx90a:sramecc+:xnack-
    version = int(name[3:-2])
    lanes = 64 if version == 9 else 32
    layouts = _layouts(name, version)
    shared = 160 << 10 if name == "gfx950" else _LDS
    target = Target(
        "hip", f"generic {name}", "amd", arch=name, subgroup_size=lanes, subgroup_sizes=(lanes,), max_threads=1024,
        max_shared_bytes=shared, max_grid=(2**31 - 1, 65535, 65535), max_buffers=256, max_buffer_bytes=1 << 40,
        offset_alignment=1, registers_per_unit=_registers(name, version),
        shared_per_unit=shared * (1 if version == 9 else 2), f16=True, f64=True, int64=True, storage16=True,
        storage8=True, e4m3=name == "gfx950" or version == 12, device_fence=True,
        atomic_f32_add=name in _ADDS_FLOATS or version >= 11,
    )  # fmt: skip
    if layouts is None:
        return target
    results, left, right = layouts
    return replace(
        target,
        matrix_units=tuple(f"m16n16k16:{elem}:f32" for elem in ("f16", "bf16") if f"{name}:{elem}" != _FLUSHES),
        matrix_layout=results,
        matrix_factors=(left, right),
        matrix_right=right,
    )


def _layouts(name: str, version: int) -> tuple[FragmentLayout, FragmentLayout, FragmentLayout] | None:
    if name in _MATRIX:
        return CDNA_LAYOUTS
    return {11: RDNA3_LAYOUTS[32], 12: RDNA4_LAYOUTS}.get(version)


def _registers(name: str, version: int) -> int:
    """Vector registers of a unit: of its 4 SIMDs. On RDNA, HIP counts pairs of compute units, which share memory."""
    if version == 9:
        return (512 if name in _ADDS_FLOATS else 256) * 64 * 4
    return (1536 if name in _LARGE_FILE else 1024) * 32 * 4
