"""Exports of a run's buffer: stored groups as a file, records and overviews as JSON.

Both formats hold one map for each group, in the order of their sequence:

    seq      position of its ticket
    state    ready, taken or kept, at the first look
    step     the newest step that it was taken for, or null
    group    the record as it is stored: kind, format, seq, attempt, task, samples, server, ...

`jsonl` is one JSON object per line, with arrays as lists of numbers. `msgpack` is a stream of maps in which `group` has
the stored bytes unchanged, with arrays as raw bytes; `msgpack.Unpacker` reads it. Records are decoded by the `msgpack`
package alone, so records of a newer format, with fields that this release does not know, can be read too.

`wait_until_drained` looks twice a second until no group is INFLIGHT. A group leaves that state when its server inserts
or discards it. If the server dies, the lease expires and the next server that asks takes the group over, even while
admission is stopped. Groups stay INFLIGHT only if no server is left; then the wait times out.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from async_grpo.errors import ConfigError, WaitTimeout, WireError
from async_grpo.utils.files import atomic_file
from async_grpo.wire.records import LOGPROB_DTYPE, MAX_RECORD_BYTES, TOKEN_DTYPE
from buffer.inspector import GroupFacts, GroupState, Inspector, Overview

LOOK_EVERY_S = 0.5
EXPORTABLE = (GroupState.READY, GroupState.TAKEN, GroupState.KEPT)
_DTYPES: dict[str, np.dtype[Any]] = {"tokens": TOKEN_DTYPE, "logprobs": LOGPROB_DTYPE}
"""End of a field's name -> type of its array."""


async def wait_until_drained(inspector: Inspector, timeout_s: float, show: Callable[[Overview], None]) -> Overview:
    """The first overview in which nothing is INFLIGHT; `show` gets every overview.

    Raises WaitTimeout, which says what is left and why, after `timeout_s`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        overview = await inspector.overview()
        show(overview)
        if overview.stats.inflight == 0:
            return overview
        left_s = deadline - loop.time()
        if left_s <= 0:
            raise _still_in_flight(overview, timeout_s)
        await asyncio.sleep(min(LOOK_EVERY_S, left_s))


def _still_in_flight(overview: Overview, timeout_s: float) -> WaitTimeout:
    held, unheld = overview.held, overview.expired + overview.given_back
    waited_for = f"the {overview.stats.inflight} groups in flight ({held} held by a server, {unheld} by no server)"
    fix = "Admission stays stopped: wait again with a longer --timeout, or undo it with --resume"
    if unheld:
        fix = f"No server continues those {unheld}: start a rollout server. {fix}"
    return WaitTimeout(waited_for, timeout_s, fix)


def to_jsonable(value: object) -> object:
    """The value as JSON has it: arrays as lists of numbers, bytes as {"base64": ...}, and numbers that JSON does not
    know by name: "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, np.ndarray):
        return [_number(each) for each in value.tolist()]
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {str(key): to_jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(each) for each in value]
    if isinstance(value, float):
        return _number(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def plain_overview(overview: Overview) -> object:
    """An overview as JSON values, with the counters that follow from others."""
    stats = overview.stats
    derived = {"active": stats.active, "released_total": stats.released_total, "balanced": stats.balanced}
    content = asdict(overview)
    content["stats"] |= derived
    content["policy"]["age_bound"] = overview.policy.age_bound
    return to_jsonable(content)


def _number(value: float) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def decode_untyped(payload: bytes) -> object:
    """The value in `payload`, its arrays as numpy views. Raises WireError for what is no MessagePack."""
    try:
        value = msgpack.unpackb(
            payload,
            raw=False,
            strict_map_key=False,
            unicode_errors="backslashreplace",
            max_str_len=MAX_RECORD_BYTES,
            max_bin_len=MAX_RECORD_BYTES,
        )
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        what = str(error) or type(error).__name__
        raise WireError(f"{len(payload):,} bytes that are no MessagePack: {what}. Something else wrote them") from error
    return _with_arrays(value, "")


def _with_arrays(value: object, name: str) -> object:
    if isinstance(value, dict):
        return {key: _with_arrays(each, str(key)) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_arrays(each, name) for each in value]
    if isinstance(value, bytes):
        dtype = next((dtype for suffix, dtype in _DTYPES.items() if name.endswith(suffix)), None)
        if dtype is not None and len(value) % dtype.itemsize == 0:
            return np.frombuffer(value, dtype)
    return value


async def export(inspector: Inspector, groups: Sequence[GroupFacts], file: Path, advance: Callable[[], None]) -> int:
    """Write `file`, whole or not at all; returns the number of groups written.

    Groups that have ended since they were listed are left out. Only a few groups are in memory at a time. `advance` is
    called after every group. Raises ConfigError if the file exists or its name ends in neither .jsonl nor .msgpack,
    WireError for a payload that is not a record.
    """
    pack = _packer(file)
    by_seq = {group.seq: group for group in groups}
    written = 0
    with atomic_file(file) as stream:
        async for seq, payload in inspector.payloads([by_seq[seq] for seq in sorted(by_seq)]):
            if payload is not None:
                stream.write(pack(by_seq[seq], payload))
                written += 1
            advance()
    return written


def _packer(file: Path) -> Callable[[GroupFacts, bytes], bytes]:
    """The function that makes an entry of `file`, by the end of its name."""
    pack = {".jsonl": _line, ".msgpack": _packed}.get(file.suffix)
    if pack is None:
        raise ConfigError(f"{file} ends neither in .jsonl nor in .msgpack, so its format is unknown. Rename it")
    if file.exists():
        raise ConfigError(f"{file} exists already and is not overwritten. Choose another name or remove it")
    return pack


def _facts(group: GroupFacts) -> dict[str, Any]:
    return {"seq": group.seq, "state": group.state.value, "step": group.step}


def _line(group: GroupFacts, payload: bytes) -> bytes:
    content = {**_facts(group), "group": to_jsonable(decode_untyped(payload))}
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"


def _packed(group: GroupFacts, payload: bytes) -> bytes:
    """A map packed by hand, so that it contains the stored bytes unchanged."""
    decode_untyped(payload)  # bytes that are not MessagePack would make the rest of the file unreadable
    packer, facts = msgpack.Packer(), _facts(group)
    parts = [packer.pack(part) for fact in facts.items() for part in fact]
    return b"".join([packer.pack_map_header(len(facts) + 1), *parts, packer.pack("group"), payload])
