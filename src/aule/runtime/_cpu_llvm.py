"""LLVM through llvmlite: detects the processor's features and compiles LLVM IR into callable functions.

Object code is cached on disk under a key of everything that determines it, so a new process parses and optimises
nothing. MCJIT links it, because llvmlite calls its ORC interface experimental. MCJIT aborts the process if a symbol is
missing, so an object's symbols are checked first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aule import store
from aule.errors import BackendUnavailableError, InvalidArgumentError
from aule.runtime import _cpu_compile
from aule.runtime._refused import save_refused
from aule.store.source import code_digest

log = logging.getLogger("aule")

_REMEDY = 'pip install "aule-attention[cpu]"'
_ARCHITECTURES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
_FEATURES = {
    "x86_64": """sse4.1 sse4.2 avx avx2 fma f16c avx512f avx512bw avx512cd avx512dq avx512vl avx512bf16 avx512fp16
        avx512vnni avxvnni amx-tile amx-bf16 amx-fp16 amx-int8""".split(),
    "aarch64": "neon fullfp16 fp16fml bf16 dotprod i8mm sve sve2 sme".split(),
}
"""Features that kernels may use, by LLVM's names."""
_LEVELS = {
    ("x86_64", "avx2"): ("x86-64-v3", ("sse4.1", "sse4.2", "avx", "avx2", "fma", "f16c")),
    ("x86_64", "baseline"): ("x86-64", ()),
    ("aarch64", "baseline"): ("generic", ("neon",)),
}
"""For each reduced feature level, LLVM's processor name and the features of `_FEATURES` that it has."""

_COMPILED, _REFUSED, _FAILED = b"+", b"-", b"!"
"""First byte of the child's answer; the object code or the message of an exception follows."""

# Held during every LLVM call and every talk with the compiling child, and across a fork: a forked process would inherit
# locked locks of llvmlite and LLVM.
_lock = threading.RLock()
# Engines whose code is no longer used. A finalizer may run in the middle of anything, where waiting for the lock could
# deadlock; so it only appends here, and the next call that holds the lock closes them.
_retired: deque[Any] = deque()


# Code that LLVM failed to optimise in this process, by cache name: unoptimised, or None if LLVM failed on that too.
_unoptimised: dict[str, bytes | None] = {}


class Refused(Exception):
    """LLVM refused the code, with its message as the text."""


class Failed(Exception):
    """LLVM crashed or made invalid code out of valid code, with its message as the text."""


@dataclass(frozen=True)
class Machine:
    """The machine that code is compiled for. Together with the IR it determines the object code."""

    arch: str
    triple: str
    cpu: str
    features: str
    """In LLVM's notation: ``+avx2,-avx512f``."""
    extensions: tuple[str, ...]
    """The usable features of `_FEATURES`, sorted."""
    version: str
    """Versions of llvmlite and LLVM."""


class Code:
    """Compiled functions in memory. They are freed with this object."""

    __slots__ = ("_engine", "addresses")

    def __init__(self, engine: Any, addresses: tuple[int, ...]) -> None:
        self._engine = engine
        self.addresses = addresses

    def keep_for_ever(self) -> None:
        """Never free the code: threads that outlive the interpreter run in it."""
        self._engine.detach()

    def __del__(self, retire: Callable[[Any], None] = _retired.append) -> None:
        retire(self._engine)


