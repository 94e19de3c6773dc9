"""The same steps in plain Hugging Face and torch: no packing, no parallelism.

`plain_steps` makes the updates of `make_batch` with torch's AdamW, in float32. `plain_tokens` is the aged batch as an
objective sees it, in the precision of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from async_grpo.algorithms import ADVANTAGES, AGGREGATIONS, PROXIMALS, Tokens
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.wire import Group, Sample
from tests.support.trainer_programs.batches import AGED_VERSION, LONGEST, make_aged_batch, make_batch
from tests.support.trainer_programs.launching import CAP, CLIP, DECAY, EPS, TEMPERATURE
from trainer.batch.packing import split_groups

LOW = 0.01
HIGH = 0.02
"""The trust region of several updates: so narrow that the later ones leave it."""
LEAST = 0.05
MOST = 1e3
"""Sequences whose product of rho is outside are rejected, in the case `behaviour`."""


@dataclass
class PlainSteps:
    """`steps`: loss and norm, means over the updates of a step, and the trained tokens. Weights as on a disk."""

    logprobs: list[float]
    steps: list[dict[str, float]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    """After each step."""


@dataclass(frozen=True)
class Row:
    """A sample that a verifier could judge. `before`: its log-probabilities before the step."""

    place: int
    group: Group
    sample: Sample
    advantage: float
    before: Tensor


@functools.cache
def plain_steps(folder: Path, versions: int, lr: float, name: str = "recompute", updates: int = 1) -> PlainSteps:
    """What Megatron must come to. `updates`: passes over the batch, and updates of each. `name`: what pi_prox is, and
    the objective."""
    model = load(folder).float()
    return steps_of(model, lambda: _weights(model, folder), versions, lr, name, updates)


def steps_of(
    model: Any,
    weights: Callable[[], dict[str, Tensor]],
    versions: int,
    lr: float,
    name: str = "recompute",
    updates: int = 1,
) -> PlainSteps:
    """As `plain_steps`, of what `model` does not freeze; `weights` reads it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = {"params": [p for p in trained if p.dim() > 1], "weight_decay": DECAY}
    others = {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([matrices, others], lr=lr, betas=(0.9, 0.95), eps=EPS)
    done = PlainSteps([value for row in _rows(model, 0) for value in row.before.tolist()])
    for version in range(versions):
        rows = _rows(model, version)
        figures = []
        for iteration in range(updates):
            for part in split_groups(4, updates, seed=1, version=version, iteration=iteration):
                chosen = [row for row in rows if row.place in part]
                optimizer.zero_grad()
                loss = torch.cat(_losses(model, chosen, name, version)).mean()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                figures.append(torch.stack([loss.detach(), norm]))
                optimizer.step()
        mean_loss, mean_norm = torch.stack(figures).mean(0).tolist()
        tokens = sum(len(row.before) for row in rows) * updates
        done.steps.append({"loss": mean_loss, "grad_norm": mean_norm, "trained_tokens": tokens})
        if version in (0, versions - 1):
            done.weights.append(weights())
    return done


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def _weights(model: Any, folder: Path) -> dict[str, Tensor]:
    """As they lie on a disk: in memory, transformers fuses the experts."""
    written = folder.with_name(f"{folder.name}-plain")
    model.save_pretrained(written)
    return load_file(written / "model.safetensors")


def _rows(model: Any, version: int) -> list[Row]:
    found = []
    for place, group in enumerate(make_batch(version).groups):
        rewards = torch.tensor([[sample.reward or 0.0 for sample in group.samples]]).double()
        valid = torch.tensor([[sample.reward is not None for sample in group.samples]])
        advantages = ADVANTAGES["grpo"](rewards, valid, valid.long())[0].tolist()
        judged = zip(group.samples, advantages, strict=True)
        found += [(place, group, sample, each) for sample, each in judged if sample.reward is not None]
    with torch.no_grad():
        values = _logprobs(model, [(group, sample) for _, group, sample, _ in found])
    return [Row(*each, before) for each, before in zip(found, values, strict=True)]


def _logprobs(model: Any, members: list[tuple[Group, Sample]]) -> list[Tensor]:
    """Log-probabilities of the completions, from one padded batch; the model is causal, so no token sees padding."""
    words = [_words(group, sample) for group, sample in members]
    logits_BTV = model(pad_sequence([torch.cat(pair) for pair in words], batch_first=True)).logits / TEMPERATURE
    rows = [
        logits_TV[len(prompt) - 1 : len(prompt) + len(completion) - 1]
        for logits_TV, (prompt, completion) in zip(logits_BTV, words, strict=True)
    ]
    return [
        row.log_softmax(-1).gather(-1, completion[:, None])[:, 0]
        for row, (_, completion) in zip(rows, words, strict=True)
    ]


def _words(group: Group, sample: Sample) -> tuple[Tensor, Tensor]:
    tokens = (torch.tensor(ids.copy(), dtype=torch.int64) for ids in (group.task.prompt_ids(), sample.token_ids()))
    prompt, completion = tokens
    return prompt, completion


def _losses(model: Any, rows: list[Row], name: str, version: int) -> list[Tensor]:
    """-w * min(r A, clip(r) A) of each token, 0 where w > cap; of a single update r is 1, and carries the gradient."""
    values = _logprobs(model, [(row.group, row.sample) for row in rows])
    return [_loss(row, logprobs, name, version) for row, logprobs in zip(rows, values, strict=True)]


def _loss(row: Row, logprobs: Tensor, name: str, version: int) -> Tensor:
    behaviour = torch.tensor(row.sample.token_logprobs().copy())
    advantage = row.advantage
    prox = row.before
    if name == "behaviour":
        product = (prox - behaviour).sum().exp().item()
        r = (logprobs - behaviour).exp()
        return -float(LEAST <= product <= MOST) * torch.minimum(r * advantage, r.clamp(0.5, 1.5) * advantage)
    if name == "loglinear":
        age = version - torch.tensor(row.sample.token_versions().copy())
        prox = behaviour + age / (age + 1) * (logprobs.detach() - behaviour)
    w = (prox - behaviour).exp()
    r = (logprobs - prox).exp()
    return -w * (w <= CAP) * torch.minimum(r * advantage, r.clamp(1 - LOW, 1 + HIGH) * advantage)


Penalty = Callable[[Group, Sample, Tensor], float]
"""(group, sample, which tokens of its completion are trained) -> what is taken from its reward."""


def plain_tokens(
    model: Any,
    objective: ObjectiveConfig,
    *,
    reference: Any = None,
    room: int | None = None,
    truncate: bool = False,
    penalty: Penalty | None = None,
    repetition_penalty: float | None = None,
) -> tuple[Tokens, Tensor]:
    """All trained tokens, and the weight of each. `room`: what is longer is truncated to it, or else dropped.
    `repetition_penalty`: of truncated samples; None: they are not truncated."""
    batch = make_aged_batch(truncated=repetition_penalty is not None)
    size = max(len(group.samples) for group in batch.groups)
    rewards_BG = torch.zeros(len(batch.groups), size).double()
    lengths_BG = torch.zeros(len(batch.groups), size)
    trained: dict[tuple[int, int], Tensor] = {}
    for row, group in enumerate(batch.groups):
        for column, sample in enumerate(group.samples):
            if sample.reward is not None:
                trained[row, column] = _trained(group, sample, batch.mask_below, room, truncate)
                taken = penalty(group, sample, trained[row, column]) if penalty else 0.0
                rewards_BG[row, column] = sample.reward - taken
                lengths_BG[row, column] = sum(sample.written_by_policy().tolist())
    counts_BG = lengths_BG.clone()
    if objective.advantage == "opob":
        for (row, column), chosen in trained.items():
            sample = batch.groups[row].samples[column]
            moved = reference_logprobs(model, batch.groups[row], sample) - torch.tensor(sample.token_logprobs().copy())
            counts_BG[row, column] *= moved[chosen].sum().exp().square() if chosen.any() else 0.0
    advantages_BG = ADVANTAGES[objective.advantage](rewards_BG, lengths_BG > 0, counts_BG)
    if objective.advantage_norm == "batch":
        values = [advantages_BG[place] for place, chosen in trained.items() for _ in range(int(chosen.sum()))]
        whole = torch.stack(values)
        advantages_BG = (advantages_BG - whole.mean()) / (whole.std() + 1e-5)
    groups_BG = torch.arange(lengths_BG.shape[0])[:, None].expand(lengths_BG.shape)
    weights_BG = AGGREGATIONS[objective.aggregation](lengths_BG.long().flatten(), groups_BG.flatten(), LONGEST).reshape(
        lengths_BG.shape
    )
    columns: list[list[Tensor]] = []
    for (row, column), chosen in trained.items():
        group = batch.groups[row]
        sample = batch.groups[row].samples[column]
        if chosen.any():
            logprobs, entropies = plain_logprobs(model, group, sample, repetition_penalty or 1.0)
            ones = torch.ones(sample.length, dtype=torch.float64)
            parts = [
                logprobs,
                entropies,
                torch.tensor(sample.token_logprobs().copy()).double(),
                torch.tensor(sample.token_versions().copy()),
                ones * advantages_BG[row, column],
                ones * weights_BG[row, column],
                torch.full((sample.length,), len(columns)),
                ones * 0 if reference is None else reference_logprobs(reference, group, sample),
            ]
            columns.append([part[chosen] for part in parts])
    logprobs_N, entropy_N, behaviour_N, versions_N, advantages_N, weights_N, segment_N, reference_N = (
        torch.cat(parts) for parts in zip(*columns, strict=True)
    )
    tokens = Tokens(
        logprobs_N,
        PROXIMALS[objective.prox](logprobs_N, behaviour_N, AGED_VERSION - versions_N),
        behaviour_N,
        advantages_N,
        segment_N,
        segments=len(columns),
        reference_N=None if reference is None else reference_N,
        entropy_N=entropy_N,
    )
    return tokens, weights_N


def plain_logprobs(model: Any, group: Group, sample: Sample, repetition_penalty: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy at every token of the completion, over the tokens of its sampling mask, if any."""
    prompt, completion = _words(group, sample)
    logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
    mask = sample.sampling_mask()
    if mask is not None:
        words = torch.cat([prompt, completion])
        rows = []
        for position, row in enumerate(logits):
            repeated = torch.zeros_like(row, dtype=torch.bool)
            repeated[words[: len(prompt) + position]] = True
            penalised = torch.where(row > 0, row / repetition_penalty, row * repetition_penalty)
            row = torch.where(repeated, penalised, row)
            kept = torch.zeros_like(row, dtype=torch.bool)
            kept[torch.from_numpy(mask.slice_rows(position, position + 1).token_ids.astype("int64"))] = True
            rows.append(row.masked_fill(~kept, -1e6) if kept.any() else row)
        logits = torch.stack(rows)
    logs = (logits / TEMPERATURE).log_softmax(-1)
    return logs.gather(-1, completion[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def reference_logprobs(model: Any, group: Group, sample: Sample) -> Tensor:
    with torch.no_grad():
        return plain_logprobs(model, group, sample)[0]


def minus_gradient(model: Any) -> dict[str, Tensor]:
    """How far plain gradient descent with a rate of 1 moves the weights."""
    return {name: -parameter.grad for name, parameter in model.named_parameters()}


def _trained(group: Group, sample: Sample, mask_below: int, room: int | None, truncate: bool) -> Tensor:
    written = zip(sample.written_by_policy().tolist(), sample.token_versions().tolist(), strict=True)
    trained = torch.tensor([wrote and version >= mask_below for wrote, version in written])
    prompt = len(group.task.prompt_ids())
    if room is not None and prompt + sample.length - 1 > room:
        trained[room + 1 - prompt if truncate else 0 :] = False
    return trained
