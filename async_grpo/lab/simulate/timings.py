"""Timings: the speed of each part of a run, as a file to read, edit and compare.

    --from runs/NAME   fitted to a run (`calibrate`)
    --device h100      estimated from a data sheet (`devices`)
    --timings FILE     this file, edited by hand

    decoding step       step_s + request_s * running samples + context_s * tokens in the KV cache
    prefill             prefill_s per prompt token; the engine's other samples wait
    training step       base_s + token_s * tokens read (prompts and completions)
    buffer              exchange_s per admission and per insert of a group, one after another
    weight update       transfer_s after the trainer continued; loading pauses an engine for load_s

All times are seconds. Speeds are per server for engines, and of all ranks together for the trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from async_grpo.config.base import PositiveInt, StrictModel
from async_grpo.errors import ConfigError
from async_grpo.lab.simulate.lengths import LengthModel

Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0)]
Factor = Annotated[float, Field(ge=1)]


class EngineTimings(StrictModel):
    """One rollout server and its engine."""

    step_s: Seconds = 0.005
    """Fixed seconds per decoding step: reading the weights, and Python."""
    request_s: Seconds = 0.0001
    """Seconds per decoding step and running sample."""
    context_s: Seconds = 0.0
    """Seconds per decoding step and token in the KV cache, which attention reads."""
    prefill_s: Seconds = 0.00005
    """Seconds per prompt token."""
    shared_prompt: bool = True
    """True if the samples of a group share one prefill of their prompt (prefix cache)."""
    call_s: Seconds = 0.001
    """Seconds from a free slot to a running sample: the buffer, Python."""
    cache_tokens: PositiveInt | None = None
    """Capacity of the KV cache in tokens; used where rollout.min_concurrency adapts concurrency to the load. None: no
    limit."""

    def slowed_by(self, factor: float) -> EngineTimings:
        """Copy of an engine that is `factor` times slower."""
        if factor == 1:
            return self
        keys = ("step_s", "request_s", "context_s", "prefill_s")
        return self.model_copy(update={key: getattr(self, key) * factor for key in keys})


class TrainerTimings(StrictModel):
    """The trainer, all ranks together."""

    base_s: Seconds = 0.1
    """Fixed seconds per step."""
    token_s: Seconds = 0.00001
    """Seconds per token read."""
    part_s: Seconds = 0.0
    """trainer.streaming: seconds per part of a batch."""
    variation: Seconds = 0.0
    """Standard deviation of a step's time, divided by its mean."""
    checkpoint_s: Seconds = 0.0
    """Seconds for which a checkpoint stops the trainer."""
    take_s: Seconds = 0.002
    """Seconds from a ready batch to its first micro-batch."""

    def slowed_by(self, factor: float) -> TrainerTimings:
        """Copy of a trainer that computes `factor` times slower."""
        return self.model_copy(update={"base_s": self.base_s * factor, "token_s": self.token_s * factor})


class SyncTimings(StrictModel):
    """New weights on their way to the engines."""

    stall_s: Seconds = 0.01
    """Seconds for which publishing stops the trainer."""
    transfer_s: Seconds = 0.05
    """Seconds from then until a server has the weights. Both sides keep working."""
    load_s: Seconds = 0.05
    """Seconds for which an engine pauses to load them."""


class VerifierTimings(StrictModel):
    """Rewards."""

    latency_s: Seconds = 0.0
    """Seconds from a group's last token to its insert, without judging: the pool, the buffer."""
    sample_s: Seconds = 0.0
    """Seconds to judge one sample."""
    workers: PositiveInt = 1
    """Samples judged in parallel per server."""
    filtered: Fraction = 0.0
    """rollout.dynamic_sampling: fraction of the groups whose rewards are all equal."""


class BufferTimings(StrictModel):
    """The process that holds the buffer and handles one call after another. Measured by
    `python -m benchmarks.control_plane`."""

    exchange_s: Seconds = 0.0
    """Processor seconds for each of a group's two exchanges: its admission and its insert."""
    server_share: Fraction = 0.0
    """Fraction of the processor that heartbeats and other periodic calls of one rollout server take."""


class FaultTimings(StrictModel):
    """Failures and restarts. 0 seconds between failures: none."""

    server_every_s: Seconds = 0.0
    """Mean seconds between two failures of a server."""
    server_restart_s: Seconds = 60.0
    """Seconds until a failed server generates again."""
    trainer_every_s: Seconds = 0.0
    """Mean seconds between two failures of the trainer."""
    trainer_restart_s: Seconds = 120.0
    """Seconds until a failed trainer has loaded its checkpoint."""


class Timings(StrictModel):
    """Input of a simulation in addition to the run's configuration."""

    source: str = "defaults"
    """Origin of these timings, in words."""
    prompt_tokens: Annotated[float, Field(gt=0)] = 64
    """Mean length of a prompt."""
    lengths: LengthModel = LengthModel(mean=256)
    engine: EngineTimings = EngineTimings()
    trainer: TrainerTimings = TrainerTimings()
    sync: SyncTimings = SyncTimings()
    verifier: VerifierTimings = VerifierTimings()
    buffer: BufferTimings = BufferTimings()
    faults: FaultTimings = FaultTimings()
    engine_beside: Factor = 1.0
    """Factor by which engines are slower while the trainer computes: both share processors, power or memory."""
    trainer_beside: Factor = 1.0
    """Factor by which the trainer is slower while an engine generates."""
    task_s: Seconds = 0.0
    """Seconds per task that the task source takes. 0: tasks are always available."""
    evaluation_factor: Annotated[float, Field(gt=0)] = 1.0
    """Factor by which completions of an evaluation take longer than those of training groups: they are requested one by
    one, and graded."""
    slow_servers: list[Factor] = []
    """Factors by which the engines of the last servers are slower than `engine`, one per server."""
    engine_contended: Fraction = 0.0
    """Fraction of the engines' time spent waiting for a processor. With dedicated processors `engine` would be faster
    by that."""
    trainer_contended: Fraction = 0.0
    """The same fraction of the trainer's computing."""
    first_step_s: Seconds = 0.0
    """Extra seconds of the first training step, while both sides start up."""

    @classmethod
    def read(cls, path: Path, *, base: Timings | None = None) -> Timings:
        """Read timings from a YAML file. With `base`, the file's keys replace those of `base`. Raises ConfigError."""
        try:
            plain = yaml.safe_load(path.read_text()) or {}
            if base is not None and isinstance(plain, dict):
                plain = _merge_sections(base.model_dump(mode="json", exclude_defaults=True), plain)
            return cls.model_validate(plain)
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read timings from {path}: {error}. Write one with --write-timings") from error
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{path}: {key or 'the file'}: {first['msg']}. See docs/simulate.md") from error

    def write(self, path: Path) -> None:
        """Write the values that differ from the defaults, as YAML."""
        text = yaml.safe_dump(
            self.model_dump(mode="json", exclude_defaults=True), sort_keys=False, width=120, default_flow_style=None
        )
        path.write_text(f"# Timings for `async-grpo simulate --timings`; docs/simulate.md explains every key.\n{text}")


def _merge_sections(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge two files, key by key within a section. `lengths` is replaced whole: half of a distribution is none."""
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict) and key != "lengths":
            merged[key] = {**base[key], **value}
        else:
            merged[key] = value
    return merged
