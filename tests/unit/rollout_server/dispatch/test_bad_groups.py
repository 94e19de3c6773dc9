"""A group that cannot be generated fails alone: its server, the other groups and the run continue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import structlog

from async_grpo.errors import EngineError, RequestRefused, RoleFailed
from async_grpo.rewards.base import RewardInput, RewardResult
from async_grpo.utils.aio import root_cause
from async_grpo.wire import Partial, Sample, Task, Ticket, VersionSpan
from buffer import InMemoryBuffer
from rollout_server.engines.base import Generation, GenerationRequest
from rollout_server.workflows import SingleTurn
from rollout_server.workflows.session import SampleSession
from tests.support.rollout_fakes import (
    FakeEngine,
    FakePool,
    buffer_of,
    config_of,
    context_of,
    dispatching,
    until_buffer,
)
from tests.support.tokenizers import Bytes
from tests.support.waiting import until


class KilledByGroup0(FakeEngine):
    """Dies of a request of group 0, after requests of all other groups have started; those are slow."""

    async def generate(self, request: GenerationRequest) -> Generation:
        if not request.request_id.startswith("0-"):
            self.running += 1
            await asyncio.sleep(0.05)
            self.running -= 1
            return await super().generate(request)
        await asyncio.sleep(0.02)
        raise EngineError("vLLM's engine died")


async def serve_until_engine_dies(tmp_path: Path, buffer: InMemoryBuffer, life: int) -> None:
    config = config_of(rollout={"max_concurrency": 16})
    context = context_of(tmp_path / str(life), config, KilledByGroup0(), buffer, name=f"rollout-{life}")
    async with dispatching(context) as (_, running), asyncio.timeout(5):
        (error,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(error, BaseException)
    assert isinstance(root_cause(error), EngineError)


async def test_a_group_that_kills_its_engine_fails_alone(tmp_path: Path) -> None:
    config = config_of(rollout={"max_concurrency": 16})
    buffer = buffer_of(config)
    with structlog.testing.capture_logs() as logs:
        for life in range(config.rollout.max_attempts):
            await serve_until_engine_dies(tmp_path, buffer, life)

    async with dispatching(context_of(tmp_path / "last", config, KilledByGroup0(), buffer)):
        await until_buffer(buffer, lambda stats: stats.ready == 4)
    assert {reason: count for reason, count in (await buffer.stats()).released.items() if count} == {"failed": 1}
    deaths = [entry for entry in logs if entry.get("seq") == 0 and "engine died" in entry["event"]]
    assert [entry["expired_leases"] for entry in deaths] == [1, 2, 3, 4, 5]


async def test_groups_without_a_request_in_the_dead_engine_keep_their_leases(tmp_path: Path) -> None:
    config = config_of(rollout={"max_concurrency": 4})
    buffer, engine = buffer_of(config), FakeEngine()
    context = context_of(tmp_path, config, engine, buffer)
    assert isinstance(context.pool, FakePool)
    context.pool.gate = asyncio.Event()  # group 0 waits for its rewards
    engine.hold = True
    async with dispatching(context) as (_, running):
        await until(lambda: len(engine.held) == 4)
        engine.release()
        await until(lambda: len(engine.requests) == 8)  # those of group 1
        engine.error = EngineError("died")
        engine.release()
        await asyncio.wait([running], timeout=5)
    tickets = await buffer.admit_groups(4, holder="rollout-1", timeout_s=1.0)
    assert [(ticket.seq, ticket.expired_leases) for ticket in tickets][:2] == [(0, 0), (1, 1)]


async def test_stopping_a_server_counts_no_lease_as_expired(tmp_path: Path) -> None:
    config = config_of()
    buffer, engine = buffer_of(config), FakeEngine()
    engine.hold = True
    async with dispatching(context_of(tmp_path, config, engine, buffer)):
        await until(lambda: len(engine.held) == 8)
    tickets = await buffer.admit_groups(2, holder="rollout-1", timeout_s=1.0)
    assert [ticket.expired_leases for ticket in tickets] == [0, 0]


def refuse(prefix: str) -> FakeEngine:
    """Engine that refuses requests whose ID starts with `prefix`."""

    def answer(request: GenerationRequest) -> str:
        if request.request_id.startswith(prefix):
            raise RequestRefused("rollout-0: vLLM refused request 0-1-0.0: too long")
        return "yes"

    return FakeEngine(answer)


async def test_refused_requests_fail_their_group_and_not_the_server(tmp_path: Path) -> None:
    why = await failure_of_group_0(tmp_path, buffer_of(config_of()), refuse("0-"))
    assert why.startswith("refused: RequestRefused")


async def insert_with_failed_sample(tmp_path: Path, ends: dict[str, str], **rollout: object) -> list[Sample]:
    """Samples of group 0 if the engine refuses its second sample."""
    config = config_of(rollout={"ends": ends, **rollout})
    buffer = buffer_of(config)
    async with dispatching(context_of(tmp_path, config, refuse("0-1-1."), buffer)) as (dispatcher, _):
        await until_buffer(buffer, lambda stats: stats.ready == 4)
        assert dispatcher.slots.reserved == 0
        assert dispatcher.counters.reward_failures == {"refused": 1}
    stats = await buffer.stats()
    assert (stats.released["failed"], stats.released["unverifiable"]) == (0, 0)
    batch = await buffer.take_batch(epoch=0, version=0, timeout_s=1.0)
    return batch.groups[0].samples


async def test_a_failed_sample_is_masked_and_its_group_continues(tmp_path: Path) -> None:
    samples = await insert_with_failed_sample(tmp_path, {})
    assert [sample.reward is None for sample in samples] == [False, True, False, False]
    assert (samples[1].length, samples[1].finish_reason) == (0, "refused")


async def test_a_failed_sample_gets_reward_zero_if_its_rule_says_so(tmp_path: Path) -> None:
    samples = await insert_with_failed_sample(tmp_path, {"refused": "zero"})
    assert samples[1].reward == 0.0
    assert samples[1].rewards == dict.fromkeys(samples[0].rewards, 0.0)


async def test_a_server_gives_up_if_all_samples_fail_even_if_they_score_zero(tmp_path: Path) -> None:
    config = config_of(steps=100, max_staleness=20, rollout={"ends": {"workflow_error": "zero"}})
    context = replace(context_of(tmp_path, config, FakeEngine()), workflow=FailsAfterATurn(Bytes()))
    async with dispatching(context) as (dispatcher, running), asyncio.timeout(20):
        (raised,) = await asyncio.gather(running, return_exceptions=True)
        assert dispatcher.counters.groups["inserted"] > 0
    assert isinstance(raised, BaseException)
    assert isinstance(root_cause(raised), RoleFailed)


class FailsAfterATurn(SingleTurn):
    async def run(self, task: Task, session: SampleSession) -> Sample:
        await session.turn()
        raise OSError("the tool is away")


async def test_an_oversampled_group_takes_a_finished_sample_instead_of_a_failed_one(tmp_path: Path) -> None:
    config = config_of(rollout={"oversample": 1, "max_concurrency": 16})
    buffer = buffer_of(config)
    async with dispatching(context_of(tmp_path, config, refuse("0-1-1."), buffer)):
        await until_buffer(buffer, lambda stats: stats.ready == 4)
    batch = await buffer.take_batch(epoch=0, version=0, timeout_s=1.0)
    assert [sample.reward is None for sample in batch.groups[0].samples] == [False] * 4


class Misbehaves(SingleTurn):
    """Misbehaves for task 0, in the way that `ending` selects."""

    def __init__(self, ending: str) -> None:
        super().__init__(Bytes())
        self.ending = ending

    async def run(self, task: Task, session: SampleSession) -> Sample:
        if task.index > 0:
            return await super().run(task, session)
        match self.ending:
            case "cancelled":
                shared = asyncio.get_running_loop().create_future()
                shared.cancel()
                await shared
            case "no turn":
                return session.sample("silent")
            case "no sample":
                return None  # type: ignore[return-value]
            case "unknown token":
                await session.turn()
                await session.observe(lambda: asyncio.sleep(0, [10**6]))
        return session.sample("")


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        ("cancelled", "WorkflowFailed"),
        ("no turn", "WorkflowFailed"),
        ("no sample", "WorkflowFailed"),
        ("unknown token", "ValueError"),
    ],
)
async def test_a_misbehaving_workflow_fails_its_group_with_a_named_error(
    tmp_path: Path, ending: str, error: str
) -> None:
    why = await failure_of_group_0(tmp_path, buffer_of(config_of()), FakeEngine(), Misbehaves(ending))
    assert why.startswith(f"workflow_error: {error}: ")


async def failure_of_group_0(
    tmp_path: Path, buffer: InMemoryBuffer, engine: FakeEngine, workflow: SingleTurn | None = None
) -> str:
    """Reason why group 0 failed. Checks that no other group failed."""
    context = replace(context_of(tmp_path, config_of(), engine, buffer), vocabulary=256)
    context = context if workflow is None else replace(context, workflow=workflow)
    with structlog.testing.capture_logs() as logs:
        async with dispatching(context) as (dispatcher, running):
            await until_buffer(buffer, lambda stats: stats.released["failed"] == 1 and stats.ready == 4)
            assert not running.done()
            assert len(dispatcher.groups) == 0
            assert dispatcher.slots.reserved == 0
    (entry,) = [entry for entry in logs if entry["event"] == "group discarded"]
    assert (entry["seq"], (await buffer.stats()).admitted) == (0, 5)
    return str(entry["why"])


class CancelledPool(FakePool):
    """Judging task 0 raises CancelledError, as if it had awaited a future that was cancelled."""

    async def judge(self, items: Sequence[RewardInput]) -> list[RewardResult]:
        if items[0].prompt == "p0":
            raise asyncio.CancelledError
        return await super().judge(items)


async def test_a_group_whose_task_always_ends_silently_is_failed(tmp_path: Path) -> None:
    config = config_of(rollout={"max_concurrency": 8, "max_attempts": 3})
    buffer = buffer_of(config)
    context = replace(context_of(tmp_path, config, FakeEngine(), buffer), pool=CancelledPool())  # type: ignore[arg-type]
    async with dispatching(context):
        await until_buffer(buffer, lambda stats: stats.released["failed"] == 1 and stats.ready == 4)


class WrongLogprobs(FakeEngine):
    """Returns this log-probability for the first token of group 0."""

    def __init__(self, logprob: float) -> None:
        super().__init__()
        self.logprob = logprob

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await super().generate(request)
        if request.request_id.startswith("0-"):
            generation.logprobs[0] = self.logprob
        return generation


@pytest.mark.parametrize("logprob", [np.nan, -np.inf, np.inf, 0.5])
async def test_invalid_log_probabilities_fail_the_group_and_name_the_server(tmp_path: Path, logprob: float) -> None:
    why = await failure_of_group_0(tmp_path, buffer_of(config_of()), WrongLogprobs(logprob))
    assert why.startswith("workflow_error: rollout-0 generated an invalid sample")


class SlowProgress(InMemoryBuffer):
    """The first save of a partial arrives when the test sets `arrives`, or just after the second save."""

    def __init__(self, buffer: InMemoryBuffer) -> None:
        self.__dict__ = buffer.__dict__
        self.arrives = asyncio.Event()
        self.saves = 0

    async def save_partial(self, ticket: Ticket, partial: Partial) -> None:
        self.saves += 1
        if self.saves == 1:
            # As with a real connection: cancelling the caller does not recall a command that was sent.
            arriving = asyncio.create_task(self.arrives.wait())
            arriving.add_done_callback(lambda _: self._state.save_partial(ticket, partial, self._clock()))
            await asyncio.shield(arriving)
            return
        await super().save_partial(ticket, partial)
        self.arrives.set()
        await asyncio.sleep(0.01)


class Growing(FakeEngine):
    """Requests never end; the test sets their number of tokens."""

    length = 1

    def peek(self, request_id: str) -> Generation:
        tokens = np.full(self.length, 97, np.int32)
        return Generation(tokens, np.full(self.length, -0.5, np.float32), [VersionSpan(0, 0, self.length)], "")


async def test_a_save_in_flight_does_not_replace_the_newer_partial_of_a_stop(tmp_path: Path) -> None:
    config = config_of(max_staleness=0, groups_per_step=1, rollout={"max_concurrency": 4, "progress_interval_s": 0.01})
    buffer, engine = SlowProgress(buffer_of(config)), Growing()
    engine.hold = True
    async with dispatching(context_of(tmp_path, config, engine, buffer)) as (_, running):
        await until(lambda: buffer.saves == 1)
        engine.length = 5
        running.cancel()
        await asyncio.sleep(0.01)
        buffer.arrives.set()
        await asyncio.wait([running], timeout=5)
    (ticket,) = await buffer.admit_groups(1, holder="rollout-1", timeout_s=1.0)
    assert ticket.partial is not None
    assert ticket.partial.longest == 5
