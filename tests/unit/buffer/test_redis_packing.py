"""Commands are packed as redis-py packs them."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis._parsers import Encoder
from redis.connection import PythonRespSerializer

from buffer.redis.connection import LARGE_BYTES, Command, pack_commands

PARTS = st.one_of(
    st.integers(),
    st.floats(allow_nan=False),
    st.binary(max_size=30),
    st.text(max_size=30),
    st.just(b"x" * LARGE_BYTES),
)


def by_redis_py(*commands: Command) -> bytes:
    serializer = PythonRespSerializer(1 << 20, Encoder("utf-8", "strict", False).encode)
    return b"".join(part for command in commands for part in serializer.pack(*command))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(PARTS, min_size=1, max_size=6), min_size=1, max_size=4))
def test_every_command_is_packed_as_redis_py_packs_it(commands: list[Command]) -> None:
    named = [["SET", *command] for command in commands]
    assert b"".join(pack_commands(named)) == by_redis_py(*named)


def test_a_large_value_is_not_copied() -> None:
    value = b"v" * LARGE_BYTES
    assert any(chunk is value for chunk in pack_commands([["SET", "key", value]]))
