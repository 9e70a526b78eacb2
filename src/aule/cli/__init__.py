"""The command line: ``aule info | check | bench | tune | cache | show``.

ADD A COMMAND HERE: a module with ``add_arguments(parser)`` and ``run(args) -> int``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from aule._version import __version__
from aule.errors import AuleError

COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("info", "aule.cli.info", "list devices, the default one, and why other backends are unavailable"),
    ("check", "aule.cli.check", "compare attention on every device with the fp64 reference, with errors and times"),
    ("bench", "aule.cli.bench", "measure attention, decoding and row operations, beside PyTorch where it is there"),
    ("tune", "aule.cli.tune", "measure the fastest tiles on a device and keep them for later calls"),
    ("cache", "aule.cli.cache", "say where compiled kernels are kept and how large they are, or remove them"),
    ("show", "aule.cli.show", "print the source of a kernel in any language, or its IR"),
)
"""Name, module and help line of each command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; default: those of the process.

    Returns
    -------
    int
        Exit status: 0 for success, 1 if a check failed, 2 for an invalid or unavailable request.
    """
    parser = argparse.ArgumentParser(prog="aule", description="FlashAttention for whatever hardware you have.")
    parser.add_argument("--version", action="version", version=f"aule {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, module, summary in COMMANDS:
        command = importlib.import_module(module)
        sub = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return int(args.run(args))
    except AuleError as error:
        print(f"aule: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader closed the pipe (``aule show ... | head``). Without this, Python's flush at exit would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
