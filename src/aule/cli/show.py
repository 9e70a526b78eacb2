"""``aule show``: prints the code of the kernels of any op, in any language."""

from __future__ import annotations

import argparse
import difflib
import sys
from dataclasses import fields
from pathlib import Path

from aule import settings
from aule.api.info import table
from aule.backends import registry
from aule.cli._launches import ALIASES, OPS, Sizes, about, directions, launches, sizes_of
from aule.codegen import TARGETS, generate, target_for, with_arch
from aule.engine.probe import find_layout
from aule.errors import InvalidArgumentError
from aule.ir import KernelIR
from aule.target import Target

NATIVE, IR = "native", "ir"
LANGUAGES: dict[str, str] = {
    "ptx": "NVIDIA GPUs through CUDA",
    "hip": "AMD GPUs through ROCm",
    "spirv": "Vulkan; binary, so add --output kernel.spv",
    "opencl": "OpenCL C",
    "wgsl": "WebGPU",
    "msl": "Metal",
    "llvm": "LLVM IR for CPUs",
    NATIVE: "assembly for the CPU of this machine",
    IR: "aule's own kernel language, before it is translated",
}
"""What ``--language`` takes. Backends' names are understood too."""
_DEFAULT_LANGUAGE = "ptx"
_COMMENTS = {"llvm": ";", NATIVE: "#", IR: "#"}
_ARCHS = {"cuda": "as sm_90, from sm_60 on", "hip": "as gfx942, from gfx900 to gfx12"}
"""What ``--arch`` takes, by backend."""
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "f32": "f32", "f16": "f16", "bf16": "bf16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("op", nargs="?", help="an operation, as flash_attention or rms_norm; see --list")
    parser.add_argument("--list", action="store_true", help="list the operations and languages")
    parser.add_argument("--backward", action="store_true", help="the gradient's kernels")
    parser.add_argument(
        "--language", metavar="NAME", help=f"as in --list; default: the device's, or {_DEFAULT_LANGUAGE}"
    )
    parser.add_argument("--backend", metavar="SPEC", help="compile for this device, as 'vulkan:0'")
    parser.add_argument("--arch", metavar="NAME", help="instruction set, as 'sm_90' for ptx or 'gfx942' for hip")
    parser.add_argument("--launch", type=int, metavar="N", help="only the N-th of an operation's launches, from 1")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="float32", help="element type (default float32)")
    parser.add_argument("--seq-len", type=int, metavar="N", help="queries and keys, or tokens (default 1024)")
    parser.add_argument("--head-dim", type=int, metavar="N", help="head dimension (default 64)")
    parser.add_argument("--heads", type=int, metavar="N", help="heads of queries, or of a cache (default 1)")
    parser.add_argument("--kv-heads", type=int, metavar="N", help="key and value heads (default: as query heads)")
    parser.add_argument("--causal", action="store_true", default=None, help="row i attends to keys 0..i")
    parser.add_argument("--tiles", metavar="QxKV", help="tiles of flash_attention, as '64x32' (default: the target's)")
    parser.add_argument("--rows", type=int, metavar="N", help="of a row operation (default 1024)")
    parser.add_argument("--columns", type=int, metavar="N", help="of a row operation (default 4096)")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="write to this file instead of printing")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.list:
        print("\n".join(_listed()))
        return 0
    op, language = _op(args.op), None if args.language is None else _language(args.language)
    target = _target(args, language)
    language = language or registry.backend(target.backend).language
    direction = "backward" if args.backward else "forward"
    planned = launches(op, direction, _sizes(op, args), target)
    if not planned:
        raise InvalidArgumentError("[show] expected arrays with elements, got empty ones; choose larger sizes")
    chosen = range(1, len(planned) + 1)
    if args.launch is not None or (language == "spirv" and len(planned) > 1):
        if args.launch not in chosen:
            raise InvalidArgumentError(
                f"[show] expected --launch from 1 to {len(planned)}, because {op} {direction} has as many launches"
                f"{' and SPIR-V is binary' if language == 'spirv' else ''}, got {args.launch or 'none'}; name one"
            )
        chosen = range(args.launch, args.launch + 1)
    texts: list[str] = []
    for number in chosen:
        kernel = planned[number - 1].build()
        code = _code(kernel, language, target)
        if isinstance(code, bytes):
            return _write(code, args.output)
        which = f"launch {number} of {len(planned)}: {kernel.name}, grid {planned[number - 1].grid}"
        note = f"{op} {direction}, {which}, {target.name}"
        texts.append(f"{_COMMENTS.get(language, '//')} {note}\n{code.rstrip()}\n")
    return _write("\n".join(texts), args.output)


