"""Model shapes and memory plans, compared with values worked out by hand."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import Qwen3MoeConfig

from async_grpo.app.launch.memory_plan import (
    GRAPH_BYTES,
    DevicePlan,
    HostPlan,
    plan_devices,
    plan_engine_memory,
    plan_hosts,
)
from async_grpo.app.launch.memory_plan import RESERVED_BYTES as ENGINE_RESERVED
from async_grpo.config import RunConfig, validate
from async_grpo.errors import ConfigError
from async_grpo.models.shapes import SHAPES, ModelShape, named_shape, shape_of
from async_grpo.utils import memory_limit
from async_grpo.utils.text import GIB
from trainer.platform import base
from trainer.platform.memory import (
    PROCESS_BYTES,
    RESERVED_BYTES,
    TrainerMemory,
    dense_replicas,
    expert_replicas,
    layer_bytes,
    stage_parameters,
    trainer_host_memory,
    trainer_memory,
)

QWEN_7B = SHAPES["qwen2.5-7b"]
TINY = ModelShape(vocab=100, hidden=8, layers=4, heads=2, groups=1, head_dim=4, ffn=16)


def run_config(trainer: dict[str, Any] | None = None, vllm: dict[str, Any] | None = None, **more: Any) -> RunConfig:
    raw = {
        "name": "plan",
        "model": {"path": "models/any", "precision": "bfloat16"},
        "trainer": {"platform": "cuda", **(trainer or {})},
        "rollout": {"max_concurrency": 10, "vllm": {"platform": "cuda", "max_model_len": 1000, **(vllm or {})}},
        **more,
    }
    return validate(raw, "test")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("llama3.1-8b", 8_030_261_248),
    ],
)
def test_public_models_have_the_published_parameter_count(name: str, parameters: int) -> None:
    assert SHAPES[name].parameters == parameters


@pytest.mark.parametrize(
    ("name", "published"),
    [
        (
            "qwen2.5-7b",
            {
                "model_type": "qwen2",
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "num_attention_heads": 28,
                "num_hidden_layers": 28,
                "num_key_value_heads": 4,
                "tie_word_embeddings": False,
                "vocab_size": 152064,
            },
        ),
        (
            "qwen3-30b-a3b",
            {
                "model_type": "qwen3_moe",
                "head_dim": 128,
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_attention_heads": 32,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "num_hidden_layers": 48,
                "num_key_value_heads": 4,
                "tie_word_embeddings": False,
                "vocab_size": 151936,
            },
        ),
    ],
)
def test_a_config_json_gives_the_shipped_shape(name: str, published: dict[str, Any]) -> None:
    assert shape_of(published) == SHAPES[name]


def test_a_mixture_saved_by_transformers_has_its_experts() -> None:
    saved = Qwen3MoeConfig(num_experts=16, num_experts_per_tok=2, moe_intermediate_size=96, intermediate_size=512)
    for shape in (shape_of(saved), shape_of(json.loads(saved.to_json_string()))):
        assert (shape.experts, shape.experts_per_token, shape.ffn) == (16, 2, 96)


def test_missing_settings_of_a_model_are_named() -> None:
    with pytest.raises(ConfigError, match="'vocab_size'"):
        shape_of({"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8})
    with pytest.raises(ConfigError, match=r"'gpt-2'.*qwen2\.5-7b"):
        named_shape("gpt-2")


def test_one_rank_holds_every_parameter() -> None:
    layout = run_config().trainer
    for shape in (QWEN_7B, SHAPES["qwen2.5-0.5b"], SHAPES["qwen3-30b-a3b"]):
        assert sum(stage_parameters(shape, layout, "only")) == shape.parameters


def test_all_ranks_together_hold_every_parameter_and_repeat_the_norms() -> None:
    layout = run_config({"processes": 8, "tensor_parallel": 4, "pipeline_parallel": 2}).trainer
    first, last = (sum(stage_parameters(QWEN_7B, layout, stage)) for stage in ("first", "last"))
    repeated = 3 * (28 * 2 * 3584 + 3584)
    assert 4 * (first + last) == QWEN_7B.parameters + repeated
    assert last - first == 3584


def test_experts_are_split_over_expert_parallel_ranks() -> None:
    layout = run_config({"processes": 8, "tensor_parallel": 2, "expert_parallel": 4}).trainer
    dense, experts = stage_parameters(SHAPES["qwen3-30b-a3b"], layout, "only")
    assert experts == 48 * 128 * 3 * 2048 * 768 // 4
    assert dense < 2 * 10**9
    assert (dense_replicas(layout), expert_replicas(layout)) == (4, 2)


@pytest.mark.parametrize(("precision", "weights", "optimizer"), [("bfloat16", 2, 12), ("float32", 4, 8)])
def test_the_bytes_of_a_parameter(precision: str, weights: int, optimizer: int) -> None:
    memory = trainer_memory(run_config(model={"path": "any", "precision": precision}), QWEN_7B)
    assert memory.weights == weights * 7_615_616_512
    assert memory.gradients == 4 * 7_615_616_512
    assert memory.optimizer == optimizer * 7_615_616_512


def test_zero_1_shards_the_optimizer_over_ranks_with_equal_weights() -> None:
    alone = trainer_memory(run_config(), QWEN_7B)
    four = trainer_memory(run_config({"processes": 4}), QWEN_7B)
    assert (four.weights, four.gradients) == (alone.weights, alone.gradients)
    assert four.optimizer == pytest.approx(alone.optimizer / 4, rel=1e-6)


def test_activations_per_layer_follow_the_formula() -> None:
    layout = run_config().trainer
    # 4hb = 64, attention (3q + 3k)b = 72, 3fb = 96
    assert layer_bytes(TINY, layout, 2, recompute="none") == 64 + 72 + 96
    assert layer_bytes(TINY, layout, 2, recompute="selective") == 64 + 48 + 96
    assert layer_bytes(TINY, layout, 2, recompute="full") == 16
    cut = {"processes": 2, "tensor_parallel": 2}
    without, shared = (run_config({**cut, "sequence_parallel": on}).trainer for on in (False, True))
    assert layer_bytes(TINY, without, 2, recompute="none") == 64 + 36 + 48
    assert layer_bytes(TINY, shared, 2, recompute="none") == 32 + 36 + 48
    npu = run_config({"platform": "npu"}).trainer
    assert layer_bytes(TINY, npu, 2, recompute="none") == 64 + (96 + 2 * 64) + 96
    # Ranks that share sequences keep the keys of 2 * 2 + 1 chunks: (2q + 5k)b, and on an NPU (3q + 6k)b.
    context = {"processes": 2, "context_parallel": 2}
    layouts = [run_config({**context, "platform": platform}).trainer for platform in ("cuda", "npu")]
    sizes = [layer_bytes(TINY, layout, 2, recompute="none") for layout in layouts]
    assert sizes == [64 + 72 + 96, 64 + (96 + 2 * 64) + 96]


TWO_STAGES = {"processes": 2, "pipeline_parallel": 2}


@pytest.mark.parametrize(
    ("trainer", "layers", "stage", "activations", "work_space"),
    [
        ({}, 4, "only", 1000 * 4 * 232, 1000 * (100 * 6 + 32)),
        (TWO_STAGES, 4, "last", 1000 * 2 * 232, 1000 * 632),
        (TWO_STAGES, 40, "first", 1000 * 20 * 2 * 232, 1000 * (4 * 8 + 3 * 16) * 2),  # two micro-batches in flight
        ({"recompute": "full"}, 4, "only", 1000 * 4 * 16, 1000 * 632),
        ({"processes": 2, "context_parallel": 2}, 4, "only", 500 * 4 * (64 + 72 + 96), 500 * 632),
        ({"objective": {"entropy_coef": 0.01}}, 4, "only", 1000 * 4 * 232, 1000 * (100 * 12 + 32)),
    ],
)
def test_the_largest_stage_has_activations_in_flight_and_logits(
    trainer: dict[str, Any], layers: int, stage: str, activations: int, work_space: int
) -> None:
    memory = trainer_memory(run_config({"micro_batch_tokens": 1000, **trainer}), replace(TINY, layers=layers))
    assert (memory.stage, memory.activations, memory.work_space) == (stage, activations, work_space)


def test_a_float32_head_on_an_npu_copies_its_weights_and_input() -> None:
    def work_space(platform: str, fp32_head: bool) -> int:
        model = {"path": "models/any", "precision": "bfloat16", "fp32_head": fp32_head}
        config = run_config({"platform": platform, "micro_batch_tokens": 1000}, model=model)
        return trainer_memory(config, replace(TINY, hidden=1024)).work_space

    assert work_space("cuda", True) == work_space("cuda", False)
    assert work_space("npu", True) == 4 * 1024 * 100 + 1000 * (4 * 100 + 8 * 1024)


def test_an_offloaded_optimizer_is_fetched_by_parameter() -> None:
    memory = trainer_memory(run_config({"optimizer": {"offload": True}}), QWEN_7B)
    assert (memory.optimizer, memory.fetched) == (0, 20 * 152_064 * 3584)  # the embedding
    less = replace(memory, activations=GIB, work_space=GIB)
    assert less.total == int(1.05 * (less.weights + less.gradients + less.fetched)) + RESERVED_BYTES
    assert "fetched from the optimizer 10.2) + 3.0 reserved" in str(less)


def test_all_experts_of_a_rank_are_fetched_as_one_parameter() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    offloaded = {"processes": 4, "expert_parallel": 4, "platform": "cuda", "optimizer": {"offload": True}}
    memory = trainer_memory(run_config(offloaded), shape)
    assert memory.fetched == 20 * max(shape.vocab * shape.hidden, 2 * shape.ffn * shape.hidden * shape.experts // 4)


def test_a_reference_model_on_the_device_is_counted() -> None:
    kept = {"objective": {"kl_beta": 0.1}, "reference": {"source": "frozen", "placement": "model"}}
    assert trainer_memory(run_config(kept), QWEN_7B).reference == 2 * 7_615_616_512
    measured_only = {"reference": {"source": "frozen", "placement": "model"}}
    assert trainer_memory(run_config(measured_only), QWEN_7B).reference == 2 * 7_615_616_512
    swapped = run_config({"objective": {"kl_beta": 0.1}, "reference": {"source": "frozen"}})
    assert trainer_memory(swapped, QWEN_7B).reference == 2 * (64 << 20)  # buffers of the exchange
    assert trainer_host_memory(swapped, QWEN_7B).reference == 2 * 7_615_616_512


def test_the_total_has_slack_and_reserved_memory() -> None:
    memory = trainer_memory(run_config({"micro_batch_tokens": 1000}), TINY)
    parts = memory.weights + memory.gradients + memory.optimizer + memory.activations + memory.work_space
    assert memory.total == int(1.05 * parts) + RESERVED_BYTES


def test_a_cached_token_has_keys_and_values_in_every_layer() -> None:
    assert plan_engine_memory(run_config(), QWEN_7B).per_token == 2 * 28 * 4 * 128 * 2
    assert plan_engine_memory(run_config(vllm={"tensor_parallel": 2}), QWEN_7B).per_token == 2 * 28 * 2 * 128 * 2
    # Eight ranks for four groups: every group lies on two of them.
    assert plan_engine_memory(run_config(vllm={"tensor_parallel": 8}), QWEN_7B).per_token == 2 * 28 * 1 * 128 * 2


def test_an_8_bit_engine_stores_layers_with_one_byte_per_element() -> None:
    whole, small = (
        plan_engine_memory(run_config(vllm={"quantization": kind}), QWEN_7B).weights for kind in ("none", "int8")
    )
    outside = 2 * 152064 * 3584 + 3584
    assert whole == 2 * QWEN_7B.parameters
    assert small == 2 * outside + (QWEN_7B.parameters - outside)


def test_the_cache_is_the_share_without_weights_and_work_space() -> None:
    memory = plan_engine_memory(run_config(vllm={"gpu_memory_utilization": 0.5}), QWEN_7B)
    assert memory.weights == 2 * 7_615_616_512
    assert memory.work_space > ENGINE_RESERVED
    assert memory.cache_bytes(80 * GIB) == 40 * GIB - memory.weights - memory.work_space
    assert memory.count_samples(80 * GIB) == memory.cache_bytes(80 * GIB) // (57_344 * 1000)


def test_the_work_space_has_one_step_of_all_requests_and_graphs() -> None:
    widths = 4 * 8 + 2 * 16 + 8 + 2 * 4
    step = 8192 * 2 * widths + 4 * 32 * 100  # 2 * 10 samples and 8 completions for HTTP: 32 requests
    assert plan_engine_memory(run_config(), TINY).work_space == step + ENGINE_RESERVED + GRAPH_BYTES
    assert plan_engine_memory(run_config(vllm={"enforce_eager": True}), TINY).work_space == step + ENGINE_RESERVED


def plan(trainer_gib: float | None, engine_gib: float | None, **trainer: int) -> DevicePlan:
    """Plan a 7B model on devices of the given sizes."""
    model = {"path": "models/none", "architecture": "qwen2.5-7b", "precision": "bfloat16"}
    device_plan = plan_devices(
        run_config({"device_memory_gib": trainer_gib, **trainer}, {"device_memory_gib": engine_gib}, model=model)
    )
    assert device_plan is not None
    return device_plan


def test_a_7b_model_on_one_80_gib_device_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"80 GiB.*1\d\d\.\d GiB.*optimizer 85\.1.*tensor_parallel"):
        plan(80, 80).check()


def test_an_engine_without_room_for_one_sample_is_refused_with_the_arithmetic() -> None:
    cut = {"processes": 8, "tensor_parallel": 4}
    with pytest.raises(ConfigError, match=r"16 GiB.*12\.8.*weights 14\.2.*rollout\.vllm\.tensor_parallel"):
        plan(80, 16, **cut).check()
    plan(80, 80, **cut).check()


def test_staging_is_outside_the_engines_share() -> None:
    config = run_config(vllm={"staging_gib": 15, "gpu_memory_utilization": 0.8})
    engine = plan_engine_memory(config, QWEN_7B)
    assert (engine.max_bytes(80 * GIB), engine.asleep) == (79 * GIB, ENGINE_RESERVED + GRAPH_BYTES + 15 * GIB)
    assert "staging 15.0 outside the share" in str(engine)
    plan = DevicePlan(None, None, engine, 80.0, 0)
    plan.check()
    with pytest.raises(ConfigError, match=r"staging_gib is 15\.0.*64 GiB.*66\.2 GiB"):
        replace(plan, engine_gib=64.0).check()


def test_devices_of_unknown_size_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "TOOL_TIMEOUT_S", 0.0)
    unknown = plan(None, None)
    unknown.check()
    assert all("not known" in text for _, text in unknown.table_rows()[:2])


def shared_plan(sharing: str, device_gib: float, cache_gib: int) -> DevicePlan:
    """Return a plan of both sides on one device.

    The trainer needs 1.05 * (2 + 4 + 8 + 5 + 1) + 3 = 24 GiB, 17.7 of them between steps. The engine needs 4 GiB and
    its cache; its share is 10 GiB.
    """
    vllm = {"kv_cache_bytes": cache_gib * GIB, "gpu_memory_utilization": 10.01 / device_gib}
    launch = {"share_devices": sharing} if sharing != "off" else {}
    config = run_config({"device_memory_share": 24.01 / device_gib}, vllm, launch=launch)
    sizes = {"weights": 2, "gradients": 4, "optimizer": 8, "activations": 5, "work_space": 1, "reference": 0}
    trainer = TrainerMemory("only", 0, **{part: size * GIB for part, size in sizes.items()})
    engine = replace(
        plan_engine_memory(config, TINY), weights=3 * GIB, work_space=GIB, per_token=GIB // 1000, asleep=GIB
    )
    share = config.trainer.device_memory_share
    return DevicePlan(trainer, device_gib, engine, device_gib, 0, share, config.launch.share_devices)


def test_a_shared_device_holds_the_sum_of_both_sides() -> None:
    split = shared_plan("split", 34.1, 6)
    split.check()
    assert dict(split.table_rows())["shared device"] == "trainer 24.0 + engine 10.0 = 34.0 GiB at worst; of 34.1 GiB"
    sleep = shared_plan("sleep", 28.0, 6)
    sleep.check()
    assert dict(sleep.table_rows())["shared device"] == (
        "trainer 17.7 + engine 10.0 = 27.7 GiB between steps; trainer 24.0 + sleeping engine 1.0 = 25.0 GiB in a step; "
        "of 28 GiB"
    )


def test_a_too_small_shared_device_is_refused_with_the_phase() -> None:
    with pytest.raises(ConfigError, match=r"27 GiB.*27\.7 GiB"):
        shared_plan("sleep", 27.0, 6).check()
    with pytest.raises(ConfigError, match=r"kv_cache_bytes is 7516192768.*645318\d+ bytes"):
        shared_plan("split", 34.1, 7).check()
    with pytest.raises(ConfigError, match=r"0\.5 .*24\.0 GiB"):
        replace(shared_plan("split", 34.1, 6), trainer_share=0.5).check()


def test_a_side_on_the_cpu_has_no_device_plan() -> None:
    model = {"path": "any", "architecture": "qwen2.5-7b"}
    assert plan_devices(validate({"name": "cpu", "model": model}, "test")) is None
    half = plan_devices(validate({"name": "half", "model": model, "trainer": {"platform": "cuda"}}, "test"))
    assert half is not None and half.engine is None


def test_adapters_have_gradients_and_moments_of_their_own_size() -> None:
    config = run_config(model={"path": "models/any", "precision": "bfloat16", "lora": {"rank": 16}})
    adapters = 40_370_176  # as PEFT counts them
    memory = trainer_memory(config, QWEN_7B)
    assert memory.weights == 2 * (QWEN_7B.parameters + adapters)
    assert (memory.gradients, memory.optimizer) == (4 * adapters, 12 * adapters)


@pytest.mark.parametrize(
    ("precision", "offload", "optimizer_bytes", "checkpoint_bytes"),
    [("bfloat16", False, 0, 14), ("bfloat16", True, 12, 2), ("float32", False, 0, 16), ("float32", True, 8, 8)],
)
def test_a_checkpoint_copies_weights_and_an_optimizer_on_the_device(
    precision: str, offload: bool, optimizer_bytes: int, checkpoint_bytes: int
) -> None:
    model = {"path": "models/any", "precision": precision}
    config = run_config({"processes": 2, "optimizer": {"offload": offload}}, model=model)
    memory = trainer_host_memory(config, QWEN_7B)
    assert memory.optimizer == optimizer_bytes * QWEN_7B.parameters
    assert memory.checkpoint == checkpoint_bytes * QWEN_7B.parameters


def test_a_too_small_machine_is_refused_unless_it_is_not_compared() -> None:
    trainer = trainer_host_memory(run_config({"optimizer": {"offload": True}}), QWEN_7B)
    plan = HostPlan(trainer=trainer, stores=GIB, engines=GIB, redis=GIB, available=None, source="not here")
    plan.check()
    replace(plan, available=plan.total).check()
    with pytest.raises(ConfigError, match="checkpoint"):
        replace(plan, available=plan.total - 1).check()


def install_fake_smi(count: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an nvidia-smi first on the PATH that lists `count` devices of 80 GB."""
    rows = "".join(f"{index}, NVIDIA H100 80GB HBM3, 81559, 550.54.15\n" for index in range(count))
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{rows}'\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def plan_host(devices: int, **changes: Any) -> HostPlan:
    """Plan the first host of a run with a trainer on all devices but one, and one engine."""
    trainer = {"processes": devices - 1, "nodes": changes.pop("nodes", 1), "rendezvous": {"address": "10.0.0.5"}}
    return plan_hosts(run_config(trainer, **changes), QWEN_7B)[0]


