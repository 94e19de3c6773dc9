"""Launching of roles (locally and on clusters), evaluation, and telemetry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from async_grpo.config.base import NonNegativeInt, PositiveInt, Seconds, StrictModel
from async_grpo.config.data import DataConfig
from async_grpo.config.http import ListenConfig
from async_grpo.config.model import LoraConfig
from async_grpo.config.rollout import EngineLimits, RolloutConfig
from async_grpo.config.trainer import TrainerConfig


class EvalConfig(StrictModel):
    """Evaluation on held-out prompts: before the run, after it, and every `every_steps` versions."""

    prompts: PositiveInt = 256
    """Held-out prompts per evaluation."""
    samples: PositiveInt = 4
    """Completions per prompt at temperature 1: the k of mean@k."""
    greedy: bool = True
    """Also generate one completion per prompt at temperature 0."""
    every_steps: Annotated[int, Field(ge=0)] = 0
    """Versions between two evaluations. 0: evaluate only before and after the run."""
    right_at: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Minimum score by the first reward function at which a completion counts as right, for pass@k and maj@k."""
    timeout_s: Seconds = 600.0
    """Maximum seconds per evaluation; after that the rollout server exits with an error."""

    def find_conflicts(self, data: DataConfig) -> Iterator[str]:
        """Find conflicts with the number of held-out problems."""
        held_out = data.arithmetic.held_out
        if data.kind == "arithmetic" and self.prompts > held_out:
            yield (
                f"eval.prompts ({self.prompts}) is above data.arithmetic.held_out ({held_out}): there are not enough "
                "prompts. Lower eval.prompts or raise data.arithmetic.held_out"
            )


class RestartConfig(StrictModel):
    """Restarts of roles that die. A role that rejects its configuration or data is not restarted."""

    rollout: Annotated[int, Field(ge=0)] = 3
    """Restarts of one rollout server before it is given up; the run continues as long as there is another."""
    trainer: Annotated[int, Field(ge=0)] = 3
    """Restarts of the trainer before the run is given up."""


class CoresConfig(StrictModel):
    """CPU affinity: numbers of the cores that a role and its child processes may use; empty: all. Linux only."""

    rollout: list[NonNegativeInt] = []
    """Cores that all rollout servers share."""
    trainer: list[NonNegativeInt] = []
    """Cores that all ranks of the trainer share."""


class SlurmConfig(StrictModel):
    """Site-specific options of `async-grpo launch slurm`."""

    trainer: list[Annotated[str, Field(pattern=r"^-[^\n]*$")]] = []
    """sbatch options of the trainer's job, such as `--partition=long`; they follow the launcher's own options."""
    rollout: list[Annotated[str, Field(pattern=r"^-[^\n]*$")]] = []
    """sbatch options of the job array of rollout servers."""
    report: list[Annotated[str, Field(pattern=r"^-[^\n]*$")]] = []
    """sbatch options of the job that writes the report."""
    setup: str = ""
    """Shell commands that every job runs before its role, such as `module load cuda`."""
    npu_gres: str = Field(default="npu", pattern=r"^[A-Za-z0-9_.:-]*$")
    """Name of Ascend NPUs among Slurm's generic resources (gres.conf): jobs request `--gres=NAME:COUNT` on each node.
    Empty: request none; add your site's options to `trainer` and `rollout` instead."""


class RayConfig(StrictModel):
    """The cluster of `async-grpo launch ray`, and the resources that roles request."""

    address: str | None = None
    """HOST:PORT of the head node. None: RAY_ADDRESS, which `ray job submit` sets."""
    trainer: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {"CPU": 1}
    """Ray resources per trainer node in addition to its GPUs or NPUs, such as `{CPU: 32}`."""
    rollout: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {"CPU": 1}
    """Ray resources per rollout server in addition to its GPUs or NPUs."""
    wait_s: Seconds = 3600.0
    """Maximum seconds to wait until Ray has room for a role."""


