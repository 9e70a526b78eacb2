"""Run a vLLM engine in a process of its own: vLLM does not start several in one.

The process reads ``{"model", "prompts", "tokens", "options"}`` as JSON from standard input and writes its results to
the file that is its argument.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "float32", "seed": 0, "enforce_eager": True, "max_model_len": 1024,
    "max_num_batched_tokens": 256, "max_num_seqs": 32, "enable_prefix_caching": True, "enable_chunked_prefill": True,
    "kv_cache_memory_bytes": 128 << 20, "disable_log_stats": True, "worker_extension_cls": "run_engine.Layers",
}  # fmt: skip


class Layers:
    """Methods that the tests add to vLLM's workers."""

    def attention_layers(self) -> list[str]:
        layers = self.vllm_config.compilation_config.static_forward_context.values()  # type: ignore[attr-defined]
        return sorted({type(impl).__name__ for impl in (getattr(x, "impl", None) for x in layers) if impl})


def run_engine(model: str, prompts: list[list[int]], backend: str, tokens: int = 24, **options: Any) -> dict[str, Any]:
    """Greedy tokens and their log-probabilities, cached prompt tokens, and the classes of each rank's layers."""
    asked = {"model": model, "prompts": prompts, "tokens": tokens, "options": {"attention_backend": backend, **options}}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "found.json")
        done = subprocess.run(
            [sys.executable, __file__, str(target)], input=json.dumps(asked), capture_output=True, text=True,
            timeout=400, cwd=Path(__file__).parent, check=False,
        )  # fmt: skip
        if done.returncode:
            lines = [x for x in (done.stdout + done.stderr).splitlines() if "rror" in x]
            raise RuntimeError("\n".join(lines[-20:]) or done.stderr[-2000:])
        found: dict[str, Any] = json.loads(target.read_text())
        return found


def _run(asked: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    engine = LLM(asked["model"], **(ENGINE | asked["options"]))
    sampling = SamplingParams(temperature=0, max_tokens=asked["tokens"], detokenize=False, ignore_eos=True, logprobs=0)
    found = engine.generate([{"prompt_token_ids": x} for x in asked["prompts"]], sampling, use_tqdm=False)
    rows = [x.outputs[0] for x in found]
    return {
        "tokens": [list(x.token_ids) for x in rows],
        "logprobs": [[step[t].logprob for t, step in zip(x.token_ids, x.logprobs, strict=True)] for x in rows],
        "cached": sum(x.num_cached_tokens or 0 for x in found),
        "layers": engine.collective_rpc("attention_layers"),
    }


if __name__ == "__main__":
    answer = _run(json.load(sys.stdin))
    Path(sys.argv[1]).write_text(json.dumps(answer))
