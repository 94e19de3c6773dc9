"""How the trainer's ranks may be laid out, as far as no model is needed to know."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from async_grpo.config.trainer import TrainerConfig


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        ({"processes": 6, "tensor_parallel": 2, "context_parallel": 2}, "Set trainer.processes to 4 times"),
        ({"processes": 4, "expert_parallel": 3}, "Set trainer.expert_parallel to a divisor of 4"),
        (
            {"processes": 4, "pipeline_parallel": 2, "expert_parallel": 4},
            "Set trainer.expert_parallel to a divisor of 2",
        ),
        ({"processes": 2, "sequence_parallel": True}, "Set trainer.tensor_parallel above 1"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_its_fix(keys: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainerConfig(**keys)
    assert fix in str(caught.value)


def test_expert_parallel_ranks_are_ranks_that_the_other_kinds_count_too() -> None:
    config = TrainerConfig(processes=4, tensor_parallel=2, sequence_parallel=True, expert_parallel=4)
    assert config.expert_parallel == config.processes
