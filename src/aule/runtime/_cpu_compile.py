"""Compiles in a child process, because LLVM ends the process when one of its assertions fails.

The child is the same interpreter without the user's script. It starts at the first kernel that the disk cache lacks,
answers one request after the other, and ends with this process. Requests and answers are frames: a length in 8 bytes,
then that many bytes. An empty frame from the child says that it is ready.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import struct
import sys
from collections.abc import Callable
from typing import IO

_SIZE = struct.Struct("<Q")


class ChildDied(Exception):
    """The child ended instead of answering; the text is what it printed last."""


class ChildUnavailable(Exception):
    """This process cannot start a child; the text says why."""


class _Child:
    """A running child. Its users take turns: an answer belongs to the last request."""

    def __init__(self, command: list[str]) -> None:
        import subprocess  # slow to import, and needed only when a kernel is new
        import tempfile

        # Not a pipe: nobody reads it while the child works, and a full pipe would stop the child.
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        # No console window on Windows.
        flags = getattr(subprocess, "CREATE_NO_WINDOW", 0)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._printed, creationflags=flags
            )
        except BaseException:
            self._printed.close()
            raise
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests: IO[bytes] = self._process.stdin
        self._answers: IO[bytes] = self._process.stdout

    def wait_until_ready(self) -> None:
        _read(self._answers)

    def ask(self, request: bytes) -> bytes:
        """Send a request and wait for its answer; raises `EOFError` or `OSError` if the child ends before."""
        _write(self._requests, request)
        return _read(self._answers)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> str:
        """End the child if it is still running, and return what it printed last."""
        self._process.kill()
        self._process.wait()
        lines = []
        if not self._printed.closed:  # else it was ended before
            self._printed.seek(0)
            lines = self._printed.read().decode(errors="replace").strip().splitlines()
            self._close_files()
        return lines[-1] if lines else f"exit status {self._process.returncode}"

    def close(self) -> None:
        """Let the child end by itself, which it does when its requests end."""
        with contextlib.suppress(Exception):  # it still compiles for a thread that outlives the interpreter
            self._requests.close()
            self._process.wait(timeout=1)
            self._close_files()

    def disown(self) -> None:
        """In a forked process: leave the child to the parent."""
        self._close_files()
        self._process.returncode = 0  # keeps its destructor from waiting for another process's child

    def _close_files(self) -> None:
        for file in (self._requests, self._answers, self._printed):
            with contextlib.suppress(OSError):  # a request that was never read
                file.close()


_child: _Child | None = None
_unavailable: str | None = None


def ask(request: bytes) -> bytes:
    """Have the child compile; `serve` describes requests and answers. One thread at a time may call this.

    Raises
    ------
    ChildDied
        The child ended instead of answering. The next request goes to a new one.
    ChildUnavailable
        No child can be started, now or earlier.
    """
    global _child
    if _child is not None and _child.ended():  # killed by someone, not by a request
        _child.end()
        _child = None
    if _child is None:
        _child = _start()
    try:
        return _child.ask(request)
    except (EOFError, OSError):
        child, _child = _child, None
        raise ChildDied(child.end()) from None
    except BaseException:  # interrupted: the answer, which may still come, belongs to no later request
        child, _child = _child, None
        child.end()
        raise


def _start() -> _Child:
    global _unavailable
    command = _command()
    if command is None:
        _unavailable = "sys.executable is not a Python interpreter"
    if _unavailable is not None or command is None:
        raise ChildUnavailable(_unavailable)
    child = None
    try:
        child = _Child(command)
        child.wait_until_ready()
        return child
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        # Processes are forbidden, the interpreter is ending, or the child's imports fail.
        _unavailable = child.end() if child is not None else f"{type(error).__name__}: {error}"
        raise ChildUnavailable(_unavailable) from None
    except BaseException:
        if child is not None:
            child.end()
        raise


def _command() -> list[str] | None:
    """The child's command line; None if ``sys.executable`` is unknown, or a program that embeds Python."""
    program = sys.executable
    if not program or hasattr(sys, "frozen") or not os.path.basename(program).lower().startswith(("python", "pypy")):
        return None
    path = [place for place in sys.path if isinstance(place, str)]
    code = [
        "import signal, sys",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",  # Ctrl-C in a terminal reaches both; the parent handles it
        f"sys.path[:] = {path!r}",
        "from aule.runtime import _cpu_llvm",
        "_cpu_llvm.serve()",
    ]
    return [program, "-I", "-c", "; ".join(code)]


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Be the child: answer requests from standard input on standard output, then end the process."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between the answers
    _write(answers, b"")
    with contextlib.suppress(EOFError):
        while True:
            _write(answers, answer(_read(requests)))
    os._exit(0)


def _write(pipe: IO[bytes], frame: bytes) -> None:
    pipe.write(_SIZE.pack(len(frame)) + frame)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    head = pipe.read(_SIZE.size)
    if len(head) < _SIZE.size:
        raise EOFError
    (size,) = _SIZE.unpack(head)
    frame = pipe.read(size)
    if len(frame) < size:
        raise EOFError
    return frame


def _at_exit() -> None:
    global _child
    child, _child = _child, None
    if child is not None:
        child.close()


def _after_fork() -> None:
    global _child
    child, _child = _child, None
    if child is not None:
        child.disown()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
