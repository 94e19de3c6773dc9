"""The bench of the rollout server: both sides get the same work, and a round with less work is an error."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from async_grpo.errors import EngineError
from async_grpo.lab.bench.rollout import bare_vllm
from async_grpo.lab.bench.rollout.bench import measure_dispatch, measure_overhead, run_pairs
from async_grpo.lab.bench.rollout.workload import LogNormal, RolloutRound, RolloutWork, Uniform
from rollout_server.engines.base import GenerationRequest

WORK = RolloutWork(groups=6, group_size=4, groups_per_step=2, concurrency=3, lengths=Uniform(2, 9), prompt_tokens=5)


def drawn(work: RolloutWork) -> list[int]:
    return [request.max_tokens for request in work.requests(vocabulary=50)]


def test_the_same_work_has_the_same_requests() -> None:
    requests = WORK.requests(vocabulary=50)
    assert requests == WORK.requests(vocabulary=50) != replace(WORK, seed=2).requests(vocabulary=50)
    assert len({request.seed for request in requests}) == len({request.request_id for request in requests}) == 24
    assert all(len(request.prompt) == 5 and max(request.prompt) < 50 for request in requests)
    prompts = [WORK.task(group, 50).prompt_ids().tolist() for group in range(6) for _ in range(4)]
    assert [request.prompt for request in requests] == prompts


def test_lengths_stay_within_their_bounds_and_differ() -> None:
    assert {Uniform(2, 4).draw(seed) for seed in range(200)} == {2, 3, 4}
    lengths = [LogNormal(32, 1.2, 512).draw(seed) for seed in range(4000)]
    assert min(lengths) >= 1 and max(lengths) == 512
    assert 30 <= np.median(lengths) <= 34 and np.mean(lengths) > 1.5 * np.median(lengths)


@pytest.mark.parametrize("change", [lambda drawn: drawn[:-1], lambda drawn: [drawn[0] - 1, *drawn[1:]], sorted])
async def test_a_round_with_other_lengths_ends_the_bench(change: Any) -> None:
    async def lazy(work: RolloutWork) -> RolloutRound:
        return RolloutRound(change(drawn(work)), 1.0, 1.0)

    WORK.check_lengths(drawn(WORK))
    with pytest.raises(EngineError, match=r"[1-9]\d* of 24 completions"):
        WORK.check_lengths(change(drawn(WORK)))
    with pytest.raises(EngineError, match=r"[1-9] of 8 completions"):
        await run_pairs(lazy, lazy, WORK, 1, lambda: None)


async def test_rounds_are_paired_in_alternating_order_after_a_warm_up() -> None:
    turns: list[tuple[str, int]] = []

    def feeder(name: str) -> Any:
        async def feed(work: RolloutWork) -> RolloutRound:
            turns.append((name, work.groups))
            return RolloutRound(drawn(work), 1.0, cpu_s=0.0)

        return feed

    steps: list[int] = []
    pairs = await run_pairs(feeder("whole"), feeder("bare"), WORK, 3, lambda: steps.append(1))
    assert turns[:2] == [("whole", 2), ("bare", 2)]
    assert [name for name, _ in turns[2:]] == ["whole", "bare", "bare", "whole", "whole", "bare"]
    assert {groups for _, groups in turns[2:]} == {6}
    assert len(steps) == len(pairs) == 3


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    whole = [RolloutRound([600], seconds, cpu_s=0.06) for seconds in (1.0, 2.0, 4.0)]
    bare = [RolloutRound([600], seconds, cpu_s=0.03) for seconds in (1.0, 1.0, 3.0)]
    pairs = list(zip(whole, bare, strict=True))
    speed, lowest, highest, tokens, cpu = measure_overhead("a model", WORK, pairs)
    assert (speed.value, speed.baseline, speed.ratio) == (300.0, 600.0, 0.75)
    assert (lowest.value, highest.value) == (0.5, 1.0)
    assert tokens.value == tokens.baseline == 600
    assert (cpu.value, cpu.baseline, cpu.ratio) == (pytest.approx(100.0), pytest.approx(50.0), pytest.approx(2.0))
    assert "2 to 9 tokens" in speed.name
    uneven = measure_dispatch("m", replace(WORK, lengths=LogNormal(32, 1.2, 512)), pairs)
    assert "lognormal, median 32, sigma 1.2" in uneven[0].name


@pytest.mark.parametrize(
    ("loop", "overlapping"), [(bare_vllm.generate_continuously, {0, 3}), (bare_vllm.generate_in_waves, {0, 1})]
)
async def test_the_plain_loops_start_requests_as_slots_become_free_or_in_waves(
    monkeypatch: pytest.MonkeyPatch, loop: bare_vllm.Loop, overlapping: set[int]
) -> None:
    running: set[int] = set()
    running_at_ends: list[set[int]] = []

    async def complete(_llm: None, request: GenerationRequest) -> int:
        """Take one turn of the event loop per token."""
        running.add(int(request.request_id))
        for _ in range(request.max_tokens):
            await asyncio.sleep(0)
        running_at_ends.append(set(running))
        running.remove(int(request.request_id))
        return request.max_tokens

    monkeypatch.setattr(bare_vllm, "complete", complete)
    lengths = [9, 1, 1, 1, 2, 3]
    requests = [GenerationRequest(str(index), [1], max_tokens=length) for index, length in enumerate(lengths)]
    assert await loop(None, requests, 2) == lengths
    assert max(map(len, running_at_ends)) == 2 and overlapping in running_at_ends
    if loop is bare_vllm.generate_in_waves:
        assert all(len({index // 2 for index in indices}) == 1 for indices in running_at_ends)
