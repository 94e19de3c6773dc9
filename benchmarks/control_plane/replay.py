"""What virtual rollout servers replay, and the parts of them that are not real: engine, workflow and verdicts.

    ReplayPlan --> replay_config     the run of all servers
               --> ReplayEngine      every completion takes the time of its length; nothing is computed
               --> bare_groups       the same engines alone, without buffer, board and weights: the ideal

Lengths come from a list that a run has recorded or that was drawn; a request's seed says which one it gets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from async_grpo.config import RunConfig
from async_grpo.data.base import make_task
from async_grpo.rewards.base import RewardInput, RewardResult
from async_grpo.weights.base import HeldWeights
from async_grpo.wire import Sample, Task
from rollout_server.dispatch.concurrency import SampleSlots
from rollout_server.engines.base import GenerationRequest, Interruption, UpdateTimes
from rollout_server.engines.scripted import ScriptedEngine
from rollout_server.workflows.session import SampleSession

TOKENS_AT_ONCE = 64
PROMPT = list(range(64))
SPREAD_S = 6.0
"""The servers of a process begin one after another for so long: longer than all that they repeat."""
ENDLESS = 1_000_000
"""Steps of the run, which the bench ends long before."""


class ReplayPlan(msgspec.Struct, frozen=True):
    """One round of the bench, as it is told to the processes of the servers."""

    run: str
    folder: str
    url: str
    """Of the server that holds the buffer."""
    servers: int
    """Also the groups of a step, so that a step takes about as long whatever their number."""
    lengths: list[int]
    """Tokens of completions, to be drawn from."""
    token_s: float
    """Seconds of one token with all slots busy."""
    slots: int = 16
    group_size: int = 8
    seed: int = 1

    @property
    def completion_s(self) -> float:
        """Mean seconds of a completion."""
        return self.token_s * sum(self.lengths) / len(self.lengths)

    @property
    def groups_per_s(self) -> float:
        """Groups a second if no slot of any server were ever free."""
        return self.servers * self.slots / self.group_size / self.completion_s


def replay_config(plan: ReplayPlan) -> RunConfig:
    """The run that all servers of the plan belong to. The window has room for what finishes while the
    longest completion of a step is made, so that it never keeps a slot free."""
    longest = len(PROMPT) + max(plan.lengths)
    return RunConfig.model_validate(
        {
            "name": plan.run,
            "runs_dir": plan.folder,
            "seed": plan.seed,
            "steps": ENDLESS,
            "max_staleness": 15,
            "group_size": plan.group_size,
            "groups_per_step": plan.servers,
            "model": {"path": plan.folder},
            "sampling": {"max_tokens": max(plan.lengths)},
            "rollout": {"max_concurrency": plan.slots, "http": {"port": -1}, "vllm": {"max_model_len": longest}},
            "trainer": {"checkpoint": {"every_steps": 1}},
            "redis": {"url": plan.url},
            "telemetry": {"samples_every": ENDLESS},
        }
    )


class ReplayEngine(ScriptedEngine):
    """An engine that takes the recorded time for every completion, and notes when each version was applied."""

    def __init__(self, plan: ReplayPlan) -> None:
        longest = range(max(plan.lengths))
        lengths = plan.lengths
        super().__init__(
            lambda request: longest[: lengths[(request.seed or 0) % len(lengths)]],
            tokens_per_s=1 / plan.token_s,
            chunk_tokens=TOKENS_AT_ONCE,
        )
        self.applied: list[tuple[int, float]] = []
        """Version, and `time.monotonic()` when the engine had it."""

    async def update_weights(self, weights: HeldWeights, *, interruption: Interruption) -> UpdateTimes:
        """Take the version at once."""
        times = await super().update_weights(weights, interruption=interruption)
        self.applied.append((weights.version, time.monotonic()))
        return times


class ReplaySource:
    """An endless stream of one prompt."""

    dropped: Mapping[str, int] = {}

    def task(self, index: int) -> Task:
        return make_task(index, "", PROMPT, "")

    def held_out(self) -> list[Task]:
        return []


class ReplayWorkflow:
    """One completion, without a text."""

    async def run(self, task: Task, session: SampleSession) -> Sample:
        """The sample of the task."""
        await session.turn()
        return session.sample("")


class EqualVerdicts:
    """Stands for a reward pool: every completion gets the reward 1 at once."""

    async def judge(self, items: Sequence[RewardInput]) -> list[RewardResult]:
        """One result per item."""
        return [RewardResult({"replayed": 1.0}, 1.0) for _ in items]


async def bare_groups(plan: ReplayPlan, servers: int, warm_s: float, seconds: float) -> int:
    """How many groups so many engines finish in `seconds`, after `warm_s`, when nothing but their slots limits them."""
    ended_s: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        engines = []
        for number in range(servers):
            engines.append(tasks.create_task(_bare_server(plan, number, ended_s)))
            await asyncio.sleep(min(SPREAD_S, warm_s) / servers)
        begin_s = time.monotonic() + warm_s
        await asyncio.sleep(warm_s + seconds)
        for engine in engines:
            engine.cancel()
    return sum(begin_s <= moment_s < begin_s + seconds for moment_s in ended_s)


async def _bare_server(plan: ReplayPlan, number: int, ended_s: list[float]) -> None:
    engine, slots, made = ReplayEngine(plan), SampleSlots(plan.slots), 0

    async def sample(seed: int) -> None:
        async with slots.running():
            await engine.generate(GenerationRequest(str(seed), PROMPT, max_tokens=max(plan.lengths), seed=seed))
        slots.finish()

    async def group(first: int) -> None:
        await asyncio.gather(*(sample(first + index) for index in range(plan.group_size)))
        ended_s.append(time.monotonic())

    await engine.start()
    async with asyncio.TaskGroup() as tasks:
        while True:
            await slots.room()
            for _ in range(slots.groups_wanted(plan.group_size)):
                slots.commit(plan.group_size)
                tasks.create_task(group((number * ENDLESS + made) * plan.group_size))
                made += 1


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie; 0 if there are none."""
    ordered: list[Any] = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
