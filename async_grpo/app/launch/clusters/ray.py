"""`async-grpo launch ray`: a run as actors of an existing Ray cluster.

    trainer     a placement group with a bundle on each of trainer.nodes, and an actor in each: `async-grpo trainer`
    rollout-i   a placement group with one bundle per server: `async-grpo rollout`
    report      `async-grpo runs report --wait`, on the machine of this command

This command runs as long as the run. It supervises the actors and restarts a role wherever there is room. Ray ends the
actors when this command dies; the same command then resumes the run. Roles communicate through Redis; Ray carries only
commands and exit codes. A role ends for one of five reasons, and the `Supervisor` reacts:

    exit code 0: the run is over, or the server was removed    not restarted
    the node is drained (preemption)                           stopped, saves its work, started elsewhere
    the actor or its node is lost                              restarted, launch.restarts times
    exit code 78: wrong configuration                          not restarted
    any other exit code                                        like a lost actor

The run ends when the trainer is given up. It continues without a rollout server as long as there is another.
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
"""Seconds after launch.stop_timeout_s in which an actor must report the end of its role."""
LOST = 1
"""Exit code for an actor that was lost before it could report one."""

_COMMAND = [sys.executable, "-m", "async_grpo.app.cli.main"]

Bundles = list[dict[str, float]]
"""Ray resources of each node of a role."""


def plan_bundles(config: RunConfig, servers: int) -> dict[str, Bundles]:
    """Return the bundles of each role's placement group. Raises ConfigError without redis.url."""
    check_reachable(config, one_machine=True)
    resources, trainer, limits = config.launch.ray, config.trainer, config.rollout.limits
    trainer_bundle = _device_resource(trainer.platform, trainer.processes_per_node) | resources.trainer
    server_bundle = _device_resource(limits.platform, limits.devices) | resources.rollout
    bundles: dict[str, Bundles] = {TRAINER: [trainer_bundle] * trainer.nodes}
    for index in range(servers):
        bundles[f"rollout-{index}"] = [server_bundle]
    return bundles


def _device_resource(platform: str, count: int) -> dict[str, float]:
    """Return the Ray resource of the devices; {} for the CPU.

    For these resources, Ray sets CUDA_VISIBLE_DEVICES (GPU) or ASCEND_RT_VISIBLE_DEVICES (NPU) in the actor.
    """
    resource = {"cuda": "GPU", "npu": "NPU"}.get(select_platform(platform).name)
    return {} if resource is None else {resource: count}


def launch_run(config: RunConfig, servers: int | None, report_progress: Callable[[str], None]) -> int:
    """Start or resume the run and wait for its end.

    `servers`: number of rollout servers, instead of `rollout.servers`. If the run already has a trainer, they are added
    to it. With 0, only the trainer is started.

    Returns 0, or 130 after SIGTERM or Ctrl-C. Raises ConfigError before anything is started, DependencyError without
    Ray, and RoleFailed or WaitTimeout when the trainer or every server was given up.
    """
    bundles = plan_bundles(config, config.rollout.servers if servers is None else servers)
    with _connect(config) as ray:
        has_trainer = _find_actor(ray, config, f"{TRAINER}-0") is not None
        if has_trainer and not servers:
            raise ConfigError(
                f"the trainer of {config.name} is already on this cluster. Pass --servers N to add N rollout servers, "
                "or stop the run first: send Ctrl-C or SIGTERM to the command that started it"
            )
        check_reachable(config, one_machine=all(is_loopback(node["NodeManagerAddress"]) for node in ray.nodes()))
        if has_trainer:
            del bundles[TRAINER]
        write_config(open_run(config), config, for_roles=config)

        # Another command may add servers to the run, so their names have the id of this command's Ray job.
        job = ray.get_runtime_context().get_job_id()
        named_bundles = {name.replace("rollout-", f"rollout-{job}-"): group for name, group in bundles.items()}
        return asyncio.run(RayJob(config, ray, named_bundles, report_progress).run())


def remove_server(config: RunConfig, server: str) -> None:
    """Stop one rollout server after it has given its work back. Raises ConfigError if there is no such server."""
    with _connect(config) as ray:
        actor = _find_actor(ray, config, server)
        if actor is None or server.startswith(TRAINER):
            raise ConfigError(
                f"{config.name} has no rollout server {server} on this cluster. The name of a server is that of its "
                f"log in {_log_folder(config)}"
            )
        ray.get(actor.stop.remote(config.launch.stop_timeout_s), timeout=config.launch.stop_timeout_s + GRACE_S)


