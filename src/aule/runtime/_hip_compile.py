"""Compiles HIP C in this process with hiprtc, and keeps the code objects in the disk cache."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import time

from aule import store
from aule.artifact import Artifact
from aule.errors import OutOfMemoryError
from aule.runtime._hip_driver import TEXT, Driver
from aule.runtime._stream_driver import PTR, SIZE, Functions
from aule.store.source import code_digest

_log = logging.getLogger("aule")
# hiprtcResult
_OUT_OF_MEMORY = 1
_COMPILATION = 6

OPTIONS = ("-O3", "-std=c++17")
"""Beside the instruction set, and the features that a kernel requires."""


class Refused(Exception):
    """The compiler refuses a source, or fails; the second argument is its log."""


def code_object(driver: Driver, artifact: Artifact, arch: str) -> tuple[bytes, str]:
    """Return a kernel's code object for an instruction set and the compiler's log, which is empty if it was cached.

    Raises `Refused`, or `OutOfMemoryError` of the host.
    """
    options = (f"--offload-arch={arch}", *OPTIONS, *(f"-m{extension}" for extension in artifact.extensions))
    recipe = repr((driver.version, options, code_digest(__name__))).encode()
    key = hashlib.sha256(recipe + artifact.code).hexdigest()
    name = f"objects/{key[:2]}/{key}"
    code = store.read(name)
    if code is not None:
        return code, ""
    start = time.perf_counter()
    code, log = _compile(driver.compiler, artifact, options)
    store.write(name, code)
    _log.debug("hip: compiled %s in %.0f ms", artifact.entry, 1e3 * (time.perf_counter() - start))
    return code, log


def _compile(compiler: Functions, artifact: Artifact, options: tuple[str, ...]) -> tuple[bytes, str]:
    program = PTR()
    _require(compiler, compiler.create(ctypes.byref(program), artifact.code, b"aule.hip", 0, None, None))
    try:
        result = compiler.compile(program, len(options), (TEXT * len(options))(*(o.encode() for o in options)))
        log = _text(compiler, program)
        _require(compiler, result, log)
        size = SIZE()
        _require(compiler, compiler.code_size(program, ctypes.byref(size)), log)
        code = ctypes.create_string_buffer(size.value)
        _require(compiler, compiler.code(program, code), log)
        return code.raw, log
    finally:
        compiler.destroy(ctypes.byref(program))


def _text(compiler: Functions, program: ctypes.c_void_p) -> str:
    """The compiler's log; empty if it has none."""
    size = SIZE()
    if compiler.log_size(program, ctypes.byref(size)) or not size.value:
        return ""
    log = ctypes.create_string_buffer(size.value + 1)
    if compiler.log(program, log):
        return ""
    return log.value.decode(errors="replace").strip()


def _require(compiler: Functions, result: int, log: str = "") -> None:
    if result == _OUT_OF_MEMORY:
        raise OutOfMemoryError("[hip] expected enough host memory to compile a kernel, got too little; free some")
    if result:
        text: object = compiler.error_text(result)
        name = text.decode(errors="replace") if isinstance(text, bytes) else f"hiprtc error {result}"
        raise Refused("hiprtc refused it" if result == _COMPILATION else f"hiprtc got {name}", log)
