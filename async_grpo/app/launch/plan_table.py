"""The table that `async-grpo run --dry-run` prints of a RunPlan."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from async_grpo.app.launch.plan import RunPlan
from async_grpo.config import RunConfig
from buffer import plan_buffer_memory


def plan_table(plan: RunPlan) -> Table:
    """Table of the roles that start, the groups in flight and the meaning of the staleness bound.

    Raises ConfigError for cores that this machine does not have.
    """
    config = plan.config
    table = Table(title=f"run {config.name} (dry run: nothing is started)", show_header=False)
    s, p, g = config.max_staleness, config.groups_per_step, config.group_size
    table.add_row("writes", str(config.run_dir))
    table.add_row("server", config.redis.url or "embedded Valkey, private to the run")
    rollout = config.rollout
    table.add_row(
        "rollout servers",
        f"{rollout.servers} x {rollout.limits.engine}{_numbers(config)}, {rollout.max_concurrency} samples in flight "
        f"for training{_eager(config)}",
    )
    table.add_row("trainer", f"{_ranks(config)} on {config.trainer.platform}, {config.steps} steps")
    table.add_row("objective", config.trainer.objective.summary)
    table.add_row("one step", f"P = {p} groups of G = {g} samples: {p * g} samples")
    auto = config.auto_staleness
    bounds = f"; auto keeps the effective S between {auto.min} and {auto.max}, at first {auto.start}" if auto else ""
    table.add_row("staleness", f"S = {s}: active <= (S + 1) * P = {config.capacity_groups} groups{bounds}")
    policy, memory = config.replay_policy, plan_buffer_memory(config)
    table.add_row("selector", f"{policy.selector}, on_stale {policy.on_stale}: age <= {policy.age_bound} steps")
    table.add_row("server memory", f"at worst {memory}")
    table.add_row("evaluation", _evaluation(config))
    memory_rows = plan.memory.rows() if plan.memory is not None else []
    for what, value in (*plan.placement, *memory_rows, *plan.notes):
        table.add_row(what, Text(value, overflow="fold"))  # commands are to be copied: an ellipsis would cut them
    return table


def _numbers(config: RunConfig) -> str:
    quantization = config.rollout.vllm.quantization
    return "" if quantization == "none" else f" of {quantization} matrices"


def _eager(config: RunConfig) -> str:
    limits = config.rollout.limits
    if limits.platform == "cpu" or limits.captures_graphs:
        return ""
    return "; without captured graphs (enforce_eager), which is slower than the default"


def _ranks(config: RunConfig) -> str:
    trainer = config.trainer
    if trainer.nodes == 1:
        return f"{trainer.processes} rank(s)"
    return f"{trainer.nodes} nodes (async-grpo trainer --node-rank) x {trainer.processes_per_node} rank(s)"


def _evaluation(config: RunConfig) -> str:
    """How much is evaluated, and when."""
    plan, final = config.eval, config.steps
    completions = plan.prompts * (plan.samples + int(plan.greedy))
    when = "before and after"
    if 0 < plan.every_steps < final:
        count = len(range(0, final, plan.every_steps)) + 1
        when = f"every {plan.every_steps} steps, before and after: {count} times"
    return f"{plan.prompts} held-out prompts, mean@{plan.samples}, {completions:,} completions, {when}"
