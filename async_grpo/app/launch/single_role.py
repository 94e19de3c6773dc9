"""One role in the foreground, as a container or a cluster job starts it.

Each node of a trainer on several machines needs its rank, the number of nodes and the address of node 0. They come from
the command line and the configuration, or from the environment of the first of these starters that set it:

    srun                            SLURM_PROCID     SLURM_STEP_NUM_TASKS SLURM_LAUNCH_NODE_IPADDR SLURM_LOCALID
    LeaderWorkerSet                 LWS_WORKER_INDEX LWS_GROUP_SIZE       LWS_LEADER_ADDRESS
    Kubeflow's trainer, Ray's jobs  RANK             WORLD_SIZE           MASTER_ADDR              LOCAL_RANK

A starter with one process per node (trainer.nodes) leaves it to each process to start the ranks. A starter with one
process per rank (trainer.processes) has placed the ranks itself.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from async_grpo.app.launch.first_policy import prepare_model, read_warmup_s
from async_grpo.app.launch.plan import RunPlan, plan_run
from async_grpo.app.launch.role_specs import rank_argv, rollout_argv, trainer_argv, trainer_environment
from async_grpo.app.launch.run_copy import fetch_run
from async_grpo.app.launch.run_folder import (
    FIRST_TRAINER,
    RunFolder,
    find_run,
    open_run,
    write_config,
    write_role_config,
)
from async_grpo.config import RunConfig, load
from async_grpo.errors import ConfigError
from async_grpo.telemetry.logging import make_progress_logger
from async_grpo.utils.network import LOOPBACK, address_towards
from buffer import connect_board
from trainer.ranks.local_ranks import network_environment

_STARTERS = (
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_LOCALID"),
    ("LeaderWorkerSet", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS", ""),
    ("the launcher", "RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK"),
)
"""Starter of this process -> its variables: number of the process, number of processes, address of the first process,
and number on its machine ("" for a starter with one process per machine)."""


@dataclass(frozen=True, slots=True)
class ProcessPlacement:
    """Position of this process in the trainer: a node, or a single rank."""

    number: int
    """Node rank; global rank if the starter has placed the ranks."""
    address: str | None = None
    """Address of node 0; None with a single process."""
    local_rank: int | None = None
    """Rank on its machine; None for a node, which starts its ranks itself."""


def prepare_inputs(path: Path, overrides: Sequence[str]) -> int:
    """Check a run, and download or generate the inputs of its roles: model, data, first policy."""
    report_progress = make_progress_logger("init")
    plan = plan_run(path, overrides, download=True, report_progress=report_progress)
    report_progress(f"ready: {asyncio.run(prepare_model(plan.inputs, report_progress))}")
    return 0


def run_rollout(path: Path, overrides: Sequence[str], name: str) -> int:
    """Become a rollout server. Raises ConfigError without redis.url."""
    file, model = _prepare_role(_plan_role(path, overrides, name), name)
    return _exec_role(rollout_argv(file, model, name))


def join_run(run_dir: Path, name: str) -> int:
    """Become an additional rollout server of a live run. Raises ConfigError if the run is not live or `name` is
    taken."""
    model = asyncio.run(_prepare_to_join(find_run(None, [], run_dir), name))
    folder = RunFolder(run_dir)
    file = write_role_config(folder, name, load(folder.roles_file))
    folder.register_role(name)
    return _exec_role(rollout_argv(file, model, name))


async def _prepare_to_join(config: RunConfig, name: str) -> Path:
    board = await connect_board(config.redis, config.name)
    try:
        names = [beat.name for beat in await board.live_servers()]
    finally:
        await board.aclose()
    if name in names:
        raise ConfigError(f"the run {config.name} has a server named {name} already ({', '.join(names)}). Give --name")
    return await prepare_model(config, print)


def run_trainer(path: Path, overrides: Sequence[str], node_rank: int | None) -> int:
    """Become the trainer, or its node `node_rank`. Raises ConfigError without redis.url or for a wrong rank."""
    plan = _plan_role(path, overrides, "trainer")
    config = plan.config
    placement = find_placement(config, node_rank, os.environ)
    file, model = _prepare_role(plan, f"trainer-{placement.number}", placement.address)
    environment = trainer_environment(config, os.environ)
    if placement.local_rank is None:
        return _exec_role(trainer_argv(file, model, placement.number), environment)
    return _exec_role(rank_argv(file, model), environment | rank_environment(config, placement, os.environ))


def find_placement(config: RunConfig, node_rank: int | None, environment: Mapping[str, str]) -> ProcessPlacement:
    """Return the position of this process in the trainer.

    `node_rank` (the option) and a configured address take precedence over the environment. Raises ConfigError for a
    wrong or missing node rank, a missing address, or a wrong number of processes.
    """
    nodes = config.trainer.nodes
    if node_rank is None:
        rank = _find_rank(config, environment)
        if rank is not None:
            return rank

    number = node_rank
    address = config.trainer.rendezvous.address
    if nodes == 1:
        number = number or 0
    elif number is None or address is None:
        env_number, env_address = _find_node(config, environment)
        number = env_number if number is None else number
        address = address or env_address

    if number is None:
        others = "1 on the other" if nodes == 2 else f"1 to {nodes - 1} on the others"
        raise ConfigError(
            f"trainer.nodes is {nodes}, but the rank of this machine is unknown. Pass --node-rank 0 on the machine of "
            f"trainer.rendezvous.address ({config.trainer.rendezvous.address}), and {others}"
        )
    if not 0 <= number < nodes:
        raise ConfigError(
            f"--node-rank is {number}, but trainer.nodes is {nodes}, so ranks are from 0 to {nodes - 1}. Correct the "
            "rank, or set trainer.nodes (and trainer.processes) to the machines that you have"
        )
    if address is None and nodes > 1:
        raise ConfigError(
            f"trainer.nodes is {nodes}, but trainer.rendezvous.address is not set, so the nodes would not find each "
            "other. Set it to an address of node 0 that every node reaches, or start the nodes with srun, which sets it"
        )
    return ProcessPlacement(number, address)


def rank_environment(config: RunConfig, placement: ProcessPlacement, environment: Mapping[str, str]) -> dict[str, str]:
    """Return PyTorch's environment variables for a rank that its starter has placed, in addition to `environment`."""
    trainer = config.trainer
    address = placement.address or LOOPBACK
    port = environment.get("MASTER_PORT", str(trainer.rendezvous.port))
    variables = {
        "RANK": str(placement.number),
        "LOCAL_RANK": str(placement.local_rank),
        "WORLD_SIZE": str(trainer.processes),
        "LOCAL_WORLD_SIZE": str(trainer.processes_per_node),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return variables | network_environment(trainer.platform, address_towards(address), environment)


def _find_rank(config: RunConfig, environment: Mapping[str, str]) -> ProcessPlacement | None:
    """Return the position of a rank, from the variables of a starter with one process per rank; None without such a
    starter."""
    trainer = config.trainer
    if trainer.processes == trainer.nodes:  # one rank per node: node_main starts it
        return None
    for _, number, size, address, local in _STARTERS:
        if local in environment and number in environment and environment.get(size) == str(trainer.processes):
            node_0 = trainer.rendezvous.address or environment.get(address)
            return ProcessPlacement(int(environment[number]), node_0, int(environment[local]))
    return None


def _find_node(config: RunConfig, environment: Mapping[str, str]) -> tuple[int | None, str | None]:
    """Return the rank of this node and the address of node 0, from the variables of its starter; None for each without
    a starter.

    Slurm's variable has the machine on which srun was called. In a batch job this is the first machine, node 0.
    """
    nodes = config.trainer.nodes
    for starter, number, size, address, _ in _STARTERS:
        if number not in environment or size not in environment:
            continue
        if environment[size] != str(nodes):
            raise ConfigError(
                f"{starter} has started {environment[size]} processes of the trainer ({size}), but trainer.nodes is "
                f"{nodes} and trainer.processes {config.trainer.processes}. Start one process per node or one per "
                "rank, or correct the two keys"
            )
        return int(environment[number]), environment.get(address)
    return None, None


def _plan_role(path: Path, overrides: Sequence[str], role: str) -> RunPlan:
    plan = plan_run(path, overrides, download=True, report_progress=make_progress_logger(role))
    if plan.config.redis.url is None:
        raise ConfigError(
            "redis.url is not set: a role that is started separately needs a server that the other roles reach too. "
            "Set redis.url to redis://HOST:6379 for all of them, or use `async-grpo run`, which starts its own server"
        )
    return plan


def _prepare_role(plan: RunPlan, role: str, node_0: str | None = None) -> tuple[Path, Path]:
    """Return the configuration file of this role and the folder of the first policy."""
    started_s = time.monotonic()
    report_progress = make_progress_logger(role)
    config = plan.config
    local = plan.inputs
    model = asyncio.run(prepare_model(local, report_progress))
    if role == FIRST_TRAINER:
        fetch_run(
            config, report_progress
        )  # before the folder is opened, so that a bare machine resumes instead of starting over
    folder = open_run(config)
    if role == FIRST_TRAINER:
        state = folder.read_state()
        state.prepare_s = max(state.prepare_s, time.monotonic() - started_s, read_warmup_s(model))
        folder.write_state(state)
    write_config(folder, config, for_roles=local)

    # The address of node 0 goes only into this role's file, which every start writes. In the shared files it would
    # survive a restart, after which another machine may be node 0.
    if node_0 is not None:
        rendezvous = local.trainer.rendezvous.model_copy(update={"address": node_0})
        trainer = local.trainer.model_copy(update={"rendezvous": rendezvous})
        local = local.model_copy(update={"trainer": trainer})
    file = write_role_config(folder, role, local)
    folder.register_role(role)
    return file, model


def _exec_role(argv: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> int:
    """Replace this process by the role, so that signals reach the role directly and its exit code is ours."""
    os.execve(argv[0], list(argv), {**os.environ, **environment})
