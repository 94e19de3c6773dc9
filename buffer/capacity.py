"""How much server memory a run can need at most, computed before it starts.

    active   (S + 1) * P groups, finished or partial, each of G samples of max_tokens tokens
    logged   every_steps * P groups: the batches since the last checkpoint, kept for replay. Twice as many if
             checkpoints are written in the background, because the next one is due before the last is on disk
    waiting  2 * (S + 1) * P tasks, which the feeder keeps ahead

A server with less memory would fill up with groups that only the next checkpoint frees. Nothing could be inserted, so
the trainer's batch would never be complete and that checkpoint would never come. Such a configuration is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

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
TASKS_AHEAD = 2
"""Tasks that the feeder keeps waiting, as a multiple of the window's capacity."""


@dataclass(frozen=True, slots=True)
class BufferMemoryPlan:
    """The most that a run can hold on its server at once."""

    group_bytes: int
    task_bytes: int
    active_groups: int
    logged_groups: int
    waiting_tasks: int

    @property
    def needed_bytes(self) -> int:
        """Bytes that the server's maxmemory must allow."""
        groups = (self.active_groups + self.logged_groups) * self.group_bytes
        return int(OVERHEAD * (groups + self.waiting_tasks * self.task_bytes))

    def __str__(self) -> str:
        return (
            f"{self.needed_bytes >> 20} MiB = {OVERHEAD:g} * (({self.active_groups} active + {self.logged_groups} "
            f"logged groups) * {self.group_bytes >> 10} KiB + {self.waiting_tasks} tasks * {self.task_bytes} bytes)"
        )

    def check(self, limit_bytes: int, where: str) -> None:
        """Raises ConfigError, with the arithmetic, if `limit_bytes` of the server `where` is less. 0 means no limit."""
        if 0 < limit_bytes < self.needed_bytes:
            raise ConfigError(
                f"{where} allows {limit_bytes >> 20} MiB, but this run can need {self}: the server would fill up with "
                "groups that only the next checkpoint frees, and the run would stall. Raise redis.max_memory_bytes "
                "(the server's maxmemory) to that, or lower max_staleness, trainer.checkpoint.every_steps, "
                "groups_per_step, group_size or sampling.max_tokens"
            )


def memory_plan(config: RunConfig) -> BufferMemoryPlan:
    """The memory for the worst case: every completion as long as allowed, every slot of the window full."""
    checkpoint = config.trainer.checkpoint
    logged_steps = min(checkpoint.every_steps * (2 if checkpoint.background else 1), config.steps)
    prompt = config.data.max_prompt_tokens * PROMPT_TOKEN_BYTES
    sample = config.sampling.max_tokens * TOKEN_BYTES + SAMPLE_BYTES
    return BufferMemoryPlan(
        group_bytes=config.group_size * sample + prompt + GROUP_BYTES,
        task_bytes=prompt + GROUP_BYTES,
        active_groups=config.capacity_groups,
        logged_groups=logged_steps * config.groups_per_step,
        waiting_tasks=TASKS_AHEAD * config.capacity_groups,
    )
