"""What every `Sampler` and `Engine` promises: the scripted engine, HTTP to a server around one, and a real vLLM."""

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
from rollout_server.workflows.session import join
from tests.support.http_fakes import Letters, serving

pytestmark = pytest.mark.asyncio(loop_scope="session")

RUN = f"test-engines-{os.getpid()}"
PROMPT = [20, 30, 40]
LONG = 400
"""Tokens of a completion that is not finished before an update comes."""


@dataclass
class Subject:
    """An implementation, and what the test does to it from outside."""

    sampler: Sampler
    engine: Engine
    """The engine behind the sampler; they are one unless the sampler is over HTTP."""
    store: Path
    update: Callable[[Interruption], Awaitable[int]]
    """Makes, publishes and loads new weights; returns their version."""
    check: Callable[[Generation, bool], None]
    """Raises unless every log-probability is that of the version in its span; `recomputed`: of the weights that encoded
    the whole prefix anew."""
    stall: Callable[[], None]
    """From now on the engine neither generates nor updates."""
    die: Callable[[], None]


@pytest_asyncio.fixture(loop_scope="session")
async def scripted() -> AsyncIterator[Subject]:
    engine = ScriptedEngine(counting, tokens_per_s=1000.0, reads_store=True)
    store = WeightStore.create(store_path(RUN, "scripted"), make_layout([("weight", "float32", [4])]))

    async def update(interruption: Interruption) -> int:
        version = engine.version + 1
        store.begin_write()
        store.commit_write(WeightVersion(0, version))
        held = HeldWeights.in_store(store.path, epoch=0, version=version)
        times = await engine.update_weights(held, interruption=interruption)
        assert times.pause_s >= times.load_s >= 0
        return version

    def check(made: Generation, recomputed: bool) -> None:
        assert made.logprobs.tolist() == scripted_logprobs(made.tokens).tolist()

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

    def check(made: Generation, recomputed: bool) -> None:
        assert lab.error(PROMPT, made, keep=not recomputed) < EXACT
        if len(made.spans) > 1:
            assert lab.error(PROMPT, made, keep=recomputed) > FAR
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
    found: Subject = request.getfixturevalue(request.param)
    return found


engines = pytest.mark.parametrize("subject", ["scripted", "vllm"], indirect=True)


async def test_every_token_has_a_log_probability_and_a_version(subject: Subject) -> None:
    version = await subject.update("keep")
    made = await subject.sampler.generate(asked(30))
    assert (made.tokens.dtype, made.tokens.shape, made.finish_reason) == (np.int32, (30,), "length")
    assert (made.logprobs.dtype, made.logprobs.shape) == (np.float32, (30,))
    assert versions(made) == [version]
    subject.check(made, False)


async def test_a_seed_gives_one_completion_whole_or_in_pieces(subject: Subject) -> None:
    request = asked(30, seed=2**62 + 1)
    whole, again = await subject.sampler.generate(request), await subject.sampler.generate(request)
    pieces = [piece async for piece in subject.sampler.stream(request)]
    assert len(pieces) > 2
    assert {piece.finish_reason for piece in pieces[:-1]} == {""}
    for other in (again, joined(pieces)):
        assert other.tokens.tolist() == whole.tokens.tolist()
        assert np.allclose(other.logprobs, whole.logprobs, atol=1e-4)
        assert (other.spans, other.finish_reason) == (whole.spans, whole.finish_reason)


@pytest.mark.parametrize("interruption", ["keep", "recompute"])
async def test_requests_in_flight_go_on_under_the_new_weights(subject: Subject, interruption: Interruption) -> None:
    old = await subject.update("keep")
    running = [start(subject.sampler.generate(asked(LONG))) for _ in range(2)]
    reading = start(read(subject, asked(LONG)))
    await more_tokens(subject, 90)
    new = await subject.update(interruption)
    for made in await asyncio.gather(*running, reading):
        assert (len(made.tokens), made.finish_reason, versions(made)) == (LONG, "length", [old, new])
        subject.check(made, interruption == "recompute")


