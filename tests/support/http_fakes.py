"""A rollout server's HTTP around a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
from starlette.types import ASGIApp

from async_grpo.config import RunConfig
from async_grpo.weights.manifest import WeightVersion
from buffer import InMemoryBuffer
from rollout_server.context import ServerContext
from rollout_server.dispatch.admission import AdmissionGate, TaskFeeder
from rollout_server.dispatch.dispatcher import Dispatcher
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.scripted import ScriptedEngine
from rollout_server.evaluation.milestones import MilestoneEvaluator
from rollout_server.http.app import make_app
from rollout_server.http.context import ApiKeys, HttpContext, ReadyServer
from rollout_server.http.jobs import CompletionJobs
from rollout_server.http.prompts import PromptEncoder
from rollout_server.http.server import ApiServer
from rollout_server.server import RolloutServer
from rollout_server.weight_watcher import WeightWatcher
from rollout_server.workflows import SingleTurn
from tests.support.rollout_fakes import FakeEngine, FakeReceiver, buffer_of, config_of, context_of, watcher_of

CONTEXT = 64
STOP = 255
ADMIN = {"authorization": "Bearer open sesame"}


class Letters:
    """A tokenizer with one token per byte, a chat template, and the special token STOP."""

    chat_template: str | None = "{{ messages }}"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return ([STOP] if add_special_tokens else []) + list(text.encode("ascii"))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        if skip_special_tokens:
            token_ids = [token for token in token_ids if token != STOP]
        return bytes(token_ids).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


@dataclass
class ServerHarness:
    """A ready server with its parts, and the HTTP application."""

    app: ASGIApp
    http: HttpContext
    context: ServerContext
    engine: Any
    watcher: WeightWatcher
    dispatcher: Dispatcher

    def client(self, host: str = "127.0.0.1") -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url=f"http://{host}")


def script_of(text: str) -> Callable[[GenerationRequest], list[int]]:
    """Script that writes this text and the stop token."""
    return lambda request: [*text.encode(), STOP]


def http_config(http: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    rollout = {"max_concurrency": 8, "vllm": {"max_model_len": CONTEXT}, "http": http or {}}
    return config_of(**{"rollout": rollout, **changes})


def prompts_of(tokenizer: Letters | None = None) -> PromptEncoder:
    return PromptEncoder(tokenizer or Letters(), vocabulary=256, limits=http_config().rollout.limits)


async def scripted(script: Callable[[GenerationRequest], list[int]], tokens_per_s: float = 10_000.0) -> ScriptedEngine:
    engine = ScriptedEngine(script, tokens_per_s=tokens_per_s)
    await engine.start()
    return engine


def with_letters(context: ServerContext) -> ServerContext:
    """The context with a workflow whose tokenizer skips the stop token."""
    return replace(context, workflow=SingleTurn(Letters()))


async def make_harness(
    tmp_path: Path,
    engine: ScriptedEngine | FakeEngine,
    *,
    config: RunConfig | None = None,
    keys: ApiKeys | None = None,
    tokenizer: Letters | None = None,
    buffer: InMemoryBuffer | None = None,
    version: int = 3,
) -> ServerHarness:
    """Make a ready server with weights of epoch 2."""
    config = config or http_config()
    context = with_letters(context_of(tmp_path, config, engine, buffer or buffer_of(config)))
    watcher = watcher_of(context, FakeReceiver(WeightVersion(2, version)))
    await watcher.wait_for_initial_weights(1.0)
    dispatcher = Dispatcher(context, watcher, TaskFeeder(context.buffer, context.source, target=16))
    http = HttpContext(config, context.name, keys or ApiKeys(), prompts_of(tokenizer))
    jobs = CompletionJobs(engine, config.rollout.http.max_concurrency)
    http.server = ReadyServer(context, watcher, dispatcher, MilestoneEvaluator(context, watcher), jobs)
    return ServerHarness(make_app(http), http, context, engine, watcher, dispatcher)


@asynccontextmanager
async def ready_server(
    tmp_path: Path,
    engine: ScriptedEngine,
    config: RunConfig | None = None,
    *,
    buffer: InMemoryBuffer | None = None,
    weights: WeightVersion = WeightVersion(1, 0),
) -> AsyncIterator[tuple[ApiServer, RolloutServer, FakeReceiver]]:
    """A ready server with a real socket, which does not serve yet."""
    config = config or http_config()
    context = with_letters(context_of(tmp_path, config, engine, buffer or buffer_of(config)))
    receiver = FakeReceiver(weights)
    watcher = watcher_of(context, receiver)
    await watcher.wait_for_initial_weights(1.0)
    api = ApiServer(config, "rollout-0", prompts_of())
    await api.open()
    try:
        yield api, RolloutServer(context, watcher, api), receiver
    finally:
        await api.detach()
        await api.aclose()


@asynccontextmanager
async def serving(engine: Any, tokenizer: Any, *, vocabulary: int, max_length: int = 1024) -> AsyncIterator[str]:
    """Routes of /v1 around an engine whose weights the test replaces; yields the address."""
    config = config_of(
        name="policy",
        model={"random": {"max_positions": max_length}},
        trainer={"micro_batch_tokens": max_length},
        rollout={"vllm": {"max_model_len": max_length}},
    )
    api = ApiServer(config, "rollout-0", PromptEncoder(tokenizer, vocabulary=vocabulary, limits=config.rollout.limits))
    await api.open()
    parts: list[Any] = [SimpleNamespace(engine=engine), SimpleNamespace(applied=WeightVersion(0, 0))]
    api.attach(*parts, cast(Any, SimpleNamespace(admission=AdmissionGate())), cast(Any, None))
    try:
        yield api.address
    finally:
        await api.detach()
        await api.aclose()


@asynccontextmanager
async def dispatching(harness: ServerHarness) -> AsyncIterator[asyncio.Task[None]]:
    """Run the dispatcher; it is stopped at the end of the block."""
    feeder = asyncio.create_task(TaskFeeder(harness.context.buffer, harness.context.source, target=16).run_feeding())
    running = asyncio.create_task(harness.dispatcher.run_until_end())
    try:
        yield running
    finally:
        for task in (running, feeder):
            task.cancel()
        await asyncio.gather(running, feeder, return_exceptions=True)
