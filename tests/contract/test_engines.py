"""Contract of every `Sampler` and `Engine`: the scripted engine, HTTP to a server around it, and a real vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from async_grpo.config.rollout import RolloutConfig
from async_grpo.errors import EngineError, WeightsError
from async_grpo.weights.base import HeldWeights
from async_grpo.weights.manifest import WeightVersion, make_layout
from async_grpo.weights.shared_memory import remove_stores, store_path
from async_grpo.weights.store import WeightStore
from rollout_server.engines.base import CHECKPOINT_VERSION, Engine, Generation, GenerationRequest, Interruption, Sampler
from rollout_server.engines.http import HttpSampler
from rollout_server.engines.scripted import ScriptedEngine, scripted_logprobs
from rollout_server.engines.vllm.engine import VllmEngine
from rollout_server.workflows.session import join_generations
from tests.support.http_fakes import Letters, serving

pytestmark = pytest.mark.asyncio(loop_scope="session")

RUN = f"test-engines-{os.getpid()}"
PROMPT = [20, 30, 40]
LONG = 400
"""Tokens of a completion that is still running when an update comes."""


@dataclass
class Subject:
    """An implementation, with the actions of a test on it."""

    sampler: Sampler
    engine: Engine
    """The engine behind the sampler; the same object unless the sampler is over HTTP."""
    store: Path
    update: Callable[[Interruption], Awaitable[int]]
    """Create, publish and load new weights; returns their version."""
    check: Callable[[Generation, bool], None]
    """Raise unless every log-probability is of the version in its span. Second argument: True if the prefix was encoded
    again with that version."""
    stall: Callable[[], None]
    """Make the engine stop generating and updating."""
    die: Callable[[], None]


@pytest_asyncio.fixture(loop_scope="session")
async def scripted() -> AsyncIterator[Subject]:
    engine = ScriptedEngine(counting_script, tokens_per_s=1000.0, reads_store=True)
    store = WeightStore.create(store_path(RUN, "scripted"), make_layout([("weight", "float32", [4])]))

    async def update(interruption: Interruption) -> int:
        version = engine.version + 1
        store.begin_write()
        store.commit_write(WeightVersion(0, version))
        held = HeldWeights.in_store(store.path, epoch=0, version=version)
        times = await engine.update_weights(held, interruption=interruption)
        assert times.pause_s >= times.load_s >= 0
        return version

    def check(generation: Generation, recomputed: bool) -> None:
        assert generation.logprobs.tolist() == scripted_logprobs(generation.tokens).tolist()

    def stall() -> None:
        engine._update_s = 0.4

    await engine.start()
    yield Subject(engine, engine, store.path, update, check, stall, engine.fail)
    await engine.aclose()
    remove_stores(RUN)


@pytest_asyncio.fixture(loop_scope="session")
async def http(scripted: Subject) -> AsyncIterator[Subject]:
    async with serving(scripted.engine, Letters(), vocabulary=256) as address:
        scripted.sampler = sampler = HttpSampler([address], max_concurrency=8, timeout_s=60.0)
        yield scripted
        await sampler.aclose()


@pytest.fixture
def vllm(request: pytest.FixtureRequest) -> Subject:
    from tests.support.vllm_lab import EXACT, FAR

    lab = request.getfixturevalue("untied_lab")

    def check(generation: Generation, recomputed: bool) -> None:
        assert lab.error(PROMPT, generation, keep=not recomputed) < EXACT
        if len(generation.spans) > 1:
            assert lab.error(PROMPT, generation, keep=recomputed) > FAR
        assert lab.engine.disputed_spans == 0

    def send(number: int) -> None:
        for process in lab.engine._llm.engine_core.resources.engine_manager.processes:
            os.kill(process.pid, number)

    return Subject(
        lab.engine,
        lab.engine,
        lab.store.path,
        lab.update,
        check,
        lambda: send(signal.SIGSTOP),
        lambda: send(signal.SIGKILL),
    )


@pytest.fixture(params=["scripted", "http", "vllm"])
def subject(request: pytest.FixtureRequest) -> Subject:
    subject: Subject = request.getfixturevalue(request.param)
    return subject


engines = pytest.mark.parametrize("subject", ["scripted", "vllm"], indirect=True)


async def test_every_token_has_a_logprob_and_a_version(subject: Subject) -> None:
    version = await subject.update("keep")
    generation = await subject.sampler.generate(make_request(30))
    assert (generation.tokens.dtype, generation.tokens.shape, generation.finish_reason) == (np.int32, (30,), "length")
    assert (generation.logprobs.dtype, generation.logprobs.shape) == (np.float32, (30,))
    assert versions(generation) == [version]
    subject.check(generation, False)


async def test_a_seed_gives_the_same_completion_whole_or_streamed(subject: Subject) -> None:
    request = make_request(30, seed=2**62 + 1)
    whole = await subject.sampler.generate(request)
    again = await subject.sampler.generate(request)
    pieces = [piece async for piece in subject.sampler.stream(request)]
    assert len(pieces) > 2
    assert {piece.finish_reason for piece in pieces[:-1]} == {""}
    for other in (again, join_pieces(pieces)):
        assert other.tokens.tolist() == whole.tokens.tolist()
        assert np.allclose(other.logprobs, whole.logprobs, atol=1e-4)
        assert (other.spans, other.finish_reason) == (whole.spans, whole.finish_reason)


@pytest.mark.parametrize("interruption", ["keep", "recompute"])
async def test_requests_in_flight_continue_with_new_weights(subject: Subject, interruption: Interruption) -> None:
    old = await subject.update("keep")
    running = [start(subject.sampler.generate(make_request(LONG))) for _ in range(2)]
    reading = start(read_stream(subject, make_request(LONG)))
    await wait_for_tokens(subject, 90)
    new = await subject.update(interruption)
    for generation in await asyncio.gather(*running, reading):
        assert (len(generation.tokens), generation.finish_reason, versions(generation)) == (LONG, "length", [old, new])
        subject.check(generation, interruption == "recompute")


async def test_drain_lets_requests_finish_and_delays_new_ones(subject: Subject) -> None:
    old = await subject.update("keep")
    running = [start(subject.sampler.generate(make_request(LONG))), start(read_stream(subject, make_request(LONG)))]
    await wait_for_tokens(subject, 20)
    updating = start(subject.update("drain"))
    await wait_for_closed_gate(subject)
    assert not updating.done()
    late = start(subject.sampler.generate(make_request(20)))
    assert [versions(generation) for generation in await asyncio.gather(*running)] == [[old], [old]]
    assert versions(await late) == [await updating]


@engines
async def test_requests_survive_sleep_with_tokens_and_weights(subject: Subject) -> None:
    version = await subject.update("keep")
    running = start(subject.sampler.generate(make_request(LONG)))
    reading = start(read_stream(subject, make_request(LONG)))
    await wait_for_tokens(subject, 60)
    await subject.engine.sleep()
    tokens_before = count_tokens(subject)
    late = start(subject.sampler.generate(make_request(10)))
    await asyncio.sleep(0.1)
    assert count_tokens(subject) == tokens_before
    await subject.engine.wake()
    for whole in await asyncio.gather(running, reading, late):
        assert (versions(whole), whole.finish_reason) == ([version], "length")
        subject.check(whole, True)


@engines
async def test_abort_ends_interruptible_requests_and_another_continues_them(subject: Subject) -> None:
    old = await subject.update("keep")
    cut = start(subject.sampler.generate(make_request(LONG)))
    uninterruptible = start(subject.sampler.generate(make_request(LONG, interruptible=False)))
    await wait_for_tokens(subject, 60)
    new = await subject.update("abort")
    partial = await cut
    assert (partial.finish_reason, versions(partial)) == ("abort", [old])
    assert 0 < len(partial.tokens) < LONG
    assert versions(await uninterruptible) == [old, new]
    rest = await subject.sampler.generate(make_request(LONG - len(partial.tokens), prefix=partial.tokens.tolist()))
    assert (len(rest.tokens), rest.finish_reason) == (LONG - len(partial.tokens), "length")
    subject.check(join_generations(partial, rest), True)


@engines
async def test_peek_returns_the_tokens_of_a_running_request(subject: Subject) -> None:
    old = await subject.update("keep")
    request = make_request(LONG)
    running = start(subject.sampler.generate(request))
    before = await wait_for_partial(subject, request, 30)
    new = await subject.update("keep")
    now = await wait_for_partial(subject, request, 0)
    after = await wait_for_partial(subject, request, len(now.tokens) + 30)
    whole = await running
    for partial, seen in ((before, [old]), (after, [old, new])):
        assert partial.tokens.tolist() == whole.tokens[: len(partial.tokens)].tolist()
        assert (partial.finish_reason, versions(partial)) == ("", seen)
        subject.check(partial, False)
    assert subject.sampler.peek(request.request_id) is None


async def test_a_cancelled_request_leaves_the_engine(subject: Subject) -> None:
    before = subject.engine.load()
    running = start(subject.sampler.generate(make_request(LONG)))
    await wait_for_tokens(subject, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await wait_until_idle(subject)
    assert len((await subject.sampler.generate(make_request(5))).tokens) == 5
    after = subject.engine.load()
    assert after.generated_tokens + after.streamed_tokens >= before.generated_tokens + before.streamed_tokens + 15


async def test_a_closed_stream_leaves_the_engine(subject: Subject) -> None:
    async with aclosing(subject.sampler.stream(make_request(LONG))) as stream:
        await anext(stream)
        assert subject.engine.load().running == 1
    await wait_until_idle(subject)


@engines
async def test_streamed_tokens_are_counted_separately(subject: Subject) -> None:
    before = subject.engine.load()
    await read_stream(subject, make_request(10))
    await subject.sampler.generate(make_request(20))
    after = subject.engine.load()
    assert after.streamed_tokens - before.streamed_tokens == 10
    assert after.generated_tokens - before.generated_tokens == 20


@engines
async def test_missing_weights_are_refused_and_generation_continues(subject: Subject) -> None:
    version = await subject.update("keep")
    with pytest.raises(WeightsError, match="not hold version 99"):
        held = HeldWeights.in_store(subject.store, epoch=0, version=99)
        await subject.engine.update_weights(held, interruption="keep")
    assert subject.engine.version == version
    subject.check(await subject.sampler.generate(make_request(10)), False)


@pytest.mark.parametrize(
    "engine",
    [ScriptedEngine(), VllmEngine(Path("unused"), RolloutConfig(), precision="float32")],
    ids=["scripted", "vllm"],
)
async def test_an_engine_that_was_not_started_refuses_updates(engine: Engine) -> None:
    assert (engine.version, engine.load().running, engine.peek("r")) == (CHECKPOINT_VERSION, 0, None)
    with pytest.raises(EngineError, match="not started"):
        held = HeldWeights.in_store(Path("unused"), epoch=0, version=0)
        await engine.update_weights(held, interruption="keep")


@pytest.mark.parametrize("subject", ["scripted", pytest.param("vllm", marks=pytest.mark.ends_engine)], indirect=True)
async def test_a_dead_engine_fails_all_calls_but_keeps_partials(subject: Subject) -> None:
    await subject.update("keep")
    request = make_request(LONG)
    running = start(subject.sampler.generate(request))
    reading = start(read_stream(subject, make_request(LONG)))
    before = await wait_for_partial(subject, request, 40)
    subject.stall()
    updating = start(subject.update("keep"))
    await asyncio.sleep(0.2)
    assert not updating.done()
    subject.die()
    async with asyncio.timeout(20):
        for task in (running, reading, updating):
            with pytest.raises(EngineError, match=r"died|EngineDeadError"):
                await task
    left = subject.sampler.peek(request.request_id)
    assert left is not None
    assert left.tokens[: len(before.tokens)].tolist() == before.tokens.tolist()
    subject.check(left, False)
    with pytest.raises(EngineError):
        await subject.sampler.generate(make_request(5))
    assert (subject.engine.load().running, subject.engine.load().waiting) == (0, 0)


def counting_script(request: GenerationRequest) -> list[int]:
    """A completion in which each token determines the next, so that a prefix is continued."""
    tokens = []
    last = request.prompt[-1]
    for _ in range(2 * LONG):
        last = (5 * last + 3) % 250
        tokens.append(last)
    return tokens


def make_request(max_tokens: int, **fields: Any) -> GenerationRequest:
    number = next(_NUMBERS)
    return GenerationRequest(**{"request_id": f"r{number}", "prompt": PROMPT, "max_tokens": max_tokens, **fields})


_NUMBERS = iter(range(10_000))


def start(work: Coroutine[Any, Any, Any] | Awaitable[Any]) -> asyncio.Task[Any]:
    return asyncio.ensure_future(work)  # type: ignore[return-value]


def versions(generation: Generation) -> list[int]:
    """Return the versions of the spans, which must cover all tokens in order."""
    assert [span.start for span in generation.spans] == [0, *(span.end for span in generation.spans[:-1])]
    assert generation.spans[-1].end == len(generation.tokens) == len(generation.logprobs)
    return [span.version for span in generation.spans]


def join_pieces(pieces: list[Generation]) -> Generation:
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = join_generations(whole, piece)
    return whole


async def read_stream(subject: Subject, request: GenerationRequest) -> Generation:
    return join_pieces([piece async for piece in subject.sampler.stream(request)])


def count_tokens(subject: Subject) -> int:
    load = subject.engine.load()
    return load.generated_tokens + load.streamed_tokens


async def wait_for_tokens(subject: Subject, count: int) -> None:
    target = count_tokens(subject) + count
    async with asyncio.timeout(60):
        while count_tokens(subject) < target:
            await asyncio.sleep(0.005)


async def wait_for_closed_gate(subject: Subject) -> None:
    """Wait until an update has closed the gate of the engine behind `subject`."""
    gate = subject.engine._gate if isinstance(subject.engine, VllmEngine) else subject.engine._admits_requests  # type: ignore[attr-defined]
    async with asyncio.timeout(60):
        while gate.is_set():
            await asyncio.sleep(0.005)


async def wait_for_partial(subject: Subject, request: GenerationRequest, min_tokens: int) -> Generation:
    async with asyncio.timeout(60):
        while (partial := subject.sampler.peek(request.request_id)) is None or len(partial.tokens) < min_tokens:
            await asyncio.sleep(0.005)
    return partial


async def wait_until_idle(subject: Subject) -> None:
    async with asyncio.timeout(20):
        while subject.engine.load().running + subject.engine.load().waiting:
            await asyncio.sleep(0.01)
