"""DevicePlan and HostPlan: the memory that a run needs on its devices and machines, checked before it starts.

Memory of one device of an engine. The KV cache gets what weights and work space leave of the engine's share.

    share        gpu_memory_utilization * memory of the device
    weights      b * parameters / TP
    work space   for one step: activations of max_num_batched_tokens tokens, float32 logits of max_num_seqs requests
                 and captured graphs, unless enforce_eager
    token        2 * L * max(groups / TP, 1) * head_dim * b     keys and values; fewer groups than ranks are repeated
    at worst     max_num_seqs requests of max_model_len tokens: training, an evaluation and HTTP together
    staging      staging_gib for the next version, outside the share

The engine is started with the max_num_seqs and max_num_batched_tokens of this plan (`EngineLimits`) and checks that it
got them. vLLM makes the cache as large as the share allows. Below `at worst` it delays or recomputes samples, which
costs time; below one sample of full length it does not start. vLLM takes the memory of captured graphs from its share;
vllm-ascend 0.23 needs it outside the share.

If trainer and engine share a device of M bytes (launch.share_devices), the cache is kv_cache_bytes, and

    split   trainer <= device_memory_share * M,  engine <= gpu_memory_utilization * M,  and the shares sum to at most 1
    sleep   trainer between steps + gpu_memory_utilization * M <= M,  trainer + sleeping engine <= M

Between steps the trainer holds weights, gradients, optimizer and reference. A sleeping engine keeps its context and its
captured graphs.
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
from trainer.platform.base import smallest_device_gib
from trainer.platform.memory import (
    ELEMENT_BYTES,
    NO_TRAINER,
    PROCESS_BYTES,
    TrainerHostMemory,
    TrainerMemory,
    trainer_host_memory,
)

RESERVED_BYTES = 1 * GIB
"""Device context, workspaces, and one layer of new weights while it is loaded."""
GRAPH_BYTES = 2 * GIB
"""Estimate for captured graphs: about 45 sizes of mixed batches and as many of decoding batches. vLLM's logs show 24 to
28 MiB for a large one (vllm-project/vllm, pull request 22897)."""

PUBLISHER_COPIES = 2
"""Copies of the model in shared memory on rank 0's machine: the served version and the next one."""

