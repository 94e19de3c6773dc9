"""What the inspector makes of stored bytes and of hostile text, without a server."""

from __future__ import annotations

import json
import math

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from rich.console import Console, RenderableType

from async_grpo.errors import WireError
from async_grpo.lab.inspector.export import decode_untyped, to_jsonable
from async_grpo.lab.inspector.views import format_bytes, render_groups, render_record
from async_grpo.utils.text import escape_controls
from async_grpo.wire import encode, logprobs_to_bytes, tokens_to_bytes
from buffer.inspector import GroupFacts, GroupState
from tests.support.buffer_cases import sample, tasks

HOSTILE = "\x1b[2J\x1b]0;owned\x07 [bold red]shout[/] [/] \u202egnp.exe\u202c \x9b31m \r\ud800"


def printed(view: RenderableType) -> str:
    """As on a terminal with colours, where escape sequences would be obeyed."""
    console = Console(width=160, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def test_unsafe_characters_are_spelled_out_and_a_long_text_is_cut() -> None:
    unsafe = {"\x1b[2J": "\\x1b[2J", "a\nb\tc\r": "a\\nb\\tc\\r", "\u202eabc": "\\u202eabc", "\x9b31m": "\\x9b31m"}
    for text, shown in {**unsafe, "\ud800": "\\ud800", "\u2028": "\\u2028"}.items():
        assert escape_controls(text) == shown
    assert escape_controls("plain, schön, 漢字, 🙂") == "plain, schön, 漢字, 🙂"
    assert escape_controls("x" * 1234, 3) == "xxx [... 1,231 more characters]"


def test_nothing_that_a_model_wrote_reaches_the_terminal_as_a_command() -> None:
    record = {"text": HOSTILE, HOSTILE: [HOSTILE, {"deep": HOSTILE}]}
    shown = printed(render_record(HOSTILE, record, 400))
    assert not {"\x1b", "\x07", "\x9b", "\r", "\u202e"} & set(shown)
    assert "[bold red]shout[/] [/]" in shown


def test_a_record_of_a_newer_format_is_read_with_its_unknown_fields() -> None:
    newer = {"kind": "group", "format": 99, "novelty": {"mood": "new"}, "tokens": tokens_to_bytes([1, 2, 3])}
    record = decode_untyped(msgpack.packb(newer))
    shown = printed(render_record("group 0", record, 400))
    assert "novelty" in shown and "mood" in shown and "99" in shown
    assert "int32[3] 1, 2, 3" in shown


def test_arrays_are_read_by_the_names_of_their_fields() -> None:
    record = decode_untyped(encode(sample(3, length=4)))
    assert isinstance(record, dict)
    assert (record["tokens"].dtype, record["tokens"].tolist()) == (np.int32, [0, 1, 2, 3])
    assert (record["logprobs"].dtype, record["logprobs"].tolist()) == (np.float32, [-0.5] * 4)
    task = decode_untyped(encode(tasks(7, 1)[0]))
    assert isinstance(task, dict) and task["prompt_tokens"].tolist() == [7]


def test_bytes_of_unknown_meaning_stay_bytes() -> None:
    record = decode_untyped(msgpack.packb({"image": b"\x00\xff" * 20, "tokens": b"odd"}))
    assert record == {"image": b"\x00\xff" * 20, "tokens": b"odd"}
    assert "40 bytes 00 ff 00 ff 00 ff 00 ff ..." in printed(render_record("x", record, 400))
    shown = printed(render_record("x", {"tokens": np.arange(1000, dtype="<i4")}, 400))
    assert "int32[1,000] 0, 1, 2, 3, 4, 5, 6, 7, ... 996, 997, 998, 999" in shown


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x81\xa1a", msgpack.packb({"a": 1}) + b"more"])
def test_what_is_no_record_is_named_as_such(payload: bytes) -> None:
    with pytest.raises(WireError, match="not valid MessagePack"):
        decode_untyped(payload)


def test_every_record_becomes_strict_json() -> None:
    arrays = {"logprobs": logprobs_to_bytes([-0.5, -math.inf, math.nan]), "raw": b"\x00\x01"}
    record = decode_untyped(msgpack.packb({**arrays, "reward": math.inf, 5: [None, True, "text", [1, 2]]}))
    assert json.loads(json.dumps(to_jsonable(record), allow_nan=False)) == {
        "logprobs": [-0.5, "-Infinity", "NaN"],
        "reward": "Infinity",
        "raw": {"base64": "AAE="},
        "5": [None, True, "text", [1, 2]],
    }


def test_groups_are_listed_by_state_and_the_rest_is_counted() -> None:
    ready = [GroupFacts(seq, GroupState.READY, attempt=1, oldest_version=1, size_bytes=2048) for seq in range(5)]
    inflight = GroupFacts(9, GroupState.INFLIGHT, attempt=2, expired_leases=1, lease_s=-1.5)
    lines = printed(render_groups([*ready, inflight], head_version=3, limit=2)).splitlines()
    first = [line for line in lines if "ready 0" in line]
    assert len(first) == 1 and "2.0 KiB" in first[0] and " 2 " in first[0]
    assert any("3 more" in line for line in lines)
    assert not any("ready 2" in line for line in lines)
    assert any("inflight 9" in line and "expired 1.5 s ago" in line for line in lines)


def test_sizes_are_readable() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 5 << 40: "5120.0 GiB"}
    assert [format_bytes(count) for count in sizes] == list(sizes.values())
