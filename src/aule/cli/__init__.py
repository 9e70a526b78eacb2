"""``aule info | check | tune | show``.

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
    ("info", "aule.cli.info", "what this machine has: devices, the default, and why other backends were refused"),
    ("check", "aule.cli.check", "attention on every device against the fp64 reference, with errors and times"),
    ("tune", "aule.cli.tune", "the fastest tiles on this machine's device, measured and kept for later calls"),
    ("show", "aule.cli.show", "the source of a kernel in any language, or its IR"),
)
"""Name, module and one line of help of each command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; default: those of the process.

    Returns
    -------
    int
        Exit status: 0 when all is well, 1 when a check found something wrong, 2 for a request that cannot be served.
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
        # The reader left (``aule show ... | head``). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
