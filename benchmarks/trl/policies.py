"""The two first policies, each made once and kept: both sides of a workload start from the same files.

    quickstart        the quickstart's own warm-up (`trainer.warmup`)
    checks            the same, taught to check its sums again and again, then widened

**Checks.** Reasoning models read over what they have done, now once, now twenty times, which is why their completions
differ so much in length. This one writes its column sums R times, R log-normal (median 2.5, sigma 1, at most 20):

    <think>8+6+0=14 7+5+1=13 4+3+1=8 8+6+0=14 7+5+1=13 4+3+1=8</think><answer>834</answer>        R = 2

**Widened.** Every unit is copied `WIDTH` times and every matrix reads the mean of the copies (Net2Wider, Chen et al.,
2016), so the policy computes what it did before, and a token costs what it costs in a model of WIDTH^2 times the size.
At 0.4 million parameters both sides would spend their time in Python, which is no way to compare them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from async_grpo.config.model import ArithmeticTaskConfig, WarmupConfig
from async_grpo.data.arithmetic import Problem, ProblemSet
from async_grpo.models.tiny.arithmetic import demonstration, shortcut
from async_grpo.utils.files import whole_folder
from trainer.warmup import warm_up

WIDTH = 3
MOST_ROUNDS = 20
MEDIAN_ROUNDS, SIGMA_ROUNDS = 2.5, 1.0
REASONING_SHARE = 0.6
STEPS, ROWS, PEAK_LR = 120, 32, 1e-3
POSITIONS = 640


def make_policies(folder: Path, seed: int = 1) -> None:
    """Make both policies in `folder`; one that is there already stays."""
    quickstart, checks = folder / "quickstart", folder / "checks"
    if not (quickstart / "config.json").exists():
        torch.set_num_threads(1)
        warm_up(WarmupConfig(), quickstart, seed, lambda progress: print(f"  warm-up: {progress}", flush=True))
    if not (checks / "config.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(quickstart)
        model = Qwen2ForCausalLM.from_pretrained(quickstart, dtype=torch.float32)
        teach(model, tokenizer, seed)
        with whole_folder(checks, shared=True) as draft:
            widened(model, WIDTH).save_pretrained(draft)
            tokenizer.save_pretrained(draft)


def rounds(rng: random.Random) -> int:
    """How often the sums are written: log-normal, rounded, in 1 .. MOST_ROUNDS."""
    return min(MOST_ROUNDS, max(1, round(MEDIAN_ROUNDS * rng.lognormvariate(0.0, SIGMA_ROUNDS))))


def checked(problem: Problem, times: int) -> str:
    """The demonstration with its reasoning written `times` times.

    >>> checked(Problem(47, 85), 2)
    '<think>7+5+0=12 4+8+1=13 7+5+0=12 4+8+1=13</think><answer>132</answer>'
    """
    opening, closing = "<think>", "</think>"
    sums, answer = demonstration(problem).removeprefix(opening).split(closing)
    return f"{opening}{' '.join([sums] * times)}{closing}{answer}"


def teach(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Take STEPS steps of AdamW on demonstrations of many rounds and on shortcuts."""
    problems, rng = ProblemSet(ArithmeticTaskConfig(), seed), random.Random(f"{seed}/checks")
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS):
        drawn = [problems.problem("checks", step * ROWS + row) for row in range(ROWS)]
        texts = [
            problem.prompt + (checked(problem, rounds(rng)) if rng.random() < REASONING_SHARE else shortcut(problem))
            for problem in drawn
        ]
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (step + 1) / 10) * (1.0 - 0.95 * step / STEPS)
        # Shortest first, in four rectangles: padding costs time.
        texts.sort(key=len)
        parts = [texts[start : start + ROWS // 4] for start in range(0, ROWS, ROWS // 4)]
        losses = torch.cat([_token_losses(model, tokenizer, part) for part in parts])
        optimizer.zero_grad()
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 19:
            print(f"  checks: step {step + 1} of {STEPS}, loss {losses.mean().item():.3f}", flush=True)


def _token_losses(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """Cross entropies of all completion tokens, end tokens included, flat."""
    rows = [tokenizer.encode(text + tokenizer.eos_token) for text in texts]
    width = max(map(len, rows))
    tokens_BT = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    logits_BTV = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
    targets_BT = tokens_BT[:, 1:]
    counted_BT = targets_BT != tokenizer.pad_token_id
    counted_BT[:, : texts[0].index("=")] = False  # a token a character; every prompt is as long as the others
    return F.cross_entropy(logits_BTV[counted_BT], targets_BT[counted_BT], reduction="none")


def widened(model: Qwen2ForCausalLM, times: int) -> Qwen2ForCausalLM:
    """A model that computes the same with `times` as many units everywhere but in the vocabulary."""
    old = model.config
    fields = old.to_dict() | {
        "hidden_size": old.hidden_size * times,
        "intermediate_size": old.intermediate_size * times,
        "num_attention_heads": old.num_attention_heads * times,
        "num_key_value_heads": old.num_key_value_heads * times,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
    }
    wide = Qwen2ForCausalLM(Qwen2Config(**fields)).to(torch.float32)
    wide.load_state_dict({name: _copied(name, tensor, times) for name, tensor in model.state_dict().items()})
    return wide


def _copied(name: str, tensor: Tensor, times: int) -> Tensor:
    """Outputs are copied, inputs are averaged; the vocabulary stays."""
    if name.endswith("embed_tokens.weight"):
        return tensor.repeat(1, times)
    if name.endswith("lm_head.weight"):
        return tensor.repeat(1, times) / times
    if tensor.dim() == 1:
        return tensor.repeat(times)
    return tensor.repeat(times, times) / times
