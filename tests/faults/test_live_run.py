"""What surrounds a live run may misbehave, and others may talk to its policy meanwhile: the run goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from async_grpo.config import RunConfig
from buffer import connect_board
from tests.support.whole_run import WholeRun, check_books
from tests.support.wild_rewards import DEEDS, ONE_IN

STEPS = 16
ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., WholeRun]]:
    """Starts a run with the given overrides."""
    started: list[WholeRun] = []

    def started_with(*overrides: str) -> WholeRun:
        whole = WholeRun(tmp_path, steps=STEPS, max_tokens=48, overrides=overrides)
        started.append(whole)
        whole.start()
        return whole

    yield started_with
    for whole in started:
        whole.close()


async def counters(config: RunConfig) -> dict[str, int]:
    board = await connect_board(config.redis, config.name)
    try:
        return await board.counters()
    finally:
        await board.aclose()


async def address_of(config: RunConfig) -> str:
    board = await connect_board(config.redis, config.name)
    try:
        beats = await board.servers()
    finally:
        await board.aclose()
    return beats[0].http if beats else ""


def test_rewards_that_hang_raise_eat_memory_and_flood_are_counted_and_the_run_goes_on(
    start: Callable[..., WholeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = start(
        "rewards.functions=[{name: 'tests.support.wild_rewards:wild'}]",
        "rewards.deadline_s=1.5",
        "rewards.memory_bytes=268435456",
        "rewards.workers=2",
    )
    run.wait_for_step(STEPS - 1)
    failures = {
        name.removeprefix("reward_failures."): count
        for name, count in asyncio.run(counters(run.roles_config())).items()
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
    run = start("rollout.http.port=0")
    run.wait_for_step(1)
    versions: list[int] = []
    with openai.OpenAI(base_url=f"{asyncio.run(address_of(run.roles_config()))}/v1", api_key="none") as client:
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