@functools.cache
def _llvm() -> Any:
    """Import llvmlite's binding, which is slow, and prepare it to emit code for this processor."""
    try:
        import llvmlite.binding as llvm
    except (ImportError, OSError, RuntimeError) as error:  # absent; its library missing, or built for another system
        raise BackendUnavailableError(
            "cpu", f"[cpu] expected the package llvmlite, got {type(error).__name__}: {error}; {_REMEDY}"
        ) from error
    if llvm.llvm_version_info < (20,):
        raise BackendUnavailableError(
            "cpu",
            f"[cpu] expected llvmlite 0.45 or later, got one with LLVM {_dotted(llvm.llvm_version_info)}; {_REMEDY}",
        )
    try:
        llvm.check_jit_execution()
    except OSError as error:
        raise BackendUnavailableError(
            "cpu",
            f"[cpu] expected to be allowed to run generated code, got {error}; allow it for this process (SELinux: "
            "execmem) or use backend='numpy'",
        ) from error
    if sys.platform.startswith("linux"):
        # Kernels call its sin, cos and log2. Python may have loaded it without making its symbols global.
        with contextlib.suppress(RuntimeError):
            llvm.load_library_permanently("libm.so.6")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def machine(level: str) -> Machine:
    """Describe this processor, with the features of a level of `settings.cpu_features`.

    Raises
    ------
    BackendUnavailableError
        llvmlite is missing, or the processor is not supported.
    InvalidArgumentError
        This processor does not have that level.
    """
    arch = _ARCHITECTURES.get(platform.machine().lower())
    if arch is None or struct.calcsize("P") != 8:
        raise BackendUnavailableError(
            "cpu",
            f"[cpu] expected a 64-bit x86_64 or aarch64 process, got {platform.machine() or 'an unknown processor'}; "
            "use backend='numpy'",
        )
    with _lock:
        llvm = _llvm()
        triple = llvm.get_process_triple()
        has = dict(llvm.get_host_cpu_features())
        host = llvm.get_host_cpu_name()
    if arch == "aarch64":
        has.setdefault("neon", True)  # part of the architecture, but not every system lists it
    import llvmlite  # here, because `_llvm` explains its absence

    version = f"llvmlite {llvmlite.__version__}, LLVM {_dotted(llvm.llvm_version_info)}"
    if level == "native":
        features = [f"{'+' if on else '-'}{name}" for name, on in sorted(has.items())]
        if has.get("avx512f"):
            features.append("-prefer-256-bit")  # LLVM's tuning for some processors, which would split our vectors
        extensions = tuple(sorted(name for name in _FEATURES[arch] if has.get(name)))
        return Machine(arch, triple, host, ",".join(features), extensions, version)
    if (arch, level) not in _LEVELS:
        levels = ", ".join(["native", *(name for owner, name in _LEVELS if owner == arch)])
        raise InvalidArgumentError(
            f"[cpu] expected AULE_CPU_FEATURES of {levels} on {arch}, got {level!r}; change or unset it"
        )
    cpu, names = _LEVELS[arch, level]
    missing = [name for name in names if not has.get(name)]
    if missing:
        raise InvalidArgumentError(
            f"[cpu] expected a processor with {', '.join(missing)} for AULE_CPU_FEATURES={level}, got {host}; unset it"
        )
    return Machine(arch, triple, cpu, "", tuple(sorted(names)), version)


@functools.cache
def _recipe() -> bytes:
    """Hash this module, as part of the cache key: object code depends on how it was compiled."""
    return code_digest(__name__).encode()


def load(made_for: Machine, text: str, entries: dict[str, tuple[str, ...]]) -> Code:
    """Load LLVM IR without a triple or a data layout, compiling it unless the disk cache has it.

    ``entries`` are the functions that it must define, with the types of their parameters; the code has their addresses
    in order. Raises `Refused` if LLVM rejects the code, or an entry or a symbol is missing.
    """
    key = hashlib.sha256(_recipe() + repr((made_for, text, entries)).encode()).hexdigest()
    name = f"objects/{key[:2]}/{key}"
    built = store.read(name)
    if built is None:
        start = time.perf_counter()
        with _lock:
            built = _build(name, made_for, text, entries)
        log.debug("cpu: compiled %s in %.0f ms", ", ".join(entries), 1e3 * (time.perf_counter() - start))
    with _lock:
        while _retired:
            _retired.pop().close()
        return _link(made_for, built, tuple(entries))


def _build(name: str, made_for: Machine, text: str, entries: dict[str, tuple[str, ...]]) -> bytes:
    """Compile and store the object code; if LLVM fails at optimising it, unoptimised and only for this process."""
    if name not in _unoptimised:
        try:
            built = _compile_safely(made_for, text, entries)
            _check_symbols(built)
            store.write(name, built)
            return built
        except Failed as failure:
            log.warning(
                "cpu: LLVM failed to optimise %s (%s); this process runs it unoptimised, which is slow. Please report "
                "%s with %s",
                *(", ".join(entries), failure, save_refused("llvm", text.encode()) or "the call", made_for.version),
            )
        try:
            built = _compile_safely(made_for, text, entries, optimise=False)
            _check_symbols(built)
            _unoptimised[name] = built
        except Failed as failure:
            log.warning("cpu: LLVM also failed without optimising (%s)", failure)
            _unoptimised[name] = None
    found = _unoptimised[name]
    if found is None:
        raise Refused(f"{made_for.version} crashed; use another version of llvmlite, or backend='numpy'")
    return found


def _compile_safely(made_for: Machine, text: str, entries: dict[str, tuple[str, ...]], optimise: bool = True) -> bytes:
    """Compile in a child process if there can be one; raises `Failed` if it dies."""
    request = json.dumps((asdict(made_for), text, entries, optimise)).encode()
    try:
        answer = _cpu_compile.ask(request)
    except _cpu_compile.ChildDied as death:
        raise Failed(str(death)) from None
    except _cpu_compile.ChildUnavailable as reason:
        log.debug("cpu: compiling in this process: %s", reason)
        return _compile(made_for, text, entries, optimise)
    kind, body = answer[:1], answer[1:]
    if kind != _COMPILED:
        raise {_REFUSED: Refused, _FAILED: Failed}[kind](body.decode())
    return body


def serve() -> None:
    """Compile for another process until it ends; the main function of the child of `_cpu_compile`."""
    _llvm()
    _cpu_compile.serve(_answer)


