"""Supervised stage before GRPO: trains a tiny Qwen2 that reasons in some of its completions.

    ProblemSet --demonstrations--> train step --every probe_every steps--> probe: sampled accuracy
                                       |                                      |
                                       |   above the limit: restore the weights of the previous probe
                                       v
                          Hugging Face checkpoint + warmup.json

Runs once before training, on the CPU, in plain torch. The same arguments give the same weights.

    python -m trainer.warmup --config '{}' --out FOLDER --seed 1
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from async_grpo.config.model import WarmupConfig
from async_grpo.data.arithmetic import Problem, ProblemSet
from async_grpo.errors import TrainingError
from async_grpo.models.tiny.arithmetic import build_char_tokenizer, demonstration, is_correct, reasons_first, shortcut
from async_grpo.models.tiny.qwen2 import build_tiny_qwen2
from async_grpo.utils.files import whole_folder
from trainer.platform.cpu_patches import use_onednn_products

HELD_OUT_SAMPLES = 4
"""Completions per held-out problem, for mean@4."""


@dataclass(frozen=True, slots=True)
class WarmupProgress:
    """Result of a probe. `accuracy` is sampled at temperature 1, on problems that are not held out."""

    step: int
    loss: float
    accuracy: float
    reasoning_share: float
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """Description of the policy that was written. Accuracies are on the held-out problems."""

    seed: int
    steps: int
    parameters: int
    sampled_accuracy: float
    """mean@4 at temperature 1."""
    greedy_accuracy: float
    reasoning_share: float
    """Fraction of the sampled completions that start with <think>."""
    rolled_back: bool
    """True if the last probe exceeded `accuracy_limit`; `steps` is then that of the previous probe."""
    elapsed_s: float


def warm_up(
    config: WarmupConfig,
    out_dir: Path,
    seed: int,
    on_progress: Callable[[WarmupProgress], None] | None = None,
) -> WarmupReport:
    """Train the first policy and write it to `out_dir`, completely or not at all.

    Raises TrainingError if its held-out accuracy is outside [accuracy_floor, accuracy_limit].
    """
    stage = WarmupStage(config, seed)
    report = stage.train_and_measure(on_progress or (lambda progress: None))
    _check(config, report)
    _write(stage.model, stage.tokenizer, report, out_dir)
    return report


class WarmupStage:
    """Model, optimizer and data of one warm-up."""

    def __init__(self, config: WarmupConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._problems = ProblemSet(config.task, seed)
        self._generator = torch.Generator().manual_seed(seed)
        self.tokenizer = build_char_tokenizer()
        self.model = build_tiny_qwen2(config, self.tokenizer, vocab_size=len(self.tokenizer), seed=seed)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)

    def train_and_measure(self, on_progress: Callable[[WarmupProgress], None]) -> WarmupReport:
        """Train until the last step, or until a probe exceeds the limit. Then measure on the held-out set."""
        started = time.monotonic()
        last_step = 0
        last_weights = copy.deepcopy(self.model.state_dict())
        rolled_back = False
        for step in range(1, self._config.steps + 1):
            loss = self._train_step(step)
            if step % self._config.probe_every and step != self._config.steps:
                continue
            problems = [self._problems.problem("probe", index) for index in range(self._config.probe_samples)]
            correct, reasoning = self._measure(problems, greedy=False)
            elapsed_s = round(time.monotonic() - started, 1)
            on_progress(WarmupProgress(step, round(loss, 4), correct, reasoning, elapsed_s))
            if correct > self._config.accuracy_limit:
                self.model.load_state_dict(last_weights)
                rolled_back = True
                break
            last_step = step
            last_weights = copy.deepcopy(self.model.state_dict())
        return self._make_report(last_step, rolled_back, started)

    def _train_step(self, step: int) -> float:
        """Make one AdamW step on the mean cross entropy of the completion tokens. Returns that mean."""
        config = self._config
        first = (step - 1) * config.batch_size
        problems = [self._problems.problem("warm-up", first + row) for row in range(config.batch_size)]
        reasoned = min(max(round(config.reasoning_share * config.batch_size), 1), config.batch_size - 1)
        # Two batches instead of one: shortcuts are a fifth as long, and padding them would cost time.
        parts = (
            self._token_losses(problems[:reasoned], demonstration),
            self._token_losses(problems[reasoned:], shortcut),
        )
        loss = torch.cat(parts).mean()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.detach())

    def _token_losses(self, problems: Sequence[Problem], complete: Callable[[Problem], str]) -> Tensor:
        """Return the cross entropies of all completion tokens, including end tokens: [tokens]."""
        eos: str = self.tokenizer.eos_token
        rows = [self.tokenizer.encode(problem.prompt + complete(problem) + eos) for problem in problems]
        width = max(map(len, rows))
        tokens_BT = torch.tensor([row + [self.tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        logits_BTV = self.model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
        targets_BT = tokens_BT[:, 1:]
        counted_BT = targets_BT != self.tokenizer.pad_token_id
        counted_BT[:, : self._config.task.prompt_tokens - 1] = False
        return F.cross_entropy(logits_BTV[counted_BT], targets_BT[counted_BT], reduction="none")

    def _measure(self, problems: Sequence[Problem], *, greedy: bool) -> tuple[float, float]:
        """Return the fractions of completions that are right, and of those that reason."""
        prompts_BT = torch.tensor([self.tokenizer.encode(problem.prompt) for problem in problems])
        room = self._config.task.max_completion_tokens
        generator = None if greedy else self._generator
        rows = sample(self.model, prompts_BT, room, generator).tolist()
        completions = [self.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        correct = [is_correct(problem, text) for problem, text in zip(problems, completions, strict=True)]
        reasoning = [reasons_first(text) for text in completions]
        return sum(correct) / len(correct), sum(reasoning) / len(reasoning)

    def _make_report(self, steps: int, rolled_back: bool, started: float) -> WarmupReport:
        held_out = self._problems.held_out
        sampled, reasoning = self._measure(held_out * HELD_OUT_SAMPLES, greedy=False)
        greedy, _ = self._measure(held_out, greedy=True)
        return WarmupReport(
            seed=self._seed,
            steps=steps,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            sampled_accuracy=sampled,
            greedy_accuracy=greedy,
            reasoning_share=reasoning,
            rolled_back=rolled_back,
            elapsed_s=round(time.monotonic() - started, 1),
        )


def learning_rate(config: WarmupConfig, step: int) -> float:
    """Return the learning rate of a step (1 .. steps): linear warm-up times a cosine from lr to lr / 20."""
    ramp = min(1.0, step / max(1, config.lr_warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / config.steps))
    return config.lr * ramp * (0.05 + 0.95 * cosine)


@torch.no_grad()
def sample(model: Qwen2ForCausalLM, prompts_BT: Tensor, max_tokens: int, generator: torch.Generator | None) -> Tensor:
    """Sample completions [B, <= max_tokens] at temperature 1, or greedily without a generator; padded after eos."""
    eos = model.config.eos_token_id
    pad = model.config.pad_token_id
    cache = DynamicCache()
    ended_B = torch.zeros(len(prompts_BT), dtype=torch.bool)
    inputs_BT = prompts_BT
    columns = []
    for _ in range(max_tokens):
        logits_BV = model(input_ids=inputs_BT, past_key_values=cache, use_cache=True).logits[:, -1]
        if generator is None:
            next_B = logits_BV.argmax(dim=-1)
        else:
            next_B = torch.multinomial(logits_BV.softmax(dim=-1), 1, generator=generator)[:, 0]
        next_B = next_B.masked_fill(ended_B, pad)
        columns.append(next_B)
        ended_B |= next_B == eos
        if bool(ended_B.all()):
            break
        inputs_BT = next_B[:, None]
    return torch.stack(columns, dim=1)


def _check(config: WarmupConfig, report: WarmupReport) -> None:
    """Raise TrainingError if GRPO should not start from this policy."""
    accuracy = report.sampled_accuracy
    if config.accuracy_floor <= accuracy <= config.accuracy_limit:
        return
    fix = "Raise" if accuracy < config.accuracy_floor else "Lower"
    raise TrainingError(
        f"the warm-up ended with a held-out accuracy of {accuracy:.3f}, outside "
        f"[{config.accuracy_floor:g}, {config.accuracy_limit:g}]: GRPO would have too few right samples to learn from, "
        f"or nothing left to learn. {fix} model.warmup.reasoning_share or model.warmup.steps, or change the seed"
    )


def _write(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, report: WarmupReport, out_dir: Path) -> None:
    with whole_folder(out_dir, shared=True) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        (draft / "warmup.json").write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")


def main() -> None:
    """Train the policy of a WarmupConfig (JSON). Prints one JSON line per probe, then the report."""
    parser = argparse.ArgumentParser(description="Make the first policy of the quickstart.")
    parser.add_argument("--config", required=True, help="a WarmupConfig as JSON")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    config = WarmupConfig.model_validate_json(arguments.config)
    torch.set_num_threads(config.threads)
    use_onednn_products()
    transformers_logging.disable_progress_bar()
    report = warm_up(config, arguments.out, arguments.seed, _print_line)
    _print_line(report)


def _print_line(record: WarmupProgress | WarmupReport) -> None:
    print(json.dumps(dataclasses.asdict(record)), flush=True)


if __name__ == "__main__":
    main()
