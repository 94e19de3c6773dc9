"""Workflows make one sample each: `single_turn` completes a prompt once, `multi_turn` is a conversation with tools."""

from __future__ import annotations

from async_grpo.config.rollout import RolloutConfig
from async_grpo.data.tokenizer import Tokenizer
from async_grpo.errors import ConfigError
from async_grpo.plugins import is_plugin, load_plugin
from rollout_server.workflows.base import SingleTurn, Workflow
from rollout_server.workflows.multi_turn import MultiTurn

__all__ = ["MultiTurn", "SingleTurn", "Workflow", "make_workflow"]


def make_workflow(config: RolloutConfig, tokenizer: Tokenizer) -> Workflow:
    """The workflow that the configuration names; a user's own is called with the tokenizer. Raises ConfigError."""
    match config.workflow:
        case "single_turn":
            return SingleTurn(tokenizer)
        case "multi_turn":
            return MultiTurn(tokenizer, config.multi_turn)
        case name if is_plugin(name):
            kind = load_plugin(name, key="rollout.workflow")
            try:
                workflow: Workflow = kind(tokenizer)
            except Exception as error:  # a user's class may raise anything
                raise ConfigError(
                    f"rollout.workflow: {name!r} cannot be made ({type(error).__name__}: {error}). It is called with "
                    "one argument, the tokenizer, and returns an object with a method run(task, session)"
                ) from error
            if not callable(getattr(workflow, "run", None)):
                raise ConfigError(
                    f"rollout.workflow: {name!r} made a {type(workflow).__name__} without a method run(task, session). "
                    "Add it: it returns session.sample(text)"
                )
            return workflow
    raise ConfigError(
        f"rollout.workflow: there is no workflow {config.workflow!r}. "
        "Use single_turn, multi_turn, or module:attribute for your own"
    )