async def test_drain_lets_requests_finish_and_holds_new_ones_back(subject: Subject) -> None:
    old = await subject.update("keep")
    running = [start(subject.sampler.generate(asked(LONG))), start(read(subject, asked(LONG)))]
    await more_tokens(subject, 20)
    updating = start(subject.update("drain"))
    await new_requests_held_back(subject)
    assert not updating.done()
    late = start(subject.sampler.generate(asked(20)))
    assert [versions(made) for made in await asyncio.gather(*running)] == [[old], [old]]
    assert versions(await late) == [await updating]


@engines
async def test_requests_outlive_a_sleep_with_their_tokens_and_go_on_under_the_same_weights(subject: Subject) -> None:
    version = await subject.update("keep")
    running, reading = start(subject.sampler.generate(asked(LONG))), start(read(subject, asked(LONG)))
    await more_tokens(subject, 60)
    await subject.engine.sleep()
    made = tokens_made(subject)
    late = start(subject.sampler.generate(asked(10)))
    await asyncio.sleep(0.1)
    assert tokens_made(subject) == made
    await subject.engine.wake()
    for whole in await asyncio.gather(running, reading, late):
        assert (versions(whole), whole.finish_reason) == ([version], "length")
        subject.check(whole, True)


@engines
async def test_abort_ends_what_may_be_interrupted_and_another_request_goes_on_from_there(subject: Subject) -> None:
    old = await subject.update("keep")
    cut = start(subject.sampler.generate(asked(LONG)))
    spared = start(subject.sampler.generate(asked(LONG, interruptible=False)))
    await more_tokens(subject, 60)
    new = await subject.update("abort")
    partial = await cut
    assert (partial.finish_reason, versions(partial)) == ("abort", [old])
    assert 0 < len(partial.tokens) < LONG
    assert versions(await spared) == [old, new]
    rest = await subject.sampler.generate(asked(LONG - len(partial.tokens), prefix=partial.tokens.tolist()))
    assert (len(rest.tokens), rest.finish_reason) == (LONG - len(partial.tokens), "length")
    subject.check(join(partial, rest), True)


@engines
async def test_what_a_request_has_can_be_looked_at_while_it_runs(subject: Subject) -> None:
    old, request = await subject.update("keep"), asked(LONG)
    running = start(subject.sampler.generate(request))
    before = await peeked(subject, request, 30)
    new = await subject.update("keep")
    now = await peeked(subject, request, 0)
    after = await peeked(subject, request, len(now.tokens) + 30)
    whole = await running
    for partial, seen in ((before, [old]), (after, [old, new])):
        assert partial.tokens.tolist() == whole.tokens[: len(partial.tokens)].tolist()
        assert (partial.finish_reason, versions(partial)) == ("", seen)
        subject.check(partial, False)
    assert subject.sampler.peek(request.request_id) is None


