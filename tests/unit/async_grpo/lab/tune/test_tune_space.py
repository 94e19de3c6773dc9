"""The keys that `async-grpo tune` varies, and their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import RunConfig, load, validate
from async_grpo.errors import ConfigError
from async_grpo.lab.tune.space import build_axes, merge_choices
from tests.support.recorded_runs import PLAIN


def config(**changes: Any) -> RunConfig:
    return validate({**PLAIN, "name": "run", **changes}, "test")


def values_of(base: RunConfig, *vary: str, fix: tuple[str, ...] = ()) -> dict[str, list[str]]:
    axes = build_axes(base, vary, fix)
    return {axis.name: [" ".join(choice.values()) for choice in axis.choices] for axis in axes}


def test_the_default_axes_do_not_change_the_training_data() -> None:
    assert values_of(config()) == {
        "max_staleness": ["2", "0", "1", "4", "8"],  # 16 would be 17 steps of 40: no four windows
        "rollout.max_concurrency": ["64", "16", "32", "48", "96", "128"],
        "buffer.selector": ["fifo 1", "windowed_fifo 4", "windowed_fifo 8", "windowed_fifo 16"],
    }


def test_a_selector_that_chooses_by_age_is_varied_on_request_only() -> None:
    freshest = config(buffer={"selector": {"kind": "freshest"}})
    assert "buffer.selector" not in values_of(freshest)
    requested = values_of(freshest, "buffer.selector.kind=fifo,freshest")
    assert requested["buffer.selector.kind"] == ["freshest", "fifo"]


def test_a_requested_axis_replaces_the_default_and_includes_the_present_value() -> None:
    axes = values_of(config(), "max_staleness=6,3", "groups_per_step=4,8", fix=("rollout.max_concurrency",))
    assert axes["max_staleness"] == ["2", "3", "6"]
    assert axes["groups_per_step"] == ["8", "4"]
    assert "rollout.max_concurrency" not in axes
    windows = values_of(config(), "buffer.selector=windowed_fifo:3")
    assert windows["buffer.selector"] == ["fifo 1", "windowed_fifo 3"]


def test_an_interruption_that_waits_may_become_keep() -> None:
    assert values_of(config(rollout={"interruption": "drain"}))["rollout.interruption"] == ["drain", "keep"]


def test_the_devices_of_a_machine_are_split_in_every_way_that_uses_all() -> None:
    base = load(
        Path("configs/qwen2.5_7b_deepscaler_cuda.yaml"),
        [
            *("trainer.processes=4", "trainer.tensor_parallel=2", "trainer.pipeline_parallel=1"),
            *("rollout.servers=2", "rollout.vllm.tensor_parallel=2", "trainer.nodes=1"),
        ],
    )
    axis = next(axis for axis in build_axes(base, [], []) if axis.name == "split")
    assert [(split["rollout.servers"], split["trainer.processes"]) for split in axis.choices] == [
        ("2", "4"),
        ("3", "2"),
        ("1", "6"),
    ]


def test_the_axes_do_not_depend_on_the_kind_of_device() -> None:
    values = []
    for trains, generates in (("cuda", "cuda"), ("npu", "ascend")):
        trainer = {"platform": trains, "processes": 8, "tensor_parallel": 4}
        rollout = {"servers": 2, "vllm": {"platform": generates, "tensor_parallel": 4}}
        values.append(values_of(config(trainer=trainer, rollout=rollout)))
    cuda, ascend = values
    assert ascend == cuda
    assert ascend["split"] == ["2 8", "3 4", "1 12"]
    assert {"max_staleness", "rollout.max_concurrency", "buffer.selector"} < ascend.keys()


@pytest.mark.parametrize(
    ("vary", "fix", "message"),
    [
        (("trainer.optimizer.lr=1e-5",), (), "async-grpo sweep --grid"),
        (("max_staleness",), (), "--vary 'max_staleness' is not of the form"),
        (("buffer.selector=windowed_fifo",), (), "windowed_fifo:W"),
        ((), ("groups_per_step",), "--fix groups_per_step: that is not varied"),
        ((), ("max_staleness", "rollout.max_concurrency", "buffer.selector"), "nothing is left to vary"),
    ],
)
def test_invalid_options_are_refused(vary: tuple[str, ...], fix: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_axes(config(), vary, fix)


def test_choices_merge_into_the_overrides_of_a_point() -> None:
    assert merge_choices([{"a": "1"}, {"b": "2", "c": "3"}]) == {"a": "1", "b": "2", "c": "3"}
