"""``aule cache``: says where compiled kernels are kept and how large they are, and removes them."""

from __future__ import annotations

import argparse
import json
import os

from aule import settings
from aule.api.info import table
from aule.cli._figures import counted
from aule.errors import InvalidArgumentError
from aule.store import sweep
from aule.store.folder import Untrusted

_KINDS = {
    "kernels": "generated kernels",
    "objects": "kernels compiled for the CPU, or through HIP",
    "vulkan": "kernels compiled by Vulkan drivers",
    "tuned": "what `aule tune` measured",
    "refused": "kernels that a driver refused, to look at",
}
"""Folders of the cache, and what is in them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--clear", action="store_true", help="remove all kernels; they are made again when needed")
    parser.add_argument("--clear-tuned", action="store_true", help="the same, and what `aule tune` measured")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    root, limit = str(settings.cache_dir()), settings.cache_size()
    if os.path.exists(root) and not os.path.isdir(root):
        raise InvalidArgumentError(f"[cache] expected a folder, got the file {root}; change AULE_CACHE_DIR")
    try:
        if args.clear or args.clear_tuned:
            sweep.clear(root, tuned=args.clear_tuned)
        found = sweep.usage(root)
    except Untrusted as error:
        print(f"The cache is not used: {error}")
        return 1
    total = sum(size for _, size in found.values())
    if args.json:
        folders = {name: {"files": count, "bytes": size} for name, (count, size) in found.items()}
        answer = {"path": root, "bytes": total, "limit": limit, "on": settings.disk_cache()}
        print(json.dumps(answer | {"folders": folders}, indent=2))
        return 0
    print(root + ("" if settings.disk_cache() else " (switched off by AULE_DISK_CACHE)"))
    rows = [
        (name, counted(count, "file"), _mib(size), _KINDS.get(name, ""))
        for name, (count, size) in sorted(found.items())
    ]
    print("\n".join([*(f"  {line}" for line in table(rows))] if rows else ["  empty"]))
    print(f"{_mib(total)} of at most {limit >> 20} MiB (AULE_CACHE_SIZE)")
    return 0


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
