"""Which tokens of a batch are predicted, from which positions, and which get a gradient."""

from __future__ import annotations

from statistics import fmean, stdev

import numpy as np
import pytest
from msgspec.structs import replace

from async_grpo.config.objective import ObjectiveConfig
from async_grpo.telemetry.metrics import METRICS
from async_grpo.wire import Batch, Group, Sample, Task, Turn, tokens_to_bytes
from tests.support.buffer_cases import mixed_sample
from tests.support.rollout_fakes import config_of
from trainer.batch.sequences import (
    MIXED,
    group_advantages,
    make_micro_batch,
    reweight_sequences,
    split_into_sequences,
    stack_trained_tokens,
)
from trainer.step.results import step_row, trained_row

PROMPT = [7, 8, 9]


def batch_of(*samples: Sample, mask_below: int = 0) -> Batch:
    task = Task(index=0, prompt="", prompt_tokens=tokens_to_bytes(PROMPT), answer="")
    group = Group(seq=0, attempt=1, task=task, samples=list(samples))
    return Batch(epoch=1, version=3, groups=[group], mask_below=mask_below)


OLD_AND_NEW, NEW = mixed_sample(1, 3, 6), mixed_sample(3, 3, 4)


def test_every_completion_token_is_predicted_from_the_position_before_it() -> None:
    tensors = make_micro_batch(split_into_sequences(batch_of(OLD_AND_NEW, NEW), ObjectiveConfig(), 64))
    assert tensors.tokens_1T.tolist() == [[*PROMPT, 0, 1, 2, 3, 4, *PROMPT, 0, 1, 2]]
    assert tensors.trained_N.tolist() == [2, 3, 4, 5, 6, 7, 10, 11, 12, 13]
    assert tensors.labels_N.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]


@pytest.mark.parametrize("mask_below", [2, 3])
def test_masked_tokens_stay_as_context_and_get_no_gradient(mask_below: int) -> None:
    tensors = make_micro_batch(
        split_into_sequences(batch_of(OLD_AND_NEW, NEW, mask_below=mask_below), ObjectiveConfig(), 64)
    )
    assert tensors.tokens_1T.tolist() == [[*PROMPT, 0, 1, 2, 3, 4, *PROMPT, 0, 1, 2]]
    assert tensors.trained_N.tolist() == [5, 6, 7, 10, 11, 12, 13]
    assert tensors.labels_N.tolist() == [3, 4, 5, 0, 1, 2, 3]
    sizes = {
        len(column) for column in (tensors.behaviour_N, tensors.advantages_N, tensors.weights_N, tensors.versions_N)
    }
    assert sizes == {7}
    whole = make_micro_batch(
        split_into_sequences(batch_of(mixed_sample(1, 1), NEW, mask_below=2), ObjectiveConfig(), 64)
    )
    assert whole.trained_N.tolist() == [8, 9, 10, 11], "a sequence whose tokens are all masked"


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_masking_does_not_change_the_weight_of_the_other_tokens(aggregation: str) -> None:
    objective = ObjectiveConfig(aggregation=aggregation)
    whole, masked = (
        make_micro_batch(split_into_sequences(batch_of(OLD_AND_NEW, NEW, mask_below=below), objective, 64))
        for below in (0, 2)
    )
    assert masked.weights_N.tolist() == whole.weights_N[3:].tolist()


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "prompt_mean"])
def test_a_failed_sample_without_tokens_changes_nothing_for_the_others(aggregation: str) -> None:
    objective = ObjectiveConfig(aggregation=aggregation)
    failed = Sample(tokens=b"", logprobs=b"", spans=[], finish_reason="deadline", unverifiable="deadline: late")
    failed.validate()
    samples = [replace(OLD_AND_NEW, reward=1.0), replace(NEW, reward=0.0)]
    expected, padded = (
        make_micro_batch(split_into_sequences(batch_of(*group), objective, 64))
        for group in (samples, [samples[0], failed, samples[1]])
    )
    assert padded.advantages_N.tolist() == expected.advantages_N.tolist()
    assert padded.weights_N.tolist() == expected.weights_N.tolist()
    row = step_row(
        batch_of(*samples, failed),
        {metric.key: 0 for metric in METRICS if metric.reduce is not None},
        lr=0.1,
        seconds={},
    )
    assert (row["unverifiable_samples"], row["reward_mean"]) == (1, 0.5)


