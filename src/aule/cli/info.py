"""``aule info``: lists this machine's devices and backends."""

from __future__ import annotations

import argparse
import json

from aule.api.info import get_backend_info, print_backend_info


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.json:
        print(json.dumps(get_backend_info(), indent=2))
    else:
        print_backend_info()
    return 0
