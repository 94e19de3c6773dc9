"""The local supervisor, evaluation, and what a run writes."""

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
    """Evaluation on held-out prompts, before, after and every `every_steps` versions."""

    prompts: PositiveInt = 256
    """Held-out prompts of an evaluation."""
    samples: PositiveInt = 4
    """Completions per prompt at temperature 1: the k of mean@k."""
    greedy: bool = True
    """Also generate one completion per prompt at temperature 0."""
    every_steps: Annotated[int, Field(ge=0)] = 0
    """Versions between two evaluations. 0: evaluate only before and after the run."""
    right_at: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Minimum score by the first reward function at which a completion counts as right, for pass@k and maj@k."""
    timeout_s: Seconds = 600.0
    """Seconds for a whole evaluation; after that the rollout server ends with an error."""

    def problems_in_run(self, data: DataConfig) -> Iterator[str]:
        """Clashes with the number of problems that the data hold out."""
        kept = data.arithmetic.held_out
        if data.kind == "arithmetic" and self.prompts > kept:
            yield (
                f"eval.prompts ({self.prompts}) is above data.arithmetic.held_out ({kept}). "
                "Lower eval.prompts or hold out more"
            )


class RestartConfig(StrictModel):
    """Restarts of roles that die. One that refuses its configuration or data is not restarted."""

    rollout: Annotated[int, Field(ge=0)] = 3
    """Restarts of one rollout server before it is given up; the run continues as long as there is another."""
    trainer: Annotated[int, Field(ge=0)] = 3
    """Restarts of the trainer before the run is given up."""


class CoresConfig(StrictModel):
    """Cores of this machine, by number, that a role and everything that it starts may use; empty: all. Linux only."""

    rollout: list[NonNegativeInt] = []
    """Cores that all rollout servers share."""
    trainer: list[NonNegativeInt] = []
    """Cores that all ranks of the trainer share."""


class SlurmConfig(StrictModel):
    """Options of a cluster's site for `async-grpo launch slurm`."""

    trainer: list[Annotated[str, Field(pattern=r"^-[^\n]*$")]] = []
    """Options of sbatch for the trainer's job, such as `--partition=long`; they come after those of the launcher."""
    rollout: list[Annotated[str, Field(pattern=r"^-[^\n]*$")]] = []
    """Options of sbatch for the array of rollout servers."""
    report: list[Annotated[str, Field(pattern=r"^-[^\n]*$")]] = []
    """Options of sbatch for the job that writes the report."""
    setup: str = ""
    """Shell commands that every job runs before its role, such as `module load cuda`."""
    npu_gres: str = Field(default="npu", pattern=r"^[A-Za-z0-9_.:-]*$")
    """Name of Ascend NPUs among the generic resources of Slurm (gres.conf): jobs request `--gres=NAME:COUNT` on each
    node. An empty name requests none: then give options of your site."""


class RayConfig(StrictModel):
    """The cluster of `async-grpo launch ray`, and the resources that roles request."""

    address: str | None = None
    """HOST:PORT of the head. None: that of RAY_ADDRESS, which `ray job submit` sets."""
    trainer: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {"CPU": 1}
    """Ray resources of each trainer node besides its GPUs or NPUs, such as `{CPU: 32}`."""
    rollout: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {"CPU": 1}
    """Ray resources of a rollout server besides its GPUs or NPUs."""
    wait_s: Seconds = 3600.0
    """Maximum seconds to wait until Ray has room for a role."""


