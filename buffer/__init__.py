"""The replay buffer and the run board: contracts, in-memory references, Redis, and a server of our own."""

from buffer.base import BufferStats, CachedStats, ReplayBuffer, Resume, RunBoard
from buffer.capacity import TASKS_AHEAD, BufferMemoryPlan, plan_buffer_memory
from buffer.connect import (
    attach,
    attach_board,
    connect,
    connect_board,
    is_run_over,
    open_run,
    run_exists,
    wipe,
    wipe_run,
)
from buffer.memory import InMemoryBoard, InMemoryBuffer
from buffer.redis.board import RedisBoard
from buffer.redis.buffer import RedisBuffer
from buffer.redis.client import check_server, make_client
from buffer.redis.errors import PASSWORD_VARIABLE
from buffer.server import EmbeddedServer

__all__ = [
    "PASSWORD_VARIABLE",
    "TASKS_AHEAD",
    "BufferMemoryPlan",
    "BufferStats",
    "CachedStats",
    "EmbeddedServer",
    "InMemoryBoard",
    "InMemoryBuffer",
    "RedisBoard",
    "RedisBuffer",
    "ReplayBuffer",
    "Resume",
    "RunBoard",
    "attach",
    "attach_board",
    "check_server",
    "connect",
    "connect_board",
    "is_run_over",
    "make_client",
    "open_run",
    "plan_buffer_memory",
    "run_exists",
    "wipe",
    "wipe_run",
]
