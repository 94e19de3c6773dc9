"""From a configuration file to a checked plan, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from async_grpo.config import RunConfig, load
from async_grpo.errors import ConfigError
from async_grpo.launch.models import check_model
from async_grpo.launch.run_folder import run_name
from async_grpo.rewards.check import check_rewards
from buffer import memory_plan


def resolve(path: Path, overrides: Sequence[str]) -> RunConfig:
    """Load, name and check a run: configuration, reward functions, objective, files. Raises ConfigError."""
    config = load(path, overrides)
    config = config.model_copy(update={"name": run_name(config.name, overrides)})
    check_rewards(config.rewards)
    _check_own_objective(config)
    if config.model.path is not None:
        check_model(config.model.path)
    for key, file in (("data.path", config.data.path), ("data.eval_path", config.data.eval_path)):
        if file is not None and not file.is_file():
            raise ConfigError(f"{key}: there is no file {file}. Point it at a JSON-lines file")
    if config.redis.url is None:
        memory_plan(config).check(config.redis.max_memory_bytes, "redis.max_memory_bytes")
    return config


def describe(config: RunConfig) -> Table:
    """The run in a table: what starts, how much is in flight, what the bound means."""
    table = Table(title=f"run {config.name} (dry run: nothing is started)", show_header=False)
    s, p, g = config.max_staleness, config.groups_per_step, config.group_size
    table.add_row("writes", str(config.run_dir))
    table.add_row("server", config.redis.url or "embedded Valkey, private to the run")
    rollout = config.rollout
    table.add_row("rollout servers", f"{rollout.servers} x vLLM, {rollout.max_concurrency} samples in flight")
    table.add_row("trainer", f"{config.trainer.processes} rank(s) on {config.trainer.platform}, {config.steps} steps")
    table.add_row("objective", config.trainer.objective.summary)
    table.add_row("one step", f"P = {p} groups of G = {g} samples: {p * g} samples")
    table.add_row("staleness", f"S = {s}: active <= (S + 1) * P = {config.capacity_groups} groups")
    policy, memory = config.replay_policy, memory_plan(config)
    table.add_row("selector", f"{policy.selector}, on_stale {policy.on_stale}: age <= {policy.age_bound} steps")
    table.add_row("server memory", f"at worst {memory}")
    table.add_row("evaluation", f"{config.eval.prompts} held-out prompts, mean@{config.eval.samples}, before and after")
    return table


def _check_own_objective(config: RunConfig) -> None:
    """Functions of the user's own are tried here; the built-in ones need no torch in this process."""
    if config.trainer.objective.own_functions:
        from async_grpo.algorithms import check_objective

        check_objective(config.trainer.objective)
