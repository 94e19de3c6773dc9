"""One role in the foreground, as a container or a cluster job starts it.

Each node of a trainer on several machines needs its rank, their number and the address of node 0. They come from the
command line and the configuration, or from what has started the node, by the first of these that is there:

    srun                            SLURM_PROCID     SLURM_STEP_NUM_TASKS SLURM_LAUNCH_NODE_IPADDR SLURM_LOCALID
    LeaderWorkerSet                 LWS_WORKER_INDEX LWS_GROUP_SIZE       LWS_LEADER_ADDRESS
    Kubeflow's trainer, Ray's jobs  RANK             WORLD_SIZE           MASTER_ADDR              LOCAL_RANK

What has started a process for each of trainer.nodes leaves it to them to start the ranks; what has started one for each
of trainer.processes has placed the ranks itself.
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
from async_grpo.telemetry.logging import say_as
from async_grpo.utils.network import LOOPBACK, address_towards
from buffer import connect_board
from trainer.ranks.local_ranks import network_environment

_STARTERS = (
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_LOCALID"),
    ("LeaderWorkerSet", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS", ""),
    ("the launcher", "RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK"),
)
"""What may have started this process, and its variables: number, how many there are, address of the first, and number
on its machine, "" where there is one on each."""


@dataclass(frozen=True, slots=True)
class ProcessPlacement:
    """Which part of the trainer this process is."""

    number: int
    """Of the node; of the rank, if the ranks were placed by what has started them."""
    address: str | None = None
    """Of node 0, where there are several processes."""
    local_rank: int | None = None
    """Number of the rank on its machine; None for a node, which starts its ranks."""


def prepare_inputs(path: Path, overrides: Sequence[str]) -> int:
    """Check a run, and download or make all that its roles will find: model, data, first policy."""
    say = say_as("init")
    plan = plan_run(path, overrides, download=True, say=say)
    say(f"ready: {asyncio.run(prepare_model(plan.inputs, say))}")
    return 0


def run_rollout(path: Path, overrides: Sequence[str], name: str) -> int:
    """Become a rollout server. Raises ConfigError without redis.url."""
    file, model = _make_ready(_plan_role(path, overrides, name), name)
    return _become(rollout_argv(file, model, name))


def join_run(run_dir: Path, name: str) -> int:
    """Become one more rollout server of a live run. Raises ConfigError if it is not live or has a server `name`."""
    model = asyncio.run(_prepare_to_join(find_run(None, [], run_dir), name))
    folder = RunFolder(run_dir)
    file = write_role_config(folder, name, load(folder.roles_file))
    folder.register_role(name)
    return _become(rollout_argv(file, model, name))


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
    place = find_placement(config, node_rank, os.environ)
    file, model = _make_ready(plan, f"trainer-{place.number}", place.address)
    environment = trainer_environment(config, os.environ)
    if place.local_rank is None:
        return _become(trainer_argv(file, model, place.number), environment)
    return _become(rank_argv(file, model), environment | rank_environment(config, place, os.environ))


def find_placement(config: RunConfig, given: int | None, environment: Mapping[str, str]) -> ProcessPlacement:
    """Which part of the trainer this process is.

    A node that is given and a configured address come before those of the environment. Raises ConfigError for a wrong
    node, for none, without an address, and if another number of processes was started.
    """
    nodes = config.trainer.nodes
    rank = _rank_from(config, environment) if given is None else None
    if rank is not None:
        return rank
    told = given is not None and config.trainer.rendezvous.address is not None
    number, address = (0, None) if nodes == 1 or told else _node_from(config, environment)
    number = given if given is not None else number
    if number is None:
        raise ConfigError(
            f"trainer.nodes is {nodes}: which of them is this machine? Pass --node-rank 0 on the machine of "
            f"trainer.rendezvous.address ({config.trainer.rendezvous.address}), and 1 to {nodes - 1} on the others"
        )
    if not 0 <= number < nodes:
        raise ConfigError(
            f"--node-rank is {number}, but trainer.nodes is {nodes}, so that nodes are numbered from 0 to {nodes - 1}. "
            "Correct it, or set trainer.nodes (and trainer.processes) to what there is"
        )
    address = config.trainer.rendezvous.address or address
    if address is None and nodes > 1:
        raise ConfigError(
            f"trainer.nodes is {nodes}, but trainer.rendezvous.address is not set, so that they would not find each "
            "other. Set it to an address of node 0 that every node reaches, or start them by srun, which says it"
        )
    return ProcessPlacement(number, address)


def rank_environment(config: RunConfig, place: ProcessPlacement, given: Mapping[str, str]) -> dict[str, str]:
    """PyTorch's environment of a rank that was placed by what has started it, beside the environment that is given."""
    trainer = config.trainer
    address, port = place.address or LOOPBACK, given.get("MASTER_PORT", str(trainer.rendezvous.port))
    told = {
        "RANK": str(place.number),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(trainer.processes),
        "LOCAL_WORLD_SIZE": str(trainer.processes_per_node),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return told | network_environment(trainer.platform, address_towards(address), given)


def _rank_from(config: RunConfig, environment: Mapping[str, str]) -> ProcessPlacement | None:
    """The rank that this process is, by the variables of what has started one for each; None without any."""
    trainer = config.trainer
    if trainer.processes == trainer.nodes:  # which node_main starts
        return None
    for _, number, size, address, local in _STARTERS:
        if local in environment and number in environment and environment.get(size) == str(trainer.processes):
            found = trainer.rendezvous.address or environment.get(address)
            return ProcessPlacement(int(environment[number]), found, int(environment[local]))
    return None


def _node_from(config: RunConfig, environment: Mapping[str, str]) -> tuple[int | None, str | None]:
    """Number and address of node 0, by the variables of what has started this process; None without any.

    Slurm names the machine on which srun was called; in a batch job that is the first one, which is node 0.
    """
    nodes = config.trainer.nodes
    for starter, number, size, address, _ in _STARTERS:
        if number not in environment or size not in environment:
            continue
        if environment[size] != str(nodes):
            raise ConfigError(
                f"{starter} has started {environment[size]} processes of the trainer ({size}), but trainer.nodes is "
                f"{nodes} and trainer.processes {config.trainer.processes}. Start one for each node, or one for each "
                "process, or correct the two keys"
            )
        return int(environment[number]), environment.get(address)
    return None, None


def _plan_role(path: Path, overrides: Sequence[str], role: str) -> RunPlan:
    plan = plan_run(path, overrides, download=True, say=say_as(role))
    if plan.config.redis.url is None:
        raise ConfigError(
            "redis.url is not set: a role on its own needs a server that the other roles reach too. "
            "Pass -o redis.url=redis://HOST:6379, or use `async-grpo run`, which brings its own"
        )
    return plan


def _make_ready(plan: RunPlan, role: str, node_0: str | None = None) -> tuple[Path, Path]:
    """The configuration file of this role and the folder of the first policy.

    The address of node 0 is in the file of this start alone: after a restart, another machine may be node 0.
    """
    began_s, say = time.monotonic(), say_as(role)
    config, local = plan.config, plan.inputs
    model = asyncio.run(prepare_model(local, say))
    if role == FIRST_TRAINER:
        fetch_run(config, say)
    folder = open_run(config)
    if role == FIRST_TRAINER:
        state = folder.read_state()
        state.prepare_s = max(state.prepare_s, time.monotonic() - began_s, read_warmup_s(model))
        folder.write_state(state)
    write_config(folder, config, for_roles=local)
    if node_0 is not None:
        where = local.trainer.rendezvous.model_copy(update={"address": node_0})
        trainer = local.trainer.model_copy(update={"rendezvous": where})
        local = local.model_copy(update={"trainer": trainer})
    file = write_role_config(folder, role, local)
    folder.register_role(role)
    return file, model


def _become(argv: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> int:
    """Replace this process, so that signals and the exit code are the role's own."""
    os.execve(argv[0], list(argv), {**os.environ, **environment})
