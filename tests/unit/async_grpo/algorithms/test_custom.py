"""Functions of the user's own are found, tried before anything starts, and used; wrong ones are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from async_grpo.algorithms import check_objective, load_advantage, token_objective
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.errors import ConfigError
from tests.support.objective_cases import random_rows, tokens_of

HERE = "tests.support.own_objective"


def test_valid_functions_pass_the_check() -> None:
    check_objective(
        ObjectiveConfig(advantage=f"{HERE}:signs", loss=f"{HERE}:squared", corrections=[f"{HERE}:halves", "seq_mis"])
    )


def test_a_custom_loss_gets_its_options_and_its_gradient_is_used() -> None:
    config = ObjectiveConfig(loss=f"{HERE}:squared", options={"scale": 2.0}, corrections=[f"{HERE}:halves"])
    tokens = tokens_of(random_rows(0))
    found = token_objective(tokens, config)
    found.loss_N.sum().backward()
    log_r_N = tokens.logprobs_N.detach() - tokens.prox_N
    assert torch.allclose(found.loss_N, 0.5 * (2.0 * log_r_N.square() - tokens.advantages_N * log_r_N), rtol=1e-12)
    assert torch.allclose(tokens.logprobs_N.grad, 0.5 * (4.0 * log_r_N - tokens.advantages_N), rtol=1e-12)


def test_a_custom_advantage_replaces_the_built_in_rule() -> None:
    rewards = torch.tensor([[1.0, 0.2]])
    found = load_advantage(f"{HERE}:signs")(rewards, torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 2))
    assert found.tolist() == [[1.0, -1.0]]


def test_a_custom_correction_may_request_the_whole_batch() -> None:
    kinds = [{"kind": f"{HERE}:halves", "whole_batch": whole} for whole in (False, True)]
    assert [ObjectiveConfig(corrections=[kind]).needs_forward_pass for kind in kinds] == [False, True]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"loss": "no.such.module:loss"}, "ModuleNotFoundError"),
        ({"loss": f"{HERE}:missing"}, "AttributeError"),
        ({"loss": f"{HERE}:not_a_function"}, "type int"),
        ({"loss": f"{HERE}:takes_nothing"}, "trial .*TypeError"),
        ({"loss": f"{HERE}:gives_a_bare_tensor"}, "returned a Tensor"),
        ({"loss": f"{HERE}:forgets_the_gradient"}, "gradient"),
        ({"advantage": f"{HERE}:gives_nan"}, "rewards_BG is NaN"),
        ({"advantage": f"{HERE}:takes_nothing"}, "TypeError"),
        ({"corrections": [f"{HERE}:gives_one_number"]}, r"\(\).* \(5,\)"),
        ({"corrections": [":"]}, "cannot be imported"),
    ],
)
def test_an_invalid_function_is_rejected_by_name_with_its_signature(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refusal:
        check_objective(ObjectiveConfig(**keys))
    assert "trainer.objective" in str(refusal.value)
    assert "(tokens" in str(refusal.value) or "(rewards" in str(refusal.value) or "PYTHONPATH" in str(refusal.value)
