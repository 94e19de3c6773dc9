"""Custom objective functions: `module:attribute` in the working folder or on the Python path.

    advantage     (rewards_BG, valid_BG, lengths_BG) -> advantages_BG
    loss          (Tokens, ObjectiveConfig) -> TokenLoss           settings: config.options
    correction    (Tokens, CorrectionConfig) -> multiplier [N]     settings: config.options

Losses and corrections must compute each sequence separately, so that results do not depend on micro-batches and ranks.
A correction with `whole_batch: true` may use the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from async_grpo.algorithms.advantages import ADVANTAGES, Advantage
from async_grpo.algorithms.corrections import CORRECTIONS, Correction
from async_grpo.algorithms.losses import LOSSES, Loss, TokenLoss
from async_grpo.algorithms.tokens import Tokens
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.config.presets import is_custom
from async_grpo.errors import ConfigError
from async_grpo.plugins import load_plugin

F = TypeVar("F", bound=Callable[..., Any])

SIGNATURES = {
    "advantage": "(rewards_BG, valid_BG, lengths_BG) -> advantages_BG",
    "loss": "(tokens: Tokens, config: ObjectiveConfig) -> TokenLoss",
    "correction": "(tokens: Tokens, config: CorrectionConfig) -> multiplier_N",
}


def load_advantage(name: str) -> Advantage:
    """Return the built-in or custom function of this name. Raises ConfigError if it cannot be imported."""
    return _load_function("advantage", name, ADVANTAGES)


def load_loss(name: str) -> Loss:
    """Return the built-in or custom function of this name. Raises ConfigError if it cannot be imported."""
    return _load_function("loss", name, LOSSES)


def load_correction(name: str) -> Correction:
    """Return the built-in or custom function of this name. Raises ConfigError if it cannot be imported."""
    return _load_function("correction", name, CORRECTIONS)


_INVALID_SAMPLES = (
    " for a group with a sample that no verifier could judge: rewards_BG is NaN where valid_BG is false. Replace it "
    "first, rewards_BG.nan_to_num() * valid_BG, and leave such samples at advantage 0"
)


def check_objective(config: ObjectiveConfig) -> None:
    """Import all custom functions and call each on a trial of five tokens, before the run starts.

    Raises ConfigError if a function cannot be imported, fails, or returns something else than its signature.
    """
    if is_custom(config.advantage):
        rewards_BG = torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.0, float("nan")]], dtype=torch.float64)
        trial = (rewards_BG, ~rewards_BG.isnan(), torch.full((2, 3), 4))
        advantages_BG = _call_on_trial("advantage", load_advantage, config.advantage, trial)
        _check_numbers("advantage", config.advantage, advantages_BG, (2, 3))

    if is_custom(config.loss):
        tokens = _trial_tokens()
        result = _call_on_trial("loss", load_loss, config.loss, (tokens, config))
        if not isinstance(result, TokenLoss):
            raise _invalid_function("loss", config.loss, f"returned a {type(result).__name__}")
        _check_numbers("loss", config.loss, result.loss_N, (5,))
        _check_numbers("loss", config.loss, result.clipped_N, (5,))
        if result.rejected_N is not None:
            _check_numbers("loss", config.loss, result.rejected_N, (5,))
        if not result.loss_N.requires_grad:
            raise _invalid_function("loss", config.loss, "lost the gradient of tokens.logprobs_N")

    for correction in config.corrections:
        if is_custom(correction.kind):
            arguments = (_trial_tokens().detached(), correction)
            multiplier_N = _call_on_trial("correction", load_correction, correction.kind, arguments)
            _check_numbers("correction", correction.kind, multiplier_N, (5,))


def _load_function(role: str, name: str, built_in: Mapping[str, F]) -> F:
    if name in built_in:
        return built_in[name]
    function: F = load_plugin(name, key=f"trainer.objective: {role}", expected=f"a function {SIGNATURES[role]}")
    return function


def _call_on_trial(role: str, load: Callable[[str], Callable[..., Any]], name: str, arguments: tuple[Any, ...]) -> Any:
    function = load(name)
    try:
        return function(*arguments)
    except Exception as error:  # a user's function may raise anything
        problem = f"failed on a trial of five tokens ({type(error).__name__}: {error})"
        raise _invalid_function(role, name, problem) from error


def _check_numbers(role: str, name: str, values: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(values, Tensor):
        raise _invalid_function(role, name, f"returned {type(values).__name__} instead of a tensor of shape {shape}")
    if tuple(values.shape) != shape:
        raise _invalid_function(role, name, f"returned {tuple(values.shape)} instead of a tensor of shape {shape}")
    if not values.isfinite().all():
        hint = _INVALID_SAMPLES if role == "advantage" else ""
        raise _invalid_function(role, name, f"returned numbers that are not finite{hint}")


def _invalid_function(role: str, name: str, problem: str) -> ConfigError:
    return ConfigError(f"trainer.objective: {role} {name!r} {problem}. It must be a function {SIGNATURES[role]}")


def _trial_tokens() -> Tokens:
    """Two sequences, of three and of two tokens, one advantage of each sign."""
    return Tokens(
        logprobs_N=torch.tensor([-0.5, -1.0, -2.0, -0.2, -3.0], requires_grad=True),
        prox_N=torch.tensor([-0.6, -1.1, -1.5, -0.2, -2.5]),
        behaviour_N=torch.tensor([-0.7, -0.9, -1.8, -0.1, -2.0]),
        advantages_N=torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5]),
        segment_N=torch.tensor([0, 0, 0, 1, 1]),
        segments=2,
    )
