"""What a run can need is worked out before it starts, and compared with what there is."""

from __future__ import annotations

from typing import Any

import pytest

from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from buffer import plan_buffer_memory


def config_of(**changes: Any) -> RunConfig:
    values = {"name": "a", "model": {"path": "model"}, "max_staleness": 1, "groups_per_step": 2, "steps": 100}
    return RunConfig.model_validate(values | changes)


def test_the_worst_case_is_a_full_window_a_full_log_and_the_longest_completions() -> None:
    """Per group: 8 samples of 64 tokens and a prompt of 512 tokens."""
    plan = plan_buffer_memory(config_of(trainer={"checkpoint": {"every_steps": 5, "background": False}}))
    group = 8 * (64 * 14 + 512) + 512 * 10 + 2048
    assert (plan.group_bytes, plan.active_groups, plan.logged_groups, plan.waiting_tasks) == (group, 4, 10, 8)
    assert plan.needed_bytes == int(1.25 * (14 * group + 8 * (512 * 10 + 2048)))


def test_truncated_sampling_adds_the_kept_tokens_of_every_position() -> None:
    plain, truncated = (plan_buffer_memory(config_of(sampling={"top_k": top_k})) for top_k in (0, 20))
    assert truncated.group_bytes - plain.group_bytes == 8 * 64 * (2 + 20 * 4)


def test_a_checkpoint_in_the_background_can_leave_two_periods_in_the_log() -> None:
    assert plan_buffer_memory(config_of(trainer={"checkpoint": {"every_steps": 5}})).logged_groups == 20


def test_no_more_steps_are_logged_than_the_run_has() -> None:
    assert plan_buffer_memory(config_of(steps=3, trainer={"checkpoint": {"every_steps": 5}})).logged_groups == 6


def test_a_server_that_is_too_small_is_refused_with_the_arithmetic() -> None:
    plan = plan_buffer_memory(config_of())
    with pytest.raises(ConfigError, match=r"1\.0 MiB.* 1\.25 \* \(\(4 active \+ 40 logged groups\) \* 18 KiB") as error:
        plan.check(plan.needed_bytes - 1, "redis.max_memory_bytes")
    assert "Raise redis.max_memory_bytes" in str(error.value)


def test_enough_memory_and_no_limit_are_both_fine() -> None:
    plan = plan_buffer_memory(config_of())
    plan.check(plan.needed_bytes, "the server")
    plan.check(0, "the server")


def test_room_for_a_spare_checkpoint_is_what_the_worst_case_of_the_groups_to_come_leaves() -> None:
    plan = plan_buffer_memory(config_of(redis={"url": "redis://h:1"}))
    logged_bytes = plan.logged_groups * plan.group_bytes
    assert plan.leaves_room(logged_bytes, finished=0)
    assert not plan.leaves_room(logged_bytes + plan.group_bytes, finished=0)
    assert plan.leaves_room(logged_bytes + plan.group_bytes, finished=1)
    own_server = plan_buffer_memory(config_of(redis={"max_memory_bytes": 2 * plan.needed_bytes}))
    assert own_server.leaves_room(logged_bytes + plan.group_bytes, finished=0)
