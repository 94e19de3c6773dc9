"""The objects of the trainer bench: a policy, a batch, and a slow producer.

The policy exists twice with the same weights: in the trainer, and as the Hugging Face model of the baselines.

The batch has lengths as in GSM8K, drawn by seed. A prompt has 50 to 200 tokens and G completions, whose lengths
are log-normal: most are short, a few very long, and a micro-batch that is padded to its longest pays for them. The
tokens are random because speed does not depend on them. None is special, because the Hugging Face model gives the
embedding of its padding token no gradient.

The slow producer shows the gain from streaming: a step that starts with the first groups, compared with one that waits
for all of them.

    producer: a group every `seconds` / P --> groups --> add as soon as some exist  --> close
                                                     --> sleep until all exist         --> step

The producer is a clock: it costs no computing time, like rollout servers on machines of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from transformers import AutoModelForCausalLM

from async_grpo.config import RunConfig, validate
from async_grpo.config.data import DataConfig
from async_grpo.config.model import RandomModelConfig
from async_grpo.data.jsonl import usable_rows
from async_grpo.data.prepare.formats import Rejections
from async_grpo.data.tokenizer import load_tokenizer
from async_grpo.lab.bench.sampling_masks import add_sampling_mask
from async_grpo.lab.bench.trainer.baselines import BenchStep, PlainModel, packed_by_hand
from async_grpo.models.tiny.random_qwen2 import make_random_model
from async_grpo.telemetry.timeline import PhaseTimer
from async_grpo.wire import Batch, Group, Sample, Task, VersionSpan, logprobs_to_bytes, tokens_to_bytes
from trainer.batch import sequences as ours
from trainer.batch.packing import assign_sequences
from trainer.model.policy import Policy, load_policy
from trainer.platform import Platform
from trainer.ranks.distributed import start_ranks
from trainer.step.step import train_step, train_step_streamed

STREAMED = "streamed"
WAITED = "waited"
TRUNCATED = "with sampling masks"
WHOLE = "without sampling masks"
Contestant = Callable[[], BenchStep]
"""Runs one step over the batch, from the same weights as all contestants."""
_SPECIAL_TOKENS = 3
"""Number of special tokens of `make_random_model`, which come first."""
_RANK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Number of groups in a batch, and the lengths of prompts and completions in tokens."""

    groups: int
    group_size: int = 8
    prompt: tuple[int, int] = (50, 200)
    """Uniform between these, both included; not used if prompts are given."""
    median: int = 150
    sigma: float = 0.8
    """Standard deviation of the logarithm: the longest of 64 completions has about seven times the median."""
    longest: int = 1024
    """Longer completions are truncated, as by max_tokens."""
    seed: int = 1


def make_batch(mix: BatchShape, vocab_size: int, prompts: Sequence[list[int]] = ()) -> Batch:
    """Return a batch that depends only on the arguments. `prompts`: token ids to draw from (default: random ones)."""
    random = np.random.default_rng(mix.seed)
    groups = []
    for index in range(mix.groups):
        if prompts:
            prompt = np.asarray(prompts[int(random.integers(len(prompts)))])
        else:
            prompt = random.integers(_SPECIAL_TOKENS, vocab_size, random.integers(mix.prompt[0], mix.prompt[1] + 1))
        task = Task(index=index, prompt=f"bench {index}", prompt_tokens=tokens_to_bytes(prompt), answer="")
        samples = [_sample(mix, vocab_size, random) for _ in range(mix.group_size)]
        groups.append(Group(seq=index, attempt=1, task=task, samples=samples))
    return Batch(epoch=1, version=0, groups=groups)


def lengths_of(mix: BatchShape, vocab_size: int) -> list[int]:
    """Return the number of positions that the network reads of each sequence of the batch."""
    groups = make_batch(mix, vocab_size).groups
    return [len(g.task.prompt_ids()) + sample.length - 1 for g in groups for sample in g.samples]


def _sample(mix: BatchShape, vocab_size: int, random: np.random.Generator) -> Sample:
    length = int(min(max(round(random.lognormal(math.log(mix.median), mix.sigma)), 1), mix.longest))
    return Sample(
        tokens=tokens_to_bytes(random.integers(_SPECIAL_TOKENS, vocab_size, length)),
        logprobs=logprobs_to_bytes(-np.log(vocab_size) + random.normal(0, 0.5, length)),
        spans=[VersionSpan(0, 0, length)],
        reward=float(random.random() < 0.5),
    )


@dataclass(frozen=True, slots=True)
class SlowProducer:
    """Produces the groups of `batch` evenly over `seconds`."""

    batch: Batch
    seconds: float

    def produce_parts(self) -> Iterator[Batch]:
        """Yield the groups produced since the last part, at least one. The clock starts with the first part."""
        started_s = time.perf_counter()
        total = len(self.batch.groups)
        taken = 0
        while taken < total:
            produced = int(total * (time.perf_counter() - started_s) / self.seconds)
            if produced <= taken:
                next_at_s = started_s + (taken + 1) * self.seconds / total
                time.sleep(max(0.0, next_at_s - time.perf_counter()))
                produced = taken + 1
            produced = min(produced, total)
            yield structs.replace(self.batch, groups=self.batch.groups[taken:produced])
            taken = produced

    def produce_batch(self) -> Batch:
        """Return all groups after the last one is produced. The clock starts now."""
        time.sleep(self.seconds)
        return self.batch


