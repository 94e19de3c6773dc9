"""The replay buffer and the run board on Redis or Valkey."""

from buffer.redis.board import RedisBoard
from buffer.redis.buffer import RedisBuffer

__all__ = ["RedisBoard", "RedisBuffer"]
