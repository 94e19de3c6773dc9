"""The replay buffer: durable, bounded, exactly once; and the run board beside it."""

from buffer.connect import connect, connect_board, wipe_run
from buffer.memory import InMemoryBuffer
from buffer.memory_board import InMemoryBoard
from buffer.protocol import BufferStats, ReplayBuffer, Resume
from buffer.redis import RedisBoard, RedisBuffer
from buffer.server import EmbeddedServer

__all__ = [
    "BufferStats",
    "EmbeddedServer",
    "InMemoryBoard",
    "InMemoryBuffer",
    "RedisBoard",
    "RedisBuffer",
    "ReplayBuffer",
    "Resume",
    "connect",
    "connect_board",
    "wipe_run",
]
