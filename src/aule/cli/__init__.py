"""The command line: ``aule info | doctor | check | bench | tune | cache | show``.

ADD A COMMAND HERE: a module with ``add_arguments(parser)`` and ``run(args) -> int``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from aule._version import __version__
from aule.errors import AuleError

COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("info", "aule.cli.info", "list devices, and why other backends are unavailable"),
    ("doctor", "aule.cli.doctor", "check packages, drivers and PyTorch's build, with remedies"),
    ("check", "aule.cli.check", "compare every device with a float64 reference"),
    ("bench", "aule.cli.bench", "measure this machine, beside PyTorch if it is installed"),
    ("tune", "aule.cli.tune", "find a GPU's fastest tiles by measuring, and keep them"),
    ("cache", "aule.cli.cache", "show the size of the kernel cache, or clear it"),
    ("show", "aule.cli.show", "print the generated code of any operation"),
)
"""Name, module and help line of each command."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; default: those of the process.

    Returns
    -------
    int
        Exit status: 0 for success, 1 if a check failed, 2 for an invalid or unavailable request, 130 if interrupted.
    """
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # here, where a closed pipe is caught, and not at the interpreter's end
    except AuleError as error:
        print(f"aule: {' '.join(error.message.split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader closed the pipe (``aule show ... | head``). Without this, Python's flush at exit would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        reason = error.strerror or error
        print(f"aule: expected to read or write{where}, got: {reason}; choose another path", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="aule",
        description="FlashAttention for whatever hardware you have.",
        epilog="aule COMMAND --help describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"aule {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    for name, module, summary in COMMANDS:
        sub = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name in argv:  # the others need no arguments, and their modules take time to import
            command = importlib.import_module(module)
            command.add_arguments(sub)
            sub.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    return int(args.run(args))
