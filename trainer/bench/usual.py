"""The step as Hugging Face trainers of this kind usually make it: padded at both ends, logits wherever a token may be.

    prompts padded at the left | completions padded at the right --> logits of all positions of the longest completion

Facts from TRL's `GRPOTrainer` (https://huggingface.co/docs/trl/grpo_trainer): prompts and completions of a micro-batch
are padded apart and joined, the model is given an attention mask and asked for the logits of as many positions as the
longest completion has, and the log-probabilities of padding are masked out afterwards; eight rows is its default.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer import sequences as ours
from trainer.bench.padded import PlainModel
from trainer.bench.rounds import Done

ROWS = 8


def usual_step(plain: PlainModel, members: Sequence[ours.Sequence], rows: int = ROWS) -> Done:
    """One step over the whole batch."""
    plain.model.set_attn_implementation("sdpa")
    loss, cells = 0.0, 0
    for start in range(0, len(members), rows):
        chosen = members[start : start + rows]
        tokens_BL, mask_BL, longest = _padded(chosen)
        logits_BCV = plain.model(
            input_ids=tokens_BL, attention_mask=mask_BL, logits_to_keep=longest + 1, use_cache=False
        ).logits[:, :-1]
        logits_BCV = logits_BCV / plain.config.sampling.temperature
        labels_BC = tokens_BL[:, -longest:]
        taken_BC = logits_BCV.gather(-1, labels_BC[..., None])[..., 0]
        logprobs_BC = taken_BC - logits_BCV.float().logsumexp(-1)
        value = plain.loss(logprobs_BC[_trained(chosen, longest)], chosen)
        value.backward()
        loss += value.item()
        cells += tokens_BL.numel()
    return Done(loss, plain.update(), sum(member.length for member in members) / cells)


def _padded(rows: Sequence[ours.Sequence]) -> tuple[Tensor, Tensor, int]:
    """Tokens and mask [B, L], and the longest completion. A token more than is read: the last predicts nothing."""
    tokens = [torch.from_numpy(row.tokens).long() for row in rows]
    prompts = [each[: row.prompt_tokens] for each, row in zip(tokens, rows, strict=True)]
    completions = [each[row.prompt_tokens :] for each, row in zip(tokens, rows, strict=True)]
    widest = max(map(len, prompts))
    left_BP = torch.stack([F.pad(prompt, (widest - len(prompt), 0), value=-1) for prompt in prompts])
    right_BC = pad_sequence(completions, batch_first=True, padding_value=-1)
    tokens_BL = torch.cat([left_BP, right_BC], 1)
    mask_BL = (tokens_BL >= 0).long()
    return tokens_BL.clamp(min=0), mask_BL, right_BC.shape[1]


def _trained(rows: Sequence[ours.Sequence], longest: int) -> Tensor:
    """bool [B, C]: the completion tokens that get a gradient."""
    trained_BC = torch.zeros(len(rows), longest, dtype=torch.bool)
    for index, row in enumerate(rows):
        trained_BC[index, torch.from_numpy(row.places_N)] = True
    return trained_BC
