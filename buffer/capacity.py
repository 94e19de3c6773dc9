"""How much memory a run can need at worst, worked out before it starts.

    active   (S + 1) * P groups, finished or partial            each of G samples of max_tokens tokens
    logged   every_steps * P groups: batches since the last checkpoint, kept to be delivered again; twice as
             many where it is written in the background, the next one being due before it is on disk
    waiting  2 * (S + 1) * P tasks, which the feeder keeps ahead

A server without that much room would fill up with groups that only the next checkpoint lets go: nothing
could be inserted any more, the batch that the trainer waits for would never be whole, and the checkpoint
would never come. Such a configuration is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError

TOKEN_BYTES = 4 + 4 + 6
"""Of one completion token: its id, its log-probability, and its text, of which a token has about 4 bytes."""
PROMPT_TOKEN_BYTES = 4 + 6
SAMPLE_BYTES = 512
"""Version spans, rewards, timings, names of fields."""
GROUP_BYTES = 2048
"""Task, names, bookkeeping."""
OVERHEAD = 1.25
"""Allocator, connections' buffers, the replies on their way."""
TASKS_AHEAD = 2
"""Tasks that the feeder keeps waiting, in windows."""


@dataclass(frozen=True, slots=True)
class BufferMemoryPlan:
    """Bytes, at worst."""

    group_bytes: int
    task_bytes: int
    active_groups: int
    logged_groups: int
    waiting_tasks: int

    @property
    def needed_bytes(self) -> int:
        """What the server's maxmemory must allow."""
        groups = (self.active_groups + self.logged_groups) * self.group_bytes
        return int(OVERHEAD * (groups + self.waiting_tasks * self.task_bytes))

    def __str__(self) -> str:
        return (
            f"{self.needed_bytes >> 20} MiB = {OVERHEAD:g} * (({self.active_groups} active + {self.logged_groups} "
            f"logged groups) * {self.group_bytes >> 10} KiB + {self.waiting_tasks} tasks * {self.task_bytes} bytes)"
        )

    def check(self, limit_bytes: int, where: str) -> None:
        """Raises ConfigError, with the arithmetic, if `limit_bytes` (0: no limit) is less."""
        if 0 < limit_bytes < self.needed_bytes:
            raise ConfigError(
                f"{where} allows {limit_bytes >> 20} MiB, but this run can need {self}: it would fill up with groups "
                "that only the next checkpoint lets go, and stand still. Raise redis.max_memory_bytes (the server's "
                "maxmemory) to that, or lower max_staleness, trainer.checkpoint.every_steps, groups_per_step, "
                "group_size or sampling.max_tokens"
            )


def memory_plan(config: RunConfig) -> BufferMemoryPlan:
    """At worst: every completion as long as allowed, every slot of the window full."""
    prompt = config.data.max_prompt_tokens * PROMPT_TOKEN_BYTES
    sample = config.sampling.max_tokens * TOKEN_BYTES + SAMPLE_BYTES
    return BufferMemoryPlan(
        group_bytes=config.group_size * sample + prompt + GROUP_BYTES,
        task_bytes=prompt + GROUP_BYTES,
        active_groups=config.capacity_groups,
        logged_groups=min(_logged_steps(config), config.steps) * config.groups_per_step,
        waiting_tasks=TASKS_AHEAD * config.capacity_groups,
    )


def _logged_steps(config: RunConfig) -> int:
    checkpoint = config.trainer.checkpoint
    return checkpoint.every_steps * (2 if checkpoint.background else 1)
