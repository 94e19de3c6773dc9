"""Opens the parts of a rollout server, in the order in which they need each other.

    buffer, board -> HTTP -> verifiers -> prompts -> engine, proof of its log-probabilities -> receiver, first weights

Everything is closed in the reverse order, also if opening a later part fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

import buffer
from async_grpo.config import RunConfig
from async_grpo.data import make_source
from async_grpo.data.tokenizer import Tokenizer, load_tokenizer
from async_grpo.errors import ConfigError, DependencyError, WaitTimeout
from async_grpo.rewards.pool import RewardPool
from async_grpo.utils.aio import Overtaken, cancel_and_wait, race
from async_grpo.utils.files import DeviceTurn
from async_grpo.weights import make_receiver
from async_grpo.wire.board import PROTOCOL, PublisherAddress
from buffer.base import ReplayBuffer, RunBoard
from rollout_server.context import ServerContext
from rollout_server.engines import make_engine
from rollout_server.engines.base import Engine
from rollout_server.engines.model_files import vocabulary_size
from rollout_server.engines.proof import LogprobProof, prove_logprobs
from rollout_server.evaluation.milestones import LOOK_EVERY_S
from rollout_server.run_logger import RolloutLogger
from rollout_server.server import RolloutServer
from rollout_server.weight_watcher import WeightWatcher
from rollout_server.workflows import make_workflow

if TYPE_CHECKING:
    from rollout_server.http.server import ApiServer

log = structlog.get_logger()


@asynccontextmanager
async def open_server(config: RunConfig, model: Path, name: str) -> AsyncIterator[RolloutServer | None]:
    """Open a server and give it its first weights; yields None if the run is over.

    Raises what any part raises: ConfigError, DataError, EngineError, LogprobsWrong, BufferFault, WaitTimeout.
    """
    async with AsyncExitStack() as stack:
        state, board = await _connect(stack, config)
        if await buffer.is_run_over(config, state, board):
            yield None
            return
        life = round(1000 * time.time())
        # A server that was killed cannot give its groups back. Their leases would fill the window until they expire.
        await state.expire_leases(name, life=life - 1)
        tokenizer = load_tokenizer(model)
        api = await _open_api(stack, config, model, name, tokenizer)
        turn = await _turn_on_devices(stack, config)
        context = await _assemble(stack, config, model, name, life, state, board, tokenizer)
        watcher = await _follow_weights(stack, context)
        first, giving_way = watcher.first(config.launch.ready_timeout_s), None
        if turn is not None:  # from now on: the trainer may replay steps before it publishes weights
            giving_way = asyncio.create_task(watcher.give_way(turn))
            stack.push_async_callback(cancel_and_wait, giving_way)
            first = race(first, giving_way)
        if not await came_before_the_end(first, lambda: buffer.is_run_over(config, state, board)):
            yield None
            return
        if api is not None:
            stack.push_async_callback(api.detach)
        yield RolloutServer(context, watcher, api, giving_way)


async def _connect(stack: AsyncExitStack, config: RunConfig) -> tuple[ReplayBuffer, RunBoard]:
    state = await buffer.open_run(config)
    stack.push_async_callback(state.aclose)
    board = await buffer.connect_board(config.redis, config.name)
    stack.push_async_callback(board.aclose)
    await _publisher_of(board)
    return state, board


async def _publisher_of(board: RunBoard) -> PublisherAddress | None:
    """Where weights are published, if they are. Raises ConfigError if that trainer is of a release with which this one
    cannot speak."""
    found = await board.publisher_address()
    if found is not None and found.protocol != PROTOCOL:
        raise ConfigError(
            f"the trainer of this run speaks protocol {found.protocol}, this rollout server {PROTOCOL}: their releases "
            "cannot work together. Start the server with the trainer's release, or stop the run, and start all roles "
            "with this one"
        )
    return found


async def _open_api(
    stack: AsyncExitStack, config: RunConfig, model: Path, name: str, tokenizer: Tokenizer
) -> ApiServer | None:
    """The HTTP API, open before the engine so that it can report that the engine is not ready. None if HTTP is off."""
    if not config.rollout.http.is_on:
        return None
    try:
        from rollout_server.http.prompts import PromptEncoder
        from rollout_server.http.server import ApiServer
    except ImportError as error:
        raise DependencyError(
            f"HTTP needs FastAPI, uvicorn and prometheus-client ({error}). Install the extra http, or set "
            "rollout.http.port to -1"
        ) from error
    prompts = PromptEncoder(tokenizer, vocabulary=vocabulary_size(model), limits=config.rollout.limits)
    api = ApiServer(config, name, prompts)
    await api.open()
    stack.push_async_callback(api.aclose)
    return api


async def _assemble(
    stack: AsyncExitStack,
    config: RunConfig,
    model: Path,
    name: str,
    life: int,
    state: ReplayBuffer,
    board: RunBoard,
    tokenizer: Tokenizer,
) -> ServerContext:
    pool = RewardPool(config.rewards)
    await stack.enter_async_context(pool)
    source = make_source(config, tokenizer)
    if source.dropped:
        log.warning("rows of the data are not used", rows=str(source.dropped))
    every = config.telemetry.samples_every
    logger = RolloutLogger(config.run_dir, name, samples_every=every, tokenizer=tokenizer)
    stack.callback(logger.close)
    engine, proof = await start_engine(stack, config, model, name)
    if engine.note:
        logger.engine_note(engine.note)
    workflow = make_workflow(config.rollout, tokenizer)
    return ServerContext(
        config,
        name,
        engine,
        pool,
        workflow,
        source,
        state,
        board,
        logger,
        proof,
        vocabulary=vocabulary_size(model),
        life=life,
    )


async def start_engine(
    stack: AsyncExitStack, config: RunConfig, model: Path, name: str
) -> tuple[Engine, LogprobProof | None]:
    """An engine that generates, and the proof of its log-probabilities. Raises EngineError, LogprobsWrong,
    WaitTimeout."""
    engine = make_engine(config, model, name=name)
    stack.push_async_callback(engine.aclose)
    ready_timeout_s = config.launch.ready_timeout_s
    try:
        async with asyncio.timeout(ready_timeout_s):
            await engine.start()
    except TimeoutError:
        raise WaitTimeout(
            f"the engine of {name} to load {model}",
            ready_timeout_s,
            "Raise launch.ready_timeout_s if the model takes that long, or read above what the engine has logged",
        ) from None
    limits = config.rollout.limits
    log.info("the engine runs", requests_at_once=limits.requests, tokens_per_step=limits.batched_tokens)
    proof = await prove_logprobs(
        engine,
        vocabulary=vocabulary_size(model),
        temperature=config.sampling.temperature,
        precision=config.model.precision,
        timeout_s=ready_timeout_s,
    )
    if proof is not None:
        log.info("log-probabilities are those of the sampled distribution", engine=engine.description, **asdict(proof))
    return engine, proof


async def _turn_on_devices(stack: AsyncExitStack, config: RunConfig) -> DeviceTurn | None:
    """The device's lock, held from before the engine takes memory until it has none; None if it never sleeps."""
    if config.launch.share_devices != "sleep":
        return None
    turn = DeviceTurn(config.run_dir)
    stack.callback(turn.close)
    await turn.use()
    return turn


async def _follow_weights(stack: AsyncExitStack, context: ServerContext) -> WeightWatcher:
    config = context.config
    receiver = make_receiver(config, lambda: _publisher_of(context.board), name=context.name)
    stack.push_async_callback(receiver.close)
    return WeightWatcher(
        receiver,
        context.engine,
        interruption=config.rollout.interruption,
        update_timeout_s=config.weights.update_timeout_s,
        board=context.board,
        logger=context.logger,
    )


async def came_before_the_end(first: Coroutine[Any, Any, None], is_over: Callable[[], Awaitable[bool]]) -> bool:
    """Wait for the first weights. Returns False, and cancels the wait, if the run ends first: other servers may finish
    it while this one starts, and then no weights are published. The board sends no events, so it is polled once a
    second."""

    async def end() -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if await is_over():
                return

    try:
        await race(first, end())
    except Overtaken:
        return False
    return True
