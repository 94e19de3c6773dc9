"""Baselines of the trainer's step, in plain PyTorch with the Hugging Face model.

`padded_step`: the step one would write without this trainer, in padded micro-batches.

    sequences --in batch order, or by length--> rows of a micro-batch, right-padded to its longest
              --> hidden states --trained positions only--> logits --> log-probabilities --> loss, backward
    after the last micro-batch: clip, AdamW

It does everything that makes such a step fast: it pads to the longest row of a micro-batch, not of the batch; the
output layer only computes trained positions; gradients accumulate in place; the optimizer is fused. The attention mask
may be omitted: rows are padded at their end and attention is causal, so no real token sees a padded one.

`usual_step`: the step of typical Hugging Face trainers.

    prompts left-padded | completions right-padded --> logits of all positions of the longest completion

Facts from TRL's `GRPOTrainer` (https://huggingface.co/docs/trl/grpo_trainer): prompts and completions of a micro-batch
are padded separately and joined, the model gets an attention mask and returns the logits of as many positions as the
longest completion has, and the log-probabilities of padding are masked afterwards. Eight rows is its default.

Upper bounds: the Hugging Face model without padding, forward and backward only.

- `one_by_one`      every sequence is a separate micro-batch
- `packed_by_hand`  sequences end to end in one row, each attending to itself: the packing of the trainer's step between
                    the layers of Hugging Face, so the remaining difference is the cost of Megatron-core
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from async_grpo.config import RunConfig
from trainer.batch import sequences as ours

Attention = Literal["sdpa", "sdpa without mask", "eager"]
USUAL_ROWS = 8
_BY_HAND = "packed_by_hand"
Forward = Callable[[Sequence[ours.TrainingSequence]], tuple[Tensor, int]]
"""Sequences -> log-probabilities of their trained tokens, and the number of computed positions."""


@dataclass(frozen=True, slots=True)
class BenchStep:
    """Result of one step of a contestant."""

    loss: float
    grad_norm: float
    efficiency: float
    """Tokens of sequences / computed positions."""


@dataclass(frozen=True, slots=True)
class PaddedSetting:
    """How the baseline divides its batch."""

    rows: int
    """Sequences per micro-batch."""
    attention: Attention = "sdpa"
    by_length: bool = False
    """True if sequences of similar length share a micro-batch, as with a sorted data loader."""

    def __str__(self) -> str:
        order = "sorted by length, " if self.by_length else ""
        return f"{self.rows} rows, {order}{self.attention}"


class PlainModel:
    """The Hugging Face model and torch's AdamW, shared by all baselines.

    The learning rate is 0, so that no baseline affects another.
    """

    def __init__(self, model: Any, config: RunConfig) -> None:
        self.model = model
        self.config = config
        optimizer = config.trainer.optimizer
        self._adam = torch.optim.AdamW(
            model.parameters(),
            lr=0.0,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )

    @property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def logprobs(self, hidden_NH: Tensor, labels_N: Tensor) -> Tensor:
        """Return the log-probabilities of these tokens under the sampled distribution."""
        logits_NV = self.model.lm_head(hidden_NH).float() / self.config.sampling.temperature
        return -F.cross_entropy(logits_NV, labels_N, reduction="none")

    def loss(self, logprobs_N: Tensor, members: Sequence[ours.TrainingSequence]) -> Tensor:
        """Return the decoupled PPO loss, weighted per token; the proximal policy is the one before the step."""
        rule = self.config.trainer.objective
        assert rule.clip_low is not None and rule.clip_high is not None and rule.behaviour_cap is not None
        constant_N = logprobs_N.detach()
        behaviour_N = torch.cat([torch.from_numpy(m.behaviour_C[m.positions_N]) for m in members])
        advantage_N = torch.cat([torch.full((m.trained_tokens,), m.advantage) for m in members])
        weight_N = torch.cat([torch.full((m.trained_tokens,), m.weight) for m in members])
        ratio_N = (logprobs_N - constant_N).exp()
        clipped_N = ratio_N.clamp(1 - rule.clip_low, 1 + rule.clip_high)
        importance_N = (constant_N - behaviour_N).exp()
        importance_N = importance_N.masked_fill(importance_N > rule.behaviour_cap, 0.0)
        return (weight_N * importance_N * -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)).sum()

    def step(
        self, batches: Iterable[Sequence[ours.TrainingSequence]], forward: Forward, *, update: bool = True
    ) -> BenchStep:
        """Run forward and backward over all micro-batches; with `update`, also clip the gradients and step AdamW."""
        loss = 0.0
        tokens = 0
        positions = 0
        for members in batches:
            logprobs_N, computed = forward(members)
            value = self.loss(logprobs_N, members)
            value.backward()
            loss += value.item()
            tokens += sum(member.length for member in members)
            positions += computed
        if update:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.trainer.optimizer.clip_grad)
            self._adam.step()
        else:
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.model.parameters()])
        self._adam.zero_grad(set_to_none=False)
        return BenchStep(loss, float(norm), tokens / positions)


def padded_step(
    setting: PaddedSetting, plain: PlainModel, members: Sequence[ours.TrainingSequence], *, update: bool = True
) -> BenchStep:
    """Run one step over the whole batch in padded micro-batches."""
    plain.model.set_attn_implementation("eager" if setting.attention == "eager" else "sdpa")
    ordered = sorted(members, key=lambda member: member.length) if setting.by_length else members
    masked = setting.attention != "sdpa without mask"
    return plain.step(
        _split_rows(ordered, setting.rows), lambda rows: _padded_forward(plain, rows, masked), update=update
    )


def one_by_one(plain: PlainModel, members: Sequence[ours.TrainingSequence]) -> BenchStep:
    """Run forward and backward without padding, one sequence per micro-batch."""
    return padded_step(PaddedSetting(1, "sdpa without mask"), plain, members, update=False)


def packed_by_hand(plain: PlainModel, packs: Sequence[Sequence[ours.TrainingSequence]]) -> BenchStep:
    """Run forward and backward over packed rows. `packs`: the sequences of each micro-batch."""
    AttentionInterface.register(_BY_HAND, _packed_attention)
    plain.model.set_attn_implementation(_BY_HAND)
    return plain.step(packs, lambda members: _packed_forward(plain, members), update=False)


def usual_step(plain: PlainModel, members: Sequence[ours.TrainingSequence]) -> BenchStep:
    """Run one step over the whole batch as typical trainers do."""
    plain.model.set_attn_implementation("sdpa")
    return plain.step(_split_rows(members, USUAL_ROWS), lambda rows: _usual_forward(plain, rows))


def _split_rows(members: Sequence[ours.TrainingSequence], rows: int) -> Iterator[Sequence[ours.TrainingSequence]]:
    for start in range(0, len(members), rows):
        yield members[start : start + rows]


def _padded_forward(plain: PlainModel, rows: Sequence[ours.TrainingSequence], masked: bool) -> tuple[Tensor, int]:
    """Run B rows, right-padded to L. Only trained positions reach the output layer."""
    tokens_BL = pad_sequence([torch.from_numpy(row.tokens[:-1]).long() for row in rows], batch_first=True)
    width = tokens_BL.shape[1]
    mask_BL = torch.arange(width) < torch.tensor([row.length for row in rows])[:, None]
    hidden_BLH = plain.model.model(
        input_ids=tokens_BL, attention_mask=mask_BL if masked else None, use_cache=False
    ).last_hidden_state
    positions_N = torch.cat(
        [torch.from_numpy(i * width + row.prompt_tokens - 1 + row.positions_N) for i, row in enumerate(rows)]
    )
    labels_N = torch.cat([torch.from_numpy(row.tokens[row.prompt_tokens + row.positions_N]).long() for row in rows])
    return plain.logprobs(hidden_BLH.flatten(0, 1).index_select(0, positions_N), labels_N), tokens_BL.numel()


def _packed_forward(plain: PlainModel, members: Sequence[ours.TrainingSequence]) -> tuple[Tensor, int]:
    """Run one row of T tokens without padding."""
    batch = ours.make_micro_batch(members)
    lengths = [member.length for member in members]
    hidden_1TH = plain.model.model(
        input_ids=batch.tokens_1T,
        position_ids=batch.positions_1T,
        attention_mask={"full_attention": None},
        use_cache=False,
        lengths=lengths,
    ).last_hidden_state
    return plain.logprobs(hidden_1TH[0].index_select(0, batch.trained_N), batch.labels_N), sum(lengths)


def _packed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, lengths: list[int], **_: Any
) -> tuple[Tensor, None]:
    """Attend within each sequence: [1, heads, T, d] -> [1, T, heads, d]."""
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _usual_forward(plain: PlainModel, rows: Sequence[ours.TrainingSequence]) -> tuple[Tensor, int]:
    """Run B rows, prompts left-padded and completions right-padded to C; logits of C positions."""
    tokens_BL, mask_BL, longest = _pad_rows(rows)
    logits_BCV = plain.model(
        input_ids=tokens_BL, attention_mask=mask_BL, logits_to_keep=longest + 1, use_cache=False
    ).logits[:, :-1]
    logits_BCV = logits_BCV / plain.config.sampling.temperature
    labels_BC = tokens_BL[:, -longest:]
    taken_BC = logits_BCV.gather(-1, labels_BC[..., None])[..., 0]
    logprobs_BC = taken_BC - logits_BCV.float().logsumexp(-1)
    trained_BC = torch.zeros(len(rows), longest, dtype=torch.bool)  # the completion tokens that get a gradient
    for index, row in enumerate(rows):
        trained_BC[index, torch.from_numpy(row.positions_N)] = True
    return logprobs_BC[trained_BC], tokens_BL.numel()


def _pad_rows(rows: Sequence[ours.TrainingSequence]) -> tuple[Tensor, Tensor, int]:
    """Return tokens and mask [B, L], and the length of the longest completion. The last token predicts nothing."""
    tokens = [torch.from_numpy(row.tokens).long() for row in rows]
    prompts = [row_tokens[: row.prompt_tokens] for row_tokens, row in zip(tokens, rows, strict=True)]
    completions = [row_tokens[row.prompt_tokens :] for row_tokens, row in zip(tokens, rows, strict=True)]
    longest_prompt = max(map(len, prompts))
    left_BP = torch.stack([F.pad(prompt, (longest_prompt - len(prompt), 0), value=-1) for prompt in prompts])
    right_BC = pad_sequence(completions, batch_first=True, padding_value=-1)
    tokens_BL = torch.cat([left_BP, right_BC], 1)
    mask_BL = (tokens_BL >= 0).long()
    return tokens_BL.clamp(min=0), mask_BL, right_BC.shape[1]
