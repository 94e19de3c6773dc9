"""What an engine is told on each platform, and what is refused before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from async_grpo.config.rollout import VllmConfig
from async_grpo.errors import EngineError
from rollout_server.engines.vllm.platform import check_platform, environment, platform_arguments


def test_a_cpu_engine_reads_prompts_whole_and_shares_its_cores() -> None:
    config = VllmConfig(max_model_len=4096, kv_cache_bytes=1 << 20, threads=2)
    assert platform_arguments(config) == {
        "kv_cache_memory_bytes": 1 << 20,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 4096,
        "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    }
    assert environment(config)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment(config)["OMP_NUM_THREADS"] == "2"
    assert "distributed_executor_backend" not in platform_arguments(VllmConfig(tensor_parallel=2))


def test_workers_of_an_engine_find_each_other_on_the_loopback_unless_the_user_says_otherwise() -> None:
    assert environment(VllmConfig()).items() >= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}.items()
    assert environment(VllmConfig(platform="cuda"))["NCCL_SOCKET_IFNAME"] == "=lo"
    assert environment(VllmConfig(platform="ascend"))["HCCL_SOCKET_IFNAME"] == "=lo"
    assert environment(VllmConfig(environment={"VLLM_HOST_IP": "10.0.0.5"}))["VLLM_HOST_IP"] == "10.0.0.5"


def test_a_cpu_engine_compiles_only_where_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "my-compiler"
    compiler.touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    assert "TORCHDYNAMO_DISABLE" not in environment(VllmConfig())
    (tmp_path / "Python.h").unlink()
    assert environment(VllmConfig())["TORCHDYNAMO_DISABLE"] == "1"
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX")
    assert environment(VllmConfig())["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in environment(VllmConfig(platform="cuda"))


def test_an_ascend_engine_can_replace_its_weights_and_a_cuda_engine_knows_its_share() -> None:
    config = VllmConfig(platform="ascend", additional_config={"enable_weight_nz_layout": False})
    assert platform_arguments(config) == {
        "gpu_memory_utilization": 0.8,
        "additional_config": {"enable_weight_nz_layout": False},
    }
    assert environment(config)["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert "OMP_NUM_THREADS" not in environment(config)
    config = VllmConfig(platform="cuda", gpu_memory_utilization=0.6)
    assert platform_arguments(config) == {"gpu_memory_utilization": 0.6}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_memory_utilization": 0.5}, "a dial of cuda and ascend, and the platform is cpu"),
        ({"platform": "cuda", "kv_cache_bytes": 1}, "a dial of cpu, and the platform is cuda"),
        ({"platform": "cuda", "additional_config": {"a": 1}}, "a dial of ascend, and the platform is cuda"),
        ({"tensor_parallel": 2, "multiprocessing": False}, "needs a process for each worker"),
        ({"extra": {"logprobs_mode": "raw_logprobs"}}, "extra sets logprobs_mode"),
    ],
)
def test_wrong_combinations_are_refused_before_the_engine_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        VllmConfig(**changes)


def test_a_vllm_for_another_device_is_named() -> None:
    check_platform(VllmConfig(), "cpu")
    check_platform(VllmConfig(platform="ascend"), "npu")
    with pytest.raises(EngineError, match=r"platform is cuda, but the installed vLLM computes on cpu.*rollout-cuda"):
        check_platform(VllmConfig(platform="cuda"), "cpu")
