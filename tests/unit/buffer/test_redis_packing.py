"""Commands are packed by hand as redis-py packs them."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis._parsers import Encoder
from redis.connection import PythonRespSerializer

from buffer.redis.connection import LARGE, Call, pack, script_head

PARTS = st.one_of(st.integers(), st.binary(max_size=30), st.text(max_size=30), st.just(b"x" * LARGE))


def by_redis_py(*commands: list[object]) -> bytes:
    serializer = PythonRespSerializer(1 << 20, Encoder("utf-8", "strict", False).encode)
    return b"".join(part for command in commands for part in serializer.pack(*command))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(PARTS, min_size=1, max_size=6), min_size=1, max_size=4))
def test_every_command_is_packed_as_redis_py_packs_it(commands: list[list[object]]) -> None:
    named: list[list[object]] = [["SET", *command] for command in commands]
    assert b"".join(pack(named)) == by_redis_py(*named)


def test_the_head_of_a_script_is_packed_once_and_is_the_same() -> None:
    call = Call(*script_head("abc", ("k1", "k2")), [1, "two", b"three"])
    assert b"".join(pack([call])) == by_redis_py(["EVALSHA", "abc", 2, "k1", "k2", 1, "two", b"three"])
    assert script_head("abc", ("k1", "k2"))[0] is script_head("abc", ("k1", "k2"))[0]


def test_a_large_value_is_not_copied() -> None:
    value = b"v" * LARGE
    assert any(chunk is value for chunk in pack([["SET", "key", value]]))
