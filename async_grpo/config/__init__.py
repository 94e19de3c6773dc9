"""The configuration: models, loading, errors that teach."""

from async_grpo.config.buffer import RedisConfig
from async_grpo.config.load import dump, load, validate
from async_grpo.config.schema import RunConfig

__all__ = ["RedisConfig", "RunConfig", "dump", "load", "validate"]
