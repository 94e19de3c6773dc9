"""Trial of the user's reward functions and workflow on the first rows of the data, before a run starts.

    first rows --right and wrong answers--> reward functions: one that raises for all of them cannot judge anything
    first row  --scripted policy----------> workflow: errors in its code appear here instead of after the engine's start

A verifier may raise for a completion that it cannot judge, and a tool may be temporarily unavailable, so neither alone
refuses a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from async_grpo.config import RunConfig
from async_grpo.config.rewards import RewardsConfig
from async_grpo.data.arithmetic import STREAM, ProblemSet
from async_grpo.data.base import make_task
from async_grpo.data.jsonl import usable_rows
from async_grpo.data.prepare.formats import Rejections
from async_grpo.data.prepared_source import open_configured_folder
from async_grpo.data.tokenizer import Tokenizer, find_tokenizer
from async_grpo.errors import ConfigError, DataError
from async_grpo.plugins import is_plugin, load_plugin
from async_grpo.rewards.base import TRIAL_INPUT, RewardFailure, RewardInput
from async_grpo.rewards.pool import RewardPool
from async_grpo.rewards.registry import ALGEBRA_VERIFIERS, BUILTIN
from async_grpo.weights.base import HeldWeights
from async_grpo.wire import Sample, Task
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.scripted import ScriptedEngine
from rollout_server.workflows import Workflow, make_workflow
from rollout_server.workflows.session import SampleSession

ROWS = 3
WORKFLOW_S = 30.0
"""Maximum seconds of the workflow's trial. A longer trial is aborted without an error, because tools may be slow."""
_MISTAKES = (TypeError, NameError, AttributeError, ImportError)
"""Errors of code that can never work. Others may come from the scripted answer or from an unavailable tool."""
_NEED_NO_TRIAL = BUILTIN.keys() - ALGEBRA_VERIFIERS
"""Reward functions without optional dependencies, which work wherever this package does."""


def check_rewards(rewards: RewardsConfig, rows: Sequence[RewardInput] = ()) -> None:
    """Raise ConfigError for an unknown name, a missing environment variable, or a verifier that cannot be imported,
    cannot be called, or raises for every completion of `rows`.

    Must not be called in a running event loop.
    """
    pool = RewardPool(rewards.model_copy(update={"workers": 1}))
    tried = [function.name for function in rewards.functions if function.http is None]
    tried = [name for name in tried if name not in _NEED_NO_TRIAL]
    if tried:
        asyncio.run(_try_verifiers(pool, tried, rows))


async def _try_verifiers(pool: RewardPool, names: Sequence[str], rows: Sequence[RewardInput]) -> None:
    items = [TRIAL_INPUT]
    for row in rows:
        items.append(row)  # its completion is the right answer
        items.append(row._replace(completion="I do not know."))
    async with pool:
        if not rows:
            return
        outcomes = [await pool.try_verifiers(item) for item in items]
    for name in names:
        failures = [outcome[name] for outcome in outcomes]
        if all(isinstance(failure, RewardFailure) and failure.kind == "raised" for failure in failures):
            _, first, *_ = failures
            assert isinstance(first, RewardFailure)
            raise ConfigError(
                f"rewards.functions: {name!r} raised for all {len(items)} trial completions, "
                f"such as {rows[0].completion[:80]!r} for the answer {rows[0].answer[:80]!r} of the first row: "
                f"{first.reason}. No completion could be judged, so nothing could be trained. Fix the function"
            )


def read_first_rows(config: RunConfig, count: int) -> list[RewardInput]:
    """Return the first rows of the training data, each with its answer as completion; [] if the data are missing or
    unreadable, which other checks report."""
    with contextlib.suppress(DataError, OSError):
        return list(islice(_rows(config), count))
    return []


