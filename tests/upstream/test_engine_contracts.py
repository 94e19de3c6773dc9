"""The engine's requirements, checked against the Python code of vLLM and vllm-ascend.

Releases: the oldest in range, the installed one, and the one that vllm-ascend extends. Each is checked in a separate
process (tests/support/vllm_releases.py).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config.rollout import RolloutConfig
from rollout_server.engines.vllm.platform import environment_variables
from tests.support.upstream import Unpacked, fail_with_findings, find_release, installed_vllm, run_python

pytestmark = pytest.mark.slow
CONCURRENCY = 192
RELEASES = {
    "cpu, installed": ("cpu", lambda: [installed_vllm()]),
    "cuda, installed": ("cuda", lambda: [installed_vllm()]),
    "cuda": ("cuda", lambda: [find_release("vllm")]),
    "ascend": ("ascend", lambda: [find_release("vllm-ascend"), find_release("vllm")]),
}
"""Kind of device, and the packages that its engine imports."""
PARTS = (
    *("names", "calls", "outputs", "worker", "update", "reload", "reload int8", "reload fp8", "logprobs", "proof"),
    *("device", "truncation", "head"),
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a small Qwen2 whose output layer is its embedding, as in Qwen2.5-0.5B and 1.5B."""
    folder: Path = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rollout(kind: str) -> RolloutConfig:
    return RolloutConfig.model_validate(
        {"vllm": {"platform": kind, "max_model_len": 4096}, "max_concurrency": CONCURRENCY}
    )


@cache
def examined(name: str, folder: Path) -> tuple[list[Unpacked], dict[str, Any]]:
    """The packages, and what the parts of `examine` found in them."""
    kind, packages = RELEASES[name]
    found = packages()
    program = (
        "from tests.support.vllm_releases import examine\n"
        f"examine({kind!r}, {str(folder)!r}, {rollout(kind).model_dump_json()!r})"
    )
    return found, run_python(program, *found)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", RELEASES)
def test_vllm_has_and_does_what_the_engine_asks_of_it(name: str, part: str, model_dir: Path) -> None:
    packages, found = examined(name, model_dir)
    fail_with_findings(packages, found[part])


@pytest.mark.parametrize("name", RELEASES)
def test_the_engine_runs_with_the_limits_that_the_planner_assumes(name: str, model_dir: Path) -> None:
    packages, found = examined(name, model_dir)
    kind = RELEASES[name][0]
    limits = rollout(kind).limits
    expected = {
        "max_num_seqs": limits.requests,
        "max_num_batched_tokens": limits.batched_tokens,
        "chunked_prefill": kind != "cpu",
        "prefix_cache": True,
        "eager": kind == "cpu",
        "graphs": "NONE" if kind == "cpu" else "FULL_AND_PIECEWISE",
        "largest_graph": 0 if kind == "cpu" else limits.requests,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "backend": "zmq",
    }
    effective = found["effective"]
    if isinstance(effective, list):
        fail_with_findings(packages, effective)
    fail_with_findings(
        packages,
        [f"{key} is {effective[key]}, not {value}" for key, value in expected.items() if effective[key] != value],
    )


RUNNERS = {"cpu, installed": 1, "cuda, installed": 2, "cuda": 1, "ascend": 1}
"""The version of vLLM's model runner that a dense Qwen2 gets."""


@pytest.mark.parametrize("name", RELEASES)
def test_the_model_runner_is_one_whose_sampler_was_examined(name: str, model_dir: Path) -> None:
    packages, found = examined(name, model_dir)
    if isinstance(found["effective"], dict) and found["effective"]["runner"] != RUNNERS[name]:
        fail_with_findings(
            packages, [f"model runner V{found['effective']['runner']} is the default, not V{RUNNERS[name]}"]
        )


@pytest.mark.parametrize("name", RELEASES)
def test_the_engine_reads_the_environment_variables_that_are_set_for_it(name: str) -> None:
    kind, packages = RELEASES[name]
    found = packages()
    known = set[str]().union(*(each.words() for each in found))
    ours = {name for name in environment_variables(rollout(kind).vllm) if name.startswith("VLLM_")}
    fail_with_findings(found, [f"nothing reads {each}" for each in sorted(ours - known)])
