"""How much server memory a run can need at most, computed before it starts.

    active   (S + 1) * P groups, finished or partial, each of G samples of max_tokens tokens
    logged   every_steps * P groups: the batches since the last checkpoint, kept for replay. Twice as many if
             checkpoints are written in the background, because the next one is due before the last is on disk
    waiting  2 * (S + 1) * P tasks, which the feeder keeps ahead

A server with less memory would fill up with groups that only the next checkpoint frees. Nothing could be inserted, so
the trainer's batch would never be complete and that checkpoint would never come. Such a configuration is refused.

The groups of one more checkpoint stay as a spare (trainer.checkpoint.resumable) as long as `leaves_room` holds. They
are not part of the plan: the trainer commits them before they could take memory from groups to come.

Runs that share a server each reserve what they can need, or their quota if they have one, which may be less: a group is
admitted only while the stored groups and the worst case of those in flight leave room for it. So many must always fit:

    least    a batch (the whole window where the selector or the admission rule counts on it) and the logged groups
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError

TOKEN_BYTES = 4 + 4 + 6
"""Bytes of a completion token: its id, its log-probability and its text (about 4 bytes, with a margin)."""
PROMPT_TOKEN_BYTES = 4 + 6
SAMPLE_BYTES = 512
"""Bytes of a sample beside its tokens: version spans, rewards, timings, field names."""
GROUP_BYTES = 2048
"""Bytes of a group beside its samples: task, names, bookkeeping."""
OVERHEAD = 1.25
"""Factor for the allocator, the buffers of connections and replies in transit."""
LOWER = "lower max_staleness, trainer.checkpoint.every_steps, groups_per_step, group_size or sampling.max_tokens"
"""What makes a run need less."""
TASKS_AHEAD = 2
"""Tasks that the feeder keeps waiting, as a multiple of the window's capacity."""


@dataclass(frozen=True, slots=True)
class MemoryQuota:
    """What a run may store. Units are bytes."""

    reserved_bytes: int
    """What other runs on the server leave to this one."""
    room_bytes: int = 0
    """For the payloads of groups; 0: nothing is held back."""
    group_bytes: int = 0
    """The most that a group is expected to take."""

    def admits(self, stored_bytes: int, inflight: int) -> bool:
        """Whether one more group may begin, beside `inflight` groups and those that are finished and stored."""
        return not self.room_bytes or self.free_groups(stored_bytes, inflight) > 0

    def free_groups(self, stored_bytes: int, inflight: int) -> int:
        """Number of groups that may begin under a quota, in addition to `inflight` groups and those that are stored."""
        return (self.room_bytes - stored_bytes) // max(1, self.group_bytes) - inflight


NO_QUOTA = MemoryQuota(0)


