"""One policy twice, with the same weights: in the trainer, and as the Hugging Face model of the baselines."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from async_grpo.config import RunConfig, validate
from async_grpo.config.model import RandomModelConfig
from async_grpo.data.random_model import make_random_model
from async_grpo.data.source import load_tokenizer
from async_grpo.wire import Batch
from trainer.batching import pack_batch
from trainer.bench.padded import PlainModel, Setting, padded_step
from trainer.bench.rounds import Contestant, Done
from trainer.bench.streamed import STREAMED, WAITED, SlowProducer, streamed, waited
from trainer.bench.unpadded import one_by_one, packed_by_hand
from trainer.bench.usual import usual_step
from trainer.bench.work import Mix, make_batch, question_texts
from trainer.parallel import start_ranks
from trainer.phases import Phases
from trainer.platform import Platform
from trainer.policy import Policy
from trainer.sequences import Sequence, sequences_of
from trainer.start import load_policy
from trainer.step import train_step

_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Stage:
    """What every round works on. The learning rate is 0: a step costs the same, and leaves the weights."""

    config: RunConfig
    policy: Policy
    plain: PlainModel
    batch: Batch
    phases: Phases
    """Of all steps of the trainer so far."""

    def trainer(self) -> Done:
        """The step that is measured."""
        result = train_step(self.policy, self.batch, self.config, lr=0.0, phases=self.phases)
        return Done(result.loss, result.grad_norm, result.packing_efficiency)

    def padded(self, setting: Setting) -> Contestant:
        """A baseline."""
        return lambda: padded_step(self.plain, self.members(), setting)

    def usual(self) -> Done:
        """The baseline as it is usually found."""
        return usual_step(self.plain, self.members())

    def one_by_one(self) -> Done:
        """A ceiling."""
        return one_by_one(self.plain, self.members())

    def packed_by_hand(self) -> Done:
        """A ceiling, in the micro-batches of the trainer."""
        members = self.members()
        room = self.config.trainer.micro_batch_tokens
        (packing,) = pack_batch([member.length for member in members], ranks=1, max_tokens=room)
        return packed_by_hand(self.plain, [[members[i] for i in chosen] for chosen in packing])

    def streaming(self, seconds: float) -> dict[str, Contestant]:
        """With a producer that takes so long for the batch."""
        producer = SlowProducer(self.batch, seconds)
        return {
            STREAMED: partial(streamed, self.policy, producer, self.config),
            WAITED: partial(waited, self.policy, producer, self.config),
        }

    def members(self) -> list[Sequence]:
        """The batch as sequences, with advantages and weights: part of every step."""
        return sequences_of(self.batch, self.config.trainer.objective, longest=self.config.sampling.max_tokens)


def open_stage(
    platform: Platform, folder: Path, shape: RandomModelConfig, mix: Mix, *, room: int, threads: int, data: Path | None
) -> Stage:
    """`room`: tokens of a micro-batch. `folder` gets the model; `data`: a file with real prompts. Raises DataError."""
    model = folder / "model"
    texts = [] if data is None else question_texts(data)
    make_random_model(shape, texts, model, seed=1)
    config = _config(model, mix, room, threads)
    start_ranks(config.trainer, platform, config.seed, _WAIT_S)
    policy = load_policy(config, model, platform)
    plain = PlainModel(AutoModelForCausalLM.from_pretrained(model).float(), config)
    batch = make_batch(mix, shape.vocab_size, _tokens(model, texts))
    return Stage(config, policy, plain, batch, Phases())


def _tokens(model: Path, texts: Many[str]) -> list[list[int]]:
    tokenizer = load_tokenizer(model)
    return [tokenizer.encode(text) for text in texts]


def _config(model: Path, mix: Mix, room: int, threads: int) -> RunConfig:
    raw: dict[str, Any] = {
        "name": "bench-trainer",
        "model": {"path": str(model)},
        "group_size": mix.group_size,
        "groups_per_step": mix.groups,
        "sampling": {"max_tokens": mix.longest},
        "rollout": {"vllm": {"max_model_len": room}},
        "trainer": {"threads": threads, "micro_batch_tokens": room},
    }
    return validate(raw, "bench")