async def test_a_cancelled_request_frees_the_engine(subject: Subject) -> None:
    running, started = start(subject.sampler.generate(asked(LONG))), subject.engine.load()
    await more_tokens(subject, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await idle(subject)
    assert len((await subject.sampler.generate(asked(5))).tokens) == 5
    ended = subject.engine.load()
    assert ended.generated_tokens + ended.streamed_tokens >= started.generated_tokens + started.streamed_tokens + 15


async def test_a_reader_that_leaves_frees_the_engine(subject: Subject) -> None:
    async with aclosing(subject.sampler.stream(asked(LONG))) as stream:
        await anext(stream)
        assert subject.engine.load().running == 1
    await idle(subject)


@engines
async def test_streamed_tokens_are_counted_apart(subject: Subject) -> None:
    before = subject.engine.load()
    await read(subject, asked(10))
    await subject.sampler.generate(asked(20))
    after = subject.engine.load()
    assert after.streamed_tokens - before.streamed_tokens == 10
    assert after.generated_tokens - before.generated_tokens == 20


@engines
async def test_weights_that_are_not_there_are_refused_and_generation_goes_on(subject: Subject) -> None:
    version = await subject.update("keep")
    with pytest.raises(WeightsError, match="not hold version 99"):
        held = HeldWeights.in_store(subject.store, epoch=0, version=99)
        await subject.engine.update_weights(held, interruption="keep")
    assert subject.engine.version == version
    subject.check(await subject.sampler.generate(asked(10)), False)


@pytest.mark.parametrize(
    "engine",
    [ScriptedEngine(), VllmEngine(Path("unused"), RolloutConfig(), precision="float32")],
    ids=["scripted", "vllm"],
)
async def test_an_engine_that_was_not_started_says_so(engine: Engine) -> None:
    assert (engine.version, engine.load().running, engine.peek("r")) == (CHECKPOINT_VERSION, 0, None)
    with pytest.raises(EngineError, match="not started"):
        held = HeldWeights.in_store(Path("unused"), epoch=0, version=0)
        await engine.update_weights(held, interruption="keep")


@pytest.mark.parametrize("subject", ["scripted", pytest.param("vllm", marks=pytest.mark.ends_engine)], indirect=True)
async def test_a_dead_engine_fails_requests_and_updates_and_still_has_the_partials(subject: Subject) -> None:
    await subject.update("keep")
    request = asked(LONG)
    running, reading = start(subject.sampler.generate(request)), start(read(subject, asked(LONG)))
    before = await peeked(subject, request, 40)
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
        await subject.sampler.generate(asked(5))
    assert (subject.engine.load().running, subject.engine.load().waiting) == (0, 0)


def counting(request: GenerationRequest) -> list[int]:
    """A completion in which every token follows from the one before, so that a prefix is continued."""
    tokens, last = [], request.prompt[-1]
    for _ in range(2 * LONG):
        last = (5 * last + 3) % 250
        tokens.append(last)
    return tokens


def asked(max_tokens: int, **fields: Any) -> GenerationRequest:
    number = next(_NUMBERS)
    return GenerationRequest(**{"request_id": f"r{number}", "prompt": PROMPT, "max_tokens": max_tokens, **fields})


_NUMBERS = iter(range(10_000))


def start(work: Coroutine[Any, Any, Any] | Awaitable[Any]) -> asyncio.Task[Any]:
    return asyncio.ensure_future(work)  # type: ignore[return-value]


def versions(made: Generation) -> list[int]:
    """The versions of the spans, which cover all tokens in order."""
    assert [span.start for span in made.spans] == [0, *(span.end for span in made.spans[:-1])]
    assert made.spans[-1].end == len(made.tokens) == len(made.logprobs)
    return [span.version for span in made.spans]


def joined(pieces: list[Generation]) -> Generation:
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = join(whole, piece)
    return whole


async def read(subject: Subject, request: GenerationRequest) -> Generation:
    return joined([piece async for piece in subject.sampler.stream(request)])


def tokens_made(subject: Subject) -> int:
    load = subject.engine.load()
    return load.generated_tokens + load.streamed_tokens


async def more_tokens(subject: Subject, count: int) -> None:
    target = tokens_made(subject) + count
    async with asyncio.timeout(60):
        while tokens_made(subject) < target:
            await asyncio.sleep(0.005)


async def new_requests_held_back(subject: Subject) -> None:
    """Wait until an update has closed the gate of the engine behind `subject`."""
    gate = subject.engine._gate if isinstance(subject.engine, VllmEngine) else subject.engine._admits_requests  # type: ignore[attr-defined]
    async with asyncio.timeout(60):
        while gate.is_set():
            await asyncio.sleep(0.005)


async def peeked(subject: Subject, request: GenerationRequest, least: int) -> Generation:
    async with asyncio.timeout(60):
        while (partial := subject.sampler.peek(request.request_id)) is None or len(partial.tokens) < least:
            await asyncio.sleep(0.005)
    return partial


async def idle(subject: Subject) -> None:
    async with asyncio.timeout(20):
        while subject.engine.load().running + subject.engine.load().waiting:
            await asyncio.sleep(0.01)
