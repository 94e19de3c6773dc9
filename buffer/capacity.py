"""Upper bound of the server memory that a run can need, computed before it starts.

    active   (S + 1) * P groups, finished or partial, each of G samples of max_tokens tokens
    logged   every_steps * P groups: the batches since the last checkpoint, kept for replay. Twice as many if
             checkpoints are written in the background, because the next one is due before the last is on disk
    waiting  2 * (S + 1) * P tasks, which the feeder keeps ahead

A server with less memory would fill up with groups that only the next checkpoint frees. No group could be inserted, so
the trainer's batch would never be complete and that checkpoint would never come. Such a configuration is refused.

The groups of one more checkpoint are retained as a spare (trainer.checkpoint.resumable) as long as `leaves_room` is
true. They are not part of the plan: the trainer commits them before they could take memory from groups to come.

Runs that share a server each reserve their upper bound, or their quota, which may be smaller: under a quota, a group is
admitted only while the stored groups and the worst case of those in flight leave room for it. The quota must have room
for a batch (or the whole window, if the selector or the admission rule needs it) and the logged groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError

TOKEN_BYTES = 4 + 4 + 6
"""Bytes of a completion token: its id, its log-probability and its text (about 4 bytes, with a margin)."""
MASK_ROW_BYTES = 2
MASK_ID_BYTES = 4
"""Bytes of the sampling mask of a token, and of each token in it, under truncated sampling."""
PROMPT_TOKEN_BYTES = 4 + 6
SAMPLE_BYTES = 512
"""Bytes of a sample besides its tokens: version spans, rewards, timings, field names."""
GROUP_BYTES = 2048
"""Bytes of a group besides its samples: task, names, state keys."""
OVERHEAD = 1.25
"""Factor for the allocator, the buffers of connections and replies in transit."""
LOWER = "lower max_staleness, trainer.checkpoint.every_steps, groups_per_step, group_size or sampling.max_tokens"
"""Advice for reducing the memory of a run."""
TASKS_AHEAD = 2
"""Tasks that the feeder keeps waiting, as a multiple of the window's capacity."""


@dataclass(frozen=True, slots=True)
class MemoryQuota:
    """Memory that a run may use on its server. Units are bytes."""

    reserved_bytes: int
    """Memory that other runs on the server leave to this one."""
    room_bytes: int = 0
    """Memory for the payloads of groups; 0: no limit."""
    group_bytes: int = 0
    """Maximum expected size of a group."""

    def admits_group(self, stored_bytes: int, inflight: int) -> bool:
        """True if another group may start, in addition to `inflight` groups and those that are stored."""
        return self.room_bytes == 0 or self.free_groups(stored_bytes, inflight) > 0

    def free_groups(self, stored_bytes: int, inflight: int) -> int:
        """Number of groups that may start under a quota, in addition to `inflight` groups and those that are stored."""
        return (self.room_bytes - stored_bytes) // max(1, self.group_bytes) - inflight


NO_QUOTA = MemoryQuota(0)


