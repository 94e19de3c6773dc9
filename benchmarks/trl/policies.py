"""The two initial policies. Each is made once and cached, so both sides of a workload start from the same files.

    quickstart        the quickstart's own warm-up (`trainer.warmup`)
    checks            the same, trained to check its sums repeatedly, then widened

**Checks.** Reasoning models check their work once or twenty times, so their completions differ much in length. This
policy writes its column sums R times, with log-normal R (median 2.5, sigma 1, at most 20):

    <think>8+6+0=14 7+5+1=13 4+3+1=8 8+6+0=14 7+5+1=13 4+3+1=8</think><answer>834</answer>        R = 2

**Widened.** Every unit is copied `WIDTH` times and every matrix averages over the copies (Net2Wider, Chen et al.,
2016). The policy computes the same function, but a token costs as much as in a model of WIDTH^2 times the size. With
0.4 million parameters both sides would spend their time in Python, and the comparison would measure that.
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
MAX_ROUNDS = 20
MEDIAN_ROUNDS = 2.5
SIGMA_ROUNDS = 1.0
REASONING_SHARE = 0.6
STEPS = 120
ROWS = 32
PEAK_LR = 1e-3
POSITIONS = 640


def make_policies(folder: Path, seed: int = 1) -> None:
    """Make the policies that `folder` lacks."""
    quickstart = folder / "quickstart"
    checks = folder / "checks"
    if not (quickstart / "config.json").exists():
        torch.set_num_threads(1)
        warm_up(WarmupConfig(), quickstart, seed, lambda progress: print(f"  warm-up: {progress}", flush=True))
    if not (checks / "config.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(quickstart)
        model = Qwen2ForCausalLM.from_pretrained(quickstart, dtype=torch.float32)
        train_on_checks(model, tokenizer, seed)
        with whole_folder(checks, shared=True) as draft:
            widen_model(model, WIDTH).save_pretrained(draft)
            tokenizer.save_pretrained(draft)


def draw_rounds(rng: random.Random) -> int:
    """Draw how often the sums are written: log-normal, rounded, in 1 .. MAX_ROUNDS."""
    return min(MAX_ROUNDS, max(1, round(MEDIAN_ROUNDS * rng.lognormvariate(0.0, SIGMA_ROUNDS))))


def write_checked_solution(problem: Problem, rounds: int) -> str:
    """Return the demonstration with its reasoning repeated `rounds` times.

    >>> write_checked_solution(Problem(47, 85), 2)
    '<think>7+5+0=12 4+8+1=13 7+5+0=12 4+8+1=13</think><answer>132</answer>'
    """
    opening = "<think>"
    closing = "</think>"
    sums, answer = demonstration(problem).removeprefix(opening).split(closing)
    return f"{opening}{' '.join([sums] * rounds)}{closing}{answer}"


def train_on_checks(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Take STEPS steps of AdamW on checked solutions and on shortcuts."""
    problems = ProblemSet(ArithmeticTaskConfig(), seed)
    rng = random.Random(f"{seed}/checks")
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS):
        texts = []
        for row in range(ROWS):
            problem = problems.problem("checks", step * ROWS + row)
            if rng.random() < REASONING_SHARE:
                completion = write_checked_solution(problem, draw_rounds(rng))
            else:
                completion = shortcut(problem)
            texts.append(problem.prompt + completion)

        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (step + 1) / 10) * (1.0 - 0.95 * step / STEPS)

        # Texts of similar length are padded together in four parts, because padding costs time.
        texts.sort(key=len)
        parts = [texts[start : start + ROWS // 4] for start in range(0, ROWS, ROWS // 4)]
        losses = torch.cat([_compute_token_losses(model, tokenizer, part) for part in parts])
        optimizer.zero_grad()
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 19:
            print(f"  checks: step {step + 1} of {STEPS}, loss {losses.mean().item():.3f}", flush=True)


def _compute_token_losses(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """Return the cross entropy of every completion token, end tokens included, as one flat tensor."""
    rows = [tokenizer.encode(text + tokenizer.eos_token) for text in texts]
    width = max(map(len, rows))
    tokens_BT = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    logits_BTV = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
    targets_BT = tokens_BT[:, 1:]
    counted_BT = targets_BT != tokenizer.pad_token_id
    # Exclude the prompt. A token is a character and all prompts have the same length, so one text shows where it ends.
    counted_BT[:, : texts[0].index("=")] = False
    return F.cross_entropy(logits_BTV[counted_BT], targets_BT[counted_BT], reduction="none")


def widen_model(model: Qwen2ForCausalLM, times: int) -> Qwen2ForCausalLM:
    """Return a model of the same function with `times` as many units everywhere except in the vocabulary."""
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
    wide.load_state_dict({name: _widen_tensor(name, tensor, times) for name, tensor in model.state_dict().items()})
    return wide


def _widen_tensor(name: str, tensor: Tensor, times: int) -> Tensor:
    """Copy the output units of a parameter and average over its input units. The vocabulary keeps its size."""
    if name.endswith("embed_tokens.weight"):
        return tensor.repeat(1, times)
    if name.endswith("lm_head.weight"):
        return tensor.repeat(1, times) / times
    if tensor.dim() == 1:
        return tensor.repeat(times)
    return tensor.repeat(times, times) / times
