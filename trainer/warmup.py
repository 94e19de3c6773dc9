"""The supervised stage before GRPO: a tiny Qwen2 that reasons in some of its completions.

    ProblemSet --demonstrations--> train step --every probe_every steps--> probe: sampled accuracy
                                       |                                      |
                                       |   above the limit: back to the previous probe's weights
                                       v
                          Hugging Face checkpoint + warmup.json

It runs once, before training, on CPU, in plain torch; the same arguments give the same weights.

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
from async_grpo.models.tiny.arithmetic import build_char_tokenizer, demonstration, is_right, reasons_first, shortcut
from async_grpo.models.tiny.qwen2 import build_tiny_qwen2
from async_grpo.utils.files import whole_folder
from trainer.platform.cpu_patches import multiply_with_onednn

HELD_OUT_SAMPLES = 4
"""mean@4: completions of one held-out problem."""


@dataclass(frozen=True, slots=True)
class WarmupProgress:
    """One probe: `accuracy` is sampled at temperature 1, on problems that are not held out."""

    step: int
    loss: float
    accuracy: float
    reasoning_share: float
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """The policy that was written. Accuracies are on the held-out problems."""

    seed: int
    steps: int
    parameters: int
    sampled_accuracy: float
    """mean@4 at temperature 1."""
    greedy_accuracy: float
    reasoning_share: float
    """Share of the sampled completions that start with <think>."""
    rolled_back: bool
    """The last probe passed `accuracy_limit`, so `steps` is that of the probe before."""
    elapsed_s: float


def warm_up(
    config: WarmupConfig,
    out_dir: Path,
    seed: int,
    on_progress: Callable[[WarmupProgress], None] | None = None,
) -> WarmupReport:
    """Make the first policy and write it to `out_dir`, whole or not at all.

    Raises TrainingError if its held-out accuracy is outside [accuracy_floor, accuracy_limit].
    """
    stage = WarmupStage(config, seed)
    report = stage.run(on_progress or (lambda progress: None))
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

    def run(self, on_progress: Callable[[WarmupProgress], None]) -> WarmupReport:
        """Train until the last step, or until a probe passes the limit; then measure on the held-out set."""
        started = time.monotonic()
        kept_step, kept = 0, copy.deepcopy(self.model.state_dict())
        rolled_back = False
        for step in range(1, self._config.steps + 1):
            loss = self._train_step(step)
            if step % self._config.probe_every and step != self._config.steps:
                continue
            problems = [self._problems.problem("probe", index) for index in range(self._config.probe_samples)]
            correct, reasoning = self._shares(problems, greedy=False)
            elapsed_s = round(time.monotonic() - started, 1)
            on_progress(WarmupProgress(step, round(loss, 4), correct, reasoning, elapsed_s))
            if correct > self._config.accuracy_limit:
                self.model.load_state_dict(kept)
                rolled_back = True
                break
            kept_step, kept = step, copy.deepcopy(self.model.state_dict())
        return self._report(kept_step, rolled_back, started)

    def _train_step(self, step: int) -> float:
        """One AdamW step on the mean over the tokens of the completions; returns that mean."""
        config = self._config
        first = (step - 1) * config.batch_size
        problems = [self._problems.problem("warm-up", first + row) for row in range(config.batch_size)]
        reasoned = min(max(round(config.reasoning_share * config.batch_size), 1), config.batch_size - 1)
        # Two rectangles instead of one: shortcuts are a fifth as long, and padding costs time.
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
        """Cross entropies of all completion tokens, end tokens included, flat: [tokens]."""
        eos: str = self.tokenizer.eos_token
        rows = [self.tokenizer.encode(problem.prompt + complete(problem) + eos) for problem in problems]
        width = max(map(len, rows))
        tokens_BT = torch.tensor([row + [self.tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        logits_BTV = self.model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
        targets_BT = tokens_BT[:, 1:]
        counted_BT = targets_BT != self.tokenizer.pad_token_id
        counted_BT[:, : self._config.task.prompt_tokens - 1] = False
        return F.cross_entropy(logits_BTV[counted_BT], targets_BT[counted_BT], reduction="none")

    def _shares(self, problems: Sequence[Problem], *, greedy: bool) -> tuple[float, float]:
        """The shares of completions that are right, and that reason."""
        prompts_BT = torch.tensor([self.tokenizer.encode(problem.prompt) for problem in problems])
        room = self._config.task.max_completion_tokens
        generator = None if greedy else self._generator
        rows = sample(self.model, prompts_BT, room, generator).tolist()
        completions = [self.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        correct = [is_right(problem, text) for problem, text in zip(problems, completions, strict=True)]
        reasoning = [reasons_first(text) for text in completions]
        return sum(correct) / len(correct), sum(reasoning) / len(reasoning)

    def _report(self, steps: int, rolled_back: bool, started: float) -> WarmupReport:
        held_out = self._problems.held_out
        sampled, reasoning = self._shares(held_out * HELD_OUT_SAMPLES, greedy=False)
        greedy, _ = self._shares(held_out, greedy=True)
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
    """The learning rate of step 1 .. steps: linear warm-up times a cosine from lr to lr / 20."""
    ramp = min(1.0, step / max(1, config.lr_warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / config.steps))
    return config.lr * ramp * (0.05 + 0.95 * cosine)


@torch.no_grad()
def sample(model: Qwen2ForCausalLM, prompts_BT: Tensor, max_tokens: int, generator: torch.Generator | None) -> Tensor:
    """Completions [B, <= max_tokens] at temperature 1, or greedy without a generator; padded after the end."""
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    cache = DynamicCache()
    ended_B = torch.zeros(len(prompts_BT), dtype=torch.bool)
    inputs_BT, columns = prompts_BT, []
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
    """Raises TrainingError for a policy that GRPO should not start from."""
    accuracy = report.sampled_accuracy
    if config.accuracy_floor <= accuracy <= config.accuracy_limit:
        return
    fix = "Raise" if accuracy < config.accuracy_floor else "Lower"
    raise TrainingError(
        f"the warm-up ended with a held-out accuracy of {accuracy:.3f}, outside "
        f"[{config.accuracy_floor:g}, {config.accuracy_limit:g}]: GRPO would have too little to build on, or "
        f"nothing left to learn. {fix} model.warmup.reasoning_share or model.warmup.steps, or change the seed"
    )


def _write(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, report: WarmupReport, out_dir: Path) -> None:
    with whole_folder(out_dir, shared=True) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        (draft / "warmup.json").write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")


def main() -> None:
    """Make the policy that a WarmupConfig (JSON) describes; prints one JSON line per probe, then the report."""
    parser = argparse.ArgumentParser(description="Make the first policy of the quickstart.")
    parser.add_argument("--config", required=True, help="a WarmupConfig as JSON")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    config = WarmupConfig.model_validate_json(arguments.config)
    torch.set_num_threads(config.threads)
    multiply_with_onednn()
    transformers_logging.disable_progress_bar()
    report = warm_up(config, arguments.out, arguments.seed, _print_line)
    _print_line(report)


def _print_line(record: WarmupProgress | WarmupReport) -> None:
    print(json.dumps(dataclasses.asdict(record)), flush=True)


if __name__ == "__main__":
    main()