@dataclass(frozen=True, slots=True)
class BufferMemoryPlan:
    """The most that a run can hold on its server at once."""

    group_bytes: int
    task_bytes: int
    active_groups: int
    least_groups: int
    """Active groups without which no step could be trained."""
    logged_groups: int
    waiting_tasks: int
    quota_bytes: int | None = None
    server_bytes: int | None = None
    """Limit of the server if it is this run's alone."""

    @property
    def needed_bytes(self) -> int:
        """Bytes that the server's maxmemory must allow."""
        return self._bytes_of(self.active_groups)

    @property
    def quota(self) -> MemoryQuota:
        """What the run reserves, and, with a quota, how much of it is for groups."""
        if self.quota_bytes is None:
            return MemoryQuota(self.needed_bytes)
        room = int(self.quota_bytes / OVERHEAD) - self.waiting_tasks * self.task_bytes
        return MemoryQuota(self.quota_bytes, room, self.group_bytes)

    def __str__(self) -> str:
        quota = "" if self.quota_bytes is None else f", held at {_mib(self.quota_bytes)} by redis.quota_bytes"
        return self._sum(self.active_groups, "active") + quota

    @property
    def usable_bytes(self) -> int:
        """Bytes that the run may fill: its quota, its own server, or what it reserves on a shared one."""
        return self.quota_bytes or self.server_bytes or self.needed_bytes

    def leaves_room(self, stored_bytes: int, finished: int) -> bool:
        """True if the stored payloads leave room for every group that may be finished before the next step is.

        `finished` active groups are stored already; each of the others takes `group_bytes` at most.
        """
        groups = stored_bytes + max(0, self.active_groups - finished) * self.group_bytes
        return OVERHEAD * (groups + self.waiting_tasks * self.task_bytes) <= self.usable_bytes

    def check(self, limit_bytes: int, where: str, others: Mapping[str, int] = MappingProxyType({})) -> None:
        """Raises ConfigError, with the arithmetic, if `limit_bytes` of the server `where` (0: it has no limit) is less
        than what this run and the `others` (run -> bytes) reserve, or if the quota is too small for a step."""
        if self.quota_bytes is not None and self.quota_bytes < self._bytes_of(self.least_groups):
            raise ConfigError(
                f"redis.quota_bytes allows {_mib(self.quota_bytes)}, but a step of this run can need "
                f"{self._sum(self.least_groups, 'active')}: no batch would ever be complete. Raise redis.quota_bytes "
                f"to {self._bytes_of(self.least_groups)}, or {LOWER}"
            )
        if not limit_bytes or (reserved := self.quota.reserved_bytes) + sum(others.values()) <= limit_bytes:
            return
        if reserved > limit_bytes:
            raise ConfigError(
                f"{where} allows {_mib(limit_bytes)}, but this run can need {self}: the server would fill up with "
                "groups that only the next checkpoint frees, and the run would stall. Raise redis.max_memory_bytes "
                f"(the server's maxmemory) to that, or {LOWER}"
            )
        named = ", ".join(f"{run} {_mib(size)}" for run, size in sorted(others.items(), key=lambda each: -each[1]))
        raise ConfigError(
            f"{where} allows {_mib(limit_bytes)}, of which other runs reserve {_mib(sum(others.values()))} ({named}), "
            f"but this run can need {self}: together they could fill the server, and then none could store anything. "
            f"Raise its maxmemory, set redis.quota_bytes here (at least {self._bytes_of(self.least_groups)}) or there, "
            "or delete runs that are over (async-grpo runs clean --redis)"
        )

    def _bytes_of(self, active_groups: int) -> int:
        groups = (active_groups + self.logged_groups) * self.group_bytes
        return int(OVERHEAD * (groups + self.waiting_tasks * self.task_bytes))

    def _sum(self, active_groups: int, what: str) -> str:
        return (
            f"{_mib(self._bytes_of(active_groups))} = {OVERHEAD:g} * (({active_groups} {what} + {self.logged_groups} "
            f"logged groups) * {self.group_bytes >> 10} KiB + {self.waiting_tasks} tasks * {self.task_bytes} bytes)"
        )


def memory_plan(config: RunConfig) -> BufferMemoryPlan:
    """The memory for the worst case: every completion as long as allowed, every slot of the window full."""
    checkpoint = config.trainer.checkpoint
    logged_steps = min(checkpoint.every_steps * (2 if checkpoint.background else 1), config.steps)
    prompt = config.data.max_prompt_tokens * PROMPT_TOKEN_BYTES
    sample = config.sampling.max_tokens * TOKEN_BYTES + SAMPLE_BYTES
    policy = config.replay_policy
    whole_window = policy.rate.limits or policy.max_uses > 1
    return BufferMemoryPlan(
        group_bytes=config.group_size * sample + prompt + GROUP_BYTES,
        task_bytes=prompt + GROUP_BYTES,
        active_groups=config.capacity_groups,
        least_groups=config.capacity_groups if whole_window else policy.ready_groups_needed,
        logged_groups=logged_steps * config.groups_per_step,
        waiting_tasks=TASKS_AHEAD * config.capacity_groups,
        quota_bytes=config.redis.quota_bytes,
        server_bytes=config.redis.max_memory_bytes if config.redis.url is None else None,
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
