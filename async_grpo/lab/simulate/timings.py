"""Timings: how fast each part of a run is, as a file that people can read, write and compare.

    --from runs/NAME   calibrate.py fits them to a run       --device h100   devices.py estimates them
    --timings FILE     this file, by hand

    one token of every running sample takes   step_s + request_s * running + context_s * tokens in the KV cache
    reading a prompt takes                    prefill_s a token, in which the engine's other samples wait
    a training step takes                     base_s + token_s * tokens read (prompts and completions)
    the buffer's server                       exchange_s at a group's admission and at its insert, one after another
    weights arrive                            transfer_s after the trainer went on; loading pauses an engine for load_s

All times are seconds, all speeds those of one server, or of all ranks of the trainer together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from async_grpo.config.base import PositiveInt, StrictModel
from async_grpo.errors import ConfigError
from async_grpo.lab.simulate.lengths import LengthModel

Share = Annotated[float, Field(ge=0, le=1)]
Span = Annotated[float, Field(ge=0)]
Factor = Annotated[float, Field(ge=1)]


class EngineTimings(StrictModel):
    """One rollout server and its engine."""

    step_s: Span = 0.005
    """Seconds of a decoding step with no request in it: reading the weights, and Python."""
    request_s: Span = 0.0001
    """Seconds that each running sample adds to a decoding step."""
    context_s: Span = 0.0
    """Seconds that each token in the KV cache adds to a decoding step: attention reads it."""
    prefill_s: Span = 0.00005
    """Seconds to read one token of a prompt."""
    shared_prompt: bool = True
    """Whether the samples of a group share one reading of their prompt (prefix cache)."""
    call_s: Span = 0.001
    """Seconds from a free slot to a sample that runs in the engine: the buffer, Python."""
    cache_tokens: PositiveInt | None = None
    """Tokens for which the KV cache has room; used where rollout.min_concurrency lets the engine's load decide. None:
    no limit."""

    def times(self, factor: float) -> EngineTimings:
        """An engine that is so many times slower."""
        keys = ("step_s", "request_s", "context_s", "prefill_s")
        return self.model_copy(update={key: getattr(self, key) * factor for key in keys}) if factor != 1 else self


class TrainerTimings(StrictModel):
    """The trainer, all ranks together."""

    base_s: Span = 0.1
    """Seconds of a step whatever its batch."""
    token_s: Span = 0.00001
    """Seconds for each token read."""
    part_s: Span = 0.0
    """trainer.streaming: seconds that each part of a batch adds."""
    variation: Span = 0.0
    """Standard deviation of a step's time over its mean."""
    checkpoint_s: Span = 0.0
    """Seconds that a checkpoint stops the trainer."""
    take_s: Span = 0.002
    """Seconds from a batch that is ready to its first micro-batch."""


class SyncTimings(StrictModel):
    """New weights on their way to the engines."""

    stall_s: Span = 0.01
    """Seconds for which publishing stops the trainer."""
    transfer_s: Span = 0.05
    """Seconds from then until a server has them, while both sides work."""
    load_s: Span = 0.05
    """Seconds for which an engine pauses to load them."""


class VerifierTimings(StrictModel):
    """Rewards."""

    latency_s: Span = 0.0
    """Seconds from the last token of a group to its insert, beside judging: the pool, the buffer."""
    sample_s: Span = 0.0
    """Seconds to judge one sample."""
    workers: PositiveInt = 1
    """Samples judged at the same time, on each server."""
    filtered: Share = 0.0
    """rollout.dynamic_sampling: share of the groups whose rewards are all equal."""


class BufferTimings(StrictModel):
    """The server that holds the buffer, which does one thing after another. `python -m benchmarks.control_plane`
    measures both figures."""

    exchange_s: Span = 0.0
    """Seconds of its processor for each of the two exchanges of a group: its admission and its insert."""
    server_share: Share = 0.0
    """Share of its processor that heartbeats and other repeated calls of one rollout server take."""


class FaultTimings(StrictModel):
    """Failures and restarts. 0 seconds between failures: none."""

    server_every_s: Span = 0.0
    """Mean seconds between two failures of one server."""
    server_restart_s: Span = 60.0
    """Seconds until a server that died generates again."""
    trainer_every_s: Span = 0.0
    """Mean seconds between two failures of the trainer."""
    trainer_restart_s: Span = 120.0
    """Seconds until a trainer that died has loaded its checkpoint."""


class Timings(StrictModel):
    """Everything that a simulation must know beside the configuration of the run."""

    source: str = "defaults"
    """Where these figures come from, in words."""
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
    """How much slower engines are while the trainer computes: they share processors, power or memory."""
    trainer_beside: Factor = 1.0
    """How much slower the trainer is while an engine generates."""
    task_s: Span = 0.0
    """Seconds that the source of tasks takes for one. 0: nobody waits for it."""
    evaluation_factor: Annotated[float, Field(gt=0)] = 1.0
    """How many times longer an evaluation takes than its completions would as groups of training: they are requested
    one by one, and graded."""
    slow_servers: list[Factor] = []
    """How many times slower than `engine` the engines of the last servers are, one factor each."""
    engine_contended: Share = 0.0
    """Share of the engines' time in which they waited for a processor: with processors of their own, `engine` would be
    faster by that."""
    trainer_contended: Share = 0.0
    """The same share of the trainer's computing."""
    first_step_s: Span = 0.0
    """Seconds before the first training step beside waiting: both sides start."""

    @classmethod
    def read(cls, path: Path, *, instead_of: Timings | None = None) -> Timings:
        """The timings in a YAML file; with `instead_of` those, with what the file says instead. Raises ConfigError."""
        try:
            plain = yaml.safe_load(path.read_text()) or {}
            if instead_of is not None and isinstance(plain, dict):
                plain = _merge(instead_of.model_dump(mode="json", exclude_defaults=True), plain)
            return cls.model_validate(plain)
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read timings from {path}: {error}. Write one with --write-timings") from error
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{path}: {key or 'the file'}: {first['msg']}. See docs/simulate.md") from error

    def write(self, path: Path) -> None:
        """Write them as YAML, without what is at its default."""
        text = yaml.safe_dump(
            self.model_dump(mode="json", exclude_defaults=True), sort_keys=False, width=120, default_flow_style=None
        )
        path.write_text(f"# Timings of `async-grpo simulate --timings`; docs/simulate.md explains every key.\n{text}")


def _merge(known: dict[str, Any], instead: dict[str, Any]) -> dict[str, Any]:
    """The sections of both, where the keys of `instead` win. Lengths are replaced as a whole."""
    merged = dict(known)
    for key, value in instead.items():
        if isinstance(value, dict) and isinstance(known.get(key), dict) and key != "lengths":
            merged[key] = {**known[key], **value}
        else:
            merged[key] = value
    return merged
