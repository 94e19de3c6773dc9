"""Two passes of two updates in plain torch: the Hugging Face model, one sequence at a time, and torch's AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_grpo.algorithms import ADVANTAGES
from tests.support.trainer_programs.batches import make_batch
from tests.support.trainer_programs.plain_torch import plain_logprobs
from tests.support.trainer_programs.updates import TEMPERATURE
from trainer.batch.packing import split_groups

LR, EPS, CLIP_GRAD, DECAY, CAP = 3e-3, 1e-5, 0.5, 0.1, 2.0
LOW, HIGH = 0.01, 0.02
"""The trust region: so narrow that the later updates of a step leave it."""
LEAST, MOST = 0.05, 1e3
"""Sequences whose product of rho is outside are rejected, in the case `behaviour`."""
VERSIONS = 2


def plain_updates(folder: Path, name: str) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The same updates in plain torch: mean loss and norm of each step, and how far the weights moved."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    start = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    steps = []
    for version in range(VERSIONS):
        rows = plain_rows(model, version)
        losses, norms = [], []
        for iteration in range(2):
            for part in split_groups(4, 2, seed=1, version=version, iteration=iteration):
                chosen = [row for row in rows if row["place"] in part]
                optimizer.zero_grad()
                terms = [plain_loss(model, row, name, version) for row in chosen]
                loss = torch.cat(terms).sum() / sum(len(term) for term in terms)
                loss.backward()
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD).item())
                losses.append(loss.item())
                optimizer.step()
        steps.append({"loss": sum(losses) / 4, "grad_norm": sum(norms) / 4})
    return steps, {key: tensor - start[key] for key, tensor in model.state_dict().items()}


def plain_rows(model: Any, version: int) -> list[dict[str, Any]]:
    """The samples that a verifier could judge, with their log-probabilities before the step."""
    rows = []
    for place, group in enumerate(make_batch(version).groups):
        rewards = torch.tensor([[sample.reward or 0.0 for sample in group.samples]]).double()
        valid = torch.tensor([[sample.reward is not None for sample in group.samples]])
        advantages = ADVANTAGES["grpo"](rewards, valid, valid.long())[0].tolist()
        for sample, advantage in zip(group.samples, advantages, strict=True):
            if sample.reward is not None:
                with torch.no_grad():
                    before = plain_logprobs(model, group, sample, TEMPERATURE)[0]
                rows.append(
                    {"place": place, "group": group, "sample": sample, "advantage": advantage, "before": before}
                )
    return rows


def plain_loss(model: Any, row: dict[str, Any], name: str, version: int) -> Tensor:
    """Of each token of a sample."""
    advantage, before, sample = row["advantage"], row["before"], row["sample"]
    logprobs = plain_logprobs(model, row["group"], sample, TEMPERATURE)[0]
    behaviour = torch.tensor(sample.token_logprobs().copy())
    if name == "behaviour":
        product = (before - behaviour).sum().exp().item()
        r = (logprobs - behaviour).exp()
        return -float(LEAST <= product <= MOST) * torch.minimum(r * advantage, r.clamp(0.5, 1.5) * advantage)
    prox = before
    if name == "loglinear":
        age = version - torch.tensor(sample.token_versions().copy())
        prox = behaviour + age / (age + 1) * (logprobs.detach() - behaviour)
    w, r = (prox - behaviour).exp(), (logprobs - prox).exp()
    return -w * (w <= CAP) * torch.minimum(r * advantage, r.clamp(1 - LOW, 1 + HIGH) * advantage)
