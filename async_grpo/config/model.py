"""Source of the first policy: a checkpoint, a supervised warm-up on the quickstart's task, or random weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from async_grpo.config.base import PositiveInt, StrictModel

HEAD_SIZES = (32, 64, 128)
"""Sizes of a head for which the CPU engine has an attention kernel."""


class TinyQwen2Config(StrictModel):
    """Sizes and initialisation; the vocabulary is that of the tokenizer."""

    hidden_size: PositiveInt = 128
    """Width of the residual stream."""
    layers: PositiveInt = 2
    """Decoder layers."""
    heads: PositiveInt = 4
    """Attention heads. hidden_size / heads, the size of a head, must be 32, 64 or 128."""
    kv_heads: PositiveInt = 2
    """Key and value heads; a divisor of heads."""
    intermediate_size: PositiveInt = 256
    """Width of an MLP."""
    tie_embeddings: bool = True
    """Use the embedding as the output layer."""
    max_positions: PositiveInt = 2048
    """Maximum length of a sequence, in tokens."""
    init_std: Annotated[float, Field(gt=0)] = 0.05
    """Standard deviation of the initial values of all matrices."""

    def problems(self) -> Iterator[str]:
        if self.hidden_size % self.heads or self.hidden_size // self.heads not in HEAD_SIZES:
            yield (
                f"hidden_size ({self.hidden_size}) / heads ({self.heads}) is the size of a head and must be one of "
                f"{HEAD_SIZES}: the CPU engine has no attention kernel for others. Set heads to hidden_size / 32"
            )
        if self.heads % self.kv_heads:
            yield (
                f"heads ({self.heads}) is not a multiple of kv_heads ({self.kv_heads}), so query heads cannot "
                "share key heads evenly. Set kv_heads to a divisor of heads"
            )


Probability = Annotated[float, Field(ge=0, le=1)]


class ArithmeticTaskConfig(StrictModel):
    """Addition of two numbers, worked out digit by digit with a carry."""

    digits: Annotated[int, Field(ge=2, le=9)] = 3
    """Digits of each summand; the first digit is never 0, so there are (9 * 10 ** (digits - 1)) ** 2 problems."""
    held_out: Annotated[int, Field(ge=1, le=4096)] = 256
    """Problems kept for evaluation; no other stream of the same seed contains one of them."""

    @property
    def prompt_tokens(self) -> int:
        """Length of every prompt: two summands, + and =."""
        return 2 * self.digits + 2

    @property
    def max_completion_tokens(self) -> int:
        """Length of the longest demonstration, with its end token: 10 * digits + 5."""
        return 10 * self.digits + 5


class WarmupConfig(TinyQwen2Config):
    """A tiny Qwen2 that has been taught both to reason and to guess, and does either by chance.

    Every demonstration is correct. A share of them reasons first; the others answer immediately, which a model of this
    size cannot do. So the accuracy is about reasoning_share * (accuracy when reasoning), and a reward for the right
    answer teaches the policy to think before it answers.
    """

    task: ArithmeticTaskConfig = ArithmeticTaskConfig()

    layers: PositiveInt = 2
    """Decoder layers. Two are enough to reason digit by digit and too few to add three digits in one step."""
    intermediate_size: PositiveInt = 384
    """Width of an MLP."""
    max_positions: PositiveInt = 128
    """Maximum length of a sequence, in tokens; a whole demonstration must fit."""
    init_std: Annotated[float, Field(gt=0)] = 0.05
    """Standard deviation of the initial values of all matrices. At the customary 0.02 the same accuracy takes twice as
    many steps."""

    reasoning_share: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """Share of the demonstrations that reason before they answer."""
    steps: PositiveInt = 340
    """Maximum number of optimizer steps of the supervised stage; it ends earlier once accuracy_limit is passed."""
    batch_size: Annotated[int, Field(ge=2)] = 96
    """Demonstrations per step."""
    lr: Annotated[float, Field(gt=0)] = 3e-3
    """Peak learning rate; a cosine then lowers it to a twentieth."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Steps over which the rate rises linearly to lr."""

    probe_every: PositiveInt = 40
    """Steps between two measurements of the sampled accuracy."""
    probe_samples: PositiveInt = 256
    """Completions of one measurement, at temperature 1, on problems that are not held out."""
    accuracy_limit: Probability = 0.5
    """A policy above this accuracy is too good to start from; the one of the previous probe is kept."""
    accuracy_floor: Probability = 0.25
    """Minimum held-out accuracy of the result; below it, GRPO has too little to build on."""
    threads: PositiveInt = 1
    """Number of torch threads when the warm-up runs as a program."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        need = self.task.prompt_tokens + self.task.max_completion_tokens
        if self.max_positions < need:
            yield (
                f"max_positions ({self.max_positions}) is below the {need} tokens of a whole demonstration with "
                f"{self.task.digits} digits. Raise max_positions to {need} or lower task.digits"
            )
        if self.accuracy_floor >= self.accuracy_limit:
            yield (
                f"accuracy_floor ({self.accuracy_floor:g}) is not below accuracy_limit "
                f"({self.accuracy_limit:g}): no policy would be accepted. Lower accuracy_floor"
            )


Precision = Literal["float32", "bfloat16"]
Hub = Literal["huggingface", "modelscope"]


class RandomModelConfig(TinyQwen2Config):
    """A randomly initialised tiny Qwen2, for tests of the machinery: it learns nothing."""

    vocab_size: Annotated[int, Field(ge=300)] = 1024
    """Size of the byte-level BPE vocabulary trained on the prompts."""


MOST_ENGINE_RANK = 512
"""The highest rank of vLLM's own LoRA."""
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(StrictModel):
    """Low-rank adapters (arXiv 2106.09685): of every target W only A and B of W + scale * B A are trained. Only they
    are published, and only they and their optimizer's state are in a checkpoint."""

    rank: PositiveInt = 16
    """r: rows of A [r, inputs] and columns of B [outputs, r]."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The scale is alpha / rank. None: 2 * rank, so that the scale is 2."""
    rslora: bool = False
    """The scale is alpha / sqrt(rank) (arXiv 2312.03732), under which a higher rank does not learn more slowly."""
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """The projections with adapters, by their Hugging Face names. A mixture of experts takes those of attention."""

    engine: Literal["merged", "adapters"] = "merged"
    """`merged`: the engine adds B A to its weights at every update, so that a token costs what it costs without
    adapters. `adapters`: vLLM's own LoRA computes with both at every token, as the trainer does, and updates are
    shorter."""

    @property
    def scale(self) -> float:
        """Factor on B A."""
        return self.peft_alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def peft_alpha(self) -> float:
        """alpha, or its default 2 * rank."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    def problems(self) -> Iterator[str]:
        if len(set(self.targets)) < len(self.targets):
            yield f"targets {list(self.targets)} names a projection twice. Name each once"
        if self.engine == "adapters" and self.rank > MOST_ENGINE_RANK:
            yield (
                f"rank ({self.rank}) is above {MOST_ENGINE_RANK}, the most that vLLM takes with engine adapters. Lower "
                "model.lora.rank, or set model.lora.engine to merged"
            )


class ModelConfig(StrictModel):
    """Source of the first policy: exactly one of `path`, `warmup` and `random`."""

    path: Path | None = None
    """A Hugging Face checkpoint folder (config.json, safetensors, tokenizer), or the id of a model on `hub`, such as
    `Qwen/Qwen2.5-7B` or `Qwen/Qwen2.5-7B@REVISION`. It is downloaded once, and the run keeps its commit."""
    hub: Hub = "huggingface"
    """The hub of an id in `path` and in `trainer.reference.path`: `huggingface` or `modelscope`."""
    architecture: str | None = None
    """The public model that `path` holds, such as qwen2.5-7b. With it, `--dry-run` works without the files; if the
    files are there and hold another model, that is an error. docs/platforms.md lists the names."""
    warmup: WarmupConfig | None = None
    """Make a tiny policy by a short supervised stage on the arithmetic task (cached)."""
    random: RandomModelConfig | None = None
    """Make a tiny random policy (cached)."""
    precision: Precision = "float32"
    """Data type of the weights, in the trainer and in the engine."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and leave the first policy's weights as they are. None: train all weights."""

    def problems(self) -> Iterator[str]:
        given = [name for name in ("path", "warmup", "random") if getattr(self, name) is not None]
        if len(given) != 1:
            yield (
                f"exactly one of path, warmup, random must be set, as the source of the policy, but {given or 'none'} "
                "is given. Set model.path to a Hugging Face checkpoint folder, or keep only one of them"
            )
        if self.architecture is not None and self.path is None:
            yield (
                f"architecture {self.architecture!r} describes model.path, and there is no path. Set model.path, or "
                "leave model.architecture out"
            )

    def problems_in_run(self, data_kind: str, arithmetic: ArithmeticTaskConfig) -> Iterator[str]:
        """Clashes with the data: a policy that is warmed up on one task must be trained on it."""
        if self.warmup is not None and data_kind != "arithmetic":
            yield (
                "model.warmup makes a policy for the arithmetic task, but data.kind is "
                f"{data_kind!r}. Set data.kind to arithmetic, or give model.path or model.random"
            )
        if self.warmup is not None and self.warmup.task != arithmetic:
            yield (
                f"model.warmup.task ({self.warmup.task}) and data.arithmetic ({arithmetic}) differ: "
                "the policy would be taught one task and trained on another. Give both the same values"
            )