class KubernetesConfig(StrictModel):
    """The objects of `async-grpo launch kubernetes`."""

    image: str | None = None
    """Image of all roles, in a registry that the cluster reaches. None: the name of the image in deploy/ for the
    platform of each role: `async-grpo:cpu`, `:cuda` or `:ascend`."""
    npu_resource: str = Field(default="huawei.com/Ascend910", pattern=r"^[a-z0-9.-]+/[A-Za-z0-9_.-]+$")
    """Resource by which pods request Ascend NPUs. The default is that of MindCluster's Ascend Device Plugin on Atlas A2
    and A3, where it counts each of a module's two dies; Huawei Cloud CCE and HAMi have other names."""
    redis_image: str = "valkey/valkey:8.1.3-bookworm"
    """Image of the server of the replay buffer, unless redis.url names one."""
    secret: str = "async-grpo"
    """The Secret with ASYNC_GRPO_REDIS_PASSWORD, ASYNC_GRPO_WEIGHTS_SECRET and ASYNC_GRPO_HTTP_KEY."""
    runs_gib: PositiveInt = 100
    """Size of the volume of runs. All pods mount it for writing, so its storage class must offer ReadWriteMany."""
    storage_class: str | None = None
    """Storage class of that volume. None: the cluster's default."""
    claims: dict[str, str] = {}
    """PersistentVolumeClaims of models and data, and where all pods mount them for reading, such as `{models:
    /models}`."""
    trainer: dict[str, str] = {}
    """Resources of a trainer pod besides its devices, such as `{cpu: "16", memory: 128Gi}`."""
    rollout: dict[str, str] = {}
    """Resources of a rollout server besides its devices."""
    max_servers: PositiveInt | None = None
    """Maximum number of rollout servers that KEDA may start; rollout.servers is the minimum. None: no autoscaler."""
    prometheus: str = "http://prometheus-operated.monitoring:9090"
    """Address of the Prometheus that the autoscaler queries; it must scrape the trainer."""
    monitoring_namespace: str = "monitoring"
    """Namespace from which metrics may be read."""


class AutoscaleConfig(StrictModel):
    """Number of rollout servers of `async-grpo run`, adapted to the number that the run can use."""

    max_servers: PositiveInt | None = None
    """Maximum number of rollout servers; rollout.servers is the minimum. None: always rollout.servers."""
    after_s: Seconds = 120.0
    """Seconds for which a server must have been needed before it is started, or superfluous before it is stopped."""


