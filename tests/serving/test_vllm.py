"""vLLM with aule's attention backend: the same greedy tokens as with its own CPU backend, in float32."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from run_engine import run_engine
from tiny_models import requests, write_model

TOLERANCE = 2e-3
"""Of log-probabilities, which are about -1 to -7; a window that is one key longer changes them by more than 0.1."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(folder: Path, name: str) -> str:
    path = folder / name
    return str(path) if path.exists() else write_model(path, name)


def difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Largest difference of the log-probabilities of two runs."""
    rows = zip(a["logprobs"], b["logprobs"], strict=True)
    return max(abs(x - y) for row in rows for x, y in zip(*row, strict=True))


def same_tokens(path: str, prompts: list[list[int]], ranks: int = 1, **options: Any) -> dict[str, Any]:
    """Compare aule's backend with vLLM's; return what was found with aule's."""
    own, found = (run_engine(path, prompts, backend, **options) for backend in ("CPU_ATTN", "CUSTOM"))
    assert own["layers"] == [["CPUAttentionBackendImpl"]] * ranks
    assert found["layers"] == [["AuleAttentionImpl"]] * ranks
    assert found["tokens"] == own["tokens"]
    assert difference(found, own) < TOLERANCE
    return found


def test_mixed_requests_with_prefix_caching_and_chunked_prefill(folder: Path) -> None:
    found = same_tokens(model(folder, "llama"), requests(64))
    assert len(found["tokens"]) == 64
    assert len({x for row in found["tokens"] for x in row}) > 200, "tokens hardly depend on the prompts"
    assert found["cached"] > 1000


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "bloom"])
def test_windows_softcap_sinks_alibi(folder: Path, name: str) -> None:
    same_tokens(model(folder, name), requests(24))


def test_sliding_window(folder: Path) -> None:
    found = same_tokens(model(folder, "mistral"), requests(24))
    other = write_model(folder / "wider", "mistral", sliding_window=41)
    wider = run_engine(other, requests(24), "CUSTOM")
    assert difference(wider, found) > 50 * TOLERANCE  # one key more, so the comparison sees a wrong window


def test_speculative_decoding(folder: Path) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    repeating = [x[:20] * 4 for x in requests(16)]
    found = same_tokens(model(folder, "llama"), repeating, speculative_config=speculation)
    assert found["tokens"] == run_engine(model(folder, "llama"), repeating, "CUSTOM")["tokens"]


def test_block_sizes(folder: Path) -> None:
    own = run_engine(model(folder, "llama"), requests(12), "CPU_ATTN")
    for block in (48, 512):  # vLLM splits the second
        found = run_engine(model(folder, "llama"), requests(12), "CUSTOM", block_size=block)
        assert found["tokens"] == own["tokens"], block


def test_fp8_cache(folder: Path) -> None:
    """Rounded keys change the tokens, so the first ones are compared, and vLLM's backend, whose rounding is another."""
    path, prompts = model(folder, "llama"), requests(24)
    exact = run_engine(path, prompts, "CUSTOM", tokens=1)
    errors = {}
    for backend in ("CPU_ATTN", "CUSTOM"):
        found = run_engine(path, prompts, backend, tokens=1, kv_cache_dtype="fp8")
        pairs = zip(found["logprobs"], exact["logprobs"], strict=True)
        errors[backend] = statistics.mean(abs(x[0] - y[0]) for x, y in pairs)
    assert 1e-4 < errors["CUSTOM"] < 1.2 * errors["CPU_ATTN"]


def test_compiled_model(folder: Path) -> None:
    same_tokens(model(folder, "llama"), requests(12), enforce_eager=False)


def test_tensor_parallel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = run_engine(model(folder, "llama"), requests(24), "CUSTOM")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    found = same_tokens(model(folder, "llama"), requests(24), ranks=2, tensor_parallel_size=2)
    assert found["tokens"] == one["tokens"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"block_size": 24}, "block_size not supported"),
    ],
)
def test_refusals(folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        run_engine(model(folder, "llama"), requests(2), "CUSTOM", **options)


def test_example() -> None:
    command = [sys.executable, str(ROOT / "examples" / "serve_vllm.py"), "--tokens", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert "greedy tokens are the same" in done.stdout, done.stderr[-2000:]
