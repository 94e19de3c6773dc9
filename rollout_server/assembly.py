"""Opens the parts of a rollout server, in the order of their dependencies.

    buffer, board -> HTTP -> verifiers -> prompts -> engine, proof of its log-probabilities -> receiver, first weights

All are closed in reverse order, also if opening a later part fails.
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
from rollout_server.engines.base import Engine, Truncation
from rollout_server.engines.model_files import vocabulary_size
from rollout_server.engines.proof import LogprobProof, prove_logprobs
from rollout_server.evaluation.milestones import BOARD_POLL_S
from rollout_server.run_logger import RolloutLogger
from rollout_server.server import RolloutServer
from rollout_server.weight_watcher import WeightWatcher
from rollout_server.workflows import make_workflow

if TYPE_CHECKING:
    from rollout_server.http.server import ApiServer

log = structlog.get_logger()


@asynccontextmanager
async def open_server(config: RunConfig, model: Path, name: str) -> AsyncIterator[RolloutServer | None]:
    """Open a server and load its initial weights; yields None if the run is over.

    Raises the errors of all parts: ConfigError, DataError, EngineError, LogprobsWrong, BufferFault, WaitTimeout.
    """
    async with AsyncExitStack() as stack:
        state, board = await _connect_to_run(stack, config)
        if await buffer.is_run_over(config, state, board):
            yield None
            return

        life = round(1000 * time.time())
        # A server that was killed cannot give its groups back. Their leases would occupy the window until they expire.
        await state.expire_leases(name, life=life - 1)

        tokenizer = load_tokenizer(model)
        # Before the engine, which takes minutes to load, so that /readyz can report that it is not ready.
        api = await _open_api(stack, config, model, name, tokenizer)
        # Before the engine, because the trainer must not use the device while the engine allocates its memory.
        turn = await _take_device_turn(stack, config)
        context = await _open_context(stack, config, model, name, life, state, board, tokenizer)
        watcher = await _open_watcher(stack, context)

        initial_weights = watcher.wait_for_initial_weights(config.launch.ready_timeout_s)
        yielding = None
        if turn is not None:
            # Yield the device before the first weights arrive: a resumed trainer replays steps before it publishes any,
            # so each would wait for the other.
            yielding = asyncio.create_task(watcher.yield_device_to_trainer(turn))
            stack.push_async_callback(cancel_and_wait, yielding)
            initial_weights = race(initial_weights, yielding)
        if not await wait_unless_run_ends(initial_weights, lambda: buffer.is_run_over(config, state, board)):
            yield None
            return

        if api is not None:
            stack.push_async_callback(api.detach)
        yield RolloutServer(context, watcher, api, yielding)


async def _connect_to_run(stack: AsyncExitStack, config: RunConfig) -> tuple[ReplayBuffer, RunBoard]:
    state = await buffer.open_run(config)
    stack.push_async_callback(state.aclose)
    board = await buffer.connect_board(config.redis, config.name)
    stack.push_async_callback(board.aclose)
    await _find_publisher(board)  # check the protocol now, before the engine takes minutes to load
    return state, board


async def _find_publisher(board: RunBoard) -> PublisherAddress | None:
    """Return the address at which weights are published; None if they are not published yet.

    Raises ConfigError if the trainer's release is incompatible with this one.
    """
    publisher = await board.publisher_address()
    if publisher is not None and publisher.protocol != PROTOCOL:
        raise ConfigError(
            f"the trainer of this run uses protocol {publisher.protocol}, this rollout server {PROTOCOL}: their "
            "releases are incompatible. Start the server with the trainer's release, or stop the run and start all "
            "roles with this one"
        )
    return publisher


async def _open_api(
    stack: AsyncExitStack, config: RunConfig, model: Path, name: str, tokenizer: Tokenizer
) -> ApiServer | None:
    """Open the HTTP API; returns None if HTTP is off."""
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


async def _open_context(
    stack: AsyncExitStack,
    config: RunConfig,
    model: Path,
    name: str,
    life: int,
    state: ReplayBuffer,
    board: RunBoard,
    tokenizer: Tokenizer,
) -> ServerContext:
    """Open verifiers, data, logger, engine and workflow."""
    pool = RewardPool(config.rewards)
    await stack.enter_async_context(pool)

    source = make_source(config, tokenizer)
    if source.dropped:
        log.warning("rows of the data are not used", rows=str(source.dropped))
    logger = RolloutLogger(config.run_dir, name, samples_every=config.telemetry.samples_every, tokenizer=tokenizer)
    stack.callback(logger.close)

    engine, proof = await start_engine(stack, config, model, name)
    if engine.note:
        logger.record_engine_note(engine.note)
    workflow = make_workflow(config.rollout, tokenizer)
    return ServerContext(
        config=config,
        name=name,
        engine=engine,
        pool=pool,
        workflow=workflow,
        source=source,
        buffer=state,
        board=board,
        logger=logger,
        proof=proof,
        vocabulary=vocabulary_size(model),
        life=life,
    )


async def start_engine(
    stack: AsyncExitStack, config: RunConfig, model: Path, name: str
) -> tuple[Engine, LogprobProof | None]:
    """Start the engine and check its log-probabilities. Raises EngineError, LogprobsWrong, WaitTimeout."""
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
            "Raise launch.ready_timeout_s if the model takes that long, or see the engine's log lines above",
        ) from None
    limits = config.rollout.limits
    log.info("the engine runs", requests_at_once=limits.requests, tokens_per_step=limits.batched_tokens)
    proof = await prove_logprobs(
        engine,
        vocabulary=vocabulary_size(model),
        temperature=config.sampling.temperature,
        precision=config.model.precision,
        timeout_s=ready_timeout_s,
        truncation=Truncation.from_config(config.sampling),
    )
    if proof is not None:
        log.info("log-probabilities are those of the sampled distribution", engine=engine.description, **asdict(proof))
    return engine, proof


async def _take_device_turn(stack: AsyncExitStack, config: RunConfig) -> DeviceTurn | None:
    """Take the device's lock for as long as the engine has memory there; None if the engine never sleeps."""
    if config.launch.share_devices != "sleep":
        return None
    turn = DeviceTurn(config.run_dir)
    stack.callback(turn.close)
    await turn.use()
    return turn


async def _open_watcher(stack: AsyncExitStack, context: ServerContext) -> WeightWatcher:
    config = context.config
    receiver = make_receiver(config, lambda: _find_publisher(context.board), name=context.name)
    stack.push_async_callback(receiver.close)
    return WeightWatcher(
        receiver,
        context.engine,
        interruption=config.rollout.interruption,
        update_timeout_s=config.weights.update_timeout_s,
        board=context.board,
        logger=context.logger,
    )


async def wait_unless_run_ends(work: Coroutine[Any, Any, None], is_over: Callable[[], Awaitable[bool]]) -> bool:
    """Await `work`. Returns False, and cancels it, if the run ends first.

    While this server starts, others may finish the run; then no weights are published any more. The board sends no
    events, so it is polled once a second.
    """

    async def wait_for_end() -> None:
        while True:
            await asyncio.sleep(BOARD_POLL_S)
            if await is_over():
                return

    try:
        await race(work, wait_for_end())
    except Overtaken:
        return False
    return True