class LaunchConfig(StrictModel):
    """The local supervisor."""

    restarts: RestartConfig = RestartConfig()
    slurm: SlurmConfig = SlurmConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    ray: RayConfig = RayConfig()
    autoscale: AutoscaleConfig = AutoscaleConfig()
    cores: CoresConfig = CoresConfig()
    """Cores of the roles. With lists that have no core in common, neither side takes time from the other."""
    share_devices: Literal["off", "split", "sleep"] = "off"
    """Sharing of devices by trainer and rollout servers. `off`: every role has devices of its own. `split`: both
    stay on the device, ranks with at most trainer.device_memory_share of its memory and engines with
    gpu_memory_utilization of it. `sleep`: engines also free their memory during a step, and keep the tokens they have
    generated; on CPU they only stop."""
    devices_per_node: PositiveInt | None = None
    """Accelerators of one machine, by which `--dry-run` plans a run on several machines and reports too many devices.
    None: 16 NPUs or 8 GPUs."""
    memory_gib_per_node: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Memory of one machine in GiB, with which the plan is compared. None: that of this machine, or the limit of its
    container or job, if it has all devices of the run; else nothing is compared."""
    ready_timeout_s: Seconds = 300.0
    """Maximum seconds from the start of a role until it is ready. A rollout server that takes longer is given up, and
    the run continues with the others; without a trainer or without any server it ends."""
    stop_timeout_s: Seconds = 30.0
    """Seconds from SIGTERM to SIGKILL, for every role. Raise it with -o for a trainer that has more to save."""

    def problems_in_run(self, rollout: RolloutConfig, trainer: TrainerConfig, lora: LoraConfig | None) -> Iterator[str]:
        """Clashes with the number of servers, and of roles that share devices."""
        most = self.autoscale.max_servers
        if most is not None and most < rollout.servers:
            yield (
                f"launch.autoscale.max_servers ({most}) is below rollout.servers ({rollout.servers}), the fewest "
                "servers. Raise launch.autoscale.max_servers or lower rollout.servers"
            )
        if self.share_devices != "off":
            yield from self._problems_of_sharing(trainer, rollout.limits)
        if self.share_devices == "sleep":
            yield from self._problems_of_sleep(trainer, lora)
        if self.share_devices != "off" and trainer.platform != "cpu":
            yield from self._problems_of_shared_memory(trainer, rollout.limits)

    def _problems_of_sharing(self, trainer: TrainerConfig, limits: EngineLimits) -> Iterator[str]:
        mode = f"launch.share_devices is {self.share_devices}"
        if trainer.nodes > 1:
            yield (
                f"{mode}, and trainer.nodes is {trainer.nodes}: only processes of one machine share devices. Set "
                "trainer.nodes to 1, or launch.share_devices to off"
            )
        if (trainer.platform == "cpu") is not (limits.platform == "cpu"):
            yield (
                f"{mode}, but trainer.platform is {trainer.platform} and {limits.platform_key} {limits.platform}: they "
                "have no device in common. Set launch.share_devices to off, or both platforms to that of the device"
            )

    def _problems_of_sleep(self, trainer: TrainerConfig, lora: LoraConfig | None) -> Iterator[str]:
        if lora is not None and lora.engine == "adapters":
            yield (
                "launch.share_devices is sleep: an engine that sleeps gives up the memory of its weights, and whether "
                "vLLM brings back its own adapters is not known. Set model.lora.engine to merged, or "
                "launch.share_devices to split"
            )
        if trainer.streaming:
            yield (
                "launch.share_devices is sleep: engines generate nothing while a step is made, but trainer.streaming "
                "begins a step with the first groups and waits for more. Set trainer.streaming to false, or "
                "launch.share_devices to split"
            )

    def _problems_of_shared_memory(self, trainer: TrainerConfig, limits: EngineLimits) -> Iterator[str]:
        mode = f"launch.share_devices is {self.share_devices}"
        shares = trainer.device_memory_share + limits.memory_share
        if self.share_devices == "split" and shares > 1:
            yield (
                f"{mode}, and trainer.device_memory_share ({trainer.device_memory_share:g}) and "
                f"{limits.memory_share_key} ({limits.memory_share:g}) make {shares:g} of a device, more than there is. "
                "Lower one of them (--dry-run shows what either side needs), or set launch.share_devices to sleep"
            )
        if limits.cache_bytes is None:
            yield (
                f"{mode}, and {limits.cache_key} is not set: the engine would make its cache as large as what happens "
                f"to be free when it starts, which the trainer needs later. Set {limits.cache_key} (2147483648 is "
                "2 GiB; --dry-run shows what a sample takes)"
            )


class TelemetryConfig(StrictModel):
    """Output of a run, and metrics of its trainer."""

    trackers: list[Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"]] = ["tensorboard"]
    """Destinations of scalars besides metrics.jsonl. Keys and servers come from the environment variables of each."""
    project: str = Field(default="async-grpo", min_length=1)
    """The project of wandb, SwanLab and Trackio, or the experiment of MLflow, that the run belongs to."""
    samples_every: PositiveInt = 8
    """Finished groups whose sequence number this divides are written to samples/*.jsonl, with every token."""
    http: ListenConfig = ListenConfig()
    """The trainer's /metrics, /healthz and /readyz: read-only; it accepts no commands, so it needs no key."""

    @model_validator(mode="before")
    @classmethod
    def _former_key(cls, given: Any) -> Any:
        """Read `tensorboard: true|false` of folders that an older release wrote."""
        if isinstance(given, dict) and "tensorboard" in given and "trackers" not in given:
            rest = {key: value for key, value in given.items() if key != "tensorboard"}
            return rest if given["tensorboard"] is True else {**rest, "trackers": []}
        return given
