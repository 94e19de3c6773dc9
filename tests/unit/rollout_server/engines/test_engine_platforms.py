"""Arguments and environment of vLLM on each platform, and settings refused before it starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from async_grpo.config.http import HttpConfig
from async_grpo.config.rollout import EngineLimits, RolloutConfig, VllmConfig
from async_grpo.errors import ConfigError, EngineError
from rollout_server.engines.vllm import compat
from rollout_server.engines.vllm.platform import (
    check_limits,
    check_platform,
    environment_variables,
    limit_arguments,
    platform_arguments,
)


def test_a_cpu_engine_has_no_chunked_prefill_and_binds_no_cores() -> None:
    config = VllmConfig(max_model_len=4096, kv_cache_bytes=1 << 20, threads=2)
    assert platform_arguments(config) == {
        "kv_cache_memory_bytes": 1 << 20,
        "enable_chunked_prefill": False,
        "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    }
    assert environment_variables(config)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment_variables(config)["OMP_NUM_THREADS"] == "2"
    assert "distributed_executor_backend" not in platform_arguments(VllmConfig(tensor_parallel=2))


def limits_of(concurrency: int = 192, http: int = 8, **vllm: Any) -> EngineLimits:
    server = RolloutConfig(
        max_concurrency=concurrency,
        http=HttpConfig(max_concurrency=http),
        vllm=VllmConfig(**{"platform": "cuda"} | vllm),
    )
    return server.limits


@pytest.mark.parametrize(
    ("limits", "requests", "tokens"),
    [
        (limits_of(), 400, 8192),  # 2 * 192 + 8 = 392, and the next multiple of 16
        (limits_of(4100, 16), 8224, 8224),  # a step has room for a token of each
        (limits_of(64, platform="cpu", max_model_len=256), 144, 2048),
        (limits_of(64, platform="cpu", max_model_len=4096), 144, 4096),  # prompts are read whole
        (limits_of(extra={"max_num_seqs": 100, "max_num_batched_tokens": 512}), 100, 512),
    ],
)
def test_engine_limits_cover_all_requests_of_the_server(limits: EngineLimits, requests: int, tokens: int) -> None:
    arguments = limit_arguments(limits, {})
    assert (arguments["max_num_seqs"], arguments["max_num_batched_tokens"]) == (requests, tokens)


def test_accelerators_capture_graphs_for_batches_of_every_size() -> None:
    assert [VllmConfig(platform=name).is_eager for name in ("cpu", "cuda", "ascend")] == [True, False, False]
    assert limit_arguments(limits_of(platform="ascend"), {})["max_cudagraph_capture_size"] == 400
    chosen = {"cudagraph_capture_sizes": [1, 8]}
    for limits, extra in ((limits_of(), chosen), (limits_of(enforce_eager=True), {}), (limits_of(platform="cpu"), {})):
        assert "max_cudagraph_capture_size" not in limit_arguments(limits, extra)


def test_limits_that_differ_from_the_memory_plan_are_refused() -> None:
    limits = limits_of()
    check_limits(limits, SimpleNamespace(max_num_seqs=400, max_num_batched_tokens=8192))
    with pytest.raises(EngineError, match=r"'max_num_seqs': 128, .*'max_num_seqs': 400"):
        check_limits(limits, SimpleNamespace(max_num_seqs=128, max_num_batched_tokens=8192))


def test_workers_meet_on_the_loopback_unless_the_user_sets_an_address() -> None:
    loopback = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    assert environment_variables(VllmConfig()).items() >= loopback.items()
    assert environment_variables(VllmConfig(platform="cuda"))["NCCL_SOCKET_IFNAME"] == "=lo"
    assert environment_variables(VllmConfig(platform="ascend"))["HCCL_SOCKET_IFNAME"] == "=lo"
    assert environment_variables(VllmConfig(environment={"VLLM_HOST_IP": "10.0.0.5"}))["VLLM_HOST_IP"] == "10.0.0.5"


def test_a_cpu_engine_compiles_only_if_configured_and_possible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "my-compiler"
    compiler.touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    compiled = VllmConfig(enforce_eager=False)
    assert "TORCHDYNAMO_DISABLE" not in environment_variables(compiled)
    assert environment_variables(VllmConfig())["TORCHDYNAMO_DISABLE"] == "1"
    (tmp_path / "Python.h").unlink()
    assert environment_variables(compiled)["TORCHDYNAMO_DISABLE"] == "1"
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX")
    assert environment_variables(compiled)["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in environment_variables(VllmConfig(platform="cuda"))


def test_accelerators_get_their_memory_limits_and_replaceable_weights() -> None:
    config = VllmConfig(platform="ascend", additional_config={"enable_weight_nz_layout": False})
    assert platform_arguments(config) == {
        "gpu_memory_utilization": 0.8,
        "additional_config": {"enable_weight_nz_layout": False},
    }
    assert environment_variables(config)["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert environment_variables(config)["TASK_QUEUE_ENABLE"] == "1", "torch_npu refuses to capture a graph at 2"
    assert "OMP_NUM_THREADS" not in environment_variables(config)
    config = VllmConfig(platform="cuda", gpu_memory_utilization=0.6)
    assert platform_arguments(config) == {"gpu_memory_utilization": 0.6}
    assert platform_arguments(config, sleep_mode=True) == {"gpu_memory_utilization": 0.6, "enable_sleep_mode": True}
    assert "enable_sleep_mode" not in platform_arguments(VllmConfig(), sleep_mode=True)
    config = VllmConfig(platform="cuda", kv_cache_bytes=1 << 30)
    assert platform_arguments(config) == {"gpu_memory_utilization": 0.8, "kv_cache_memory_bytes": 1 << 30}


def test_ascend_sleep_mode_refuses_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(EngineError, match="PYTORCH_NPU_ALLOC_CONF"):
        platform_arguments(VllmConfig(platform="ascend"), sleep_mode=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_memory_utilization": 0.5}, "cuda and ascend, .*cpu"),
        ({"platform": "cuda", "additional_config": {"a": 1}}, "setting of ascend"),
        ({"tensor_parallel": 2, "multiprocessing": False}, "rollout.vllm.multiprocessing"),
        ({"extra": {"logprobs_mode": "raw_logprobs"}}, "extra sets logprobs_mode"),
    ],
)
def test_conflicting_settings_are_refused_by_the_configuration(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        VllmConfig(**changes)


def test_a_float32_head_is_an_override_next_to_those_of_quantization() -> None:
    assert platform_arguments(VllmConfig(), fp32_head=True)["hf_overrides"] == {"head_dtype": "float32"}
    overrides = platform_arguments(VllmConfig(quantization="int8"), fp32_head=True)["hf_overrides"]
    assert set(overrides) == {"head_dtype", "quantization_config"}
    assert "hf_overrides" not in platform_arguments(VllmConfig())


def test_a_vllm_without_float32_heads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "explain_missing", lambda name: f"no attribute {name}")
    with pytest.raises(ConfigError, match=r"model\.fp32_head.*0\.26"):
        compat.check_float32_head()


def test_a_vllm_build_for_another_device_is_refused() -> None:
    check_platform(VllmConfig(), "cpu")
    check_platform(VllmConfig(platform="ascend"), "npu")
    with pytest.raises(EngineError, match=r"platform is cuda, .* cpu.*async-grpo install cuda"):
        check_platform(VllmConfig(platform="cuda"), "cpu")
