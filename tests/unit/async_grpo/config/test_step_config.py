"""Steps that cannot be made are refused before anything starts, with the key, the reason and the fix."""

from __future__ import annotations

from typing import Any

import pytest

from async_grpo.config import RunConfig, validate
from async_grpo.errors import ConfigError


def run_with(trainer: dict[str, Any], **run: Any) -> RunConfig:
    return validate({"name": "a", "model": {"random": {}}, "trainer": trainer, **run}, "test")


@pytest.mark.parametrize(
    ("trainer", "says"),
    [
        ({"objective": {"kl_beta": 0.1}}, "kl_beta is 0.1.*Set trainer.reference.source to frozen or synced"),
        ({"reference": {"source": "synced"}}, "Set trainer.reference.sync_every"),
        ({"reference": {"source": "frozen", "sync_every": 4}}, "sync_every .4. has no effect with source frozen"),
        ({"reference": {"path": "elsewhere"}}, "path has no effect with source none"),
        ({"streaming": True, "num_iterations": 2}, "num_iterations .2. goes over the batch more than once"),
        ({"streaming": True, "mini_batches": 2}, "mini_batches .2. deals out the groups of the whole batch"),
        (
            {"streaming": True, "objective": {"advantage": "lite_ppo"}},
            "advantage lite_ppo needs the rewards of the whole",
        ),
        ({"streaming": True, "objective": {"advantage": "reinforce_pp_baseline"}}, "set trainer.streaming to false"),
        ({"streaming": True, "objective": {"advantage": "mine:own"}}, "advantage mine:own, of your own"),
        ({"streaming": True, "objective": {"corrections": ["m2po"]}}, "correction m2po needs the log-probabilities"),
        (
            {"streaming": True, "objective": {"corrections": [{"kind": "mine:own", "whole_batch": True}]}},
            "correction mine:own needs",
        ),
        ({"mini_batches": 17}, "mini_batches .17. is above groups_per_step .16."),
        ({"micro_batch_tokens": 100}, "Raise trainer.micro_batch_tokens, or set trainer.overlong to truncate or drop"),
    ],
)
def test_what_cannot_be_is_refused(trainer: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_with(trainer)


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_micro_batches_may_be_smaller_than_a_sequence_if_it_is_said_what_becomes_of_it(overlong: str) -> None:
    assert run_with({"micro_batch_tokens": 100, "overlong": overlong}).trainer.overlong == overlong


@pytest.mark.parametrize(
    "objective",
    [{}, {"preset": "grpo"}, {"preset": "gspo"}, {"corrections": ["ess_lr", "seq_mis"]}, {"advantage": "opo"}],
)
def test_what_looks_at_a_group_or_a_sequence_can_be_streamed(objective: dict[str, Any]) -> None:
    assert run_with({"streaming": True, "objective": objective}).trainer.streaming


def test_a_reference_may_be_there_only_to_be_measured_from() -> None:
    assert run_with({"reference": {"source": "frozen"}}).trainer.objective.kl_beta == 0
