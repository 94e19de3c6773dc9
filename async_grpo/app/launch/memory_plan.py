"""DevicePlan and HostPlan: whether the devices and the machine of a run are large enough, before it starts.

Memory of one device of an engine: weights first, then work space, and the KV cache in what is left of its share.

    share        gpu_memory_utilization * memory of the device
    weights      b * parameters / TP
    work space   of one step: activations of max_num_batched_tokens tokens, float32 logits of max_num_seqs requests
                 and captured graphs, unless enforce_eager
    a token      2 * L * max(groups / TP, 1) * head_dim * b     keys and values; fewer groups than ranks are repeated
    at worst     max_num_seqs requests of max_model_len tokens: training, an evaluation and HTTP at once
    staging      staging_gib for the next version, beside the share

The engine is started with the max_num_seqs and max_num_batched_tokens of this plan (`EngineLimits`), and checks that it
has them. vLLM makes the cache as large as the share allows. With less than `at worst` it lets samples wait or begin
again, which costs time; with less than one whole sample it does not start. vLLM takes the memory of captured graphs out
of its share; vllm-ascend 0.23 does not, and needs it beside the share.

Where trainer and engine share a device of M bytes (launch.share_devices), its cache is kv_cache_bytes and

    split   trainer <= device_memory_share * M,  engine <= gpu_memory_utilization * M,  and the shares make at most 1
    sleep   trainer between steps + gpu_memory_utilization * M <= M,  trainer + engine asleep <= M

Between steps the trainer holds weights, gradients, optimizer and reference; an engine that sleeps keeps its context and
its graphs.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from async_grpo.app.launch.node_plan import plan_nodes
from async_grpo.app.launch.role_specs import count_local_devices, count_needed_devices
from async_grpo.config import RunConfig
from async_grpo.config.rollout import EngineLimits
from async_grpo.errors import ConfigError
from async_grpo.models.hub import settings_folder
from async_grpo.models.shapes import ModelShape, named_shape, shape_of
from async_grpo.utils.memory_limit import total_memory
from async_grpo.utils.text import GIB, gib
from async_grpo.weights.shared_memory import SHARED_MEMORY, run_folder
from rollout_server.engines.model_files import read_settings
from trainer.platform import select_platform
from trainer.platform.base import smallest_memory_gib
from trainer.platform.memory import (
    ELEMENT_BYTES,
    NO_TRAINER,
    PROCESS_BYTES,
    TrainerHostMemory,
    TrainerMemory,
    trainer_host_memory,
)

RESERVED_BYTES = 1 * GIB
"""Context of the device, workspaces, one layer of new weights on its way in."""
GRAPH_BYTES = 2 * GIB
"""Captured graphs, an estimate: some 45 sizes of mixed and as many of decoding batches. vLLM's logs show 24 to 28 MiB
for a large one (vllm-project/vllm, pull request 22897)."""

PUBLISHER_COPIES = 2
"""Copies of the model in shared memory next to rank 0: the version that is served and the next one."""

TRAINER_FIX = (
    "Raise trainer.tensor_parallel, pipeline_parallel or processes (which share weights and optimizer), set "
    "trainer.sequence_parallel or trainer.recompute: full, or lower trainer.micro_batch_tokens"
)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The memory that an engine needs on one device, in bytes."""

    weights: int
    work_space: int
    token: int
    """Bytes of one token in the KV cache."""
    asleep: int
    """Bytes that it keeps while it sleeps."""
    limits: EngineLimits

    def awake(self, memory_bytes: float) -> int:
        """Bytes that it may take of a device of `memory_bytes`: its share, and the room for the next version."""
        return int(self.limits.memory_share * memory_bytes) + self.limits.staging_bytes

    @property
    def least(self) -> int:
        """The least memory with which the engine starts: room for one sample of full length."""
        return self.weights + self.work_space + self.token * self.limits.max_length

    def cache(self, memory_bytes: float) -> int:
        """Bytes of the KV cache on a device of `memory_bytes`; may be negative."""
        if self.limits.cache_bytes is not None:
            return self.limits.cache_bytes
        return int(self.limits.memory_share * memory_bytes) - self.weights - self.work_space

    def excess(self, memory_bytes: float) -> int:
        """Bytes by which weights, work space and cache exceed the engine's share; 0 or less if they fit."""
        total = self.weights + self.work_space + self.cache(memory_bytes)
        return total - int(self.limits.memory_share * memory_bytes)

    def samples(self, memory_bytes: float) -> int:
        """Samples of full length that fit into the cache."""
        return max(0, self.cache(memory_bytes) // (self.token * self.limits.max_length))

    def __str__(self) -> str:
        tokens = self.limits.requests * self.limits.max_length
        staging = f"; staging {gib(self.limits.staging_bytes)} beside the share" if self.limits.staging_bytes else ""
        return (
            f"weights {gib(self.weights)} + work space {gib(self.work_space)} + "
            f"KV cache {gib(self.token * tokens)} GiB at worst ({tokens} tokens * {self.token} bytes){staging}"
        )


def engine_memory(config: RunConfig, shape: ModelShape) -> EngineMemory:
    """The memory that a rollout server needs on one device."""
    limits, element = config.rollout.limits, ELEMENT_BYTES[config.model.precision]
    ranks, reserved = limits.devices, RESERVED_BYTES + (GRAPH_BYTES if limits.captures_graphs else 0)
    widths = 4 * shape.hidden + (2 * shape.ffn + shape.query + 2 * shape.key) // ranks
    in_layers = shape.parameters - shape.outer_parameters
    return EngineMemory(
        weights=(element * shape.outer_parameters + (limits.matrix_bytes or element) * in_layers) // ranks,
        work_space=limits.batched_tokens * element * widths + 4 * limits.requests * shape.vocab + reserved,
        token=shape.cache_token_bytes(element, ranks),
        asleep=reserved + limits.staging_bytes,
        limits=limits,
    )


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The host memory of one machine of the run in bytes, at worst."""

    trainer: TrainerHostMemory
    """That of the ranks on this machine; `NO_TRAINER` if it has none."""
    stores: int
    """Copies of the model in shared memory."""
    engines: int
    server: int
    """Memory limit of an embedded Redis server; 0 for one elsewhere."""
    there: int | None
    """Memory of the machine; None if it is not compared."""
    source: str
    """Where `there` is from, or why it is not compared."""
    node: int | None = None
    """Number of the machine, None if the run has only one."""

    @property
    def total(self) -> int:
        """Bytes that the machine must have."""
        return self.trainer.total + self.stores + self.engines + self.server

    def check(self) -> None:
        """Raise ConfigError, with the arithmetic, for a machine that is too small."""
        if self.there is not None and self.total > self.there:
            machine = "the machine" if self.node is None else f"node {self.node}"
            raise ConfigError(
                f"{machine} has {gib(self.there)} GiB of memory ({self.source}), but needs {self}: the run would be "
                "killed, at its first checkpoint at the latest. Place the rollout servers on another machine, train on "
                "more nodes (trainer.nodes), or set trainer.optimizer.offload: false if the devices have room for the "
                "optimizer"
            )

    def row(self) -> tuple[str, str]:
        """The row for the table of a dry run."""
        label = "host memory" if self.node is None else f"host memory, node {self.node}"
        compared = f"not compared: {self.source}"
        if self.there is not None:
            compared = f"of {gib(self.there)} GiB ({self.source}), {gib(self.there - self.total)} stay free"
        return label, f"{self}; {compared}"

    def __str__(self) -> str:
        parts = {
            "optimizer": self.trainer.optimizer,
            "checkpoint": self.trainer.checkpoint,
            "reference model": self.trainer.reference,
            "weight stores": self.stores,
            "ranks": self.trainer.processes,
            "engines": self.engines,
            "redis": self.server,
        }
        summands = " + ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
        return f"{gib(self.total)} GiB = {summands}"


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What one device of each side needs, None where that side computes on the CPU, and the GiB that it has, None where
    they are not known."""

    trainer: TrainerMemory | None
    trainer_gib: float | None
    engine: EngineMemory | None
    engine_gib: float | None
    model_bytes: int
    trainer_share: float = 1.0
    """Share of the device that a rank may take."""
    sharing: Literal["off", "split", "sleep"] = "off"
    """How the two sides share a device (`launch.share_devices`)."""
    stored_copies: int = 4
    """Copies of the model in the shared memory of a machine that has both sides (`copies_in_shared_memory`)."""
    hosts: Sequence[HostPlan] = ()
    """One for each machine of the run."""

    def check(self) -> None:
        """Raise ConfigError, with the arithmetic, for devices or a host that are too small."""
        for host in self.hosts:
            host.check()
        if self.trainer is not None and self.trainer_gib is not None:
            self._check_trainer(self.trainer, self.trainer_gib)
        if self.engine is not None and self.engine_gib is not None:
            self._check_engine(self.engine, self.engine_gib)
        for phase, summands in self._together().items():
            if self.trainer_gib is not None and sum(summands.values()) > self.trainer_gib * GIB:
                raise ConfigError(
                    f"trainer and engine share a device of {self.trainer_gib:g} GiB, but need {_sum(summands)} GiB "
                    f"{phase}: {self.trainer}; {self.engine}. Lower the engine's share. {TRAINER_FIX}"
                )

    def _check_trainer(self, trainer: TrainerMemory, gib_there: float) -> None:
        if trainer.total <= self.trainer_share * gib_there * GIB:
            return
        is_all = self.trainer_share == 1
        given = "" if is_all else f", of which a rank may take {self.trainer_share:g} (trainer.device_memory_share)"
        raise ConfigError(
            f"a device of the trainer has {gib_there:g} GiB{given}, but needs {trainer}: training would run out of "
            f"memory. {TRAINER_FIX}{'' if is_all else ', or raise the share'}"
        )

    def _check_engine(self, engine: EngineMemory, gib_there: float) -> None:
        limits = engine.limits
        if (awake := engine.awake(gib_there * GIB)) > gib_there * GIB:
            raise ConfigError(
                f"{limits.staging_key} is {gib(limits.staging_bytes)}, beside {limits.memory_share:g} of a device of "
                f"{gib_there:g} GiB ({limits.memory_share_key}): {gib(awake)} GiB together. Lower one of the two"
            )
        if not engine.samples(gib_there * GIB):
            raise ConfigError(
                f"a device of a rollout server has {gib_there:g} GiB, of which the engine may use "
                f"{limits.memory_share * gib_there:.1f}, but one sample of {limits.max_length} tokens needs "
                f"{gib(engine.least)}: {engine}. {limits.memory_advice} or rollout.max_concurrency"
            )
        if limits.cache_bytes is not None and (excess := engine.excess(gib_there * GIB)) > 0:
            raise ConfigError(
                f"{limits.cache_key} is {limits.cache_bytes}, but the engine's share, {limits.memory_share:g} of "
                f"{gib_there:g} GiB, leaves {max(0, limits.cache_bytes - excess)} bytes beside {engine}. Lower it, or "
                f"raise {limits.memory_share_key}"
            )

    def rows(self) -> list[tuple[str, str]]:
        """The rows for the table of a dry run."""
        found = []
        if self.trainer is not None:
            free = "the device's memory is not known (trainer.device_memory_gib)"
            if self.trainer_gib is not None:
                free = f"of {self.trainer_gib:g} GiB, {gib(self.trainer_gib * GIB - self.trainer.total)} stay free"
            found.append(("trainer device", f"{self.trainer}; {free}"))
        if self.engine is not None:
            found.append(("engine device", f"{self.engine}; {self._cache(self.engine)}"))
        if together := self._together():
            sums = "; ".join(f"{_sum(summands)} GiB {phase}" for phase, summands in together.items())
            found.append(("shared device", f"{sums}; of {self.trainer_gib:g} GiB"))
        size = f"{gib(self.stored_copies * self.model_bytes)} GiB = {self.stored_copies} * {gib(self.model_bytes)}"
        if len(self.hosts) > 1:
            size = "; ".join(f"node {host.node} {gib(host.stores)} GiB" for host in self.hosts)
        found.append(("shared memory", f"/dev/shm: {size}"))
        found += [host.row() for host in self.hosts]
        return found

    def _together(self) -> dict[str, dict[str, int]]:
        """Phase of a run -> what takes how many bytes of a device that both sides share; {} if none is shared."""
        trainer, engine = self.trainer, self.engine
        if self.sharing == "off" or trainer is None or engine is None or self.engine_gib is None:
            return {}
        share = engine.awake(self.engine_gib * GIB)
        if self.sharing == "split":
            return {"at worst": {"trainer": trainer.total, "engine": share}}
        return {
            "between steps": {"trainer": trainer.resident, "engine": share},
            "in a step": {"trainer": trainer.total, "sleeping engine": engine.asleep},
        }

    def _cache(self, engine: EngineMemory) -> str:
        if self.engine_gib is None:
            return f"the device's memory is not known ({engine.limits.device_memory_key})"
        cache, samples = engine.cache(self.engine_gib * GIB), engine.samples(self.engine_gib * GIB)
        room = "all" if samples >= engine.limits.requests else f"{samples}"
        return (
            f"of {self.engine_gib:g} GiB, {engine.limits.memory_share:g} leave {gib(cache)} for the cache: {room} of "
            f"{engine.limits.requests} requests at full length"
        )


def model_shape(config: RunConfig) -> ModelShape | None:
    """The shape of the first policy; None if neither a checkpoint on this machine nor model.architecture says it."""
    folder = settings_folder(config) or config.model.path
    return _shape(Path() if folder is None else folder / "config.json", config.model.architecture)


def copies_in_shared_memory(config: RunConfig) -> int:
    """Copies of the model where both sides run: two of the publisher, and those of the receiver that all engines of the
    machine share (docs/weights.md)."""
    return PUBLISHER_COPIES + config.weights.receiver_slots


def model_bytes(config: RunConfig) -> int | None:
    """Bytes of one copy of the weights; None for a generated model or one of unknown shape."""
    shape = None if config.model.path is None else model_shape(config)
    return None if shape is None else ELEMENT_BYTES[config.model.precision] * shape.parameters


def check_shared_memory(config: RunConfig, model: Path) -> None:
    """Raise ConfigError if /dev/shm is too small for the copies of the weights of `model` (the first policy's folder).

    Adapters are smaller, and a `weights.location` takes the place of most copies: those are not checked here.
    """
    shape = _shape(model / "config.json", None)
    if shape is None or config.model.lora is not None or config.weights.location is not None:
        return
    copy, copies = ELEMENT_BYTES[config.model.precision] * shape.parameters, copies_in_shared_memory(config)
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    old = run_folder(config.local_name)  # stores that a killed role has left are replaced
    free += sum(file.stat().st_size for file in old.glob("*") if file.is_file())
    if free < copies * copy:
        size = -(-copies * copy // GIB) + 1
        raise ConfigError(
            f"{SHARED_MEMORY} has {free / 2**20:,.0f} MiB free, but {copies} copies of the weights, which trainer and "
            f"engines share, take {copies * copy / 2**20:,.0f} MiB. Enlarge it: mount -o remount,size={size}G "
            f"{SHARED_MEMORY}, or docker run --shm-size={size}g"
        )


def plan_devices(config: RunConfig) -> DevicePlan | None:
    """The plan for the sides that compute on an accelerator; None if there is none, or if the model's shape is not
    known. Raises ConfigError if the checkpoint is not of `model.architecture`.

    A device's memory is the configured one, else that of the smallest device that the vendor's tool lists.
    """
    trainer, limits = config.trainer, config.rollout.limits
    trains, generates = select_platform(trainer.platform), select_platform(limits.platform)
    if not (trains.visible_variable or generates.visible_variable) or config.model.path is None:
        return None
    folder = settings_folder(config) or config.model.path
    shape = _shape(folder / "config.json", config.model.architecture)
    if shape is None:
        return None
    trainer_gib = trainer.device_memory_gib or smallest_memory_gib(trains)
    engine_gib = limits.device_memory_gib or smallest_memory_gib(generates)
    if config.launch.share_devices != "off":
        trainer_gib = engine_gib = min((gib for gib in (trainer_gib, engine_gib) if gib is not None), default=None)
    return DevicePlan(
        trainer=trains.memory_plan(config, shape),
        trainer_gib=trainer_gib,
        engine=engine_memory(config, shape) if generates.visible_variable else None,
        engine_gib=engine_gib,
        model_bytes=ELEMENT_BYTES[config.model.precision] * shape.parameters,
        stored_copies=copies_in_shared_memory(config),
        trainer_share=trainer.device_memory_share,
        sharing=config.launch.share_devices,
        hosts=plan_hosts(config, shape),
    )


def plan_hosts(config: RunConfig, shape: ModelShape) -> list[HostPlan]:
    """The host memory of each machine of the run; of one machine with all roles where no plan of nodes fits them."""
    try:
        nodes = [("trainer" in node.roles, node.servers) for node in plan_nodes(config)]
    except ConfigError:
        nodes = [(True, config.rollout.servers)]
    there, source = _machine_memory(config, len(nodes))
    copy = ELEMENT_BYTES[config.model.precision] * shape.parameters
    found = []
    for number, (has_trainer, servers) in enumerate(nodes):
        # The publisher is on the node of rank 0 alone; a machine's receiver serves all of its engines.
        copies = (PUBLISHER_COPIES if number == 0 else 0) + (config.weights.receiver_slots if servers else 0)
        found.append(
            HostPlan(
                trainer=trainer_host_memory(config, shape) if has_trainer else NO_TRAINER,
                stores=copies * copy,
                engines=PROCESS_BYTES * config.rollout.limits.devices * servers,
                server=config.redis.max_memory_bytes if number == 0 and config.redis.url is None else 0,
                there=there,
                source=source,
                node=number if len(nodes) > 1 else None,
            )
        )
    return found


def _machine_memory(config: RunConfig, machines: int) -> tuple[int | None, str]:
    """Bytes of memory of one machine of the run, None if not known, and in words where the number is from.

    This machine counts only if it has all devices of the run: a dry run on a login node must not refuse what other
    machines have room for.
    """
    if config.launch.memory_gib_per_node is not None:
        return int(config.launch.memory_gib_per_node * GIB), "launch.memory_gib_per_node"
    if machines > 1:
        return None, "launch.memory_gib_per_node is not set"
    if (count_local_devices(config) or 0) < count_needed_devices(config):
        return None, "this machine does not have the run's devices, and launch.memory_gib_per_node is not set"
    memory = total_memory()
    is_limited = memory < psutil.virtual_memory().total
    return memory, "the limit of this container or job" if is_limited else "this machine"


def _sum(summands: dict[str, int]) -> str:
    return " + ".join(f"{what} {gib(size)}" for what, size in summands.items()) + f" = {gib(sum(summands.values()))}"


def _shape(file: Path, architecture: str | None) -> ModelShape | None:
    """The shape of the checkpoint, or of the public model of that name; None if neither is known."""
    named = None if architecture is None else named_shape(architecture)
    if not file.is_file():
        return named
    found = shape_of(read_settings(file))
    if named is not None and found != named:
        raise ConfigError(
            f"model.architecture is {architecture}, but {file} is another model: {found}, where {named} is expected. "
            "Point model.path at that model, or correct or remove model.architecture"
        )
    return found