def test_ages_count_only_tokens_with_a_gradient() -> None:
    result = {metric.key: 0 for metric in METRICS if metric.reduce is not None}
    rows = [step_row(batch_of(OLD_AND_NEW, NEW, mask_below=below), result, lr=0.1, seconds={}) for below in (0, 2)]
    assert [(row["age_max"], row["masked_tokens"]) for row in rows] == [(2, 0), (0, 3)]


def test_tokens_of_the_environment_are_context_and_not_in_the_denominator() -> None:
    turns = [Turn(0, 2, True, "tool"), Turn(2, 5, False), Turn(5, 6, True, "stop")]
    tensors = make_micro_batch(
        split_into_sequences(batch_of(replace(mixed_sample(3, 3, 6), turns=turns), NEW), ObjectiveConfig(), 64)
    )
    assert tensors.tokens_1T.tolist() == [[*PROMPT, 0, 1, 2, 3, 4, *PROMPT, 0, 1, 2]]
    assert tensors.labels_N.tolist() == [0, 1, 5, 0, 1, 2, 3]
    assert tensors.weights_N.tolist() == pytest.approx([1 / 7] * 7)


def test_every_token_has_its_version_its_sequence_and_its_index_in_the_batch() -> None:
    members = split_into_sequences(batch_of(OLD_AND_NEW, NEW, mask_below=2), ObjectiveConfig(), 64)
    tensors = make_micro_batch([members[1], members[0]])
    assert tensors.versions_N.tolist() == [3] * 7
    assert tensors.completion_version_N.tolist() == [3] * 4 + [MIXED] * 3
    assert tensors.segment_N.tolist() == [0] * 4 + [1] * 3
    assert tensors.index_N.tolist() == [3, 4, 5, 6, 0, 1, 2]
    assert stack_trained_tokens(members).index_N.tolist() == list(range(7))


def test_groups_of_unequal_size_have_the_advantages_they_have_alone() -> None:
    three = batch_of(scored(NEW, 1.0), scored(NEW, 0.0), scored(NEW, 0.5))
    single = batch_of(scored(NEW, 2.0))
    both = replace(three, groups=[*three.groups, *single.groups])
    alone = [split_into_sequences(batch, ObjectiveConfig(), 64) for batch in (three, single)]
    assert [sequence.advantage for sequence in split_into_sequences(both, ObjectiveConfig(), 64)] == pytest.approx(
        [sequence.advantage for members in alone for sequence in members]
    )


def test_the_trained_row_has_the_advantages_of_sampled_groups() -> None:
    task = Task(index=0, prompt="", prompt_tokens=tokens_to_bytes(PROMPT), answer="")
    pairs = [[scored(NEW, 1.0), scored(NEW, 0.0)], [scored(NEW, 3.0), scored(NEW, 1.0)]]
    groups = [Group(seq=seq, attempt=1, task=task, samples=pair) for seq, pair in zip((8, 9), pairs, strict=True)]
    batch = Batch(epoch=1, version=3, groups=groups, mask_below=2)
    config = config_of(trainer={"objective": {"advantage": "dr_grpo"}}, telemetry={"samples_every": 4})
    assert trained_row(batch, config, skipped=False) == {
        "step": 4,
        "skipped": False,
        "mask_below": 2,
        "groups": {8: [0.5, -0.5]},
    }


def scored(sample: Sample, reward: float) -> Sample:
    return replace(sample, reward=reward)


def test_a_truncated_sequence_does_not_change_the_weights() -> None:
    batch, objective = batch_of(OLD_AND_NEW, NEW), ObjectiveConfig()
    whole = split_into_sequences(batch, objective, 64)
    cut = split_into_sequences(batch, objective, 64, max_sequence_tokens=6, truncate=True)
    assert [sequence.overlong for sequence in cut] == [True, False]
    assert cut[0].tokens.tolist() == whole[0].tokens.tolist()[:7]
    assert cut[0].length == 6
    assert [sequence.trained_tokens for sequence in cut] == [4, 4]
    assert [sequence.weight for sequence in cut] == [sequence.weight for sequence in whole]
    assert stack_trained_tokens(cut).index_N.tolist() == list(range(8))