def _code(kernel: KernelIR, language: str, target: Target) -> str | bytes:
    if language == IR:
        return str(kernel)
    artifact = generate(kernel, target)
    if language == NATIVE:
        from aule.runtime import _cpu_llvm

        return _cpu_llvm.assembly(_cpu_llvm.machine(settings.cpu_features()), artifact.text)
    return artifact.code if language == "spirv" else artifact.text


def _write(code: str | bytes, output: Path | None) -> int:
    if output is not None:
        output.write_bytes(code if isinstance(code, bytes) else code.encode())
    elif isinstance(code, str):
        print(code, end="")
    elif sys.stdout.isatty():
        raise InvalidArgumentError(
            "[show] expected a file for SPIR-V, which is binary, got a terminal; add --output kernel.spv, "
            "and read it with spirv-dis"
        )
    else:
        sys.stdout.buffer.write(code)
        sys.stdout.buffer.flush()
    return 0


# -- arguments ---------------------------------------------------------------------------------------------------------


def _listed() -> list[str]:
    other = {name: alias for alias, name in ALIASES.items()}
    rows = [("operation", "directions", "")]
    for op in OPS:
        alias = f" (also {other[op]})" if op in other else ""
        rows.append((op, ", ".join(directions(op)), about(op) + alias))
    languages = table([("language", ""), *LANGUAGES.items()])
    return [*table(rows), "", *languages, "", "Example: aule show rms_norm --backward --language wgsl"]


def _op(name: str | None) -> str:
    if name is None:
        raise InvalidArgumentError("[show] expected an operation, as flash_attention, got none; --list names them all")
    found = ALIASES.get(name, name)
    if found not in OPS:
        raise InvalidArgumentError(f"[show] expected one of {', '.join(OPS)}, got {name!r}{_meant(name, OPS)}")
    return found


def _language(name: str) -> str:
    lower = name.lower()
    named = {"asm": NATIVE} | {b.name: b.language for b in registry.BACKENDS} | dict.fromkeys(LANGUAGES, "")
    if lower not in named:
        raise InvalidArgumentError(
            f"[show] expected --language of {', '.join(LANGUAGES)}, got {name!r}{_meant(lower, tuple(LANGUAGES))}"
        )
    return named[lower] or lower


def _meant(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else "; aule show --list says what each one is"


def _target(args: argparse.Namespace, language: str | None) -> Target:
    """The device to compile for: the one that was named, or the usual one of the language."""
    if args.backend is not None or language == NATIVE:
        device = registry.find(args.backend or "cpu")
        if device is None:
            raise InvalidArgumentError(
                "[show] expected a backend that compiles kernels, got numpy; leave --backend out"
            )
        if _DTYPES[args.dtype] != "f32":
            find_layout(device)  # as a call does: without it, kernels would not use matrix units
        target = device.target
        own = registry.backend(target.backend).language
        if language not in (None, IR, own) and not (language == NATIVE and own == "llvm"):
            raise InvalidArgumentError(
                f"[show] expected --language {own} for {args.backend}, got {language}; leave one of the two out"
            )
    else:
        target = target_for(language if language in TARGETS else _DEFAULT_LANGUAGE)
    if args.arch is None:
        return target
    wanted = _ARCHS.get(target.backend)
    if wanted is None:
        kind = registry.backend(target.backend).language
        raise InvalidArgumentError(
            f"[show] expected --arch with --language ptx or hip, got {args.arch!r} with {kind}; leave it out"
        )
    try:
        return with_arch(target, args.arch)
    except InvalidArgumentError:
        raise InvalidArgumentError(f"[show] expected --arch {wanted}, got {args.arch!r}; change it") from None


def _sizes(op: str, args: argparse.Namespace) -> Sizes:
    given = {f.name: getattr(args, f.name) for f in fields(Sizes) if f.name != "dtype"}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if name not in sizes_of(op):
            raise InvalidArgumentError(f"[show] expected options of {op}, got {option}; leave it out")
        if isinstance(value, int) and value < 1:
            raise InvalidArgumentError(f"[show] expected {option} of at least 1, got {value}; raise it")
    if "tiles" in given:
        given["tiles"] = _tiles(given["tiles"])
    return Sizes(_DTYPES[args.dtype], **given)


def _tiles(text: str) -> tuple[int, int]:
    q, _, kv = text.partition("x")
    if not (q.isdigit() and kv.isdigit()):
        raise InvalidArgumentError(f"[show] expected --tiles as 64x32, got {text!r}; queries come first")
    return int(q), int(kv)
