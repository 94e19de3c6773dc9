"""`async-grpo launch ray`: a run as actors of a Ray cluster that is there already.

    trainer     a placement group with a bundle on each of trainer.nodes, and in each an actor: `async-grpo trainer`
    rollout-i   a placement group of one bundle for each server: `async-grpo rollout`
    report      `async-grpo runs report --wait`, next to this command

This command is the job: it stays, supervises its actors, and starts a role again wherever there is room. Ray ends the
actors when it dies; the same command resumes the run. Roles meet on redis and not through Ray, which carries commands
and exit codes only. A role ends for one of five reasons, after which the `Supervisor` does the following:

    0   the run is over, or the server was removed     it is not started again
    its node is drained (preemption)                   it is stopped, saves its work, and is started elsewhere
    its actor, or its node, is lost                    started again, launch.restarts times
    78  the configuration is at fault                  not started again
    else: it failed                                    as for a lost actor

A trainer that is given up ends the run; without a server it continues, as long as there is another.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from async_grpo.app.launch.clusters.ray_role import RayRole
from async_grpo.app.launch.node_plan import check_reachable
from async_grpo.app.launch.role_process import RoleSpec
from async_grpo.app.launch.run_folder import open_run, write_config
from async_grpo.app.launch.supervisor import TRAINER, RoleEnd, Supervisor
from async_grpo.app.report.live_state import warn_as_text
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError, DependencyError, WaitTimeout
from async_grpo.utils.addresses import is_loopback
from async_grpo.utils.aio import Overtaken, cancel_and_wait, race, stop_signals
from async_grpo.utils.child_process import child_argv
from async_grpo.utils.private_names import check_private_names
from trainer.platform import select_platform

NAMESPACE = "async-grpo"
POLL_EVERY_S = 2.0
GRACE_S = 20.0
"""Seconds beyond launch.stop_timeout_s that an actor has to report the end of its role."""
LOST = 1
"""The exit code that stands for the end of an actor that could not report one."""

_COMMAND = [sys.executable, "-m", "async_grpo.app.cli.main"]

Bundles = list[dict[str, float]]
"""Ray resources of each node of a role."""


def plan_bundles(config: RunConfig, servers: int) -> dict[str, Bundles]:
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


def launch_run(config: RunConfig, servers: int | None, say: Callable[[str], None]) -> int:
    """Start or resume the run and wait for its end.

    `servers`: number of rollout servers, instead of `rollout.servers`. If the run has a trainer already, they are added
    to it. With 0, only the trainer is started.

    Returns 0, or 130 after SIGTERM or Ctrl-C. Raises ConfigError before anything is started, DependencyError without
    Ray, RoleFailed or WaitTimeout when the trainer, or every server, was given up.
    """
    groups = plan_bundles(config, config.rollout.servers if servers is None else servers)
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
        return asyncio.run(RayJob(config, ray, named, say).run())


def remove_server(config: RunConfig, server: str) -> None:
    """Stop one rollout server, which gives its work back first. Raises ConfigError if it is not there."""
    with _connected(config) as ray:
        actor = _actor(ray, config, server)
        if actor is None or server.startswith(TRAINER):
            raise ConfigError(
                f"{config.name} has no rollout server {server} on this cluster. Its name is that of its log in "
                f"{_folder(config)}"
            )
        ray.get(actor.stop.remote(config.launch.stop_timeout_s), timeout=config.launch.stop_timeout_s + GRACE_S)


class RayRunner:
    """The `RoleRunner` of a Ray cluster: every start of the role is a placement group with an actor in each bundle."""

    def __init__(self, config: RunConfig, ray: Any, name: str, bundles: Bundles, say: Callable[[str], None]) -> None:
        limits = config.launch.restarts
        self.name = name
        self.max_restarts = limits.trainer if name == TRAINER else limits.rollout
        self.waits_for_room = False
        self.pid = None
        self.placed = asyncio.Event()
        """Set once the role has had room for the first time."""
        self.nodes: set[str] = set()
        """Where its actors are."""
        self._config, self._ray, self._bundles, self._say = config, ray, bundles, say
        self._stop_asked = asyncio.Event()
        self._is_moving = False
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []

    async def start(self) -> None:
        """Wait for room, then start an actor on each node. Raises WaitTimeout after launch.ray.wait_s."""
        from ray.util import placement_group, placement_group_table

        self._stop_asked.clear()
        self._is_moving, self._runs = False, []
        self._group = placement_group(self._bundles, strategy="STRICT_SPREAD" if len(self._bundles) > 1 else "PACK")
        try:
            self.waits_for_room = True
            try:
                await race(self._wait_for_room(), self._stop_asked.wait())
            except Overtaken:
                self._free_room()
                return
            finally:
                self.waits_for_room = False
            places = placement_group_table(self._group)["bundles_to_node_id"]
            self.nodes = set(places.values())
            for index in range(len(self._bundles)):
                self._actors.append(self.make_actor(self._group, index))
            for actor, spec in zip(self._actors, self._specs(places), strict=True):
                self._runs.append(actor.run.remote(spec, self._config.name))
        except BaseException:
            self._free_room()
            raise
        self.placed.set()
        self._say(f"{self.name}: started on {', '.join(sorted({self._addresses()[node] for node in self.nodes}))}")

    async def wait(self) -> RoleEnd:
        """Wait until the process on each node has ended, and free the room; the end is that of the worst."""
        if not self._runs:
            return RoleEnd(0, f"{self.name} was stopped before it had room")
        try:
            ends = await asyncio.gather(*(self._wait_for_actor(run) for run in self._runs))
        finally:
            self._free_room()
        code, explanation = max(ends, key=lambda end: abs(end[0]))
        if self._is_moving:
            return RoleEnd(code, f"{self.name}: its node is drained", is_moved=True)
        return RoleEnd(code, explanation)

    def stop(self) -> None:
        """Have the actors send SIGTERM, and SIGKILL after launch.stop_timeout_s; a role without room is not started."""
        self._stop_asked.set()
        for actor in self._actors:
            actor.stop.remote(self._config.launch.stop_timeout_s)

    def kill(self) -> None:
        """Kill the actors; their processes die with them."""
        for actor in self._actors:
            self._ray.kill(actor)

    def stage(self) -> str:
        """ ""; the logs are on other machines."""
        return ""

    def move(self) -> None:
        """Stop the role so that it is started elsewhere, since a node of it is going to leave."""
        if not self._is_moving:
            self._is_moving = True
            self.stop()

    def make_actor(self, group: Any, index: int) -> Any:
        """Make the actor for a bundle of the placement group."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(self._bundles[index])
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            "namespace": NAMESPACE,
            "name": _actor_name(self._config, f"{self.name}-{index}" if self.name == TRAINER else self.name),
            "max_concurrency": 4,  # `stop` is called while `run` lasts
        }
        return self._ray.remote(**options)(RayRole).remote()

    async def _wait_for_room(self) -> None:
        wait_s = self._config.launch.ray.wait_s
        try:
            async with asyncio.timeout(wait_s):
                await self._group.ready()
        except TimeoutError:
            fix = "See `ray status`; add nodes, lower launch.ray.trainer or rollout, or raise launch.ray.wait_s"
            raise WaitTimeout(f"room for {self.name} on the Ray cluster, {self._bundles}", wait_s, fix) from None

    async def _wait_for_actor(self, run: Any) -> tuple[int, str]:
        try:
            end: tuple[int, str] = await run
        except self._ray.exceptions.RayError as error:
            return LOST, f"{self.name} was lost: {str(error).strip().splitlines()[-1]}"
        return end

    def _free_room(self) -> None:
        from ray.util import remove_placement_group

        self.kill()
        self._actors, self.nodes = [], set()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _specs(self, places: dict[int, str]) -> list[RoleSpec]:
        """The process of each node of the role; those of a trainer of several nodes get their rank and node 0."""
        run, folder, name = str(_run_dir(self._config)), _folder(self._config), self.name
        if name != TRAINER:
            return [RoleSpec(name, [*_COMMAND, "rollout", run, "--name", name], folder / f"{name}.log", 0)]
        nodes = len(places)
        specs = []
        for rank in range(nodes):
            environment = {}
            if nodes > 1:
                environment = {"RANK": str(rank), "WORLD_SIZE": str(nodes), "MASTER_ADDR": self._addresses()[places[0]]}
            specs.append(RoleSpec(name, [*_COMMAND, "trainer", run], folder / f"{name}.{rank}.log", 0, environment))
        return specs

    def _addresses(self) -> dict[str, str]:
        return {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}


