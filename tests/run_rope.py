"""Runs attention with RoPE on chosen devices without pytest, for machines that have none.

python tests/run_rope.py cuda vulkan
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import rope_cases
from rope_cases import Case

from aule.backends import registry

LARGER = [
    Case(dtype, (dim, dim), rotary, lengths, interleaved, causal, heads=(4, 2), tables=tables)
    for dtype in ("f32", "f16", "bf16")
    for dim, rotary in ((64, 64), (128, 128), (128, 64), (256, 256), (80, 32))
    for lengths, interleaved, causal, tables in (((300, 300), False, True, "half"), ((129, 260), True, False, "batch"))
]
"""Tiles of real devices, several to a sequence."""


def main(names: list[str]) -> int:
    wrong = 0
    for name in names:
        device = registry.find(name)
        assert device is not None
        cases = [*rope_cases.CASES.values(), *LARGER]
        for case in cases:
            for deterministic in (False, True):
                found = rope_cases.judge(case, device, deterministic)
                if found:
                    wrong += 1
                    print(f"{name} {case} {'deterministic' if deterministic else ''}: {found}", flush=True)
        print(f"{name}: {2 * len(cases)} runs, {wrong} wrong", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:] or ["cuda"]), 1))
