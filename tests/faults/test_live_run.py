"""What surrounds a live run may misbehave, and others may talk to its policy meanwhile: the run goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from async_grpo.config import RunConfig
from buffer import RedisBoard, connect_board
from tests.support.whole_run import WholeRun, check_books
from tests.support.wild_rewards import DEEDS, ONE_IN

STEPS = 16
ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


async def on_board(config: RunConfig, ask: Callable[[RedisBoard], Awaitable[Any]]) -> Any:
    board = await connect_board(config.redis, config.name)
    try:
        return await ask(board)
    finally:
        await board.aclose()


def test_rewards_that_hang_raise_eat_memory_and_flood_are_counted_and_the_run_goes_on(
    start: Callable[..., WholeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = start(
        "rewards.functions=[{name: 'tests.support.wild_rewards:wild'}]",
        "rewards.deadline_s=1.5",
        "rewards.memory_bytes=268435456",
        "rewards.workers=2",
        steps=STEPS,
        max_tokens=48,
    )
    run.wait_for_step(STEPS - 1)
    failures = {
        name.removeprefix("reward_failures."): count
        for name, count in asyncio.run(on_board(run.roles_config(), RedisBoard.counters)).items()
        if name.startswith("reward_failures.")
    }
    print(f"{failures} of {STEPS * 16} samples; one in {ONE_IN} for each of {DEEDS}")
    assert {"timeout", "raised", "memory"} <= set(failures)
    assert run.wait(400) == 0, run.printed[-3000:]
    assert run.summary()["restarts"]["rollout-0"] == 0
    check_books(run.summary(), steps=STEPS)
    masked = sum(row["unverifiable_samples"] for row in run.steps())
    assert 0 < masked < STEPS * 16 / 2


def test_an_openai_client_talks_to_the_policy_while_it_is_trained(start: Callable[..., WholeRun]) -> None:
    run = start("rollout.http.port=0", steps=STEPS, max_tokens=48)
    run.wait_for_step(1)
    versions: list[int] = []
    server, *_ = asyncio.run(on_board(run.roles_config(), RedisBoard.live_servers))
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="none") as client:
        until_s = time.monotonic() + 240
        while len(set(versions)) < 3 and time.monotonic() < until_s:
            answer = client.completions.create(model="small", prompt="2+3=", max_tokens=8, temperature=1.0)
            assert answer.usage is not None and answer.usage.completion_tokens > 0
            assert answer.system_fingerprint is not None
            versions.append(int(answer.system_fingerprint.partition("-")[2]))
    assert versions == sorted(versions)
    assert len(set(versions)) >= 3
    print(f"{len(versions)} completions, of versions {sorted(set(versions))}")
    assert run.wait(400) == 0, run.printed[-3000:]
    check_books(run.summary(), steps=STEPS)
