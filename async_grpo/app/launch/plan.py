"""RunPlan: the only way from a configuration file to a start.

    CONFIG, overrides --load_run_config--> named run --pin--> ids with commits --locate--> RunPlan --start_checks--> run

`async-grpo run` executes a plan, `--dry-run` prints one, `doctor CONFIG` reports what each of its checks finds.
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
from buffer.redis.url import parse
from trainer.checkpoint.store import RunStore

Rows = list[tuple[str, str]]
"""(label, text) of each row that a dry run prints."""
StartCheck = tuple[str, Callable[[], object]]
"""Name of a check, and a function that raises ConfigError or DependencyError, or returns what it found."""


@dataclass(frozen=True)
class RunPlan:
    """A run before anything is started. The properties are computed when they are first read, since a doctor reports
    the error of each."""

    config: RunConfig
    """Content of config.yaml: hub ids with their commits."""
    inputs: RunConfig
    """The same with files of this machine instead of ids; ids that have not been downloaded stay."""
    downloads: bool = False
    """False: nothing was downloaded, so inputs may be missing if the hub or model.architecture describes them."""

    @cached_property
    def missing(self) -> dict[str, Path]:
        """Configuration key -> local file or folder that is missing or incomplete."""
        config = self.inputs
        paths = {"trainer.reference.path": config.trainer.reference.path, **list_data_files(config.data)}
        missing = {key: path for key, path in paths.items() if path is not None and not path.exists()}
        model = config.model.path
        return missing if model is None or not missing_files(model) else {"model.path": model, **missing}

    @cached_property
    def placement(self) -> Rows:
        """Cores and devices of each role. Raises ConfigError for those that this machine lacks."""
        return placement_rows(self.config)

    @cached_property
    def memory(self) -> DevicePlan | None:
        """Memory of the devices; None on the CPU or for a model of unknown shape. Raises ConfigError."""
        return plan_devices(self.inputs)

    @cached_property
    def notes(self) -> Rows:
        """Rows about a start on this machine: refusals, downloads, rejected rows, prompt lengths. Raises DataError."""
        rows = []
        if refusal := self._find_refusal():
            rows.append(("on this machine", f"a start would be refused: {refusal}"))
        if pending := {**self.missing, **describe_downloads(self.inputs)}:
            rows.append(("not here yet", "; ".join(f"{key} ({what})" for key, what in pending.items())))
            return rows
        if rejected := find_rejected_rows(self.inputs):
            rows.append(("rows not taken", str(rejected)))
        policy = find_local_policy(self.inputs)
        if policy is not None and (lengths := count_prompt_lengths(self.inputs, policy)) is not None:
            rows.append(("prompts", str(lengths)))
        return rows

    def _find_refusal(self) -> str:
        """Why this machine alone cannot run the plan; "" if it can, or if the run is for several machines."""
        if self.config.trainer.nodes > 1:
            return ""
        try:
            check_machine(self.config)
            if (policy := find_local_policy(self.inputs)) is not None:
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
    held: Sequence[HubRepo] = (),
    say: Callable[[str], None] = print,
) -> RunPlan:
    """Load, name, pin, locate and check a run. Must not be called in a running event loop.

    Args:
        path: A configuration file, the name of a shipped one, or the folder of a run.
        overrides: KEY=VALUE; they become part of the run's name.
        download: Download models and data of a hub, which `say` reports, and check everything that a start needs.
            False changes nothing on this machine.
        steps: Optimizer steps in all; they change no name.
        on_this_machine: All roles start here: missing devices and packages are refused before any download.
        held: Commits to use instead of newer ones.

    Raises ConfigError, and DependencyError for packages that are not installed.
    """
    config = load_run_config(path, overrides, steps)
    if on_this_machine and config.trainer.nodes == 1:
        check_machine(config)
    config = pin_inputs(config, planning=not download, held=held)
    plan = RunPlan(config, fetch_inputs(config, say) if download else use_local_inputs(config), download)
    for _, check in start_checks(plan):
        check()
    return plan


def load_run_config(path: Path, overrides: Sequence[str], steps: int | None = None) -> RunConfig:
    """Load a configuration and give it the name that its overrides, but not `steps`, make. Raises ConfigError."""
    config = load(path, overrides if steps is None else [*overrides, f"steps={steps}"])
    config = config.model_copy(update={"name": run_name(config.name, overrides)})
    if path.is_dir() and not overrides and path.resolve() != config.run_dir.resolve():
        raise ConfigError(
            f"the folder {path} holds the run {config.name}, whose server and checkpoints go by that name. Call the "
            f"folder {config.name} again, or start a copy of the run by `-o name=...`"
        )
    return config


def start_checks(plan: RunPlan) -> Iterator[StartCheck]:
    """The checks before a start, the quickest first."""
    config, policy = plan.inputs, find_local_policy(plan.inputs)
    yield "Run folder", lambda: check_folder(config.run_dir)
    if (url := config.redis.url) is not None:
        yield "redis.url", lambda: parse(url)
    if config.weights.location is not None:
        yield "weights.location", lambda: check_location(config.weights, config.local_name)
    if (store := config.runs_store) is not None:
        yield "runs_store", lambda: RunStore.open(store, config.name).check()

    yield "Reward functions", lambda: check_rewards(config.rewards, read_first_rows(config, ROWS))
    yield "Workflow", lambda: check_workflow(config, policy)
    if plan.downloads:
        yield "Trackers", lambda: check_trackers(config)
    if config.trainer.objective.custom_functions:  # the built-in ones need no torch in this process
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
    """Check workflow and prompts with a policy that the run has just made, as `start_checks` could not.

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