TRAINER_FIX = (
    "Raise trainer.tensor_parallel, pipeline_parallel or processes (which share weights and optimizer), set "
    "trainer.sequence_parallel or trainer.recompute: full, or lower trainer.micro_batch_tokens"
)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory that an engine needs on one device, in bytes."""

    weights: int
    work_space: int
    per_token: int
    """Bytes of one token in the KV cache."""
    asleep: int
    """Bytes that a sleeping engine keeps."""
    limits: EngineLimits

    @property
    def minimum(self) -> int:
        """Bytes with which the engine starts: weights, work space and a cache for one sample of full length."""
        return self.weights + self.work_space + self.per_token * self.limits.max_length

    def max_bytes(self, device_bytes: float) -> int:
        """Return the most bytes that the engine takes of a device: its share and the staging of the next version."""
        return int(self.limits.memory_share * device_bytes) + self.limits.staging_bytes

    def cache_bytes(self, device_bytes: float) -> int:
        """Return the bytes of the KV cache. They are negative if weights and work space exceed the share."""
        if self.limits.cache_bytes is not None:
            return self.limits.cache_bytes
        return int(self.limits.memory_share * device_bytes) - self.weights - self.work_space

    def excess_bytes(self, device_bytes: float) -> int:
        """Return the bytes by which weights, work space and cache exceed the share; 0 or less if they fit."""
        total = self.weights + self.work_space + self.cache_bytes(device_bytes)
        return total - int(self.limits.memory_share * device_bytes)

    def count_samples(self, device_bytes: float) -> int:
        """Return the number of samples of full length that fit into the cache."""
        return max(0, self.cache_bytes(device_bytes) // (self.per_token * self.limits.max_length))

    def __str__(self) -> str:
        tokens = self.limits.requests * self.limits.max_length
        text = (
            f"weights {gib(self.weights)} + work space {gib(self.work_space)} + "
            f"KV cache {gib(self.per_token * tokens)} GiB at worst ({tokens} tokens * {self.per_token} bytes)"
        )
        if self.limits.staging_bytes:
            text += f"; staging {gib(self.limits.staging_bytes)} outside the share"
        return text


def plan_engine_memory(config: RunConfig, shape: ModelShape) -> EngineMemory:
    """Return the memory that a rollout server needs on one device."""
    limits = config.rollout.limits
    ranks = limits.devices
    element = ELEMENT_BYTES[config.model.precision]
    reserved = RESERVED_BYTES
    if limits.captures_graphs:
        reserved += GRAPH_BYTES

    # Quantization stores the matrices in the layers in fewer bytes, but not the embeddings.
    layer_parameters = shape.parameters - shape.outer_parameters
    layer_element = limits.matrix_bytes or element
    weights = (element * shape.outer_parameters + layer_element * layer_parameters) // ranks

    activations_per_token = 4 * shape.hidden + (2 * shape.ffn + shape.query + 2 * shape.key) // ranks
    activations = limits.batched_tokens * element * activations_per_token
    logits = 4 * limits.requests * shape.vocab
    return EngineMemory(
        weights=weights,
        work_space=activations + logits + reserved,
        per_token=shape.cache_token_bytes(element, ranks),
        asleep=reserved + limits.staging_bytes,
        limits=limits,
    )


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Host memory that one machine of the run needs at worst, in bytes."""

    trainer: TrainerHostMemory
    """Memory of the ranks on this machine; `NO_TRAINER` without ranks."""
    stores: int
    """Copies of the model in shared memory."""
    engines: int
    redis: int
    """Memory limit of the embedded Redis server; 0 without one."""
    available: int | None
    """Memory of the machine; None if it is not compared."""
    source: str
    """Origin of `available`, or the reason why it is not compared."""
    node: int | None = None
    """Number of the machine; None if the run has only one."""

    @property
    def total(self) -> int:
        """Bytes that the machine must have."""
        return self.trainer.total + self.stores + self.engines + self.redis

    def check(self) -> None:
        """Raise ConfigError, with the arithmetic, if the machine is too small."""
        if self.available is not None and self.total > self.available:
            machine = "the machine" if self.node is None else f"node {self.node}"
            raise ConfigError(
                f"{machine} has {gib(self.available)} GiB of memory ({self.source}), but needs {self}: the run would "
                "be killed, at its first checkpoint at the latest. Place the rollout servers on another machine, train "
                "on more nodes (trainer.nodes), or set trainer.optimizer.offload: false if the devices have room for "
                "the optimizer"
            )

    def table_row(self) -> tuple[str, str]:
        """Return label and value for the table of a dry run."""
        label = "host memory" if self.node is None else f"host memory, node {self.node}"
        if self.available is None:
            return label, f"{self}; not compared: {self.source}"
        free = gib(self.available - self.total)
        return label, f"{self}; of {gib(self.available)} GiB ({self.source}), {free} stay free"

    def __str__(self) -> str:
        sizes = {
            "optimizer": self.trainer.optimizer,
            "checkpoint": self.trainer.checkpoint,
            "reference model": self.trainer.reference,
            "weight stores": self.stores,
            "ranks": self.trainer.processes,
            "engines": self.engines,
            "redis": self.redis,
        }
        terms = " + ".join(f"{name} {gib(size)}" for name, size in sizes.items() if size)
        return f"{gib(self.total)} GiB = {terms}"


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Memory of one device of each side, and of the machines of the run.

    A side that computes on the CPU is None. A size in GiB is None if it is not known.
    """

    trainer: TrainerMemory | None
    trainer_gib: float | None
    engine: EngineMemory | None
    engine_gib: float | None
    model_bytes: int
    trainer_share: float = 1.0
    """Share of the device that a rank may take."""
    sharing: Literal["off", "split", "sleep"] = "off"
    """Sharing of a device by both sides (`launch.share_devices`)."""
    stored_copies: int = 4
    """Copies of the model in the shared memory of a machine that has both sides (`count_stored_copies`)."""
    hosts: Sequence[HostPlan] = ()
    """One per machine of the run."""

    def check(self) -> None:
        """Raise ConfigError, with the arithmetic, if a device or a machine is too small."""
        for host in self.hosts:
            host.check()
        if self.trainer is not None and self.trainer_gib is not None:
            self._check_trainer(self.trainer, self.trainer_gib)
        if self.engine is not None and self.engine_gib is not None:
            self._check_engine(self.engine, self.engine_gib)
        for phase, sizes in self._shared_device_sizes().items():
            if self.trainer_gib is not None and sum(sizes.values()) > self.trainer_gib * GIB:
                raise ConfigError(
                    f"trainer and engine share a device of {self.trainer_gib:g} GiB, but need {_format_sum(sizes)} GiB "
                    f"{phase}: {self.trainer}; {self.engine}. Lower the engine's share. {TRAINER_FIX}"
                )

    def _check_trainer(self, trainer: TrainerMemory, device_gib: float) -> None:
        if trainer.total <= self.trainer_share * device_gib * GIB:
            return
        limit, fix = "", TRAINER_FIX
        if self.trainer_share != 1:
            limit = f", of which a rank may take {self.trainer_share:g} (trainer.device_memory_share)"
            fix += ", or raise the share"
        raise ConfigError(
            f"a device of the trainer has {device_gib:g} GiB{limit}, but needs {trainer}: training would run out of "
            f"memory. {fix}"
        )

    def _check_engine(self, engine: EngineMemory, device_gib: float) -> None:
        limits = engine.limits
        device_bytes = device_gib * GIB

        max_bytes = engine.max_bytes(device_bytes)
        if max_bytes > device_bytes:
            raise ConfigError(
                f"{limits.staging_key} is {gib(limits.staging_bytes)}, next to {limits.memory_share:g} of a device of "
                f"{device_gib:g} GiB ({limits.memory_share_key}): {gib(max_bytes)} GiB together. Lower one of the two"
            )
        if not engine.count_samples(device_bytes):
            raise ConfigError(
                f"a device of a rollout server has {device_gib:g} GiB, of which the engine may use "
                f"{limits.memory_share * device_gib:.1f}, but one sample of {limits.max_length} tokens needs "
                f"{gib(engine.minimum)}: {engine}. {limits.memory_advice} or rollout.max_concurrency"
            )
        excess_bytes = engine.excess_bytes(device_bytes)
        if limits.cache_bytes is not None and excess_bytes > 0:
            raise ConfigError(
                f"{limits.cache_key} is {limits.cache_bytes}, but the engine's share, {limits.memory_share:g} of "
                f"{device_gib:g} GiB, leaves {max(0, limits.cache_bytes - excess_bytes)} bytes next to {engine}. Lower "
                f"it, or raise {limits.memory_share_key}"
            )

    def table_rows(self) -> list[tuple[str, str]]:
        """Return labels and values for the table of a dry run."""
        rows = []
        if self.trainer is not None:
            free = "the device's memory is not known (trainer.device_memory_gib)"
            if self.trainer_gib is not None:
                free = f"of {self.trainer_gib:g} GiB, {gib(self.trainer_gib * GIB - self.trainer.total)} stay free"
            rows.append(("trainer device", f"{self.trainer}; {free}"))
        if self.engine is not None:
            rows.append(("engine device", f"{self.engine}; {self._describe_cache(self.engine)}"))
        phases = self._shared_device_sizes()
        if phases:
            sums = "; ".join(f"{_format_sum(sizes)} GiB {phase}" for phase, sizes in phases.items())
            rows.append(("shared device", f"{sums}; of {self.trainer_gib:g} GiB"))

        if len(self.hosts) > 1:
            stores = "; ".join(f"node {host.node} {gib(host.stores)} GiB" for host in self.hosts)
        else:
            total_bytes = self.stored_copies * self.model_bytes
            stores = f"{gib(total_bytes)} GiB = {self.stored_copies} * {gib(self.model_bytes)}"
        rows.append(("shared memory", f"/dev/shm: {stores}"))
        rows += [host.table_row() for host in self.hosts]
        return rows

    def _shared_device_sizes(self) -> dict[str, dict[str, int]]:
        """Return for each phase of a run the bytes that each side takes of a shared device; {} if none is shared."""
        trainer, engine = self.trainer, self.engine
        if self.sharing == "off" or trainer is None or engine is None or self.engine_gib is None:
            return {}
        awake_bytes = engine.max_bytes(self.engine_gib * GIB)
        if self.sharing == "split":
            return {"at worst": {"trainer": trainer.total, "engine": awake_bytes}}
        return {
            "between steps": {"trainer": trainer.resident, "engine": awake_bytes},
            "in a step": {"trainer": trainer.total, "sleeping engine": engine.asleep},
        }

    def _describe_cache(self, engine: EngineMemory) -> str:
        if self.engine_gib is None:
            return f"the device's memory is not known ({engine.limits.device_memory_key})"
        cache = gib(engine.cache_bytes(self.engine_gib * GIB))
        samples = engine.count_samples(self.engine_gib * GIB)
        fitting = "all" if samples >= engine.limits.requests else f"{samples}"
        return (
            f"of {self.engine_gib:g} GiB, {engine.limits.memory_share:g} leave {cache} for the cache: {fitting} of "
            f"{engine.limits.requests} requests at full length"
        )


def find_model_shape(config: RunConfig) -> ModelShape | None:
    """Return the shape of the first policy, from a checkpoint on this machine or `model.architecture`; None without
    both."""
    folder = settings_folder(config) or config.model.path
    return _read_shape(Path() if folder is None else folder / "config.json", config.model.architecture)


def count_stored_copies(config: RunConfig) -> int:
    """Return the copies of the model in the shared memory of a machine with both sides.

    Two belong to the publisher, the others to the receiver that all engines of the machine share (docs/weights.md).
    """
    return PUBLISHER_COPIES + config.weights.receiver_slots


def count_model_bytes(config: RunConfig) -> int | None:
    """Return the bytes of one copy of the weights; None for a generated model or an unknown shape."""
    if config.model.path is None:
        return None
    shape = find_model_shape(config)
    return None if shape is None else ELEMENT_BYTES[config.model.precision] * shape.parameters


def check_shared_memory(config: RunConfig, model: Path) -> None:
    """Raise ConfigError if /dev/shm is too small for the copies of the first policy in the folder `model`.

    Does not check adapters, which are smaller, and runs with `weights.location`, which need fewer copies.
    """
    shape = _read_shape(model / "config.json", None)
    if shape is None or config.model.lora is not None or config.weights.location is not None:
        return
    copies = count_stored_copies(config)
    needed_bytes = copies * ELEMENT_BYTES[config.model.precision] * shape.parameters

    free_bytes = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    # Stores of killed roles are replaced at the start, so their space counts as free.
    old_stores = run_folder(config.name_with_digest)
    free_bytes += sum(file.stat().st_size for file in old_stores.glob("*") if file.is_file())
    if free_bytes < needed_bytes:
        size_gib = -(-needed_bytes // GIB) + 1
        raise ConfigError(
            f"{SHARED_MEMORY} has {free_bytes / 2**20:,.0f} MiB free, but {copies} copies of the weights, which "
            f"trainer and engines share, take {needed_bytes / 2**20:,.0f} MiB. Enlarge it: mount -o "
            f"remount,size={size_gib}G {SHARED_MEMORY}, or docker run --shm-size={size_gib}g"
        )


def plan_devices(config: RunConfig) -> DevicePlan | None:
    """Return the plan for the sides that compute on an accelerator.

    None if no side does, or if the model's shape is not known. A device's memory is the configured one, or that of the
    smallest device that the vendor's tool lists. Raises ConfigError if the checkpoint does not match
    `model.architecture`.
    """
    trainer, limits = config.trainer, config.rollout.limits
    trainer_platform, engine_platform = select_platform(trainer.platform), select_platform(limits.platform)
    has_accelerator = trainer_platform.visible_variable or engine_platform.visible_variable
    if not has_accelerator or config.model.path is None:
        return None
    shape = find_model_shape(config)
    if shape is None:
        return None

    trainer_gib = trainer.device_memory_gib or smallest_device_gib(trainer_platform)
    engine_gib = limits.device_memory_gib or smallest_device_gib(engine_platform)
    if config.launch.share_devices != "off":
        sizes = [size for size in (trainer_gib, engine_gib) if size is not None]
        trainer_gib = engine_gib = min(sizes, default=None)
    return DevicePlan(
        trainer=trainer_platform.memory_plan(config, shape),
        trainer_gib=trainer_gib,
        engine=plan_engine_memory(config, shape) if engine_platform.visible_variable else None,
        engine_gib=engine_gib,
        model_bytes=ELEMENT_BYTES[config.model.precision] * shape.parameters,
        stored_copies=count_stored_copies(config),
        trainer_share=trainer.device_memory_share,
        sharing=config.launch.share_devices,
        hosts=plan_hosts(config, shape),
    )


def plan_hosts(config: RunConfig, shape: ModelShape) -> list[HostPlan]:
    """Return the host memory of each machine of the run.

    Assumes one machine with all roles if `plan_nodes` finds no placement.
    """
    try:
        nodes = [("trainer" in node.roles, node.servers) for node in plan_nodes(config)]
    except ConfigError:
        nodes = [(True, config.rollout.servers)]
    available, source = _find_machine_memory(config, len(nodes))
    copy_bytes = ELEMENT_BYTES[config.model.precision] * shape.parameters

    plans = []
    for number, (has_trainer, servers) in enumerate(nodes):
        is_first = number == 0
        copies = 0
        if is_first:
            copies += PUBLISHER_COPIES  # the publisher runs next to rank 0
        if servers:
            copies += config.weights.receiver_slots  # one receiver serves all engines of a machine
        has_redis = is_first and config.redis.url is None
        plans.append(
            HostPlan(
                trainer=trainer_host_memory(config, shape) if has_trainer else NO_TRAINER,
                stores=copies * copy_bytes,
                engines=PROCESS_BYTES * config.rollout.limits.devices * servers,
                redis=config.redis.max_memory_bytes if has_redis else 0,
                available=available,
                source=source,
                node=number if len(nodes) > 1 else None,
            )
        )
    return plans


def _find_machine_memory(config: RunConfig, machines: int) -> tuple[int | None, str]:
    """Return the bytes of memory of one machine of the run, None if not known, and their origin.

    The memory of this machine counts only if it has all devices of the run. Otherwise a dry run on a login node would
    reject a run that fits on the machines that it is for.
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


def _format_sum(sizes: dict[str, int]) -> str:
    terms = " + ".join(f"{name} {gib(size)}" for name, size in sizes.items())
    return f"{terms} = {gib(sum(sizes.values()))}"


def _read_shape(file: Path, architecture: str | None) -> ModelShape | None:
    """Return the shape of the checkpoint, or of the public model `architecture`; None if neither is known.

    Raises ConfigError if both are known and differ.
    """
    expected = None if architecture is None else named_shape(architecture)
    if not file.is_file():
        return expected
    shape = shape_of(read_settings(file))
    if expected is not None and shape != expected:
        raise ConfigError(
            f"model.architecture is {architecture}, but {file} is another model: {shape}, where {expected} is "
            "expected. Point model.path at that model, or correct or remove model.architecture"
        )
    return shape
