"""What the real engine has of an unfinished completion is exact, and any engine goes on with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from async_grpo.errors import EngineError
from async_grpo.weights.shared_memory import remove_stores
from async_grpo.wire import Sample
from rollout_server.engines.base import Generation, Interruption
from rollout_server.workflows.session import SampleSession
from tests.support.vllm_lab import EXACT, Lab, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN = f"test-vllm-partials-{os.getpid()}"
LENGTH = 300
VERY_LONG = 900
"""Not finished before an update has come, however busy the machine is."""


@pytest.fixture(scope="module", autouse=True)
def _environment_and_shared_memory_are_left_as_found() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    remove_stores(RUN)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("partials"), run=RUN, tied=False)
    await lab.engine.start()
    await lab.update("keep")
    yield lab
    await lab.engine.aclose()


def session_of(
    lab: Lab, number: int, prior: Sample | None = None, *, interruptible: bool = True, length: int = LENGTH
) -> SampleSession:
    return SampleSession(
        lab.engine,
        f"s{number}",
        prompt_of(4 + number, number),
        seed=number + (1000 if prior else 0),
        temperature=1.0,
        max_tokens=length,
        prior=prior,
        interruptible=interruptible,
    )


async def tokens_of(session: SampleSession, least: int) -> Sample:
    """A snapshot with at least so many tokens."""
    async with asyncio.timeout(30):
        while (sample := session.snapshot()) is None or sample.length < least:
            await asyncio.sleep(0.005)
    return sample


def check(lab: Lab, number: int, sample: Sample, *, error: float = EXACT) -> None:
    """Every log-probability is that of the version in its span, its prefix being encoded anew at each of them."""
    sample.validate()
    generation = Generation(sample.token_ids(), sample.token_logprobs(), sample.spans, "")
    assert lab.error(prompt_of(4 + number, number), generation, keep=False) < error


async def test_a_snapshot_of_a_running_completion_is_exact_and_is_its_beginning(lab: Lab) -> None:
    session = session_of(lab, 1)
    turn = asyncio.create_task(session.turn())
    left = await tokens_of(session, 40)
    await turn
    whole = session.sample("")
    assert left.length < whole.length == LENGTH
    assert whole.tokens.startswith(left.tokens)
    assert whole.logprobs.startswith(left.logprobs)
    check(lab, 1, left)


async def test_an_interrupted_completion_is_taken_up_at_a_newer_version(lab: Lab) -> None:
    first = session_of(lab, 2)
    turn = asyncio.create_task(first.turn())
    left = await tokens_of(first, 60)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    await lab.update("keep")
    second = session_of(lab, 2, left)
    await second.turn()
    sample = second.sample("")
    assert sample.tokens.startswith(left.tokens)
    assert (sample.length, len(sample.spans)) == (LENGTH, 2)
    check(lab, 2, sample)


async def test_abort_ends_requests_with_all_they_have_but_spares_those_that_may_not_be(lab: Lab) -> None:
    sessions = [session_of(lab, number, interruptible=number != 3, length=VERY_LONG) for number in range(6)]
    turns = [asyncio.create_task(session.turn()) for session in sessions]
    for session in sessions:
        await tokens_of(session, 30)
    await lab.update("abort")
    await asyncio.gather(*turns)
    assert [session.is_cut_short for session in sessions] == [number != 3 for number in range(6)]
    for number, session in enumerate(sessions):
        sample = session.sample("")
        if session.is_cut_short:
            check(lab, number, sample)
            resumed = session_of(lab, number, sample, length=VERY_LONG)
            await resumed.turn()
            sample = resumed.sample("")
            check(lab, number, sample)
        assert (sample.length, len(sample.spans)) == (VERY_LONG, 2)


async def test_drain_lets_requests_finish_first_and_holds_new_ones_back(lab: Lab) -> None:
    sessions = [session_of(lab, number) for number in range(4)]
    turns = [asyncio.create_task(session.turn()) for session in sessions]
    for session in sessions:
        await tokens_of(session, 10)
    before = lab.engine.version
    update = asyncio.create_task(lab.update("drain"))
    await asyncio.sleep(0.02)
    late = session_of(lab, 5)
    turns.append(asyncio.create_task(late.turn()))
    await asyncio.gather(update, *turns)
    versions = [[span.version for span in session.sample("").spans] for session in [*sessions, late]]
    assert versions == [[before]] * 4 + [[before + 1]]


@pytest.mark.parametrize("interruption", ["keep", "recompute"])
async def test_snapshots_stay_exact_across_updates(lab: Lab, interruption: Interruption) -> None:
    session = session_of(lab, 7, length=VERY_LONG)
    turn = asyncio.create_task(session.turn())
    await tokens_of(session, 30)
    await lab.update(interruption)
    before = session.snapshot()
    assert before is not None
    left = await tokens_of(session, before.length + 30)
    await turn
    assert [span.version for span in left.spans] == [lab.engine.version - 1, lab.engine.version]
    assert session.sample("").tokens.startswith(left.tokens)
    if interruption == "recompute":
        check(lab, 7, left)


async def test_what_a_dead_engine_had_is_still_there(lab: Lab) -> None:
    """The last test: it takes the engine with it."""
    session = session_of(lab, 8, length=VERY_LONG)
    turn = asyncio.create_task(session.turn())
    before = await tokens_of(session, 40)
    for process in lab.engine._llm.engine_core.resources.engine_manager.processes:
        process.kill()
    with pytest.raises(EngineError, match="EngineDeadError"):
        await turn
    left = session.snapshot()
    assert left is not None
    assert left.tokens.startswith(before.tokens)
    check(lab, 8, left)