def _rows(config: RunConfig) -> Iterator[RewardInput]:
    data = config.data
    if data.kind == "arithmetic":
        problems = ProblemSet(data.arithmetic, config.seed)
        for index in range(ROWS):
            problem = problems.problem(STREAM, index)
            prompt = data.template.replace("{prompt}", problem.prompt)
            yield RewardInput(problem.answer, problem.answer, prompt)
    elif data.path is not None and data.path.is_file():
        for row in usable_rows(data.path, data, Rejections()):
            yield RewardInput(row.answer, row.answer, row.prompt, {"line": str(row.line)})
    elif data.path is not None and data.path.is_dir():
        prepared = open_configured_folder(config)
        try:
            for index in range(min(ROWS, len(prepared.train))):
                _, stored = prepared.train.read_row(index)
                yield RewardInput(stored.answer, stored.answer, stored.prompt, stored.metadata)
        finally:
            prepared.close()


def check_workflow(config: RunConfig, model: Path | None) -> None:
    """Raise ConfigError for a workflow that cannot be imported or constructed, or whose code fails on the first row.

    `model`: folder of the first policy, for its tokenizer. Without it, the workflow is only imported. Must not be
    called in a running event loop.
    """
    name = config.rollout.workflow
    if model is None:
        if is_plugin(name):
            load_plugin(name, key="rollout.workflow")
        return
    tokenizer = find_tokenizer(model, "model.path")
    workflow = make_workflow(config.rollout, tokenizer)
    rows = read_first_rows(config, 1)
    if is_plugin(name) and rows:
        asyncio.run(_try_workflow(config, workflow, tokenizer, rows[0]))


async def _try_workflow(config: RunConfig, workflow: Workflow, tokenizer: Tokenizer, row: RewardInput) -> None:
    try:
        prompt = tokenizer.encode(row.prompt)
        turn = tokenizer.encode(row.answer)
    except Exception:  # a tokenizer may raise anything; `check_prompts` reports it
        return
    task = make_task(0, row.prompt, prompt, row.answer, dict(row.metadata))
    stop = getattr(tokenizer, "eos_token_id", None) or 0
    try:
        async with asyncio.timeout(WORKFLOW_S):
            sample = await _play(config, workflow, task, prompt, [*turn, stop])
        if not isinstance(sample, Sample):
            raise TypeError(f"run() returned a {type(sample).__name__}, not the Sample that session.sample(text) makes")
        try:
            sample.validate()
        except ValueError as error:
            raise TypeError(f"the sample that run() returned is not valid: {error}") from None
    except Exception as error:  # a user's workflow may raise anything
        if isinstance(error, _MISTAKES):
            raise ConfigError(
                f"rollout.workflow: {config.rollout.workflow!r} was tried on the first row of the data, with a policy "
                f"that always answers {row.answer[:80]!r}, and failed{_locate_error(error)}: "
                f"{type(error).__name__}: {error}. "
                "Every group would fail the same way. Fix the workflow (docs/workflows.md)"
            ) from error


async def _play(config: RunConfig, workflow: Workflow, task: Task, prompt: list[int], turn: list[int]) -> object:
    """Return the result of the workflow with a policy that answers `turn` (token ids) to every request."""

    def script(request: GenerationRequest) -> list[int]:
        return [*request.prefix, *turn]

    engine = ScriptedEngine(script, tokens_per_s=1e6, chunk_tokens=1000)
    await engine.start()
    try:
        await engine.update_weights(HeldWeights.in_store(Path(), epoch=1, version=0), interruption="keep")
        session = SampleSession(
            engine,
            "trial",
            prompt,
            seed=0,
            temperature=config.sampling.temperature,
            max_tokens=config.sampling.max_tokens,
        )
        return await workflow.run(task, session)
    finally:
        await engine.aclose()


def _locate_error(error: BaseException) -> str:
    """Return for example ` at wf.py, line 12`: the innermost line of user code; "" if there is none."""
    root = Path(__file__).parents[4]
    not_user_code = (root / "async_grpo", root / "rollout_server", Path(asyncio.__file__).parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if not any(file.is_relative_to(folder) for folder in not_user_code):
            return f" at {file.name}, line {frame.lineno}"
    return ""
