"""`async-grpo launch ray`: a run as actors of a Ray cluster that is there already.

    trainer     a placement group with a bundle on each of trainer.nodes, and in each an actor: `async-grpo trainer`
    rollout-i   a placement group of one bundle for each server: `async-grpo rollout`
    report      `async-grpo runs report --wait`, beside this command

This command is the job: it stays, watches its actors, and starts a role again wherever there is room. Ray ends the
actors when it dies; the same command resumes the run. Roles meet on redis and not through Ray, which carries commands
and exit codes only. A role ends for one of five reasons, and `_keep` decides what comes next:

    0   the run is over, or the server was removed     it is not started again
    its node is drained (preemption)                   it is stopped, saves its work, and is started elsewhere
    its actor, or its node, is lost                    started again, launch.restarts times
    78  the configuration is at fault                  not started again
    else: it failed                                    as for a lost actor

A trainer that is given up ends the run; without a server it goes on, as long as there is another.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_grpo.app.launch.node_plan import check_reachable
from async_grpo.app.launch.ray_role import RayRole
from async_grpo.app.launch.role_process import RoleSpec
from async_grpo.app.launch.run_folder import open_run, write_config
from async_grpo.app.launch.supervisor import TRAINER, RestartDecision, decide
from async_grpo.config import RunConfig
from async_grpo.errors import AsyncGrpoError, ConfigError, DependencyError, RoleFailed, WaitTimeout
from async_grpo.utils.addresses import is_loopback
from async_grpo.utils.aio import Overtaken, cancel_and_wait, race, stop_signals
from async_grpo.utils.child_process import child_argv
from async_grpo.utils.private_names import check_private_names
from trainer.platform import select_platform

NAMESPACE = "async-grpo"
LOOK_EVERY_S = 2.0
GRACE_S = 20.0
"""Seconds beyond launch.stop_timeout_s that an actor has to report the end of its role."""
LOST = 1
"""The exit code that stands for the end of an actor that could not report one."""

_COMMAND = [sys.executable, "-m", "async_grpo.app.cli.main"]

Bundles = list[dict[str, float]]
"""What each node of a role asks of Ray."""


def plan(config: RunConfig, servers: int) -> dict[str, Bundles]:
    """Role -> the bundles of its placement group. Raises ConfigError without redis.url."""
    check_reachable(config, one_machine=True)
    asked, trainer, limits = config.launch.ray, config.trainer, config.rollout.limits
    ranks = _devices(trainer.platform, trainer.processes_per_node)
    workers = _devices(limits.platform, limits.devices)
    groups: dict[str, Bundles] = {TRAINER: [{**ranks, **asked.trainer}] * trainer.nodes}
    return groups | {f"rollout-{index}": [{**workers, **asked.rollout}] for index in range(servers)}


def _devices(platform: str, count: int) -> dict[str, float]:
    """The resource for which Ray shows an actor the devices that it has reserved: it sets CUDA_VISIBLE_DEVICES for GPU,
    ASCEND_RT_VISIBLE_DEVICES for NPU."""
    resource = {"cuda": "GPU", "npu": "NPU"}.get(select_platform(platform).name)
    return {} if resource is None else {resource: count}


def launch(config: RunConfig, servers: int | None, say: Callable[[str], None]) -> int:
    """Start or resume the run and wait for its end; or, beside its trainer, keep `servers` more rollout servers. 0
    keeps the trainer alone: its servers are started elsewhere.

    Returns 0, or 130 after SIGTERM or Ctrl-C. Raises ConfigError before anything is started, DependencyError without
    Ray, RoleFailed or WaitTimeout when the trainer, or every server, was given up.
    """
    groups = plan(config, config.rollout.servers if servers is None else servers)
    with _connected(config) as ray:
        there = _actor(ray, config, f"{TRAINER}-0") is not None
        if there and not servers:
            raise ConfigError(
                f"the trainer of {config.name} is on this cluster already. Pass --servers N to add N rollout servers, "
                "or stop the run first: Ctrl-C, or SIGTERM, to the command that has started it"
            )
        check_reachable(config, one_machine=all(is_loopback(node["NodeManagerAddress"]) for node in ray.nodes()))
        if there:
            del groups[TRAINER]
        write_config(open_run(config), config, for_roles=config)
        job = ray.get_runtime_context().get_job_id()
        named = {name.replace("rollout-", f"rollout-{job}-"): bundles for name, bundles in groups.items()}
        return asyncio.run(RayJob(config, ray, named, say).go())


def remove(config: RunConfig, server: str) -> None:
    """Stop one rollout server, which gives its work back first. Raises ConfigError if it is not there."""
    with _connected(config) as ray:
        actor = _actor(ray, config, server)
        if actor is None or server.startswith(TRAINER):
            raise ConfigError(
                f"{config.name} has no rollout server {server} on this cluster. Its name is that of its log in "
                f"{_folder(config)}"
            )
        ray.get(actor.stop.remote(config.launch.stop_timeout_s), timeout=config.launch.stop_timeout_s + GRACE_S)


@dataclass(slots=True)
class RayJob:
    """The roles that one command keeps, by name."""

    config: RunConfig
    ray: Any
    groups: dict[str, Bundles]
    say: Callable[[str], None]
    _actors: dict[str, list[Any]] = field(default_factory=dict)
    _nodes: dict[str, set[str]] = field(default_factory=dict)
    """Where the actors are."""
    _drained: set[str] = field(default_factory=set)
    """Roles that were stopped because a node of theirs is going to leave."""
    _stopping: bool = False
    _report: asyncio.subprocess.Process | None = None

    async def go(self) -> int:
        """Keep the roles until the run is over, an error or a signal; none is left."""
        interrupted, over = asyncio.Event(), False
        watching = asyncio.create_task(self._watch_nodes())
        with stop_signals(interrupted.set):
            try:
                await race(self._keep_all(), interrupted.wait())
                over = True
            except Overtaken:
                self.say("stopped; the same command resumes")
                return 130
            finally:
                await cancel_and_wait(watching)
                await self._end_report(over)
        return 0

    async def _keep_all(self) -> None:
        """Wait until all roles have ended. Raises the error with which the trainer, or the last server, was given up.
        However it ends, roles that are left are asked to stop, and have time for it."""
        keeping = {name: asyncio.create_task(self._keep(name)) for name in self.groups}
        pending = set(keeping.values())
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for name, task in keeping.items():
                    if task in done and not task.cancelled():
                        self._judge(name, task.exception(), keeping)
        finally:
            self._stopping = True
            for name, task in keeping.items():
                if name not in self._actors:  # it waits for room
                    task.cancel()
            self._ask_to_stop(self._actors)
            await asyncio.wait(keeping.values(), timeout=self.config.launch.stop_timeout_s + GRACE_S)
            await cancel_and_wait(*keeping.values())

    def _judge(self, name: str, error: BaseException | None, keeping: dict[str, asyncio.Task[None]]) -> None:
        """What the end of one role means for the others; raises `error` if the run cannot go on without it."""
        others = [task for other, task in keeping.items() if other not in (name, TRAINER)]
        if error is None and name != TRAINER and TRAINER in keeping and keeping[TRAINER].done():
            for other, task in keeping.items():  # the run is over: there is nothing left for servers without room
                if other not in self._actors:
                    task.cancel()
        if error is None:
            return
        given_up = isinstance(error, AsyncGrpoError) and name != TRAINER
        if not given_up or all(task.done() for task in others):
            raise error
        self.say(f"{error}. The run continues without {name}")

    async def _keep(self, name: str) -> None:
        """Run a role, and start it again as long as `decide` says so. Raises RoleFailed, WaitTimeout."""
        restarts, used = self.config.launch.restarts, 0
        limit = restarts.trainer if name == TRAINER else restarts.rollout
        while not self._stopping:
            ends = await self._run_once(name)
            if name in self._drained and not self._stopping:
                self._drained.remove(name)
                self.say(f"{name}: its node is drained; it is started elsewhere")
                continue
            code, words = max(ends, key=lambda end: abs(end[0]))
            decision = decide(code=code, stopping=self._stopping, over=False, needed=False, restarts=used, limit=limit)
            if decision is RestartDecision.DONE:
                return
            if decision is RestartDecision.GIVE_UP:
                raise RoleFailed(f"{words}; restarts: {used}; the same command resumes the run")
            used += 1
            self.say(f"{words}; restart {used} of {limit}")

    async def _run_once(self, name: str) -> list[tuple[int, str]]:
        """Place a role and run it. Returns how its process on each node has ended: exit code, and words."""
        from ray.util import placement_group, placement_group_table, remove_placement_group

        bundles = self.groups[name]
        group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK")
        try:
            await self._placed(group, name)
            places = placement_group_table(group)["bundles_to_node_id"]
            self._nodes[name] = set(places.values())
            self._actors[name] = [self._start(name, group, index) for index in range(len(bundles))]
            runs = [
                actor.run.remote(spec, self.config.name)
                for actor, spec in zip(self._actors[name], self._specs(name, places), strict=True)
            ]
            self.say(f"{name}: started on {', '.join(sorted({self._addresses()[node] for node in places.values()}))}")
            if name == TRAINER:
                await self._begin_report()
            return list(await asyncio.gather(*(self._end_of(run, name) for run in runs)))
        finally:
            for actor in self._actors.pop(name, []):
                self.ray.kill(actor)
            remove_placement_group(group)

    async def _placed(self, group: Any, name: str) -> None:
        wait_s = self.config.launch.ray.wait_s
        try:
            async with asyncio.timeout(wait_s):
                await group.ready()
        except TimeoutError:
            fix = "See `ray status`; add nodes, lower launch.ray.trainer or rollout, or raise launch.ray.wait_s"
            raise WaitTimeout(f"room for {name} on the Ray cluster, {self.groups[name]}", wait_s, fix) from None

    def _start(self, name: str, group: Any, index: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(self.groups[name][index])
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            "namespace": NAMESPACE,
            "name": _actor_name(self.config, f"{name}-{index}" if name == TRAINER else name),
            "max_concurrency": 4,  # `stop` beside `run`
        }
        return self.ray.remote(**options)(RayRole).remote()

    def _specs(self, name: str, places: dict[int, str]) -> list[RoleSpec]:
        """The process of each node of a role; those of a trainer of several are told their rank and node 0."""
        run, folder = str(_run_dir(self.config)), _folder(self.config)
        if name != TRAINER:
            return [RoleSpec(name, [*_COMMAND, "rollout", run, "--name", name], folder / f"{name}.log", 0)]
        nodes = len(places)
        shared = {"WORLD_SIZE": str(nodes), "MASTER_ADDR": self._addresses()[places[0]]} if nodes > 1 else {}
        return [
            RoleSpec(name, [*_COMMAND, "trainer", run], folder / f"{name}.{rank}.log", 0, {**shared, **own})
            for rank in range(nodes)
            for own in [{"RANK": str(rank)} if shared else {}]
        ]

    def _addresses(self) -> dict[str, str]:
        return {node["NodeID"]: node["NodeManagerAddress"] for node in self.ray.nodes()}

    async def _end_of(self, run: Any, name: str) -> tuple[int, str]:
        try:
            ended: tuple[int, str] = await run
        except self.ray.exceptions.RayError as error:
            return LOST, f"{name} was lost: {str(error).strip().splitlines()[-1]}"
        return ended

    async def _watch_nodes(self) -> None:
        """Stop the roles of nodes that are being drained: they are preempted, or given back."""
        from ray._private.state import state

        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            leaving = set(await asyncio.to_thread(state.get_draining_nodes))
            affected = {name for name in self._actors if self._nodes[name] & leaving} - self._drained
            self._drained |= affected
            self._ask_to_stop(affected)

    def _ask_to_stop(self, names: Any) -> None:
        for name in names:
            for actor in self._actors[name]:
                actor.stop.remote(self.config.launch.stop_timeout_s)

    async def _begin_report(self) -> None:
        if self._report is None:
            argv = child_argv([*_COMMAND, "runs", "report", str(_run_dir(self.config)), "--wait"])
            self._report = await asyncio.create_subprocess_exec(*argv, start_new_session=True)

    async def _end_report(self, over: bool) -> None:
        """Wait for the report, which is written now if the run is not over."""
        if self._report is None:
            return
        if not over and self._report.returncode is None:
            self._report.terminate()
        try:
            await asyncio.wait_for(self._report.wait(), self.config.launch.ready_timeout_s)
        except TimeoutError:
            self._report.kill()
            self.say(f"the report is not written: run `async-grpo runs report {_run_dir(self.config)}`")


@contextmanager
def _connected(config: RunConfig) -> Iterator[Any]:
    """Ray, connected to the cluster that the configuration or the environment names. Raises ConfigError for none, and
    DependencyError without Ray."""
    address = config.launch.ray.address or os.environ.get("RAY_ADDRESS")
    if address is None:
        raise ConfigError(
            "no Ray cluster is named, and none is started here. Set launch.ray.address (or RAY_ADDRESS) to HOST:6379 "
            "of its head, on a machine of the cluster, or start this command by `ray job submit`"
        )
    check_private_names("launch ray")
    try:
        import ray
    except ImportError:
        raise DependencyError("Ray is not installed. Run: pip install 'async-grpo[ray]'") from None
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"launch.ray.address (or RAY_ADDRESS) is {address}, where no Ray cluster can be joined: {error}. "
            "See `ray status` on this machine"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _actor(ray: Any, config: RunConfig, name: str) -> Any:
    """The actor of a role of this run; None if there is none."""
    try:
        return ray.get_actor(_actor_name(config, name), namespace=NAMESPACE)
    except ValueError:
        return None


def _actor_name(config: RunConfig, role: str) -> str:
    """Name of an actor. It has a digest of the run's folder: others on the cluster may have a run of the same name,
    whose trainer is not ours to add servers to, and whose servers are not ours to stop."""
    return f"{config.local_name}/{role}"


def _run_dir(config: RunConfig) -> Path:
    return config.run_dir.absolute()


def _folder(config: RunConfig) -> Path:
    """What the roles print."""
    return _run_dir(config) / "ray"
