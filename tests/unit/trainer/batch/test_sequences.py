"""From a batch to tensors: what is predicted, from where, and what gets a gradient."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from async_grpo.config.objective import ObjectiveConfig
from async_grpo.telemetry.metrics import METRICS
from async_grpo.wire import Batch, Group, Sample, Task, Turn, tokens_to_bytes
from tests.support.buffer_cases import mixed_sample
from tests.support.rollout_fakes import config_of
from trainer.batch.sequences import MIXED, micro_batch, reweighed, sequences_of, trained_tokens
from trainer.step.results import step_row, trained_row

PROMPT = [7, 8, 9]


def batch_of(*samples: Sample, mask_below: int = 0) -> Batch:
    task = Task(index=0, prompt="", prompt_tokens=tokens_to_bytes(PROMPT), answer="")
    group = Group(seq=0, attempt=1, task=task, samples=list(samples))
    return Batch(epoch=1, version=3, groups=[group], mask_below=mask_below)


OLD_AND_YOUNG, YOUNG = mixed_sample(1, 3, 6), mixed_sample(3, 3, 4)


def test_every_completion_token_is_predicted_from_the_position_before_it() -> None:
    tensors = micro_batch(sequences_of(batch_of(OLD_AND_YOUNG, YOUNG), ObjectiveConfig(), 64))
    assert tensors.tokens_1T.tolist() == [[*PROMPT, 0, 1, 2, 3, 4, *PROMPT, 0, 1, 2]]
    assert tensors.trained_N.tolist() == [2, 3, 4, 5, 6, 7, 10, 11, 12, 13]
    assert tensors.labels_N.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]


@pytest.mark.parametrize("mask_below", [2, 3])
def test_masked_tokens_stay_as_context_and_get_no_gradient(mask_below: int) -> None:
    tensors = micro_batch(sequences_of(batch_of(OLD_AND_YOUNG, YOUNG, mask_below=mask_below), ObjectiveConfig(), 64))
    assert tensors.tokens_1T.tolist() == [[*PROMPT, 0, 1, 2, 3, 4, *PROMPT, 0, 1, 2]]
    assert tensors.trained_N.tolist() == [5, 6, 7, 10, 11, 12, 13]
    assert tensors.labels_N.tolist() == [3, 4, 5, 0, 1, 2, 3]
    sizes = {len(each) for each in (tensors.behaviour_N, tensors.advantages_N, tensors.weights_N, tensors.versions_N)}
    assert sizes == {7}
    whole = micro_batch(sequences_of(batch_of(mixed_sample(1, 1), YOUNG, mask_below=2), ObjectiveConfig(), 64))
    assert whole.trained_N.tolist() == [8, 9, 10, 11], "one that is masked whole is context only"


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_masking_does_not_change_the_weight_of_the_other_tokens(aggregation: str) -> None:
    objective = ObjectiveConfig(aggregation=aggregation)
    whole, masked = (
        micro_batch(sequences_of(batch_of(OLD_AND_YOUNG, YOUNG, mask_below=below), objective, 64)) for below in (0, 2)
    )
    assert masked.weights_N.tolist() == whole.weights_N[3:].tolist()


def test_ages_are_those_of_the_tokens_with_a_gradient() -> None:
    result = {metric.key: 0 for metric in METRICS if metric.reduce is not None}
    rows = [step_row(batch_of(OLD_AND_YOUNG, YOUNG, mask_below=below), result, lr=0.1, seconds={}) for below in (0, 2)]
    assert [(row["age_max"], row["masked_tokens"]) for row in rows] == [(2, 0), (0, 3)]


def test_what_the_environment_wrote_is_context_and_counts_in_no_denominator() -> None:
    turns = [Turn(0, 2, True, "tool"), Turn(2, 5, False), Turn(5, 6, True, "stop")]
    tensors = micro_batch(
        sequences_of(batch_of(replace(mixed_sample(3, 3, 6), turns=turns), YOUNG), ObjectiveConfig(), 64)
    )
    assert tensors.tokens_1T.tolist() == [[*PROMPT, 0, 1, 2, 3, 4, *PROMPT, 0, 1, 2]]
    assert tensors.labels_N.tolist() == [0, 1, 5, 0, 1, 2, 3]
    assert tensors.weights_N.tolist() == pytest.approx([1 / 7] * 7)


def test_every_token_knows_its_version_its_sequence_and_its_place_in_the_batch() -> None:
    members = sequences_of(batch_of(OLD_AND_YOUNG, YOUNG, mask_below=2), ObjectiveConfig(), 64)
    tensors = micro_batch([members[1], members[0]])
    assert tensors.versions_N.tolist() == [3] * 7
    assert tensors.whole_N.tolist() == [3] * 4 + [MIXED] * 3
    assert tensors.segment_N.tolist() == [0] * 4 + [1] * 3
    assert tensors.index_N.tolist() == [3, 4, 5, 6, 0, 1, 2]
    assert trained_tokens(members).index_N.tolist() == list(range(7))


def test_groups_of_unequal_size_have_advantages_of_their_own() -> None:
    one, other = batch_of(scored(YOUNG, 1.0), scored(YOUNG, 0.0), scored(YOUNG, 0.5)), batch_of(scored(YOUNG, 2.0))
    both = replace(one, groups=[*one.groups, *other.groups])
    alone = [sequences_of(batch, ObjectiveConfig(), 64) for batch in (one, other)]
    assert [member.advantage for member in sequences_of(both, ObjectiveConfig(), 64)] == pytest.approx(
        [member.advantage for members in alone for member in members]
    )


def test_the_groups_that_people_read_have_their_advantages_in_the_row_of_their_step() -> None:
    task = Task(index=0, prompt="", prompt_tokens=tokens_to_bytes(PROMPT), answer="")
    pairs = [[scored(YOUNG, 1.0), scored(YOUNG, 0.0)], [scored(YOUNG, 3.0), scored(YOUNG, 1.0)]]
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


def test_a_sequence_that_is_too_long_is_cut_and_the_others_keep_their_weight() -> None:
    batch, objective = batch_of(OLD_AND_YOUNG, YOUNG), ObjectiveConfig()
    whole = sequences_of(batch, objective, 64)
    cut = sequences_of(batch, objective, 64, room=6, truncate=True)
    assert [member.overlong for member in cut] == [True, False]
    assert cut[0].tokens.tolist() == whole[0].tokens.tolist()[:7]
    assert cut[0].length == 6
    assert [member.trained_tokens for member in cut] == [4, 4]
    assert [member.weight for member in cut] == [member.weight for member in whole]
    assert trained_tokens(cut).index_N.tolist() == list(range(8))


def test_or_it_is_dropped_and_counts_all_the_same() -> None:
    dropped = sequences_of(batch_of(OLD_AND_YOUNG, YOUNG), ObjectiveConfig(), 64, room=6)
    assert [member.trained_tokens for member in dropped] == [0, 4]
    assert [member.weight for member in dropped] == pytest.approx([1 / 10] * 2)


def test_one_whose_prompt_alone_is_too_long_gets_no_gradient() -> None:
    (member,) = sequences_of(batch_of(YOUNG), ObjectiveConfig(), 64, room=2, truncate=True)
    assert (member.trained_tokens, member.overlong) == (0, True)


@pytest.mark.parametrize(
    ("aggregation", "weights"), [("token_mean", [1 / 6, 1 / 4]), ("seq_mean_token_mean", [1 / 6, 1 / 4])]
)
def test_the_weights_of_a_mini_batch_are_those_of_a_batch_of_its_own(aggregation: str, weights: list[float]) -> None:
    objective = ObjectiveConfig(aggregation=aggregation)
    members = sequences_of(batch_of(OLD_AND_YOUNG, YOUNG), objective, 64)
    assert [reweighed([member], objective, 64)[0].weight for member in members] == pytest.approx(weights)
