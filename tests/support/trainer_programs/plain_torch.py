"""The aged batch as the objective sees it, from the Hugging Face model, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from async_grpo.algorithms import ADVANTAGES, AGGREGATIONS, PROXIMALS, Tokens
from async_grpo.config.objective import ObjectiveConfig
from async_grpo.wire import Group, Sample
from tests.support.trainer_programs.aged_batch import LONGEST, VERSION, make_aged_batch

Penalty = Callable[[Group, Sample, Tensor], float]
"""(group, sample, which tokens of its completion are trained) -> what is taken from its reward."""


def plain_tokens(
    model: Any,
    objective: ObjectiveConfig,
    *,
    temperature: float,
    reference: Any = None,
    room: int | None = None,
    truncate: bool = False,
    penalty: Penalty | None = None,
) -> tuple[Tokens, Tensor]:
    """All trained tokens, and the weight of each. `room`: what is longer is truncated to it, or else dropped."""
    batch = make_aged_batch()
    size = max(len(group.samples) for group in batch.groups)
    rewards_BG, lengths_BG = torch.zeros(len(batch.groups), size).double(), torch.zeros(len(batch.groups), size)
    for row, group in enumerate(batch.groups):
        for column, sample in enumerate(group.samples):
            if sample.reward is not None:
                trained = _trained(group, sample, batch.mask_below, room, truncate)
                rewards_BG[row, column] = sample.reward - (penalty(group, sample, trained) if penalty else 0.0)
                lengths_BG[row, column] = sum(sample.written_by_policy().tolist())
    advantages_BG = ADVANTAGES[objective.advantage](rewards_BG, lengths_BG > 0, lengths_BG)
    weights_BG = AGGREGATIONS[objective.aggregation](lengths_BG.long().flatten(), LONGEST).reshape(lengths_BG.shape)
    columns: list[list[Tensor]] = []
    for row, group in enumerate(batch.groups):
        for column, sample in enumerate(group.samples):
            trained = _trained(group, sample, batch.mask_below, room, truncate)
            if sample.reward is None or not trained.any():
                continue
            logprobs, entropies = plain_logprobs(model, group, sample, temperature)
            ones = torch.ones(sample.length, dtype=torch.float64)
            parts = [
                logprobs,
                entropies,
                torch.tensor(sample.token_logprobs().copy()).double(),
                torch.tensor(sample.token_versions().copy()),
                ones * advantages_BG[row, column],
                ones * weights_BG[row, column],
                torch.full((sample.length,), len(columns)),
                ones * 0 if reference is None else reference_logprobs(reference, group, sample, temperature),
            ]
            columns.append([part[trained] for part in parts])
    logprobs_N, entropy_N, behaviour_N, versions_N, advantages_N, weights_N, segment_N, reference_N = (
        torch.cat(parts) for parts in zip(*columns, strict=True)
    )
    prox_N = PROXIMALS[objective.prox](logprobs_N, behaviour_N, VERSION - versions_N)
    tokens = Tokens(
        logprobs_N,
        prox_N,
        behaviour_N,
        advantages_N,
        segment_N,
        segments=len(columns),
        reference_N=None if reference is None else reference_N,
        entropy_N=entropy_N,
    )
    return tokens, weights_N


def plain_logprobs(model: Any, group: Group, sample: Sample, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy at every token of the completion."""
    prompt = torch.tensor(group.task.prompt_ids().copy(), dtype=torch.int64)
    words = torch.tensor(sample.token_ids().copy(), dtype=torch.int64)
    logits = model(torch.cat([prompt, words])[None]).logits[0, len(prompt) - 1 : -1] / temperature
    logs = logits.log_softmax(-1)
    return logs.gather(-1, words[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def reference_logprobs(model: Any, group: Group, sample: Sample, temperature: float) -> Tensor:
    with torch.no_grad():
        return plain_logprobs(model, group, sample, temperature)[0]


def _trained(group: Group, sample: Sample, mask_below: int, room: int | None, truncate: bool) -> Tensor:
    written = zip(sample.written_by_policy().tolist(), sample.token_versions().tolist(), strict=True)
    trained = torch.tensor([wrote and version >= mask_below for wrote, version in written])
    prompt = len(group.task.prompt_ids())
    if room is not None and prompt + sample.length - 1 > room:
        trained[room + 1 - prompt if truncate else 0 :] = False
    return trained