@dataclass(frozen=True, slots=True)
class TrainerSetup:
    """The objects of every round. The learning rate is 0: a step costs the same but does not change the weights."""

    config: RunConfig
    policy: Policy
    plain: PlainModel
    batch: Batch
    phases: PhaseTimer
    """The time of all steps of the trainer so far."""

    def truncated_contestants(self) -> dict[str, Contestant]:
        """Return steps over the batch with sampling masks and without."""
        vocabulary = self.policy.shape.vocab
        groups = [
            structs.replace(group, samples=[add_sampling_mask(sample, vocabulary) for sample in group.samples])
            for group in self.batch.groups
        ]
        truncated = structs.replace(self.batch, groups=groups)
        return {
            TRUNCATED: lambda: self._step(truncated, PhaseTimer()),
            WHOLE: lambda: self._step(self.batch, PhaseTimer()),
        }

    def run_trainer_step(self) -> BenchStep:
        """Run the step that is measured."""
        return self._step(self.batch, self.phases)

    def plain_contestant(self, step: Callable[[PlainModel, list[ours.TrainingSequence]], BenchStep]) -> Contestant:
        """Return a contestant that runs a step of the plain model over the whole batch."""
        return lambda: step(self.plain, self.split_batch())

    def run_packed_by_hand(self) -> BenchStep:
        """Run a step packed by hand, with the trainer's micro-batches."""
        members = self.split_batch()
        room = self.config.trainer.micro_batch_tokens
        (packing,) = assign_sequences([member.length for member in members], ranks=1, max_tokens=room)
        return packed_by_hand(self.plain, [[members[i] for i in chosen] for chosen in packing])

    def streaming_contestants(self, seconds: float) -> dict[str, Contestant]:
        """Return steps with a producer that takes `seconds` per batch.

        One trains each part as soon as it exists, the other trains the batch after the last part.
        """
        producer = SlowProducer(self.batch, seconds)

        def streamed() -> BenchStep:
            values = train_step_streamed(
                self.policy,
                producer.produce_parts(),
                self.config,
                version=self.batch.version,
                lr=0.0,
                phases=PhaseTimer(),
            )
            assert values is not None, "the last part completes the batch"
            return _to_bench_step(values)

        return {STREAMED: streamed, WAITED: lambda: self._step(producer.produce_batch(), PhaseTimer())}

    def _step(self, batch: Batch, phases: PhaseTimer) -> BenchStep:
        return _to_bench_step(train_step(self.policy, batch, self.config, lr=0.0, phases=phases))

    def split_batch(self) -> list[ours.TrainingSequence]:
        """Return the batch as sequences with advantages and weights, which is part of every step."""
        objective = self.config.trainer.objective
        return ours.split_into_sequences(self.batch, objective, max_completion_tokens=self.config.sampling.max_tokens)


def _to_bench_step(result: Mapping[str, Any]) -> BenchStep:
    return BenchStep(result["loss"], result["grad_norm"], result["packing_efficiency"])


def open_setup(
    platform: Platform,
    folder: Path,
    shape: RandomModelConfig,
    mix: BatchShape,
    *,
    room: int,
    threads: int,
    data: Path | None,
) -> TrainerSetup:
    """Create the model in `folder` and load it twice.

    `room`: tokens of a micro-batch; `data`: a file with real prompts. Raises DataError.
    """
    model = folder / "model"
    texts: list[str] = []
    if data is not None:
        texts = [row.prompt for row in usable_rows(data, DataConfig(kind="jsonl", path=data), Rejections())]
    make_random_model(shape, texts, model, seed=1)
    config = _config(model, mix, room, threads)
    start_ranks(config.trainer, platform, config.seed, _RANK_TIMEOUT_S)
    policy = load_policy(config, model, platform)
    plain = PlainModel(AutoModelForCausalLM.from_pretrained(model).float(), config)
    tokenizer = load_tokenizer(model)
    prompts = [tokenizer.encode(text) for text in texts]
    batch = make_batch(mix, shape.vocab_size, prompts)
    return TrainerSetup(config, policy, plain, batch, PhaseTimer())


def _config(model: Path, mix: BatchShape, room: int, threads: int) -> RunConfig:
    return validate(
        {
            "name": "bench-trainer",
            "model": {"path": str(model)},
            "group_size": mix.group_size,
            "groups_per_step": mix.groups,
            "sampling": {"max_tokens": mix.longest},
            "rollout": {"vllm": {"max_model_len": room}},
            "trainer": {
                "threads": threads,
                "micro_batch_tokens": room,
                # Parts of a batch cannot be normalised over the whole batch, and all contestants must do the same step.
                "objective": {"advantage_norm": "none"},
            },
        },
        "bench",
    )
