"""The table that `async-grpo run --dry-run` prints of a RunPlan."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from async_grpo.app.launch.plan import RunPlan
from async_grpo.config import RunConfig
from buffer import plan_buffer_memory


def plan_table(plan: RunPlan) -> Table:
    """Return a table of the roles that start, the groups in flight and the effect of the staleness bound.

    Raises ConfigError for cores that this machine does not have.
    """
    config = plan.config
    table = Table(title=f"run {config.name} (dry run: nothing is started)", show_header=False)
    s = config.max_staleness
    p = config.groups_per_step
    g = config.group_size
    table.add_row("writes", str(config.run_dir))
    table.add_row("server", config.redis.url or "embedded Valkey, private to the run")
    rollout = config.rollout
    table.add_row(
        "rollout servers",
        f"{rollout.servers} x {rollout.limits.engine}{_quantization(config)}, {rollout.max_concurrency} samples in "
        f"flight for training{_eager_note(config)}",
    )
    table.add_row("trainer", f"{_ranks(config)} on {config.trainer.platform}, {config.steps} steps")
    table.add_row("objective", config.trainer.objective.summary)
    table.add_row("sampling", config.sampling.summary)
    table.add_row("one step", f"P = {p} groups of G = {g} samples: {p * g} samples")
    auto = config.auto_staleness
    bounds = f"; auto keeps the effective S between {auto.min} and {auto.max}, at first {auto.start}" if auto else ""
    table.add_row("staleness", f"S = {s}: active <= (S + 1) * P = {config.capacity_groups} groups{bounds}")
    policy = config.replay_policy
    table.add_row("selector", f"{policy.selector}, on_stale {policy.on_stale}: age <= {policy.age_bound} steps")
    table.add_row("server memory", f"at worst {plan_buffer_memory(config)}")
    table.add_row("evaluation", _evaluation(config))
    memory_rows = plan.memory.table_rows() if plan.memory is not None else []
    for label, value in (*plan.placement, *memory_rows, *plan.notes):
        # Fold long lines: some are commands to copy, and Rich would shorten them with an ellipsis.
        table.add_row(label, Text(value, overflow="fold"))
    return table


def _quantization(config: RunConfig) -> str:
    quantization = config.rollout.vllm.quantization
    return "" if quantization == "none" else f" of {quantization} matrices"


def _eager_note(config: RunConfig) -> str:
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
    """Return the size of an evaluation and the steps at which it happens."""
    plan, final = config.eval, config.steps
    completions = plan.prompts * (plan.samples + int(plan.greedy))
    when, count = "before and after", 2
    if 0 < plan.every_steps < final:
        count = len(range(0, final, plan.every_steps)) + 1
        when = f"every {plan.every_steps} steps, before and after: {count} times"
    line = f"{plan.prompts} held-out prompts, mean@{plan.samples}, {completions:,} completions, {when}"

    trained = final * config.groups_per_step * config.group_size
    if count * completions <= trained:
        return line
    fewer = max(1, plan.prompts * trained // (10 * count * completions))
    return (
        f"{line}. That is more than the {trained:,} samples of training; -o eval.prompts={fewer} would make it a tenth "
        "of them"
    )