@dataclass(frozen=True, slots=True)
class BufferMemoryPlan:
    """Maximum content of a run's buffer."""

    group_bytes: int
    task_bytes: int
    active_groups: int
    min_active_groups: int
    """Active groups that must fit for a step to be trained."""
    logged_groups: int
    waiting_tasks: int
    quota_bytes: int | None = None
    server_bytes: int | None = None
    """Limit of the server if the run has its own."""

    @property
    def needed_bytes(self) -> int:
        """Bytes that the server's maxmemory must allow."""
        return self._total_bytes(self.active_groups)

    @property
    def quota(self) -> MemoryQuota:
        """Memory that the run reserves; with `quota_bytes`, also the part of it that is for groups."""
        if self.quota_bytes is None:
            return MemoryQuota(self.needed_bytes)
        room = int(self.quota_bytes / OVERHEAD) - self.waiting_tasks * self.task_bytes
        return MemoryQuota(self.quota_bytes, room, self.group_bytes)

    def __str__(self) -> str:
        text = self._explain_total(self.active_groups)
        if self.quota_bytes is not None:
            text += f", limited to {_format_mib(self.quota_bytes)} by redis.quota_bytes"
        return text

    @property
    def usable_bytes(self) -> int:
        """Bytes that the run may fill: its quota, its own server, or its reservation on a shared one."""
        return self.quota_bytes or self.server_bytes or self.needed_bytes

    def leaves_room(self, stored_bytes: int, finished: int) -> bool:
        """True if the stored payloads leave room for all groups that can finish before the next step does.

        `finished` active groups are stored already; each of the others takes `group_bytes` at most.
        """
        group_bytes = stored_bytes + max(0, self.active_groups - finished) * self.group_bytes
        return OVERHEAD * (group_bytes + self.waiting_tasks * self.task_bytes) <= self.usable_bytes

    def check(self, limit_bytes: int, where: str, others: Mapping[str, int] = MappingProxyType({})) -> None:
        """Raise ConfigError, with the arithmetic, if the quota is too small for a step or the server for its runs.

        `limit_bytes`: limit of the server `where`; 0: none. `others`: run -> bytes that it reserves on the server.
        """
        if self.quota_bytes is not None and self.quota_bytes < self._total_bytes(self.min_active_groups):
            raise ConfigError(
                f"redis.quota_bytes allows {_format_mib(self.quota_bytes)}, but a step of this run can need "
                f"{self._explain_total(self.min_active_groups)}: no batch would ever be complete. Raise "
                f"redis.quota_bytes to {self._total_bytes(self.min_active_groups)}, or {LOWER}"
            )

        if limit_bytes == 0:
            return
        own_bytes = self.quota.reserved_bytes
        other_bytes = sum(others.values())
        if own_bytes > limit_bytes:
            raise ConfigError(
                f"{where} allows {_format_mib(limit_bytes)}, but this run can need {self}: the server would fill up "
                "with groups that only the next checkpoint frees, and the run would stall. Raise "
                f"redis.max_memory_bytes (the server's maxmemory) to that, or {LOWER}"
            )
        if own_bytes + other_bytes > limit_bytes:
            largest_first = sorted(others.items(), key=lambda item: -item[1])
            named = ", ".join(f"{run} {_format_mib(size)}" for run, size in largest_first)
            raise ConfigError(
                f"{where} allows {_format_mib(limit_bytes)}, of which other runs reserve {_format_mib(other_bytes)} "
                f"({named}), but this run can need {self}: together they could fill the server, and then none could "
                "store anything. Raise its maxmemory, set redis.quota_bytes here (at least "
                f"{self._total_bytes(self.min_active_groups)}) or there, or delete runs that are over "
                "(async-grpo runs clean --redis)"
            )

    def _total_bytes(self, active_groups: int) -> int:
        groups = (active_groups + self.logged_groups) * self.group_bytes
        return int(OVERHEAD * (groups + self.waiting_tasks * self.task_bytes))

    def _explain_total(self, active_groups: int) -> str:
        """Return the total with its arithmetic."""
        return (
            f"{_format_mib(self._total_bytes(active_groups))} = {OVERHEAD:g} * (({active_groups} active + "
            f"{self.logged_groups} logged groups) * {self.group_bytes >> 10} KiB + {self.waiting_tasks} tasks * "
            f"{self.task_bytes} bytes)"
        )


def plan_buffer_memory(config: RunConfig) -> BufferMemoryPlan:
    """Return the memory of the worst case: all completions of the maximum length, all slots of the window full."""
    checkpoint = config.trainer.checkpoint
    uncommitted_steps = checkpoint.every_steps
    if checkpoint.background:
        uncommitted_steps *= 2
    prompt_bytes = config.data.max_prompt_tokens * PROMPT_TOKEN_BYTES
    token_bytes = TOKEN_BYTES
    if config.sampling.truncates:
        token_bytes += MASK_ROW_BYTES + config.sampling.top_k * MASK_ID_BYTES
    sample_bytes = config.sampling.max_tokens * token_bytes + SAMPLE_BYTES
    policy = config.replay_policy
    needs_whole_window = policy.rate.limits or policy.max_uses > 1
    return BufferMemoryPlan(
        group_bytes=config.group_size * sample_bytes + prompt_bytes + GROUP_BYTES,
        task_bytes=prompt_bytes + GROUP_BYTES,
        active_groups=config.capacity_groups,
        min_active_groups=config.capacity_groups if needs_whole_window else policy.ready_groups_needed,
        logged_groups=min(uncommitted_steps, config.steps) * config.groups_per_step,
        waiting_tasks=TASKS_AHEAD * config.capacity_groups,
        quota_bytes=config.redis.quota_bytes,
        server_bytes=config.redis.max_memory_bytes if config.redis.url is None else None,
    )


def _format_mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
