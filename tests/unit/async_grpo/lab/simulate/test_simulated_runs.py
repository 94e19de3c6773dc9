"""Simulated runs: closed forms, the age bound, conservation of groups, and settings of other systems."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from async_grpo.errors import ConfigError
from async_grpo.lab.simulate.buffer import SimulatedBuffer
from async_grpo.lab.simulate.lengths import LengthModel
from async_grpo.lab.simulate.results import summarize_run
from async_grpo.lab.simulate.settings import SimulatedSettings
from async_grpo.lab.simulate.simulation import simulate
from async_grpo.lab.simulate.timings import (
    BufferTimings,
    EngineTimings,
    FaultTimings,
    SyncTimings,
    Timings,
    TrainerTimings,
    VerifierTimings,
)
from async_grpo.lab.simulate.whatif import simulate_changes, with_staleness
from async_grpo.staleness import OnStale, ReplayPolicy, Selector, StalenessWindow
from tests.support.recorded_runs import recorded_run

CONSTANT = Timings(
    prompt_tokens=1,
    lengths=LengthModel(mean=10),
    engine=EngineTimings(step_s=1.0, request_s=0.0, prefill_s=0.0, call_s=0.0),
    trainer=TrainerTimings(base_s=4.0, token_s=0.0, take_s=0.0),
    sync=SyncTimings(stall_s=1.0, transfer_s=2.0, load_s=3.0),
)
TAILED = CONSTANT.model_copy(
    update={
        "lengths": LengthModel(kind="lognormal", mean=20, sigma=1.0, cap=200),
        "engine": EngineTimings(step_s=0.1, request_s=0.02, prefill_s=0.01, call_s=0.01),
        "trainer": TrainerTimings(base_s=4.0, token_s=0.001, variation=0.2, checkpoint_s=0.5),
    }
)


def settings_of(
    max_staleness: int = 0,
    *,
    steps: int = 30,
    selector: Selector = "fifo",
    on_stale: OnStale = "drop",
    window: int = 1,
    max_uses: int = 1,
    **others: object,
) -> SimulatedSettings:
    """Four groups of four samples per step, on one server with slots for all of them."""
    horizon = StalenessWindow(max_staleness, 4, steps * 4)
    policy = ReplayPolicy(horizon, selector, window, on_stale, max_uses=max_uses)
    plain: dict[str, object] = {"servers": 1, "max_concurrency": 16}
    return SimulatedSettings(policy=policy, steps=steps, group_size=4, **{**plain, **others})  # type: ignore[arg-type]


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    # transfer 2 + load 3 + generation 10 + training 4 + stall 1
    metrics = summarize_run(simulate(settings_of(0), CONSTANT))
    assert metrics.step_s == pytest.approx(20.0)
    assert metrics.tokens_per_s == pytest.approx(16 * 10 / 20.0)
    assert metrics.trainer_idle == pytest.approx(15 / 20)
    assert metrics.rollout_idle == pytest.approx(10 / 20)
    assert metrics.age_max == 0


def test_servers_share_a_window_that_is_smaller_than_their_slots() -> None:
    crowded = CONSTANT.model_copy(
        update={
            "engine": EngineTimings(step_s=0.1, request_s=0.1, prefill_s=0.0, call_s=0.0),
            "trainer": TrainerTimings(base_s=0.1, token_s=0.0, take_s=0.0),
            "sync": SyncTimings(stall_s=0.0, transfer_s=0.0, load_s=0.0),
        }
    )
    took_s = [simulate(settings_of(1, servers=servers, max_concurrency=64), crowded).ended_s for servers in (1, 2, 4)]
    assert took_s[1] < 0.7 * took_s[0]
    assert took_s[2] < 0.7 * took_s[1]


def test_with_a_step_ahead_the_slower_side_sets_the_pace() -> None:
    # A trainer of 30 s hides the 10 s of generation: 30 + 1 s of stall, with tokens that are one step old.
    slow = CONSTANT.model_copy(update={"trainer": TrainerTimings(base_s=30.0, token_s=0.0, take_s=0.0)})
    metrics = summarize_run(simulate(settings_of(1), slow))
    assert metrics.step_s == pytest.approx(31.0)
    assert (metrics.trainer_idle, metrics.age_mean) == (pytest.approx(0.0), pytest.approx(1.0))


def test_too_few_verifiers_are_the_bottleneck() -> None:
    judged = CONSTANT.model_copy(update={"verifier": VerifierTimings(sample_s=5.0, workers=2)})
    metrics = summarize_run(simulate(settings_of(4), judged))
    assert metrics.step_s == pytest.approx(16 * 5.0 / 2, rel=0.01)


def test_streaming_trains_ready_groups() -> None:
    # Room for two groups: they end at 10, 10, 20 and 20 s. Parts of 6 s: one group at 10, one at 16, two at 22 s.
    parts = CONSTANT.model_copy(
        update={
            "trainer": TrainerTimings(base_s=4.0, token_s=0.0, part_s=6.0, take_s=0.0),
            "sync": SyncTimings(stall_s=0, transfer_s=0, load_s=0),
        }
    )
    metrics = summarize_run(simulate(settings_of(0, max_concurrency=8, streaming=True), parts))
    assert metrics.step_s == pytest.approx(22 + 6 + 4)


@pytest.mark.parametrize("max_staleness", [0, 1, 3, 8])
@pytest.mark.parametrize(
    ("selector", "window", "on_stale"),
    [
        ("fifo", 1, "drop"),
        ("fifo", 1, "wait"),
        ("windowed_fifo", 4, "drop"),
        ("freshest", 1, "drop"),
        ("uniform", 1, "mask"),
        ("exact_age", 1, "drop"),
    ],
)
def test_no_trained_token_is_older_than_the_bound(
    max_staleness: int, selector: Selector, window: int, on_stale: OnStale
) -> None:
    settings = settings_of(max_staleness, selector=selector, on_stale=on_stale, window=window)
    run = simulate(settings, TAILED)
    assert len(run.steps) == 30
    assert max(age for row in run.steps for age in row.ages) <= settings.policy.age_bound
    assert run.released["trained"] == 30 * 4


@pytest.mark.parametrize("interruption", ["keep", "abort"])
def test_exact_age_trains_tokens_of_exactly_that_age(interruption: str) -> None:
    settings = settings_of(3, selector="exact_age", interruption=interruption, oversample=1, servers=2)
    run = simulate(settings, TAILED)
    assert [set(row.ages) for row in run.steps] == [{min(version, 3)} for version in range(30)]


@pytest.mark.parametrize("interruption", ["keep", "recompute", "drain", "abort"])
def test_every_interruption_mode_trains_all_steps(interruption: str) -> None:
    settings = settings_of(2, interruption=interruption, servers=2)
    run = simulate(settings, TAILED)
    metrics = summarize_run(run)
    assert len(run.steps) == 30
    assert run.released == {"trained": 120}
    assert metrics.age_mean <= 2


def test_draining_engines_are_more_idle_than_those_that_keep_generating() -> None:
    idle = {}
    for mode in ("keep", "drain"):
        idle[mode] = summarize_run(simulate(settings_of(4, interruption=mode), TAILED)).rollout_idle
    assert idle["keep"] < idle["drain"]


def test_over_sampling_drops_the_longest_samples() -> None:
    alone = summarize_run(simulate(settings_of(0), TAILED))
    over = summarize_run(simulate(settings_of(0, oversample=2), TAILED))
    assert over.step_s < alone.step_s
    assert over.wasted > 0.1
    assert alone.wasted == pytest.approx(0, abs=0.01)


def test_filtered_groups_are_replaced() -> None:
    filtered = TAILED.model_copy(update={"verifier": VerifierTimings(filtered=0.5)})
    run = simulate(settings_of(2), filtered)
    assert run.released["trained"] == 120
    assert run.released["filtered"] == pytest.approx(120, rel=0.35)


def test_crashes_of_servers_and_trainer_lose_no_group() -> None:
    often = FaultTimings(server_every_s=200, server_restart_s=20, trainer_every_s=100, trainer_restart_s=30)
    faults = TAILED.model_copy(update={"faults": often})
    settings = settings_of(2, servers=2, steps=60, checkpoint_steps=5, lease_s=10.0)
    run = simulate(settings, faults)
    assert run.released == {"trained": 240}
    assert {row.version for row in run.steps} == set(range(60))
    assert any(row.replayed for row in run.steps)
    assert run.ended_s > simulate(settings, TAILED).ended_s


@pytest.mark.parametrize("interruption", ["keep", "abort"])
def test_groups_being_judged_survive_weight_updates_and_server_crashes(interruption: str) -> None:
    timings = TAILED.model_copy(update={"verifier": VerifierTimings(latency_s=5.0)})
    settings = settings_of(2, interruption=interruption, servers=2)
    assert simulate(settings, timings).released == {"trained": 120}
    dying = timings.model_copy(update={"faults": FaultTimings(server_every_s=50, server_restart_s=20)})
    assert simulate(replace(settings, lease_s=10.0), dying).released == {"trained": 120}


def test_a_sample_that_ends_at_the_moment_of_an_interruption_is_not_lost() -> None:
    settings = settings_of(2, selector="uniform", on_stale="mask", interruption="abort", min_concurrency=4, steps=25)
    assert simulate(settings, CONSTANT, seed=193).released["trained"] == 100


def test_a_crashed_trainer_without_checkpoints_replays_the_same_batches() -> None:
    rare = FaultTimings(trainer_every_s=200, trainer_restart_s=30)
    run = simulate(settings_of(2), TAILED.model_copy(update={"faults": rare}))
    assert run.released == {"trained": 120}
    assert any(row.replayed for row in run.steps)


def test_an_evaluation_takes_time_and_loses_no_group() -> None:
    plain, evaluated = (simulate(settings_of(2, eval_every=5, eval_prompts=prompts), TAILED) for prompts in (0, 64))
    assert evaluated.ended_s > plain.ended_s
    assert evaluated.released == {"trained": 120}


def test_an_evaluation_runs_max_concurrency_completions_at_a_time(tmp_path: Path) -> None:
    held_out = {"prompts": 32, "samples": 4, "greedy": True, "every_steps": 0}
    run = recorded_run(tmp_path, 0, CONSTANT, eval=held_out, rollout={"max_concurrency": 16})
    start, end = run.servers[0].evaluations[0]
    # 10 s for every 16 completions: 128 sampled ones, then 32 greedy ones
    assert end - start == pytest.approx(8 * 10 + 2 * 10)


def test_an_evaluation_reads_each_prompt_once_per_round() -> None:
    reading = CONSTANT.model_copy(update={"engine": CONSTANT.engine.model_copy(update={"prefill_s": 1.0})})
    settings = settings_of(eval_prompts=4, eval_samples=4, max_concurrency=16)
    # 4 prompts are read in 1 s each before 10 tokens of 16 samples, and again before 4 greedy ones
    assert simulate(settings, reading).evaluations[0] == pytest.approx((0.0, 4 + 10 + 4 + 10))


def test_groups_that_are_used_twice_train_half_as_many() -> None:
    run = simulate(settings_of(3, max_uses=2), TAILED)
    assert 60 <= run.released["trained"] <= 75  # some grow too old for their second use


def test_a_batch_taken_before_the_update_is_a_version_older() -> None:
    ages = {
        prefetches: summarize_run(simulate(settings_of(4, prefetches_batches=prefetches), CONSTANT)).group_age
        for prefetches in (False, True)
    }
    assert ages[True] > ages[False]


def test_runs_are_equal_for_the_same_seed_only() -> None:
    runs = [simulate(settings_of(2), TAILED, seed=seed).ended_s for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_a_slow_buffer_limits_the_groups_per_second() -> None:
    # 8 servers with room for 4 groups, which take 10 s: 3.2 groups/s. The buffer needs 2 x 0.25 s for a group.
    servers = settings_of(15, steps=120, servers=8)
    at_once = {"trainer": TrainerTimings(base_s=0.0, token_s=0.0, take_s=0.0)}
    free = CONSTANT.model_copy(update={**at_once, "sync": SyncTimings(stall_s=0.0, transfer_s=0.0, load_s=0.0)})
    slow = free.model_copy(update={"buffer": BufferTimings(exchange_s=0.25)})
    run = simulate(servers, slow)
    assert summarize_run(run).groups_per_s == pytest.approx(2.0, rel=0.1) and run.exchange_s > 0.25
    assert summarize_run(simulate(servers, free)).groups_per_s > 2.5
    beats = slow.model_copy(update={"buffer": BufferTimings(exchange_s=0.25, server_share=0.05)})  # 0.4 cores of 8
    assert summarize_run(simulate(servers, beats)).groups_per_s == pytest.approx(2.0 * 0.6, rel=0.1)
    with pytest.raises(ConfigError, match=r"heartbeats of 8 servers alone need 1.60 cores"):
        simulate(servers, slow.model_copy(update={"buffer": BufferTimings(server_share=0.2)}))


def test_the_blocker_shortcut_never_delays_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    several = settings_of(2, servers=3, max_concurrency=6)
    shortcut = simulate(several, TAILED)
    monkeypatch.setattr(
        SimulatedBuffer, "_is_blocked", lambda buffer, version: False
    )  # every insert takes from the buffer
    assert simulate(several, TAILED) == shortcut


def test_a_run_that_would_stall_is_an_error() -> None:
    never = TAILED.model_copy(update={"verifier": VerifierTimings(filtered=1.0)})
    settings = replace(settings_of(0, steps=4), max_concurrency=0)
    with pytest.raises(ConfigError, match="stalls at version 0"):
        simulate(settings, never)


@pytest.mark.parametrize(
    ("timings", "others"),
    [
        ({}, {"min_concurrency": 1}),
        ({"task_s": 2.0}, {}),
        ({"faults": FaultTimings(server_every_s=50, server_restart_s=20)}, {}),
        ({"faults": FaultTimings(trainer_every_s=50)}, {}),
    ],
    ids=["adaptive slots", "slow source", "crashing servers", "crashing trainer"],
)
def test_a_run_with_background_events_that_would_stall_is_an_error(
    timings: dict[str, object], others: dict[str, object]
) -> None:
    # No slot ever gets free, because there is none.
    settings = settings_of(0, steps=4, max_concurrency=0, **others)
    with pytest.raises(ConfigError, match="stalls at version 0"):
        simulate(settings, TAILED.model_copy(update=timings))


def test_the_best_change_names_the_bottleneck() -> None:
    slow_trainer = TAILED.model_copy(update={"trainer": TrainerTimings(base_s=40.0, token_s=0.0)})
    slow_engine = TAILED.model_copy(update={"engine": EngineTimings(step_s=1.0)})
    assert simulate_changes(settings_of(2), slow_trainer)[0].label == "a trainer twice as fast"
    assert simulate_changes(settings_of(2), slow_engine)[0].label in ("engines twice as fast", "one more server")


def test_smaller_steps_pay_the_fixed_cost_of_a_step_twice() -> None:
    slow_trainer = TAILED.model_copy(update={"trainer": TrainerTimings(base_s=40.0, token_s=0.0)})
    settings = settings_of(2, selector="windowed_fifo", window=12)
    changes = {change.label: change for change in simulate_changes(settings, slow_trainer)}
    assert changes["smaller steps"].key == "groups_per_step=2"
    assert changes["smaller steps"].speedup == pytest.approx(0.5, abs=0.05)


def test_more_staleness_is_never_slower() -> None:
    speeds = [summarize_run(simulate(with_staleness(settings_of(), bound), TAILED)).tokens_per_s for bound in (0, 1, 4)]
    assert speeds == sorted(speeds)


def test_a_group_that_expires_while_it_is_generated_ends_once() -> None:
    settings = settings_of(1, selector="windowed_fifo", window=8, checkpoint_steps=100, finishes_stale=True)
    slow_tail = TAILED.model_copy(update={"lengths": LengthModel(kind="lognormal", median=16, sigma=1.6, cap=2000)})
    run = simulate(settings, slow_tail)
    assert run.released["trained"] == 30 * 4
    assert run.released["expired"] > 0