def test_a_dropped_sequence_still_counts_in_the_denominator() -> None:
    dropped = split_into_sequences(batch_of(OLD_AND_NEW, NEW), ObjectiveConfig(), 64, max_sequence_tokens=6)
    assert [sequence.trained_tokens for sequence in dropped] == [0, 4]
    assert [sequence.weight for sequence in dropped] == pytest.approx([1 / 10] * 2)


def test_a_sequence_whose_prompt_is_too_long_gets_no_gradient() -> None:
    (member,) = split_into_sequences(batch_of(NEW), ObjectiveConfig(), 64, max_sequence_tokens=2, truncate=True)
    assert (member.trained_tokens, member.overlong) == (0, True)


@pytest.mark.parametrize(
    ("aggregation", "weights"), [("token_mean", [1 / 6, 1 / 4]), ("seq_mean_token_mean", [1 / 6, 1 / 4])]
)
def test_a_mini_batch_has_the_weights_of_a_separate_batch(aggregation: str, weights: list[float]) -> None:
    objective = ObjectiveConfig(aggregation=aggregation)
    members = split_into_sequences(batch_of(OLD_AND_NEW, NEW), objective, 64)
    assert [reweight_sequences([sequence], objective, 64)[0].weight for sequence in members] == pytest.approx(weights)


def masked(sample: Sample) -> Sample:
    """The sample with two tokens that could be sampled at each position: 0 and the sampled one plus 10."""
    tokens = sample.token_ids() + 10
    ids = [token for sampled in tokens.tolist() for token in (7, sampled)]
    counts = [2] * len(tokens)
    return replace(
        sample,
        tokens=tokens.tobytes(),
        mask_ids=np.array(ids, np.int32).tobytes(),
        mask_counts=np.array(counts, np.uint16).tobytes(),
    )


def test_kept_tokens_are_those_of_the_trained_positions_and_know_which_occurred_before() -> None:
    (sequence,) = split_into_sequences(batch_of(masked(NEW)), ObjectiveConfig(), 64)
    kept = make_micro_batch([sequence]).kept
    assert kept is not None
    assert kept.ids_NW.tolist() == [[7, 10], [7, 11], [7, 12], [7, 13]]
    assert kept.repeated_NW.tolist() == [[True, False]] * 4, "7 is in the prompt"


def test_a_sample_without_mask_gets_no_gradient_beside_samples_with_one() -> None:
    mixed = split_into_sequences(batch_of(OLD_AND_NEW, masked(NEW)), ObjectiveConfig(), 64)
    assert [sequence.trained_tokens for sequence in mixed] == [0, 4]
    assert [sequence.denominator_tokens for sequence in mixed] == [6, 4], "weights do not change"
    kept = make_micro_batch(mixed).kept
    assert kept is not None
    assert len(kept.ids_NW) == 4


def test_gdpo_normalises_each_reward_function_separately() -> None:
    scores = [(1.0, 0.01), (0.0, 0.03), (1.0, 0.02), (0.0, 0.02)]
    weights = {"right": 1.0, "format": 0.5}
    samples = [
        replace(NEW, rewards={"right": right, "format": form}, reward=right + 0.5 * form) for right, form in scores
    ]
    found = group_advantages(batch_of(*samples).groups, "gdpo", reward_weights=weights)[0]

    def normalise(values: list[float]) -> list[float]:
        return [(value - fmean(values)) / (stdev(values) + 1e-6) for value in values]

    right, form = (normalise([score[k] for score in scores]) for k in (0, 1))
    assert found == pytest.approx([a + 0.5 * b for a, b in zip(right, form, strict=True)], rel=1e-9)


def test_gdpo_counts_a_penalty_that_no_function_explains_as_one_more_function() -> None:
    samples = [replace(NEW, rewards={"right": right}, reward=right - penalty) for right, penalty in ((1, 0), (0, 0.5))]
    found = group_advantages(batch_of(*samples).groups, "gdpo", reward_weights={"right": 1.0})[0]
    deviation = 0.5**0.5
    assert found == pytest.approx([2 * 0.5 / deviation, -2 * 0.5 / deviation], rel=1e-4)
