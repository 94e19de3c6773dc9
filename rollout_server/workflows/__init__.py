"""Workflows; each run of one makes one sample.

- `base`            interface, and `single_turn`: one completion per prompt
- `multi_turn`      conversation with tools
- `session`         the sample while a workflow writes it
- `sample_rollout`  runs a workflow within its deadline
- `testkit`         tests your own workflow with a scripted policy
"""

from __future__ import annotations

from async_grpo.config.rollout import RolloutConfig
from async_grpo.data.tokenizer import Tokenizer
from async_grpo.errors import ConfigError
from async_grpo.plugins import is_plugin, load_plugin
from rollout_server.workflows.base import SingleTurn, Workflow
from rollout_server.workflows.multi_turn import MultiTurn

__all__ = ["MultiTurn", "SingleTurn", "Workflow", "make_workflow"]


def make_workflow(config: RolloutConfig, tokenizer: Tokenizer) -> Workflow:
    """Make the configured workflow; a user's class is called with the tokenizer. Raises ConfigError."""
    match config.workflow:
        case "single_turn":
            return SingleTurn(tokenizer)
        case "multi_turn":
            return MultiTurn(tokenizer, config.multi_turn)
        case name if is_plugin(name):
            workflow_class = load_plugin(name, key="rollout.workflow")
            try:
                workflow: Workflow = workflow_class(tokenizer)
            except Exception as error:  # a user's class may raise anything
                raise ConfigError(
                    f"rollout.workflow: {name!r} failed ({type(error).__name__}: {error}). It is called with one "
                    "argument, the tokenizer, and must return an object with a method run(task, session)"
                ) from error
            if not callable(getattr(workflow, "run", None)):
                raise ConfigError(
                    f"rollout.workflow: {name!r} returned a {type(workflow).__name__} without a method "
                    "run(task, session). Add the method; it returns session.sample(text)"
                )
            return workflow
    raise ConfigError(
        f"rollout.workflow: there is no workflow {config.workflow!r}. "
        "Use single_turn, multi_turn, or module:attribute for your own class"
    )
