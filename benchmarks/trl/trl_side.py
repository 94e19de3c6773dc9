"""TRL's side, in its own environment: one `GRPOTrainer`, configured as a competent user would do it on a CPU.

    spec.json --> model, prompts in order, reward --> GRPOTrainer.train --> rows.jsonl, one row per step

    python -m benchmarks.trl.trl_side SPEC

TRL generates the completions of a whole step, scores them, trains on them, and starts the next step. Both sides use the
same reward function, which belongs to this project.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from async_grpo.rewards.verifiers.answers import answer_tag

Spec = Any
"""The content of spec.json, written by `Workload.write_spec`, with keys as attributes."""


class StepRecorder(TrainerCallback):
    """Records rewards, lengths and generation time, and writes a row of `rows.jsonl` at the end of each step."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._rewards: list[float] = []
        self._tokens: list[int] = []
        self._generate_s = 0.0

    def compute_rewards(
        self, completions: list[str], completion_ids: list[list[int]], answer: list[str], **unused: Any
    ) -> list[float]:
        """Score and record the completions. This is the reward function that TRL calls."""
        rewards = [answer_tag(text, expected) for text, expected in zip(completions, answer, strict=True)]
        self._rewards += rewards
        self._tokens += [len(ids) for ids in completion_ids]
        return rewards

    @contextmanager
    def time_generation(self) -> Iterator[None]:
        """Count the time of the block as generation."""
        started_s = time.perf_counter()
        yield
        self._generate_s += time.perf_counter() - started_s

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        """Write the row of the optimizer step and reset the record. Called by the trainer."""
        row = {
            "step": state.global_step,
            "time_s": time.time(),
            "samples": len(self._rewards),
            "reward_mean": sum(self._rewards) / len(self._rewards),
            "completion_tokens": sum(self._tokens),
            "generate_s": self._generate_s,
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._rewards = []
        self._tokens = []
        self._generate_s = 0.0


class TimedTrainer(GRPOTrainer):
    """TRL's trainer, which measures the time of its generation."""

    recorder: StepRecorder

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.time_generation():
            return super()._generate_single_turn(*args, **kwargs)


def main() -> None:
    """Train with the spec that the command line names."""
    spec = read_spec(Path(sys.argv[1]))
    torch.set_num_threads(spec.settings.threads)
    build_trainer(spec).train()


def read_spec(path: Path) -> Spec:
    """Read spec.json."""
    return json.loads(path.read_text(encoding="utf-8"), object_hook=lambda fields: SimpleNamespace(**fields))


def build_trainer(spec: Spec) -> TimedTrainer:
    """Build the trainer with its model, data and optimizer."""
    model = AutoModelForCausalLM.from_pretrained(
        spec.config.model.path, dtype=torch.float32, attn_implementation=spec.settings.attention
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(spec.config.model.path)
    rows = [json.loads(line) for line in Path(spec.config.data.path).read_text(encoding="utf-8").splitlines()]
    rank = os.environ.get("RANK", "0")
    recorder = StepRecorder(Path(spec.out) / ("rows.jsonl" if rank == "0" else f"rows-{rank}.jsonl"))
    trainer = TimedTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=recorder.compute_rewards,
        args=make_trl_config(spec),
        train_dataset=Dataset.from_list([{"prompt": row["question"], "answer": row["answer"]} for row in rows]),
        callbacks=[recorder],
        optimizers=build_optimizer(model, spec),
    )
    trainer.recorder = recorder
    return trainer


def build_optimizer(
    model: torch.nn.Module, spec: Spec
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Build fused AdamW with the learning rates of our side, step by step."""
    adam = spec.config.trainer.optimizer
    adamw = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=0.0, fused=True
    )
    last_step = len(spec.learning_rates) - 1  # the scheduler also requests the rate of the step after the last
    return adamw, LambdaLR(adamw, lambda step: spec.learning_rates[min(step, last_step)])


def make_trl_config(spec: Spec) -> GRPOConfig:
    """Make TRL's configuration: one generation per step for all samples, without logs, checkpoints or evaluation."""
    config = spec.config
    objective = config.trainer.objective
    return GRPOConfig(
        output_dir=str(Path(spec.out) / "trainer"),
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        max_steps=config.steps,
        per_device_train_batch_size=spec.settings.rows // spec.settings.processes,
        gradient_accumulation_steps=config.groups_per_step * config.group_size // spec.settings.rows,
        num_generations=config.group_size,
        num_iterations=1,
        beta=0.0,
        loss_type="dapo",
        epsilon=objective.clip_low,
        epsilon_high=objective.clip_high,
        scale_rewards="group",
        temperature=config.sampling.temperature,
        top_p=1.0,
        top_k=0,
        max_completion_length=config.sampling.max_tokens,
        max_grad_norm=config.trainer.optimizer.clip_grad,
        shuffle_dataset=False,
        seed=config.seed,
        use_transformers_continuous_batching=spec.settings.generation == "continuous",
        transformers_continuous_batching_config={"max_memory_percent": 0.05},
        cache_implementation=spec.settings.cache,
        ddp_find_unused_parameters=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
