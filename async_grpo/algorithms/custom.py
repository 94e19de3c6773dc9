"""The user's own objective functions: `module:attribute` in the working folder or on the Python path.

    advantage     (rewards_BG, valid_BG, lengths_BG) -> advantages_BG
    loss          (Tokens, ObjectiveConfig) -> TokenLoss           its dials: config.options
    correction    (Tokens, CorrectionConfig) -> multiplier [N]     its dials: config.options

They must not look beyond a sequence (a correction with `whole_batch: true` may look at the whole batch), so that
micro-batches and ranks change nothing.
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


def advantage_of(name: str) -> Advantage:
    """The built-in or user's function of this name. Raises ConfigError with what to change."""
    return _function("advantage", name, ADVANTAGES)


def loss_of(name: str) -> Loss:
    """The built-in or user's function of this name. Raises ConfigError with what to change."""
    return _function("loss", name, LOSSES)


def correction_of(name: str) -> Correction:
    """The built-in or user's function of this name. Raises ConfigError with what to change."""
    return _function("correction", name, CORRECTIONS)


_UNJUDGED = (
    " for a group with a sample that no verifier could judge: rewards_BG is NaN where valid_BG is false. Replace it "
    "first, rewards_BG.nan_to_num() * valid_BG, and leave such samples at advantage 0"
)


def check_objective(config: ObjectiveConfig) -> None:
    """Import every function of the user and try it on five tokens, before anything starts.

    Raises ConfigError for one that cannot be imported, fails, or returns something other than its signature says.
    """
    if is_custom(config.advantage):
        rewards_BG = torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.0, float("nan")]], dtype=torch.float64)
        trial = (rewards_BG, ~rewards_BG.isnan(), torch.full((2, 3), 4))
        _check_numbers("advantage", config.advantage, _call("advantage", advantage_of, config.advantage, trial), (2, 3))
    if is_custom(config.loss):
        tokens = _trial_tokens()
        token = _call("loss", loss_of, config.loss, (tokens, config))
        if not isinstance(token, TokenLoss):
            raise _wrong("loss", config.loss, f"returned a {type(token).__name__}")
        _check_numbers("loss", config.loss, token.loss_N, (5,))
        _check_numbers("loss", config.loss, token.clipped_N, (5,))
        if token.rejected_N is not None:
            _check_numbers("loss", config.loss, token.rejected_N, (5,))
        if not token.loss_N.requires_grad:
            raise _wrong("loss", config.loss, "lost the gradient of tokens.logprobs_N")
    for correction in config.corrections:
        if is_custom(correction.kind):
            trial_tokens = (_trial_tokens().detached(), correction)
            multiplier_N = _call("correction", correction_of, correction.kind, trial_tokens)
            _check_numbers("correction", correction.kind, multiplier_N, (5,))


def _function(role: str, name: str, known: Mapping[str, F]) -> F:
    if name in known:
        return known[name]
    function: F = load_plugin(name, key=f"trainer.objective: {role}", expected=f"a function {SIGNATURES[role]}")
    return function


def _call(role: str, find: Callable[[str], Callable[..., Any]], name: str, arguments: tuple[Any, ...]) -> Any:
    function = find(name)
    try:
        return function(*arguments)
    except Exception as error:  # a user's function may raise anything
        raise _wrong(role, name, f"failed on a trial of five tokens ({type(error).__name__}: {error})") from error


def _check_numbers(role: str, name: str, values: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(values, Tensor) or tuple(values.shape) != shape:
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise _wrong(role, name, f"returned {found} instead of a tensor of shape {shape}")
    if not values.isfinite().all():
        raise _wrong(role, name, f"returned numbers that are not finite{_UNJUDGED if role == 'advantage' else ''}")


def _wrong(role: str, name: str, what: str) -> ConfigError:
    return ConfigError(f"trainer.objective: {role} {name!r} {what}. It must be a function {SIGNATURES[role]}")


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
