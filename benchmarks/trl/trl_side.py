"""TRL's side, in its own environment: one `GRPOTrainer`, set as a competent user would set it on a CPU.

    spec.json --> model, prompts in order, reward --> GRPOTrainer.train --> rows.jsonl, one a step

    python -m benchmarks.trl.trl_side SPEC

Nothing waits: TRL generates the completions of a whole step, scores them, trains on them, and begins again. The reward
is the same function of this project that the other side calls.
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

Facts = dict[str, Any]
Spec = Any
"""Everything that TRL's side is told, see `Workload.write_spec`."""


class Meter(TrainerCallback):
    """Collects the facts of a step; writes a row of `rows.jsonl` when it ends."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._rewards: list[float] = []
        self._tokens: list[int] = []
        self._generate_s = 0.0

    def reward(
        self, completions: list[str], completion_ids: list[list[int]], answer: list[str], **rest: Any
    ) -> list[float]:
        """The reward function, as TRL calls it."""
        rewards = [answer_tag(text, gold) for text, gold in zip(completions, answer, strict=True)]
        self._rewards += rewards
        self._tokens += [len(ids) for ids in completion_ids]
        return rewards

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Count the time of the block as generation."""
        started = time.perf_counter()
        yield
        self._generate_s += time.perf_counter() - started

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Write the row of an optimizer step and begin the next; the trainer calls this."""
        row: Facts = {
            "step": state.global_step,
            "time_s": time.time(),
            "samples": len(self._rewards),
            "reward_mean": sum(self._rewards) / len(self._rewards),
            "completion_tokens": sum(self._tokens),
            "generate_s": self._generate_s,
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._rewards, self._tokens, self._generate_s = [], [], 0.0


class TimedTrainer(GRPOTrainer):
    """TRL's trainer, with the time of its generation measured."""

    meter: Meter

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.meter.generating():
            return super()._generate_single_turn(*args, **kwargs)


def main() -> None:
    """Train as the spec says."""
    spec = read_spec(Path(sys.argv[1]))
    torch.set_num_threads(spec.dials.threads)
    build(spec).train()


def read_spec(path: Path) -> Spec:
    """The spec that `Workload.write_spec` has written, its keys as attributes."""
    return json.loads(path.read_text(encoding="utf-8"), object_hook=lambda fields: SimpleNamespace(**fields))


def build(spec: Spec) -> TimedTrainer:
    """The trainer, ready to train."""
    model = AutoModelForCausalLM.from_pretrained(
        spec.config.model.path, dtype=torch.float32, attn_implementation=spec.dials.attention
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(spec.config.model.path)
    rows = [json.loads(line) for line in Path(spec.config.data.path).read_text(encoding="utf-8").splitlines()]
    rank = os.environ.get("RANK", "0")
    meter = Meter(Path(spec.out) / ("rows.jsonl" if rank == "0" else f"rows-{rank}.jsonl"))
    trainer = TimedTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=meter.reward,
        args=arguments(spec),
        train_dataset=Dataset.from_list([{"prompt": row["question"], "answer": row["answer"]} for row in rows]),
        callbacks=[meter],
        optimizers=optimizer(model, spec),
    )
    trainer.meter = meter
    return trainer


def optimizer(model: torch.nn.Module, spec: Spec) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW, fused, and the learning rates of the other side, step by step."""
    adam = spec.config.trainer.optimizer
    adamw = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=0.0, fused=True
    )
    last = len(spec.learning_rates) - 1  # the scheduler looks one step beyond the end
    return adamw, LambdaLR(adamw, lambda step: spec.learning_rates[min(step, last)])


def arguments(spec: Spec) -> GRPOConfig:
    """Settings of TRL: one generation a step for all prompts and samples; nothing is logged, saved or evaluated."""
    config, objective = spec.config, spec.config.trainer.objective
    return GRPOConfig(
        output_dir=str(Path(spec.out) / "trainer"),
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        max_steps=config.steps,
        per_device_train_batch_size=spec.dials.rows // spec.dials.processes,
        gradient_accumulation_steps=config.groups_per_step * config.group_size // spec.dials.rows,
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
        use_transformers_continuous_batching=spec.dials.generation == "continuous",
        transformers_continuous_batching_config={"max_memory_percent": 0.05},
        cache_implementation=spec.dials.cache,
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
