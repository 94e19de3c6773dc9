"""The same steps in plain Hugging Face and torch: padded sequences, no packing, no parallelism."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from async_grpo.algorithms import ADVANTAGES
from tests.support.trainer_programs.batches import make_batch
from tests.support.trainer_programs.launching import CAP, CLIP, DECAY, EPS, LR, TEMPERATURE, Outcome


@functools.cache
def plain_training(model_folder: Path, versions: int) -> Outcome:
    """What Megatron must come to."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads wait for each other longer than such tensors take
    try:
        return _train(model_folder, versions)
    finally:
        torch.set_num_threads(threads)


def _train(model_folder: Path, versions: int) -> Outcome:
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager").float()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
        eps=EPS,
    )
    with torch.no_grad():
        logprobs = [value for _, _, values in _tokens(model, 0) for value in values.tolist()]
    steps, weights = [], {}
    for version in range(versions):
        optimizer.zero_grad()
        loss, tokens = _loss(model, version)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        steps.append({"loss": loss.item(), "grad_norm": norm.item(), "tokens": tokens})
        if version in (0, versions - 1):
            weights[version] = _weights(model, model_folder)
    untouched = load_file(model_folder / "model.safetensors")
    return Outcome(steps, logprobs, untouched, weights[0], weights[versions - 1])


def _weights(model: Any, model_folder: Path) -> dict[str, torch.Tensor]:
    """As they lie on a disk: in memory, transformers fuses the experts."""
    written = model_folder.with_name(f"{model_folder.name}-plain")
    model.save_pretrained(written)
    return load_file(written / "model.safetensors")


def _tokens(model: Any, version: int) -> list[tuple[float, torch.Tensor, torch.Tensor]]:
    """(advantage, behaviour log-probs, log-probs) of every verifiable sample."""
    prompts, samples, advantages = [], [], []
    for group in make_batch(version).groups:
        rewards = torch.tensor([[s.reward if s.reward is not None else 0.0 for s in group.samples]])
        valid = torch.tensor([[s.reward is not None for s in group.samples]])
        lengths = torch.tensor([[len(s.token_ids()) for s in group.samples]])
        advantages += ADVANTAGES["grpo"](rewards.double(), valid, lengths)[0].tolist()
        samples += group.samples
        prompts += [torch.tensor(group.task.prompt_ids().copy(), dtype=torch.int64)] * len(group.samples)
    completions = [torch.tensor(sample.token_ids().copy(), dtype=torch.int64) for sample in samples]
    whole = [torch.cat(pair) for pair in zip(prompts, completions, strict=True)]
    logits_BTV = model(pad_sequence(whole, batch_first=True)).logits / TEMPERATURE  # causal: no token sees padding
    found = []
    for row, (prompt, tokens, sample) in enumerate(zip(prompts, completions, samples, strict=True)):
        if sample.reward is not None:
            logits = logits_BTV[row, len(prompt) - 1 : len(whole[row]) - 1]
            logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
            found.append((advantages[row], torch.tensor(sample.token_logprobs().copy()), logprobs))
    return found


def _loss(model: Any, version: int) -> tuple[torch.Tensor, int]:
    """Mean over tokens of -w * r * A, 0 where w > cap; r is 1 and carries the gradient."""
    rows = _tokens(model, version)
    tokens = sum(len(logprobs) for _, _, logprobs in rows)
    terms = [
        -(_weight(logprobs.detach() - behaviour) * (logprobs - logprobs.detach()).exp() * advantage).sum()
        for advantage, behaviour, logprobs in rows
    ]
    return torch.stack(terms).sum() / tokens, tokens


def _weight(log_w: torch.Tensor) -> torch.Tensor:
    w = log_w.exp()
    return torch.where(w > CAP, torch.zeros_like(w), w)
