"""Disassembles the machine code that NVIDIA's Vulkan driver leaves in its pipeline cache.

    AULE_CACHE_DIR=/tmp/one python -c "..."                        # one call through Vulkan
    python benchmarks/vulkan_sass.py /tmp/one/vulkan/*.bin > one.sass

Format found with driver 580.159.04: a pipeline is a zstd frame (from byte 100 on if there is only one), in which words
19 and 20 are the size of the code and its start minus 8 bytes. Needs `nvdisasm`, of the package nvidia-cuda-nvdisasm,
and libzstd. The loops of a program, with their instructions by kind, are listed before its code.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FRAME = bytes.fromhex("28b52ffd")
"""What a zstd frame begins with."""
LARGEST = 64 << 20


def frames(data: bytes) -> Iterator[bytes]:
    """The zstd frames among some bytes, unpacked."""
    zstd = ctypes.CDLL(ctypes.util.find_library("zstd") or "libzstd.so.1")
    zstd.ZSTD_decompress.restype = zstd.ZSTD_findFrameCompressedSize.restype = ctypes.c_size_t
    at = data.find(FRAME)
    while at >= 0:
        packed = data[at:]
        size = zstd.ZSTD_findFrameCompressedSize(packed, ctypes.c_size_t(len(packed)))
        if not zstd.ZSTD_isError(ctypes.c_size_t(size)):
            room = ctypes.create_string_buffer(LARGEST)
            length = zstd.ZSTD_decompress(room, ctypes.c_size_t(LARGEST), packed, ctypes.c_size_t(size))
            if not zstd.ZSTD_isError(ctypes.c_size_t(length)):
                yield room.raw[:length]
                at += size - len(FRAME)
        at = data.find(FRAME, at + len(FRAME))


def programs(data: bytes) -> Iterator[bytes]:
    """The machine code in a pipeline cache, program by program."""
    for frame in frames(data):
        if frame[8:12] == b"NVuc":
            size, start = struct.unpack_from("<2I", frame, 19 * 4)
            yield frame[start + 8 : start + 8 + size]


def disassembled(code: bytes, nvdisasm: str, architecture: str) -> list[str]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        done = subprocess.run([nvdisasm, "-b", architecture, file.name], capture_output=True, text=True, check=True)
    return [line.strip() for line in done.stdout.splitlines() if re.match(r"\s*/\*[0-9a-f]{4,}\*/", line)]


def loops(lines: list[str]) -> Iterator[str]:
    """Each jump backwards: where, how long, and how many instructions of each kind lie between."""
    text = [re.match(r"/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?(.*)", line) for line in lines]
    found = [(int(m[1], 16), m[2]) for m in text if m]
    places = {address: i for i, (address, _) in enumerate(found)}
    for end, (address, instruction) in enumerate(found):
        target = re.match(r"BRA\S*\s+(?:\S+, )?`?\(?0x([0-9a-f]+)", instruction)
        if target and int(target[1], 16) < address:
            start = places[int(target[1], 16)]
            kinds = Counter(re.split(r"[. ]", line)[0] for _, line in found[start : end + 1])
            listed = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common(24))
            yield f"loop {target[1]} to {address:x}, {end + 1 - start} instructions: {listed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="data of pipeline caches")
    parser.add_argument("--nvdisasm", default="nvdisasm")
    parser.add_argument("--architecture", default="SM90")
    args = parser.parse_args()
    for path in args.files:
        for number, code in enumerate(programs(path.read_bytes())):
            lines = disassembled(code, args.nvdisasm, args.architecture)
            print(f"// {path} {number}: {len(lines)} instructions")
            for line in loops(lines):
                print(f"// {line}")
            print("\n".join(lines))


if __name__ == "__main__":
    main()
