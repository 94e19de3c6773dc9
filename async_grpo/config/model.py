"""The first policy: a checkpoint, a supervised warm-up on the quickstart's task, or random weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from async_grpo.config.base import PositiveInt, StrictModel

HEAD_SIZES = (32, 64, 128)
"""Head sizes for which the CPU engine has an attention kernel."""


class TinyQwen2Config(StrictModel):
    """Sizes and initialisation of a tiny Qwen2. The vocabulary comes from the tokenizer."""

    hidden_size: PositiveInt = 128
    """Width of the residual stream."""
    layers: PositiveInt = 2
    """Decoder layers."""
    heads: PositiveInt = 4
    """Attention heads. The head size, hidden_size / heads, must be 32, 64 or 128."""
    kv_heads: PositiveInt = 2
    """Key and value heads; a divisor of heads."""
    intermediate_size: PositiveInt = 256
    """Hidden width of each MLP."""
    tie_embeddings: bool = True
    """Use the embedding as the output layer."""
    max_positions: PositiveInt = 2048
    """Maximum length of a sequence, in tokens."""
    init_std: Annotated[float, Field(gt=0)] = 0.05
    """Standard deviation of the initial weights of all matrices."""

    def find_problems(self) -> Iterator[str]:
        if self.hidden_size % self.heads or self.hidden_size // self.heads not in HEAD_SIZES:
            yield (
                f"hidden_size ({self.hidden_size}) / heads ({self.heads}) is the head size and must be one of "
                f"{HEAD_SIZES}: the CPU engine has no attention kernel for others. Set heads to hidden_size / 32"
            )
        if self.heads % self.kv_heads:
            yield (
                f"heads ({self.heads}) is not a multiple of kv_heads ({self.kv_heads}), so query heads cannot "
                "share key-value heads evenly. Set kv_heads to a divisor of heads"
            )


Probability = Annotated[float, Field(ge=0, le=1)]


class ArithmeticTaskConfig(StrictModel):
    """Addition of two numbers, computed digit by digit with a carry."""

    digits: Annotated[int, Field(ge=2, le=9)] = 3
    """Digits of each summand; the first digit is never 0, so there are (9 * 10 ** (digits - 1)) ** 2 problems."""
    held_out: Annotated[int, Field(ge=1, le=4096)] = 256
    """Problems reserved for evaluation; no other stream of the same seed contains them."""

    @property
    def prompt_tokens(self) -> int:
        """Length of every prompt: two summands, + and =."""
        return 2 * self.digits + 2

    @property
    def max_completion_tokens(self) -> int:
        """Length of the longest demonstration, including its end token: 10 * digits + 5."""
        return 10 * self.digits + 5


class WarmupConfig(TinyQwen2Config):
    """A tiny Qwen2 trained on two kinds of demonstrations, so that it either reasons or guesses, at random.

    All demonstrations are correct. Some of them (reasoning_share) reason first; the others answer immediately, which a
    model of this size cannot learn. Its accuracy is therefore about reasoning_share * (accuracy when reasoning), and a
    reward for the right answer teaches the policy to reason before it answers.
    """

    task: ArithmeticTaskConfig = ArithmeticTaskConfig()

    layers: PositiveInt = 2
    """Decoder layers. Two are enough to reason digit by digit and too few to add three digits in one step."""
    intermediate_size: PositiveInt = 384
    """Hidden width of each MLP."""
    max_positions: PositiveInt = 128
    """Maximum length of a sequence, in tokens; a whole demonstration must fit."""
    init_std: Annotated[float, Field(gt=0)] = 0.05
    """Standard deviation of the initial weights of all matrices. With the usual 0.02 the same accuracy takes twice as
    many steps."""

    reasoning_share: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """Share of the demonstrations that reason before they answer."""
    steps: PositiveInt = 340
    """Maximum number of optimizer steps of the supervised stage; it ends earlier once accuracy_limit is passed."""
    batch_size: Annotated[int, Field(ge=2)] = 96
    """Demonstrations per step."""
    lr: Annotated[float, Field(gt=0)] = 3e-3
    """Peak learning rate; a cosine schedule then lowers it to a twentieth."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Steps of linear warm-up to lr."""

    probe_every: PositiveInt = 40
    """Steps between two measurements of the sampled accuracy."""
    probe_samples: PositiveInt = 256
    """Completions per measurement, at temperature 1, on problems that are not held out."""
    accuracy_limit: Probability = 0.5
    """Maximum accuracy of the result. A better policy leaves GRPO too little to learn, so the policy of the previous
    measurement is used."""
    accuracy_floor: Probability = 0.25
    """Minimum held-out accuracy of the result; below it, GRPO has too little to build on."""
    threads: PositiveInt = 1
    """torch threads of the warm-up when it runs as a separate program."""

    def find_problems(self) -> Iterator[str]:
        yield from super().find_problems()
        needed = self.task.prompt_tokens + self.task.max_completion_tokens
        if self.max_positions < needed:
            yield (
                f"max_positions ({self.max_positions}) is below the {needed} tokens of a whole demonstration with "
                f"{self.task.digits} digits. Raise max_positions to {needed} or lower task.digits"
            )
        if self.accuracy_floor >= self.accuracy_limit:
            yield (
                f"accuracy_floor ({self.accuracy_floor:g}) is not below accuracy_limit "
                f"({self.accuracy_limit:g}): no policy would be accepted. Lower accuracy_floor"
            )