def _answer(request: bytes) -> bytes:
    fields, text, entries, optimise = json.loads(request)
    try:
        return _COMPILED + _compile(
            Machine(**fields), text, {name: tuple(types) for name, types in entries.items()}, optimise
        )
    except Refused as refusal:
        return _REFUSED + str(refusal).encode()
    except Failed as failure:
        return _FAILED + str(failure).encode()


def _target_machine(made_for: Machine, optimise: bool = True) -> Any:
    llvm = _llvm()
    return llvm.Target.from_triple(made_for.triple).create_target_machine(
        cpu=made_for.cpu,
        features=made_for.features,
        opt=3 if optimise else 1,
        # Sections may be placed anywhere: distances between them may not fit into 32 bits.
        codemodel="jitdefault",
        reloc="static" if made_for.arch == "x86_64" else "default",
        jit=True,
    )


def _compile(made_for: Machine, text: str, entries: dict[str, tuple[str, ...]], optimise: bool) -> bytes:
    llvm = _llvm()
    # Close the module before its context: the garbage collector keeps no order, and the wrong order crashes. The global
    # context is not used because it would keep every kernel's types and constants.
    with _target_machine(made_for, optimise) as emitter, llvm.create_context() as context:
        try:
            module = llvm.parse_assembly(text, context)
        except RuntimeError as error:
            raise Refused(str(error).strip()) from None
        with module:
            try:
                module.triple = emitter.triple
                module.data_layout = str(emitter.target_data)
                module.verify()
                _check_entries(module, entries)
            except RuntimeError as error:
                raise Refused(str(error).strip()) from None
            try:
                _optimise(module, emitter, 3 if optimise else 0)
                module.verify()  # LLVM trusts its passes; invalid code would crash or compute something else
                return bytes(emitter.emit_object(module))
            except RuntimeError as error:
                raise Failed(str(error).strip()) from None


def assembly(made_for: Machine, text: str) -> str:
    """Compile as `load` does, and return the assembly, for people to read."""
    llvm = _llvm()
    with (
        _target_machine(made_for) as emitter,
        llvm.create_context() as context,
        llvm.parse_assembly(text, context) as module,
    ):
        module.triple = emitter.triple
        module.data_layout = str(emitter.target_data)
        _optimise(module, emitter, 3)
        return str(emitter.emit_assembly(module))


def _check_entries(module: Any, entries: dict[str, tuple[str, ...]]) -> None:
    for entry, expected in entries.items():
        try:
            function = module.get_function(entry)
        except NameError:
            raise Refused(f"the code does not define @{entry}") from None
        found = tuple(str(argument.type) for argument in function.arguments)
        if function.is_declaration or found != expected:
            raise Refused(f"expected a definition of @{entry}({', '.join(expected)}), found ({', '.join(found)})")


def _optimise(module: Any, emitter: Any, level: int) -> None:
    llvm = _llvm()
    with llvm.create_pipeline_tuning_options(speed_level=level) as tuning:
        # Kernels are written with explicit vectors.
        tuning.loop_vectorization = False
        tuning.slp_vectorization = False
        with llvm.create_pass_builder(emitter, tuning) as passes, passes.getModulePassManager() as manager:
            manager.run(module, passes)


def _check_symbols(built: bytes) -> None:
    llvm = _llvm()
    unknown = sorted(name for name in _undefined(built) if not llvm.address_of_symbol(name))
    if unknown:
        raise Refused(f"undefined symbols: {', '.join(unknown)}")


def _undefined(built: bytes) -> Iterator[str]:
    """List an ELF object's undefined symbols: functions called by the code or inserted by LLVM.

    Objects for MCJIT are ELF on Linux and Windows; the list is empty for other formats.
    """
    if built[:6] != b"\x7fELF\x02\x01":  # 64-bit, little-endian
        return
    (table,) = struct.unpack_from("<Q", built, 40)
    entry_size, count = struct.unpack_from("<HH", built, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", built, table + entry_size * i) for i in range(count)]
    for _, kind, _, _, offset, size, link, _, _, _ in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        names = sections[link][4]
        for at in range(offset + 24, offset + size, 24):  # the first symbol is a null entry
            name, _, _, section = struct.unpack_from("<IBBH", built, at)
            if section == 0 and name:
                yield built[names + name : built.index(b"\0", names + name)].decode()


def _link(made_for: Machine, built: bytes, entries: tuple[str, ...]) -> Code:
    llvm = _llvm()
    # One engine per object, because kernels share names. It owns its target machine and its empty first module. That
    # module is in the global context, which is never collected before the engine.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine(made_for))
    engine.add_object_file(llvm.ObjectFileRef.from_data(built))
    engine.finalize_object()
    return Code(engine, tuple(int(engine.get_function_address(entry)) for entry in entries))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