class RayJob:
    """The roles that one command keeps, and the report next to them."""

    def __init__(self, config: RunConfig, ray: Any, groups: dict[str, Bundles], say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self._runners = {name: RayRunner(config, ray, name, bundles, say) for name, bundles in groups.items()}
        self._supervisor = Supervisor(
            [*self._runners.values()],
            restarts={},
            warn=warn_as_text(say),
            stop_timeout_s=config.launch.stop_timeout_s + GRACE_S,  # the actors kill after launch.stop_timeout_s
            sees_whole_run=False,
        )
        self._report: asyncio.subprocess.Process | None = None

    async def run(self) -> int:
        """Keep the roles until the run is over, an error or a signal; none is left. Returns the exit code."""
        interrupted, over = asyncio.Event(), False
        helpers = [asyncio.create_task(self._move_drained_roles())]
        if TRAINER in self._runners:
            helpers.append(asyncio.create_task(self._start_report()))
        with stop_signals(interrupted.set):
            try:
                await race(self._supervisor.watch(), interrupted.wait())
                over = True
            except Overtaken:
                self._say("stopped; the same command resumes")
                return 130
            finally:
                await self._supervisor.stop()
                await cancel_and_wait(*helpers)
                await self._end_report(over)
        return 0

    async def _move_drained_roles(self) -> None:
        """Move the roles off nodes that are being drained: they are preempted, or given back."""
        from ray._private.state import state

        while True:
            await asyncio.sleep(POLL_EVERY_S)
            leaving = set(await asyncio.to_thread(state.get_draining_nodes))
            for runner in self._runners.values():
                if runner.nodes & leaving:
                    runner.move()

    async def _start_report(self) -> None:
        # The report waits launch.ready_timeout_s for the trainer, which may wait longer than that for room.
        await self._runners[TRAINER].placed.wait()
        argv = child_argv([*_COMMAND, "runs", "report", str(_run_dir(self._config)), "--wait"])
        self._report = await asyncio.create_subprocess_exec(*argv, start_new_session=True)

    async def _end_report(self, over: bool) -> None:
        """Wait for the report, which is written now if the run is not over."""
        if self._report is None:
            return
        if not over and self._report.returncode is None:
            self._report.terminate()
        try:
            await asyncio.wait_for(self._report.wait(), self._config.launch.ready_timeout_s)
        except TimeoutError:
            self._report.kill()
            self._say(f"the report is not written: run `async-grpo runs report {_run_dir(self._config)}`")


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
    """Folder of the logs of the roles."""
    return _run_dir(config) / "ray"
