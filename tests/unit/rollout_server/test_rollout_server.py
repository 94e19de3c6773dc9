"""The complete server around a fake engine: it serves a run, ends with it, and can be stopped."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from async_grpo.errors import EngineError, ServerLost, WaitTimeout
from async_grpo.utils.aio import root_cause
from async_grpo.weights.manifest import WeightVersion
from buffer import InMemoryBoard, InMemoryBuffer
from rollout_server import assembly
from rollout_server.assembly import wait_unless_run_ends
from rollout_server.context import ServerContext
from rollout_server.server import RolloutServer
from tests.support.rollout_fakes import (
    FakeEngine,
    FakeReceiver,
    buffer_of,
    config_of,
    context_of,
    until_buffer,
    watcher_of,
)
from tests.support.waiting import until


async def server_of(context: ServerContext, receiver: FakeReceiver) -> RolloutServer:
    watcher = watcher_of(context, receiver)
    await watcher.wait_for_initial_weights(1.0)
    return RolloutServer(context, watcher)


async def train(buffer: InMemoryBuffer, receiver: FakeReceiver, steps: int) -> list[int]:
    """A trainer without a model; returns the age of every sample."""
    ages: list[int] = []
    for version in range(steps):
        batch = await buffer.take_batch(epoch=0, version=version, timeout_s=5.0)
        ages += [version - sample.oldest_version for group in batch.groups for sample in group.samples]
        await receiver.publish(1, version + 1)
        await buffer.publish_version(epoch=0, version=version + 1)
        await buffer.release_batch(batch)
    return ages


class NeverLoads(FakeEngine):
    closed = False

    async def start(self) -> None:
        await asyncio.sleep(3600)

    async def aclose(self) -> None:
        self.closed = True


async def test_an_engine_that_does_not_load_in_time_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NeverLoads()
    monkeypatch.setattr(assembly, "make_engine", lambda config, model, name: engine)
    config = config_of(launch={"ready_timeout_s": 0.05})
    with pytest.raises(WaitTimeout, match=r"rollout-0 .*launch\.ready_timeout_s"):
        async with asyncio.timeout(5), AsyncExitStack() as stack:
            await assembly.start_engine(stack, config, tmp_path, "rollout-0")
    assert engine.closed


@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_a_run_is_served_to_its_end_within_the_staleness_bound(tmp_path: Path, staleness: int) -> None:
    config = config_of(steps=6, max_staleness=staleness)
    buffer, engine, receiver = buffer_of(config), FakeEngine(), FakeReceiver(WeightVersion(1, 0))
    context = context_of(tmp_path, config, engine, buffer)
    serving = asyncio.create_task((await server_of(context, receiver)).serve())
    ages = await train(buffer, receiver, config.steps)
    assert len(ages) == 6 * 2 * 4
    assert max(ages) <= staleness
    await buffer.end_run()
    await asyncio.wait_for(serving, 5.0)
    assert [evaluation.version for evaluation in await context.board.evaluations()] == [0, 6]
    assert (await context.board.counters())["generated_tokens"] == 48 * len("yes")


async def test_the_first_evaluation_precedes_the_first_ticket(tmp_path: Path) -> None:
    config = config_of()
    buffer, engine = buffer_of(config), FakeEngine()
    engine.hold = True
    context = context_of(tmp_path, config, engine, buffer)
    serving = asyncio.create_task((await server_of(context, FakeReceiver(WeightVersion(1, 0)))).serve())
    await until(lambda: len(engine.held) > 0)
    assert all(request.request_id.startswith("eval") for request in engine.requests)
    assert (await buffer.stats()).admitted == 0
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_a_stopped_server_gives_all_groups_back(tmp_path: Path) -> None:
    config = config_of(eval={"prompts": 1, "greedy": False, "samples": 1})
    buffer, engine = buffer_of(config), FakeEngine()
    context = context_of(tmp_path, config, engine, buffer)
    server = await server_of(context, FakeReceiver(WeightVersion(1, 0)))
    serving = asyncio.create_task(server.serve())
    await until(lambda: len(engine.requests) > 0)
    engine.hold = True
    await until(lambda: len(engine.held) == 8)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    tickets = [await buffer.admit_groups(1, holder="rollout-1", timeout_s=0.1) for _ in range(2)]
    assert [ticket.attempt for (ticket,) in tickets] == [2, 2]


async def test_an_engine_error_ends_the_server(tmp_path: Path) -> None:
    config = config_of()
    engine = FakeEngine()
    server = await server_of(context_of(tmp_path, config, engine), FakeReceiver(WeightVersion(1, 0)))
    engine.error = EngineError("rollout-0: the engine died")
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(server.serve(), 5.0)
    assert str(root_cause(raised.value)) == "rollout-0: the engine died"


async def test_a_missing_final_version_times_out_after_the_run(tmp_path: Path) -> None:
    config = config_of(weights={"update_timeout_s": 0.05}, eval={"prompts": 1, "timeout_s": 0.5})
    buffer = buffer_of(config)
    server = await server_of(context_of(tmp_path, config, FakeEngine(), buffer), FakeReceiver(WeightVersion(1, 0)))
    await buffer.end_run()
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(server.serve(), 5.0)
    cause = root_cause(raised.value)
    assert isinstance(cause, WaitTimeout)
    assert "final version 4" in str(cause)


async def test_samples_and_a_timeline_are_written(tmp_path: Path) -> None:
    config = config_of(steps=1)
    buffer, receiver = buffer_of(config), FakeReceiver(WeightVersion(1, 0))
    context = context_of(tmp_path, config, FakeEngine(), buffer)
    serving = asyncio.create_task((await server_of(context, receiver)).serve())
    await train(buffer, receiver, 1)
    await buffer.end_run()
    await asyncio.wait_for(serving, 5.0)
    rows = [json.loads(line) for line in (tmp_path / "samples" / "rollout-0.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["p0", "p1"]
    assert rows[0]["completions"][0]["spans"] == [[0, 0, 3]]
    assert rows[0]["completions"][0]["reward"] == 1.0
    spans = [json.loads(line) for line in (tmp_path / "timeline" / "rollout-0.jsonl").read_text().splitlines()]
    assert {"process", "generation", "weights", "evaluation"} <= {span["track"] for span in spans}


async def test_waiting_for_initial_weights_ends_with_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assembly, "BOARD_POLL_S", 0.01)
    answers = iter([False, False, True])
    ended = asyncio.Event()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def late() -> None:
        raise WaitTimeout("the trainer's first publication of weights", 1.0)

    async def is_over() -> bool:
        return next(answers)

    async def is_not_over() -> bool:
        return False

    assert await wait_unless_run_ends(asyncio.sleep(0.05), is_not_over)
    assert not await wait_unless_run_ends(never(), is_over)
    assert ended.is_set()
    with pytest.raises(WaitTimeout, match="first publication"):
        await wait_unless_run_ends(late(), is_not_over)


class LosableBoard(InMemoryBoard):
    """Fails to count once it is lost."""

    is_lost = False

    async def add_to_counter(self, name: str, amount: int) -> None:
        if self.is_lost:
            raise ServerLost("Redis has not answered")
        await super().add_to_counter(name, amount)


async def test_a_lost_buffer_does_not_hide_an_engine_error(tmp_path: Path) -> None:
    config, engine, board = config_of(), FakeEngine(), LosableBoard()
    buffer, receiver = buffer_of(config), FakeReceiver(WeightVersion(1, 0))
    serving = asyncio.create_task(
        (await server_of(context_of(tmp_path, config, engine, buffer, board), receiver)).serve()
    )
    await until_buffer(buffer, lambda stats: stats.ready == 4)
    board.is_lost = True
    engine.tokens += 100  # not counted yet when the server ends
    engine.error = EngineError("rollout-0: the engine died")
    await train(buffer, receiver, 1)  # makes room for another group
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(serving, 5.0)
    assert isinstance(root_cause(raised.value), EngineError)