def test_this_machine_is_compared_only_if_it_has_the_runs_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_smi(2, tmp_path, monkeypatch)
    local = plan_host(2)
    limit = memory_limit.cgroup_memory_limit() or psutil.virtual_memory().total
    assert local.available == min(limit, psutil.virtual_memory().total)
    elsewhere = plan_host(4)
    assert elsewhere.available is None
    assert "not compared: this machine does not have the run's devices" in elsewhere.table_row()[1]


def test_a_lower_container_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_smi(2, tmp_path, monkeypatch)
    monkeypatch.setattr(memory_limit, "cgroup_memory_limit", lambda: GIB)
    assert plan_host(2).available == GIB
    with pytest.raises(ConfigError, match=r"1\.0 GiB .*container"):
        plan_host(2).check()
    monkeypatch.setattr(memory_limit, "cgroup_memory_limit", lambda: 2**63 - 4096)
    assert plan_host(2).available == psutil.virtual_memory().total


def test_configured_memory_is_compared_on_any_machine() -> None:
    needed = plan_host(4).total
    sufficient = plan_host(4, launch={"memory_gib_per_node": needed / GIB + 1})
    sufficient.check()
    assert "(launch.memory_gib_per_node), 1.0 stay free" in sufficient.table_row()[1]
    with pytest.raises(ConfigError, match=r"launch\.memory_gib_per_node"):
        plan_host(4, launch={"memory_gib_per_node": needed / GIB - 1}).check()


def test_every_machine_has_the_host_memory_of_its_roles() -> None:
    trainer = {"processes": 16, "nodes": 2, "rendezvous": {"address": "10.0.0.5"}, "optimizer": {"offload": True}}
    config = run_config(trainer, redis={"url": "redis://10.0.0.5:6379"}, launch={"devices_per_node": 8})
    first, second, third = plan_hosts(config, QWEN_7B)
    copy = 2 * QWEN_7B.parameters
    assert (first.stores, second.stores, third.stores) == (2 * copy, 0, 2 * copy)
    assert first.trainer == second.trainer == trainer_host_memory(config, QWEN_7B)
    assert third.trainer.total == 0
    assert [plan.engines for plan in (first, second, third)] == [0, 0, PROCESS_BYTES]
    assert [plan.table_row()[0] for plan in (first, second, third)] == [
        f"host memory, node {node}" for node in range(3)
    ]
    together = plan_hosts(run_config({"optimizer": {"offload": True}}), QWEN_7B)
    assert [(plan.stores, plan.table_row()[0]) for plan in together] == [(4 * copy, "host memory")]