class RayRunner:
    """The `RoleRunner` of a Ray cluster. Each start of the role makes a placement group with an actor in each bundle.

    start() --> waiting for room --> running --> ended; the room is freed
                     |                  |           ^
                     +-- stop() --------+-- stop(), move(), kill(), or the processes end
    """

    def __init__(
        self, config: RunConfig, ray: Any, name: str, bundles: Bundles, report_progress: Callable[[str], None]
    ) -> None:
        limits = config.launch.restarts
        self.name = name
        self.max_restarts = limits.trainer if name == TRAINER else limits.rollout
        self.waits_for_room = False
        self.pid = None
        self.was_placed = asyncio.Event()
        """Set once the role has had room for the first time."""
        self.nodes: set[str] = set()
        """Ids of the nodes with its actors."""
        self._config = config
        self._ray = ray
        self._bundles = bundles
        self._report_progress = report_progress
        self._stop_requested = asyncio.Event()
        self._is_moving = False
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []

    async def start(self) -> None:
        """Wait for room, then start an actor on each node. Raises WaitTimeout after launch.ray.wait_s."""
        from ray.util import placement_group, placement_group_table

        self._stop_requested.clear()
        self._is_moving = False
        self._runs = []
        strategy = "STRICT_SPREAD" if len(self._bundles) > 1 else "PACK"
        self._group = placement_group(self._bundles, strategy=strategy)
        try:
            self.waits_for_room = True
            try:
                await race(self._wait_for_room(), self._stop_requested.wait())
            except Overtaken:  # `stop` was called
                self._free_room()
                return
            finally:
                self.waits_for_room = False

            node_of_bundle = placement_group_table(self._group)["bundles_to_node_id"]
            self.nodes = set(node_of_bundle.values())
            for index in range(len(self._bundles)):
                self._actors.append(self.make_actor(self._group, index))
            for actor, spec in zip(self._actors, self._make_specs(node_of_bundle), strict=True):
                self._runs.append(actor.run.remote(spec, self._config.name))
        except BaseException:
            self._free_room()
            raise
        self.was_placed.set()
        addresses = sorted({self._node_addresses()[node] for node in self.nodes})
        self._report_progress(f"{self.name}: started on {', '.join(addresses)}")

    async def wait(self) -> RoleEnd:
        """Wait until the process on each node has ended, and free the room. Returns the end with the largest code."""
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
        """Stop waiting for room, or send SIGTERM to the processes and SIGKILL after launch.stop_timeout_s."""
        self._stop_requested.set()
        for actor in self._actors:
            actor.stop.remote(self._config.launch.stop_timeout_s)

    def kill(self) -> None:
        """Kill the actors. Their processes die with them."""
        for actor in self._actors:
            self._ray.kill(actor)

    def stage(self) -> str:
        """Return "", because the logs are on other machines."""
        return ""

    def move(self) -> None:
        """Stop the role because a node of it will leave, so that the supervisor starts it elsewhere."""
        if not self._is_moving:
            self._is_moving = True
            self.stop()

    def make_actor(self, group: Any, index: int) -> Any:
        """Create the actor of a bundle of the placement group."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(self._bundles[index])
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            "namespace": NAMESPACE,
            "name": _actor_name(self._config, f"{self.name}-{index}" if self.name == TRAINER else self.name),
            "max_concurrency": 4,  # `stop` is called while `run` is running
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

    def _make_specs(self, node_of_bundle: dict[int, str]) -> list[RoleSpec]:
        """Return the process of each node. A trainer on several nodes gets its rank and the address of node 0."""
        run_dir, folder, name = str(_run_dir(self._config)), _log_folder(self._config), self.name
        if name != TRAINER:
            return [RoleSpec(name, [*_COMMAND, "rollout", run_dir, "--name", name], folder / f"{name}.log", 0)]

        nodes = len(node_of_bundle)
        specs = []
        for rank in range(nodes):
            environment = {}
            if nodes > 1:
                master = self._node_addresses()[node_of_bundle[0]]
                environment = {"RANK": str(rank), "WORLD_SIZE": str(nodes), "MASTER_ADDR": master}
            specs.append(RoleSpec(name, [*_COMMAND, "trainer", run_dir], folder / f"{name}.{rank}.log", 0, environment))
        return specs

    def _node_addresses(self) -> dict[str, str]:
        return {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}


class RayJob:
    """The roles that one command supervises, and the report process on its machine."""

    def __init__(
        self, config: RunConfig, ray: Any, bundles: dict[str, Bundles], report_progress: Callable[[str], None]
    ) -> None:
        self._config = config
        self._report_progress = report_progress
        self._runners = {
            name: RayRunner(config, ray, name, role_bundles, report_progress) for name, role_bundles in bundles.items()
        }
        self._supervisor = Supervisor(
            [*self._runners.values()],
            restarts={},
            warn=warn_as_text(report_progress),
            stop_timeout_s=config.launch.stop_timeout_s + GRACE_S,  # the actors kill after launch.stop_timeout_s
            sees_whole_run=False,
        )
        self._report: asyncio.subprocess.Process | None = None

    async def run(self) -> int:
        """Run the roles until the run is over, an error, or a signal, and stop all of them. Returns the exit code."""
        interrupted = asyncio.Event()
        is_over = False
        helpers = [asyncio.create_task(self._move_drained_roles())]
        if TRAINER in self._runners:
            helpers.append(asyncio.create_task(self._start_report()))
        with stop_signals(interrupted.set):
            try:
                await race(self._supervisor.watch(), interrupted.wait())
                is_over = True
            except Overtaken:
                self._report_progress("stopped; the same command resumes")
                return 130
            finally:
                await self._supervisor.stop()
                await cancel_and_wait(*helpers)
                await self._end_report(is_over)
        return 0

    async def _move_drained_roles(self) -> None:
        """Move roles away from nodes that Ray drains, because they are preempted or released."""
        from ray._private.state import state

        while True:
            await asyncio.sleep(POLL_EVERY_S)
            draining = set(await asyncio.to_thread(state.get_draining_nodes))
            for runner in self._runners.values():
                if runner.nodes & draining:
                    runner.move()

    async def _start_report(self) -> None:
        # The report command waits launch.ready_timeout_s for the trainer, but the trainer may wait longer for room. So
        # the report starts only when the trainer has room.
        await self._runners[TRAINER].was_placed.wait()
        argv = child_argv([*_COMMAND, "runs", "report", str(_run_dir(self._config)), "--wait"])
        self._report = await asyncio.create_subprocess_exec(*argv, start_new_session=True)

    async def _end_report(self, is_over: bool) -> None:
        """Wait until the report is written. If the run is not over, SIGTERM makes the command write it now."""
        if self._report is None:
            return
        if not is_over and self._report.returncode is None:
            self._report.terminate()
        try:
            await asyncio.wait_for(self._report.wait(), self._config.launch.ready_timeout_s)
        except TimeoutError:
            self._report.kill()
            self._report_progress(f"the report is not written: run `async-grpo runs report {_run_dir(self._config)}`")


@contextmanager
def _connect(config: RunConfig) -> Iterator[Any]:
    """Yield the ray module, connected to the cluster of the configuration or the environment.

    Raises ConfigError if no cluster is named or it cannot be joined, DependencyError without Ray.
    """
    address = config.launch.ray.address or os.environ.get("RAY_ADDRESS")
    if address is None:
        raise ConfigError(
            "no Ray cluster is named, and this command does not start one. On a machine of the cluster, set "
            "launch.ray.address (or RAY_ADDRESS) to HOST:6379 of its head, or start this command with `ray job submit`"
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


def _find_actor(ray: Any, config: RunConfig, name: str) -> Any:
    """Return the actor of a role of this run; None if there is none."""
    try:
        return ray.get_actor(_actor_name(config, name), namespace=NAMESPACE)
    except ValueError:
        return None


def _actor_name(config: RunConfig, role: str) -> str:
    """Return the name of an actor.

    It has a digest of the run's folder. Without it, a run of the same name by another user of the cluster would count
    as this run: we would add servers to their trainer, or stop their servers.
    """
    return f"{config.name_with_digest}/{role}"


def _run_dir(config: RunConfig) -> Path:
    return config.run_dir.absolute()


def _log_folder(config: RunConfig) -> Path:
    return _run_dir(config) / "ray"
