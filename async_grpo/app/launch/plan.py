"""RunPlan: the only way from a configuration file to a start.

    CONFIG, overrides --load_run_config--> named run --pin_inputs--> ids with commits --> RunPlan --start_checks--> run

`async-grpo run` executes a plan, `--dry-run` prints it, `doctor CONFIG` reports the result of each check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from async_grpo.app.launch.checks.data import (
    check_data,
    check_prompts,
    count_prompt_lengths,
    find_rejected_rows,
    list_data_files,
)
from async_grpo.app.launch.checks.trials import ROWS, check_rewards, check_workflow, read_first_rows
from async_grpo.app.launch.first_policy import check_first_policy, check_reference, find_local_policy, missing_files
from async_grpo.app.launch.inputs import describe_downloads, fetch_inputs, hub_inputs, pin_inputs, use_local_inputs
from async_grpo.app.launch.memory_plan import DevicePlan, check_shared_memory, plan_devices
from async_grpo.app.launch.node_plan import placement_rows
from async_grpo.app.launch.role_specs import check_machine
from async_grpo.app.launch.run_folder import check_folder, run_name
from async_grpo.config import RunConfig, load
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.errors import ConfigError, DependencyError
from async_grpo.models.hub import HubRepo
from async_grpo.telemetry.trackers import check_trackers
from async_grpo.weights.folder.objects import check_location
from buffer import plan_buffer_memory
from buffer.redis.url import parse_redis_url
from trainer.checkpoint.store import RunStore

Rows = list[tuple[str, str]]
"""(label, text) of each row of a dry run."""
StartCheck = tuple[str, Callable[[], object]]
"""Name of a check, and a function that raises ConfigError or DependencyError, or returns its result."""


@dataclass(frozen=True)
class RunPlan:
    """A run before anything is started.

    The properties are computed on first access, so that `async-grpo doctor` can report the error of each.
    """

    config: RunConfig
    """Content of config.yaml: hub ids with their commits."""
    inputs: RunConfig
    """The same configuration with local files instead of ids; ids that are not downloaded stay."""
    downloads: bool = False
    """True if inputs were downloaded. Otherwise inputs that the hub or model.architecture describes may be missing."""

    @cached_property
    def missing(self) -> dict[str, Path]:
        """Configuration key -> local file or folder that is missing or incomplete."""
        config = self.inputs
        missing: dict[str, Path] = {}
        model = config.model.path
        if model is not None and missing_files(model):
            missing["model.path"] = model
        paths = {"trainer.reference.path": config.trainer.reference.path, **list_data_files(config.data)}
        for key, path in paths.items():
            if path is not None and not path.exists():
                missing[key] = path
        return missing

    @cached_property
    def placement(self) -> Rows:
        """Rows with the cores and devices of each role. Raises ConfigError for those that this machine lacks."""
        return placement_rows(self.config)

    @cached_property
    def memory(self) -> DevicePlan | None:
        """Memory plan of the devices; None on the CPU or for a model of unknown shape. Raises ConfigError."""
        return plan_devices(self.inputs)

    @cached_property
    def notes(self) -> Rows:
        """Rows about a start on this machine: refusal, downloads, rejected rows, prompt lengths. Raises DataError."""
        rows = []
        refusal = self._find_refusal()
        if refusal:
            rows.append(("on this machine", f"a start would be refused: {refusal}"))

        pending = {**self.missing, **describe_downloads(self.inputs)}
        if pending:
            rows.append(("not here yet", "; ".join(f"{key} ({source})" for key, source in pending.items())))
            return rows  # the other rows need the inputs

        rejected = find_rejected_rows(self.inputs)
        if rejected:
            rows.append(("rejected rows", str(rejected)))
        policy = find_local_policy(self.inputs)
        if policy is not None:
            lengths = count_prompt_lengths(self.inputs, policy)
            if lengths is not None:
                rows.append(("prompts", str(lengths)))
        return rows

    def _find_refusal(self) -> str:
        """Return why this machine cannot run the plan; "" if it can, or if the run is for several machines."""
        if self.config.trainer.nodes > 1:
            return ""
        try:
            check_machine(self.config)
            policy = find_local_policy(self.inputs)
            if policy is not None:
                check_shared_memory(self.config, policy)
        except (ConfigError, DependencyError) as error:
            return str(error)
        return ""


def plan_run(
    path: Path,
    overrides: Sequence[str],
    *,
    download: bool,
    steps: int | None = None,
    on_this_machine: bool = False,
    pinned: Sequence[HubRepo] = (),
    report_progress: Callable[[str], None] = print,
) -> RunPlan:
    """Load, name, pin, locate and check a run. Must not be called in a running event loop.

    Args:
        path: A configuration file, the name of a shipped one, or the folder of a run.
        overrides: KEY=VALUE; they become part of the run's name.
        download: Download models and data from the hub, and run all checks of a start. False changes nothing on this
            machine.
        steps: Total optimizer steps; not part of the run's name.
        on_this_machine: True if all roles start here. Missing devices and packages are then refused before a download.
        pinned: Commits to use instead of newer ones.
        report_progress: Receives the progress of downloads.

    Raises ConfigError, and DependencyError for packages that are not installed.
    """
    config = load_run_config(path, overrides, steps)
    if on_this_machine and config.trainer.nodes == 1:
        check_machine(config)
    config = pin_inputs(config, planning=not download, pinned=pinned)
    inputs = fetch_inputs(config, report_progress) if download else use_local_inputs(config)
    plan = RunPlan(config, inputs, download)
    for _, check in start_checks(plan):
        check()
    return plan


def load_run_config(path: Path, overrides: Sequence[str], steps: int | None = None) -> RunConfig:
    """Load a configuration and name it after its overrides, but not after `steps`. Raises ConfigError."""
    config = load(path, overrides if steps is None else [*overrides, f"steps={steps}"])
    config = config.model_copy(update={"name": run_name(config.name, overrides)})
    if path.is_dir() and not overrides and path.resolve() != config.run_dir.resolve():
        raise ConfigError(
            f"the folder {path} holds the run {config.name}, whose server and checkpoints use that name. Rename the "
            f"folder to {config.name}, or start a copy of the run with `-o name=...`"
        )
    return config


def start_checks(plan: RunPlan) -> Iterator[StartCheck]:
    """Yield the checks of a start, the fastest first."""
    config, policy = plan.inputs, find_local_policy(plan.inputs)
    yield "Run folder", lambda: check_folder(config.run_dir)
    if (url := config.redis.url) is not None:
        yield "redis.url", lambda: parse_redis_url(url)
    if config.weights.location is not None:
        yield "weights.location", lambda: check_location(config.weights, config.name_with_digest)
    if (store := config.runs_store) is not None:
        yield "runs_store", lambda: RunStore.open(store, config.name).check_access()

    yield "Reward functions", lambda: check_rewards(config.rewards, read_first_rows(config, ROWS))
    yield "Workflow", lambda: check_workflow(config, policy)
    if plan.downloads:
        yield "Trackers", lambda: check_trackers(config)
    if config.trainer.objective.custom_functions:  # built-in functions are valid, and checking would import torch
        yield "Objective", lambda: _check_objective(config.trainer.objective)

    excused: set[str] = set()
    if not plan.downloads:
        described = hub_inputs(config)
        excused = {key for key in plan.missing if config.model.architecture or key in described}
    if (model := config.model.path) is not None and "model.path" not in excused:
        yield "Model", lambda: check_first_policy(model, config)
    if (reference := config.trainer.reference.path) is not None and "trainer.reference.path" not in excused:
        yield "Reference", lambda: check_reference(reference, config.model.path, config.trainer.reference)
    if not any(key in excused for key in list_data_files(config.data)):
        yield "Data", lambda: check_data(config)
        if policy is not None and "model.path" not in excused:
            yield "Prompts", lambda: check_prompts(config, policy)

    yield "Device memory", lambda: _check_device_memory(plan)
    if url is None:
        limit = config.redis.max_memory_bytes
        yield "Server memory", lambda: plan_buffer_memory(config).check(limit, "redis.max_memory_bytes")


def check_with_policy(config: RunConfig, policy: Path) -> None:
    """Check workflow and prompts with a policy that the run has just generated; `start_checks` had no tokenizer yet.

    Raises ConfigError. Must not be called in a running event loop.
    """
    check_workflow(config, policy)
    check_prompts(config, policy)


def _check_device_memory(plan: RunPlan) -> None:
    if plan.memory is not None:
        plan.memory.check()


def _check_objective(objective: ObjectiveConfig) -> None:
    from async_grpo.algorithms import check_objective

    check_objective(objective)