class KubernetesConfig(StrictModel):
    """Kubernetes objects of `async-grpo launch kubernetes`."""

    image: str | None = None
    """Image of all roles, in a registry that the cluster can pull from. None: `async-grpo:cpu`, `:cuda` or `:ascend`
    (built from deploy/), depending on the platform of each role."""
    npu_resource: str = Field(default="huawei.com/Ascend910", pattern=r"^[a-z0-9.-]+/[A-Za-z0-9_.-]+$")
    """Resource name by which pods request Ascend NPUs. The default is the one of MindCluster's Ascend Device Plugin on
    Atlas A2 and A3, which counts each of a module's two dies; Huawei Cloud CCE and HAMi have other names."""
    redis_image: str = "valkey/valkey:8.1.3-bookworm"
    """Image of the replay buffer's server. Unused if redis.url is set."""
    secret: str = "async-grpo"
    """Name of the Secret with ASYNC_GRPO_REDIS_PASSWORD, ASYNC_GRPO_WEIGHTS_SECRET and ASYNC_GRPO_HTTP_KEY."""
    runs_gib: PositiveInt = 100
    """Size of the volume for runs, in GiB. All pods write to it, so its storage class must support ReadWriteMany."""
    storage_class: str | None = None
    """Storage class of the volume for runs. None: the cluster's default."""
    claims: dict[str, str] = {}
    """PersistentVolumeClaims with models and data, and the paths where all pods mount them read-only, such as
    `{models: /models}`."""
    trainer: dict[str, str] = {}
    """Resources of a trainer pod in addition to its devices, such as `{cpu: "16", memory: 128Gi}`."""
    rollout: dict[str, str] = {}
    """Resources of a rollout server's pod in addition to its devices."""
    max_servers: PositiveInt | None = None
    """Maximum number of rollout servers that KEDA may start; rollout.servers is the minimum. None: no autoscaler."""
    prometheus: str = "http://prometheus-operated.monitoring:9090"
    """URL of the Prometheus server that the autoscaler queries; it must scrape the trainer."""
    monitoring_namespace: str = "monitoring"
    """Namespace whose pods may scrape metrics."""


class AutoscaleConfig(StrictModel):
    """Autoscaling of the rollout servers of `async-grpo run`."""

    max_servers: PositiveInt | None = None
    """Maximum number of rollout servers; rollout.servers is the minimum. None: always rollout.servers."""
    after_s: Seconds = 120.0
    """Seconds for which a server must have been needed before it is started, or superfluous before it is stopped."""


