"""From a configuration file to a checked run, before anything is started.

Checked are names, reward functions (tried in another process) and workflow, both on the first rows of the data, the
objective, the model, the data (rows, and tokens of their prompts) and the memory of server and devices. Where the run
makes its first policy, `check_with_policy` does afterwards what needs a tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from async_grpo.app.launch.first_policy import check_first_policy, check_reference, missing_files, policy_here
from async_grpo.app.launch.inputs import fetch, here, hub_inputs, pin, to_download
from async_grpo.app.launch.memory_plan import check_shared_memory, device_plan
from async_grpo.app.launch.node_plan import needs_more_nodes, node_rows
from async_grpo.app.launch.role_process import cores_here, role_cores
from async_grpo.app.launch.role_specs import assign_devices, check_machine
from async_grpo.app.launch.run_folder import run_name
from async_grpo.app.launch.slurm import check_reachable
from async_grpo.app.launch.trials import ROWS, check_rewards, check_workflow, first_rows
from async_grpo.config import RunConfig, load
from async_grpo.config.data import DataConfig
from async_grpo.data.jsonl import PromptLengths, check_rows, count_prompt_tokens
from async_grpo.data.prepare.formats import Rejections
from async_grpo.data.prepared_source import open_folder
from async_grpo.data.tokenizer import find_tokenizer
from async_grpo.errors import ConfigError, DataError, DependencyError
from async_grpo.models.hub import HubRepo
from async_grpo.telemetry.trackers import check_trackers
from async_grpo.weights.folder.objects import check_location
from buffer import memory_plan
from buffer.redis.url import parse
from trainer.checkpoint.store import RunStore


def data_files(data: DataConfig) -> dict[str, Path]:
    """Configuration key -> data file that the run reads."""
    paths = {"data.path": data.path, "data.eval_path": data.eval_path} if data.kind == "jsonl" else {}
    return {key: path for key, path in paths.items() if path is not None}


def check_data(config: RunConfig) -> Rejections:
    """The rows that the run will reject. Raises DataError for data that the run cannot start with."""
    if config.data.kind != "jsonl" or config.data.path is None:
        return Rejections()
    if not config.data.path.is_dir():
        return check_rows(config)
    open_folder(config).close()
    return Rejections()


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless the folder exists or can be made, and is writable."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(
            f"runs_dir and name make the run's folder {folder}, but {there} is a file. Set runs_dir to a folder (-o "
            "runs_dir=...), or move that file away"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"runs_dir and name make the run's folder {folder}, but {there} cannot be written to by this user. Set "
            "runs_dir to a folder that can (-o runs_dir=...)"
        )


def resolve(
    path: Path,
    overrides: Sequence[str],
    *,
    steps: int | None = None,
    planning: bool = False,
    say: Callable[[str], None] = print,
    held: Sequence[HubRepo] = (),
) -> RunConfig:
    """Load, name and check a run: configuration, reward functions, objective, model, data, memory. Raises ConfigError,
    and DependencyError for a tracker that is not installed.

    `path` may be the folder of a run. `steps` replaces the configured ones without a change of the run's name. Ids of a
    hub get a commit, and what they name is downloaded, which `say` reports. With `planning` nothing is downloaded, and
    missing files are no error if model.architecture is set or a hub has them; `describe` names them. `held`: commits to
    take in place of newer ones.
    """
    config = pin(load_named(path, overrides, steps), planning=planning, held=held)
    for _, check in checks(here(config) if planning else fetch(config, say), planning=planning):
        check()
    return config


def resolve_here(path: Path, overrides: Sequence[str], *, steps: int | None = None) -> RunConfig:
    """`resolve`, for a run whose roles all start on this machine. Raises ConfigError or DependencyError first of all if
    devices or packages are missing, before anything is downloaded."""
    config = load_named(path, overrides, steps)
    if config.trainer.nodes == 1:
        check_machine(config)
    return resolve(path, overrides, steps=steps)


def load_named(path: Path, overrides: Sequence[str], steps: int | None = None) -> RunConfig:
    """The configuration, with the name that its overrides, but not `steps`, give the run. Raises ConfigError."""
    config = load(path, overrides if steps is None else [*overrides, f"steps={steps}"])
    config = config.model_copy(update={"name": run_name(config.name, overrides)})
    if path.is_dir() and not overrides and path.resolve() != config.run_dir.resolve():
        raise ConfigError(
            f"the folder {path} holds the run {config.name}, whose server and checkpoints go by that name. Call the "
            f"folder {config.name} again, or start a copy of the run by `-o name=...`"
        )
    return config


def checks(config: RunConfig, *, planning: bool = False) -> Iterator[tuple[str, Callable[[], object]]]:
    """The checks before a run starts, by name. Each raises ConfigError or DependencyError."""
    from_hub = hub_inputs(config)
    excused = [key for key in _absent(config) if planning and (config.model.architecture or key in from_hub)]
    yield "Run folder", lambda: check_folder(config.run_dir)
    if (url := config.redis.url) is not None:
        yield "redis.url", lambda: parse(url)
    if config.weights.location is not None:
        yield "weights.location", lambda: check_location(config.weights, config.local_name)
    if (store := config.runs_store) is not None:
        yield "runs_store", lambda: RunStore.open(store, config.name).check()
    yield "Reward functions", lambda: check_rewards(config.rewards, first_rows(config, ROWS))
    yield "Workflow", lambda: check_workflow(config, policy_here(config))
    if not planning:
        yield "Trackers", lambda: check_trackers(config)
    if config.trainer.objective.own_functions:  # the built-in ones need no torch in this process
        yield "Objective", lambda: _check_objective(config)
    if (model := config.model.path) is not None and "model.path" not in excused:
        yield "Model", lambda: check_first_policy(model, config)
    if (reference := config.trainer.reference.path) is not None and "trainer.reference.path" not in excused:
        yield "Reference", lambda: check_reference(reference, config.model.path, config.trainer.reference)
    if not any(key in excused for key in data_files(config.data)):
        yield "Data", lambda: _check_data(config)
        if (policy := policy_here(config)) is not None and "model.path" not in excused:
            yield "Prompts", lambda: _check_prompts(config, policy)
    yield "Device memory", lambda: _check_devices(config)
    if url is None:
        yield (
            "Server memory",
            lambda: memory_plan(config).check(config.redis.max_memory_bytes, "redis.max_memory_bytes"),
        )


def _numbers(config: RunConfig) -> str:
    quantization = config.rollout.vllm.quantization
    return "" if quantization == "none" else f" of {quantization} matrices"


def _eager(config: RunConfig) -> str:
    limits = config.rollout.limits
    if limits.platform == "cpu" or limits.captures_graphs:
        return ""
    return "; without captured graphs (enforce_eager), which is slower than the default"


def _check_devices(config: RunConfig) -> None:
    if plan := device_plan(config):
        plan.check()


def _check_objective(config: RunConfig) -> None:
    from async_grpo.algorithms import check_objective

    check_objective(config.trainer.objective)


def _check_data(config: RunConfig) -> None:
    try:
        check_data(config)
    except DataError as error:
        raise ConfigError(str(error)) from None


def _check_prompts(config: RunConfig, policy: Path) -> str:
    try:
        return str(prompt_lengths(config, policy) or "not counted: they are not JSON lines")
    except DataError as error:
        raise ConfigError(str(error)) from None


def prompt_lengths(config: RunConfig, policy: Path) -> PromptLengths | None:
    """Lengths of the prompts in tokens of this policy; None for data that are no JSON lines. Raises DataError."""
    path = config.data.path
    if config.data.kind != "jsonl" or path is None or not path.is_file():
        return None
    return count_prompt_tokens(config, find_tokenizer(policy, "model.path"))


def check_with_policy(config: RunConfig, policy: Path) -> None:
    """The checks that need the first policy's folder, for one that the run has just made: workflow and prompts. Raises
    ConfigError. Must not be called in a running event loop."""
    check_workflow(config, policy)
    _check_prompts(config, policy)


def describe(config: RunConfig) -> Table:
    """The run in a table: what starts, how much is in flight, what the bound means. Raises ConfigError for cores that
    this machine does not have."""
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
    force = f"; auto keeps S in force between {auto.min} and {auto.max}, at first {auto.start}" if auto else ""
    table.add_row("staleness", f"S = {s}: active <= (S + 1) * P = {config.capacity_groups} groups{force}")
    policy, memory = config.replay_policy, memory_plan(config)
    table.add_row("selector", f"{policy.selector}, on_stale {policy.on_stale}: age <= {policy.age_bound} steps")
    table.add_row("server memory", f"at worst {memory}")
    table.add_row("evaluation", _evaluation(config))
    for what, found in placement(config):
        table.add_row(what, Text(found, overflow="fold"))  # commands are to be copied: an ellipsis would cut them
    if refusal := _refusal(config):
        table.add_row("on this machine", Text(f"a start would be refused: {refusal}"))
    local = here(config)
    if absent := {**_absent(local), **to_download(config)}:
        table.add_row("not here yet", Text("; ".join(f"{key} ({what})" for key, what in absent.items())))
        return table
    if rejected := check_data(local):
        table.add_row("rows not taken", Text(str(rejected)))
    model = policy_here(local)
    lengths = None if model is None else prompt_lengths(local, model)
    if lengths is not None:
        table.add_row("prompts", str(lengths))
    return table


def _evaluation(config: RunConfig) -> str:
    """How much is evaluated, and when."""
    plan, final = config.eval, config.steps
    completions = plan.prompts * (plan.samples + int(plan.greedy))
    when = "before and after"
    if 0 < plan.every_steps < final:
        count = len(range(0, final, plan.every_steps)) + 1
        when = f"every {plan.every_steps} steps, before and after: {count} times"
    return f"{plan.prompts} held-out prompts, mean@{plan.samples}, {completions:,} completions, {when}"


def _refusal(config: RunConfig) -> str:
    """Why this machine alone cannot run the configuration; "" if it can, or if the run is for several machines."""
    try:
        if config.trainer.nodes == 1:
            check_machine(config)
            if (policy := policy_here(here(config))) is not None:
                check_shared_memory(config, policy)
    except (ConfigError, DependencyError) as error:
        return str(error)
    return ""


def _ranks(config: RunConfig) -> str:
    trainer = config.trainer
    if trainer.nodes == 1:
        return f"{trainer.processes} rank(s)"
    return f"{trainer.nodes} nodes (async-grpo trainer --node-rank) x {trainer.processes_per_node} rank(s)"


def _absent(config: RunConfig) -> dict[str, Path]:
    """Configuration key -> file or folder that the run needs and that is missing or incomplete."""
    paths = {"trainer.reference.path": config.trainer.reference.path, **data_files(config.data)}
    absent = {key: path for key, path in paths.items() if path is not None and not path.exists()}
    model = config.model.path
    return absent if model is None or not missing_files(model) else {"model.path": model, **absent}


def placement(config: RunConfig) -> list[tuple[str, str]]:
    """The cores, devices and device memory of each role, as rows. Raises ConfigError for what this machine lacks."""
    return [*_core_rows(config), *_device_rows(config)]


def _core_rows(config: RunConfig) -> list[tuple[str, str]]:
    """A row with the cores of each side; none if neither side is restricted, or if there are several machines."""
    if config.trainer.nodes > 1:
        return []
    sides = zip(("trainer", "rollout servers"), role_cores(config, cores_here()), strict=True)
    kept = [f"{side}: {','.join(map(str, cores))}" for side, cores in sides if cores]
    return [("cores", "; ".join(kept))] if kept else []


def _device_rows(config: RunConfig) -> list[tuple[str, str]]:
    """Rows with the devices of each role and the plan of their memory, none for the CPU; of a run on several machines
    also with the commands for each."""
    rows = []
    excess = needs_more_nodes(config)
    if excess:
        rows.append(("too many devices", excess))
    if excess or config.trainer.nodes > 1:
        rows += node_rows(config)
        try:
            check_reachable(config)
        except ConfigError as error:
            rows.append(("set before", str(error)))
    else:
        shares = assign_devices(config, {})
        dealt = {role: ",".join(shown.values()) for role, shown in shares.items() if any(shown.values())}
        if dealt:
            rows.append(("devices", "; ".join(f"{role}: {devices}" for role, devices in dealt.items())))
    plan = device_plan(config)
    if plan is not None:
        rows += plan.rows()
    return rows
