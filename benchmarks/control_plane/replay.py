"""The replayed parts of virtual rollout servers: engine, workflow and rewards.

    ReplayPlan --> replay_config       configuration of the run of all servers
               --> ReplayEngine        every completion takes the time of its length; nothing is computed
               --> count_bare_groups   the same engines alone, without buffer, board and weights: the ideal

Lengths come from a list that was recorded in a run or drawn. A request's seed selects its length.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

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
"""Seconds over which the servers of a process start, so that their periodic calls do not coincide."""
ENDLESS = 1_000_000
"""Steps of the run; the bench stops it long before."""


class ReplayPlan(msgspec.Struct, frozen=True):
    """One round of the bench, sent to the processes of the servers."""

    run: str
    folder: str
    url: str
    """URL of the Valkey server with the buffer."""
    servers: int
    """Number of servers, and of groups per step, so that the duration of a step does not depend on it."""
    lengths: list[int]
    """Lengths of completions in tokens, to draw from."""
    token_s: float
    """Seconds per token with all slots busy."""
    slots: int = 16
    group_size: int = 8
    seed: int = 1

    @property
    def completion_s(self) -> float:
        """Mean seconds of a completion."""
        return self.token_s * sum(self.lengths) / len(self.lengths)

    @property
    def groups_per_s(self) -> float:
        """Groups per second if all slots of all servers are always busy."""
        return self.servers * self.slots / self.group_size / self.completion_s


def replay_config(plan: ReplayPlan) -> RunConfig:
    """Configuration of the run of all servers.

    The staleness window has room for all groups that finish while the longest completion of a step is generated, so
    that it never leaves a slot free.
    """
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
    """An engine that takes the recorded time for every completion, and records when each version was applied."""

    def __init__(self, plan: ReplayPlan) -> None:
        longest = range(max(plan.lengths))
        lengths = plan.lengths
        super().__init__(
            lambda request: longest[: lengths[(request.seed or 0) % len(lengths)]],
            tokens_per_s=1 / plan.token_s,
            chunk_tokens=TOKENS_AT_ONCE,
        )
        self.applied: list[tuple[int, float]] = []
        """Versions, with the `time.monotonic()` at which they were applied."""

    async def update_weights(self, weights: HeldWeights, *, interruption: Interruption) -> UpdateTimes:
        """Apply the version immediately."""
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
    """A workflow with one completion and no text."""

    async def run(self, task: Task, session: SampleSession) -> Sample:
        """Generate the sample."""
        await session.turn()
        return session.sample("")


class EqualVerdicts:
    """A reward pool that immediately returns the reward 1 for every completion."""

    async def judge(self, items: Sequence[RewardInput]) -> list[RewardResult]:
        """Return one result per item."""
        return [RewardResult({"replayed": 1.0}, 1.0) for _ in items]


async def count_bare_groups(plan: ReplayPlan, servers: int, warm_s: float, seconds: float) -> int:
    """Count the groups that engines limited only by their slots finish within `seconds`, after `warm_s`."""
    ended_s: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        engines = []
        for number in range(servers):
            engines.append(tasks.create_task(_run_bare_engine(plan, number, ended_s)))
            await asyncio.sleep(min(SPREAD_S, warm_s) / servers)
        started_s = time.monotonic() + warm_s
        await asyncio.sleep(warm_s + seconds)
        for engine in engines:
            engine.cancel()
    return sum(started_s <= group_ended_s < started_s + seconds for group_ended_s in ended_s)


async def _run_bare_engine(plan: ReplayPlan, number: int, ended_s: list[float]) -> None:
    """Generate groups until cancelled, and append the time at which each ends to `ended_s`."""
    engine = ReplayEngine(plan)
    slots = SampleSlots(plan.slots)
    group_count = 0

    async def generate_sample(seed: int) -> None:
        async with slots.occupy_slot():
            await engine.generate(GenerationRequest(str(seed), PROMPT, max_tokens=max(plan.lengths), seed=seed))
        slots.release_samples()

    async def generate_group(first_seed: int) -> None:
        await asyncio.gather(*(generate_sample(first_seed + index) for index in range(plan.group_size)))
        ended_s.append(time.monotonic())

    await engine.start()
    async with asyncio.TaskGroup() as tasks:
        while True:
            await slots.wait_for_room()
            for _ in range(slots.groups_to_fill_free_slots(plan.group_size)):
                slots.reserve_samples(plan.group_size)
                tasks.create_task(generate_group((number * ENDLESS + group_count) * plan.group_size))
                group_count += 1


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the value below which `fraction` of the values lie; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
