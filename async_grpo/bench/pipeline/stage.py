"""What is there once for all runs of the bench: a model, and the configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from async_grpo.bench.pipeline.cores import Split
from async_grpo.bench.pipeline.work import VOCABULARY, Course, Work
from async_grpo.bench.words import number_words
from async_grpo.config import RunConfig, validate
from async_grpo.config.tiny_qwen2 import TinyQwen2Config
from async_grpo.data.tiny_qwen2 import build_tiny_qwen2, whole_checkpoint
from async_grpo.errors import ConfigError

POLICY = TinyQwen2Config(hidden_size=256, layers=4, heads=4, kv_heads=2, intermediate_size=704, max_positions=8192)
"""3 million parameters: large enough that a step of either side is mostly arithmetic."""
TINY = TinyQwen2Config(hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=128)
_FLOAT32_BYTES = 4
LEARNING_RATE = 1e-5
"""Weights change, and all of them are loaded anew at every step, but the policy stays the random one that it was."""
NEVER = 1_000_000
MICRO_BATCH_TOKENS = 8192
KV_BLOCK, LEAST_KV_BYTES = 128, 256 << 20
READY_TIMEOUT_S = 900.0
"""All processes of a side start on its one core."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The folder of the bench, its model of that shape, and the cores of both sides."""

    folder: Path
    model: Path
    shape: TinyQwen2Config
    cores: Split

    def config(self, name: str, work: Work, course: Course) -> RunConfig:
        """A run of the work with the default objective, selector and interruption. It is evaluated on one short
        completion before and after, and saved once, at the end. Raises ConfigError."""
        self._check_fits(work)
        data = self.folder / "data" / name
        data.mkdir(parents=True, exist_ok=True)
        train, held_out = work.write(data)
        threads = max(1, len(self.cores.trainer))
        longest = work.longest
        return validate(
            {
                "name": name,
                "runs_dir": self.folder / "runs",
                "seed": work.seed,
                "steps": course.steps,
                "max_staleness": course.max_staleness,
                "group_size": work.group_size,
                "groups_per_step": work.groups_per_step,
                "model": {"path": self.model},
                "data": {"kind": "jsonl", "path": train, "eval_path": held_out, "shuffle": False},
                "rewards": {"functions": [{"name": "async_grpo.bench.fixed_lengths:reward"}]},
                "sampling": {"max_tokens": work.longest_completion},
                "rollout": {
                    "workflow": "async_grpo.bench.fixed_lengths:PrescribedLengths",
                    "max_concurrency": work.samples_per_step,
                    "vllm": {"max_model_len": longest, "threads": threads, "kv_cache_bytes": self._kv_bytes(work)},
                },
                "trainer": {
                    "threads": threads,
                    "micro_batch_tokens": max(MICRO_BATCH_TOKENS, longest),
                    "optimizer": {"lr": LEARNING_RATE},
                    "checkpoint": {"every_steps": NEVER, "keep": 1},
                },
                "eval": {"prompts": 1, "samples": 1, "greedy": False},
                "launch": {"cores": self.cores.as_config(), "ready_timeout_s": READY_TIMEOUT_S},
                "telemetry": {"tensorboard": False, "samples_every": NEVER},
            },
            source="async-grpo bench pipeline",
        )

    def _check_fits(self, work: Work) -> None:
        if work.longest > self.shape.max_positions:
            raise ConfigError(
                f"the longest sequence of the work has {work.longest} tokens, prompt included, and the model of this "
                f"bench {self.shape.max_positions} positions. Leave longer completions out of --lengths-from"
            )

    def _kv_bytes(self, work: Work) -> int:
        """So much that no sample in flight is ever pushed out."""
        shape = self.shape
        token_bytes = 2 * shape.layers * shape.kv_heads * (shape.hidden_size // shape.heads) * _FLOAT32_BYTES
        return max(LEAST_KV_BYTES, work.samples_per_step * (work.longest + KV_BLOCK) * token_bytes)


def make_model(folder: Path, shape: TinyQwen2Config) -> Path:
    """A random checkpoint without a stop token, and the tokenizer of the prompts."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the bench has one of its own
    with whole_checkpoint(folder) as draft:
        tokenizer = number_words(draft, VOCABULARY)
        build_tiny_qwen2(shape, tokenizer, vocab_size=VOCABULARY, seed=1).save_pretrained(draft)
    return folder