Precision = Literal["float32", "bfloat16"]
Hub = Literal["huggingface", "modelscope"]


class RandomModelConfig(TinyQwen2Config):
    """A tiny Qwen2 with random weights, for testing the system: it learns nothing."""

    vocab_size: Annotated[int, Field(ge=300)] = 1024
    """Size of the byte-level BPE vocabulary that is trained on the prompts."""


MAX_ENGINE_LORA_RANK = 512
"""Maximum rank of vLLM's own LoRA."""
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(StrictModel):
    """Low-rank adapters (arXiv 2106.09685): each target matrix W becomes W + scale * B A, and only A and B are trained
    and published. A checkpoint contains only them and their optimizer state."""

    rank: PositiveInt = 16
    """r: rows of A [r, inputs] and columns of B [outputs, r]."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Numerator of the scale, alpha / rank. None: 2 * rank, so that the scale is 2."""
    rslora: bool = False
    """Use the scale alpha / sqrt(rank) (arXiv 2312.03732), with which a higher rank does not learn more slowly."""
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Projections with adapters, by their Hugging Face names. Mixture-of-experts models support those of attention
    only."""

    engine: Literal["merged", "adapters"] = "merged"
    """`merged`: the engine adds scale * B A to its weights at every update, so generation costs the same as without
    adapters. `adapters`: vLLM's own LoRA applies the adapters to every token, as the trainer does; updates are
    faster."""

    @property
    def scale(self) -> float:
        """Factor on B A."""
        divisor = math.sqrt(self.rank) if self.rslora else self.rank
        return self.peft_alpha / divisor

    @property
    def peft_alpha(self) -> float:
        """alpha, or its default 2 * rank."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    def find_problems(self) -> Iterator[str]:
        if len(set(self.targets)) < len(self.targets):
            yield f"targets {list(self.targets)} names a projection twice. Name it once"
        if self.engine == "adapters" and self.rank > MAX_ENGINE_LORA_RANK:
            yield (
                f"rank ({self.rank}) is above {MAX_ENGINE_LORA_RANK}, the maximum that vLLM supports with engine "
                "adapters. Lower model.lora.rank, or set model.lora.engine to merged"
            )


class ModelConfig(StrictModel):
    """Source of the first policy: exactly one of `path`, `warmup` and `random`."""

    path: Path | None = None
    """A Hugging Face checkpoint folder (config.json, safetensors, tokenizer), or the id of a model on `hub`, such as
    `Qwen/Qwen2.5-7B` or `Qwen/Qwen2.5-7B@REVISION`. A model from a hub is downloaded once; the run records its commit
    and keeps using it."""
    hub: Hub = "huggingface"
    """Hub of ids in `path` and in `trainer.reference.path`: `huggingface` or `modelscope`."""
    architecture: str | None = None
    """Name of the public model at `path`, such as qwen2.5-7b (docs/platforms.md lists the names). With it, `--dry-run`
    works before the files are downloaded. Files of a different model are an error."""
    warmup: WarmupConfig | None = None
    """Create a tiny policy by a short supervised stage on the arithmetic task. The result is cached."""
    random: RandomModelConfig | None = None
    """Create a tiny policy with random weights. The result is cached."""
    precision: Precision = "float32"
    """Data type of the weights, in the trainer and in the engine."""
    fp32_head: bool = False
    """Compute the logits of a bfloat16 model in float32, in the trainer and in the engine. This reduces the difference
    between their log-probabilities. The weights stay bfloat16, and so do all gradients. Needs vLLM 0.26 or newer, so it
    is not available on Ascend yet."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and keep the first policy's weights frozen. None: train all weights."""

    def find_problems(self) -> Iterator[str]:
        sources = [name for name in ("path", "warmup", "random") if getattr(self, name) is not None]
        if len(sources) != 1:
            yield (
                "exactly one of path, warmup and random must be set, as the source of the policy, but "
                f"{', '.join(sources) or 'none'} is set. Set model.path to a Hugging Face checkpoint folder, or keep "
                "only one of them"
            )
        if self.architecture is not None and self.path is None:
            yield (
                f"architecture {self.architecture!r} describes the model at model.path, but model.path is not set. Set "
                "it, or leave model.architecture out"
            )
        if self.fp32_head and self.precision == "float32":
            yield (
                "fp32_head would have no effect: precision is float32, so logits are in float32 anyway. "
                "Remove model.fp32_head, or set model.precision to bfloat16"
            )

    def find_conflicts(self, data_kind: str, arithmetic: ArithmeticTaskConfig) -> Iterator[str]:
        """Find conflicts with the data: a policy must be trained on the task of its warm-up."""
        if self.warmup is not None and data_kind != "arithmetic":
            yield (
                "model.warmup creates a policy for the arithmetic task, but data.kind is "
                f"{data_kind!r}. Set data.kind to arithmetic, or use model.path or model.random instead"
            )
        if self.warmup is not None and self.warmup.task != arithmetic:
            yield (
                f"model.warmup.task ({self.warmup.task}) and data.arithmetic ({arithmetic}) differ: "
                "the policy would be warmed up on one task and trained on another. Set both to the same values"
            )