class LaunchConfig(StrictModel):
    """Starting, restarting and stopping roles."""

    restarts: RestartConfig = RestartConfig()
    slurm: SlurmConfig = SlurmConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    ray: RayConfig = RayConfig()
    autoscale: AutoscaleConfig = AutoscaleConfig()
    cores: CoresConfig = CoresConfig()
    """CPU affinity of the roles. With disjoint lists, trainer and rollout servers do not compete for cores."""
    share_devices: Literal["off", "split", "sleep"] = "off"
    """Sharing of devices between trainer and rollout servers. `off`: every role has its own devices. `split`: both
    stay in the device's memory, ranks with at most trainer.device_memory_share of it and engines with
    gpu_memory_utilization of it. `sleep`: engines also free their memory during a training step and keep the tokens
    generated so far; on CPU they only pause."""
    devices_per_node: PositiveInt | None = None
    """Accelerators per machine, for planning a run on several machines; `--dry-run` reports roles that do not fit.
    None: 16 NPUs or 8 GPUs."""
    memory_gib_per_node: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Host memory per machine in GiB, for the memory check of the plan. None: the memory of this machine (or the limit
    of its container or job) if it has all devices of the run; otherwise there is no check."""
    ready_timeout_s: Seconds = 300.0
    """Maximum seconds from the start of a role until it is ready. A rollout server that takes longer is given up, and
    the run continues with the others; without a trainer or without any server it ends."""
    stop_timeout_s: Seconds = 30.0
    """Seconds from SIGTERM to SIGKILL, for every role. Raise it if the trainer needs longer to save its state."""

    def find_conflicts(self, rollout: RolloutConfig, trainer: TrainerConfig, lora: LoraConfig | None) -> Iterator[str]:
        """Find conflicts with the number of servers, and between roles that share devices."""
        max_servers = self.autoscale.max_servers
        if max_servers is not None and max_servers < rollout.servers:
            yield (
                f"launch.autoscale.max_servers ({max_servers}) is below rollout.servers ({rollout.servers}), which is "
                "the minimum. Raise launch.autoscale.max_servers or lower rollout.servers"
            )
        if self.share_devices == "off":
            return
        yield from self._find_sharing_conflicts(trainer, rollout.limits)
        if self.share_devices == "sleep":
            yield from self._find_sleep_conflicts(trainer, lora)
        if trainer.platform != "cpu":
            yield from self._find_memory_conflicts(trainer, rollout.limits)

    def _find_sharing_conflicts(self, trainer: TrainerConfig, limits: EngineLimits) -> Iterator[str]:
        mode = f"launch.share_devices is {self.share_devices}"
        if trainer.nodes > 1:
            yield (
                f"{mode}, but trainer.nodes is {trainer.nodes}: only processes of one machine can share devices. Set "
                "trainer.nodes to 1, or launch.share_devices to off"
            )
        if (trainer.platform == "cpu") is not (limits.platform == "cpu"):
            yield (
                f"{mode}, but trainer.platform is {trainer.platform} and {limits.platform_key} {limits.platform}: they "
                "have no device in common. Set launch.share_devices to off, or both platforms to that of the device"
            )

    def _find_sleep_conflicts(self, trainer: TrainerConfig, lora: LoraConfig | None) -> Iterator[str]:
        if lora is not None and lora.engine == "adapters":
            yield (
                "launch.share_devices is sleep: a sleeping engine frees its weights, and it is not known whether vLLM "
                "restores its own LoRA adapters. Set model.lora.engine to merged, or launch.share_devices to split"
            )
        if trainer.streaming:
            yield (
                "launch.share_devices is sleep: engines generate nothing during a training step, but trainer.streaming "
                "starts a step with the first groups and waits for more, which would never come. Set "
                "trainer.streaming to false, or launch.share_devices to split"
            )

    def _find_memory_conflicts(self, trainer: TrainerConfig, limits: EngineLimits) -> Iterator[str]:
        mode = f"launch.share_devices is {self.share_devices}"
        share_sum = trainer.device_memory_share + limits.memory_share
        if self.share_devices == "split" and share_sum > 1:
            yield (
                f"{mode}, and trainer.device_memory_share ({trainer.device_memory_share:g}) and "
                f"{limits.memory_share_key} ({limits.memory_share:g}) add up to {share_sum:g} of a device. "
                "Lower one of them (--dry-run shows the need of both sides), or set launch.share_devices to sleep"
            )
        # Without a number vLLM sizes its cache by the memory that is free when it starts. The trainer may not have
        # allocated its share by then.
        if limits.cache_bytes is None:
            yield (
                f"{mode}, but {limits.cache_key} is not set: the engine would use all memory that is free when it "
                f"starts as cache, and the trainer would run out later. Set {limits.cache_key} (2147483648 is 2 GiB; "
                "--dry-run shows the need per sample)"
            )


class TelemetryConfig(StrictModel):
    """Experiment trackers, written samples, and the trainer's metrics endpoint."""

    trackers: list[Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"]] = ["tensorboard"]
    """Experiment trackers for scalars, in addition to metrics.jsonl. Each reads its API key and server from its usual
    environment variables."""
    project: str = Field(default="async-grpo", min_length=1)
    """Project of the run in wandb, SwanLab and Trackio; experiment of the run in MLflow."""
    samples_every: PositiveInt = 8
    """Write every N-th finished group, by its sequence number, to samples/*.jsonl, with all tokens."""
    http: ListenConfig = ListenConfig()
    """Address of the trainer's /metrics, /healthz and /readyz. They are read-only, so they need no key."""

    @model_validator(mode="before")
    @classmethod
    def _read_former_tensorboard_key(cls, raw: Any) -> Any:
        """Read `tensorboard: true|false`, which older releases wrote to config.yaml, as `trackers`."""
        if not isinstance(raw, dict) or "tensorboard" not in raw or "trackers" in raw:
            return raw
        rest = {key: value for key, value in raw.items() if key != "tensorboard"}
        if raw["tensorboard"] is True:
            return rest
        return {**rest, "trackers": []}
