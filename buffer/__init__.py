"""The replay buffer and the run board: contracts, in-memory references, Redis, and a server of our own."""

from buffer.board import RunBoard
from buffer.capacity import TASKS_AHEAD, MemoryPlan, memory_plan
from buffer.connect import attach, connect, connect_board, knows_run, wipe, wipe_run
from buffer.memory import InMemoryBuffer
from buffer.memory_board import InMemoryBoard
from buffer.protocol import BufferStats, ReplayBuffer, Resume
from buffer.recent import RecentStats
from buffer.redis import RedisBoard, RedisBuffer
from buffer.redis.client import PASSWORD_VARIABLE, check_server, make_client
from buffer.run import is_over, open_run
from buffer.server import EmbeddedServer

__all__ = [
    "PASSWORD_VARIABLE",
    "TASKS_AHEAD",
    "BufferStats",
    "EmbeddedServer",
    "InMemoryBoard",
    "InMemoryBuffer",
    "MemoryPlan",
    "RecentStats",
    "RedisBoard",
    "RedisBuffer",
    "ReplayBuffer",
    "Resume",
    "RunBoard",
    "attach",
    "check_server",
    "connect",
    "connect_board",
    "is_over",
    "knows_run",
    "make_client",
    "memory_plan",
    "open_run",
    "wipe",
    "wipe_run",
]
