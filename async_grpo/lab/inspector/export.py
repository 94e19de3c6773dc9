"""Exports of a run's buffer: stored groups as a file, records and overviews as JSON.

Both formats hold one map per group, in the order of their sequence numbers:

    seq      sequence number of its ticket
    state    ready, taken or kept, when the groups were listed
    step     the newest step it was taken for, or null
    group    the stored record: kind, format, seq, attempt, task, samples, server, ...

`jsonl` has one JSON object per line, with arrays as lists of numbers. `msgpack` is a stream of maps, for
`msgpack.Unpacker`, in which `group` is the stored payload, byte for byte. Records are decoded by the `msgpack` package
alone, so records of a newer format can be exported too, including fields that this release does not have.

`wait_until_drained` polls until no group is INFLIGHT. A group leaves that state when its server inserts or discards it.
If the server dies, the lease expires and another server takes the group over, even while admission is stopped. Groups
stay INFLIGHT only if no server is left; then the wait times out.
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

POLL_INTERVAL_S = 0.5
EXPORTABLE = (GroupState.READY, GroupState.TAKEN, GroupState.KEPT)
_DTYPES: dict[str, np.dtype[Any]] = {"tokens": TOKEN_DTYPE, "logprobs": LOGPROB_DTYPE}
"""Suffix of a field's name -> element type of its array."""


async def wait_until_drained(inspector: Inspector, timeout_s: float, show: Callable[[Overview], None]) -> Overview:
    """Return the first overview without INFLIGHT groups, and call `show` with every overview on the way.

    Raises WaitTimeout, with the remaining groups and the reason, after `timeout_s`.
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
            raise _drain_timeout(overview, timeout_s)
        await asyncio.sleep(min(POLL_INTERVAL_S, left_s))


def _drain_timeout(overview: Overview, timeout_s: float) -> WaitTimeout:
    leased = overview.held
    unleased = overview.expired + overview.given_back
    awaited = f"the {overview.stats.inflight} groups in flight ({leased} leased to a server, {unleased} without one)"
    fix = "Admission stays stopped: wait again with a longer --timeout, or undo it with --resume"
    if unleased:
        fix = f"No server continues {unleased} of them: start a rollout server. {fix}"
    return WaitTimeout(awaited, timeout_s, fix)


def to_jsonable(value: object) -> object:
    """Convert a value to JSON types: arrays become lists, bytes become {"base64": ...}, and numbers outside JSON become
    "NaN", "Infinity" or "-Infinity"."""
    if isinstance(value, np.ndarray):
        return [_jsonable_number(element) for element in value.tolist()]
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {str(key): to_jsonable(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(element) for element in value]
    if isinstance(value, float):
        return _jsonable_number(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def overview_as_json(overview: Overview) -> object:
    """Convert an overview, including its derived counters, to JSON types."""
    stats = overview.stats
    content = asdict(overview)
    content["stats"]["active"] = stats.active
    content["stats"]["released_total"] = stats.released_total
    content["stats"]["balanced"] = stats.balanced
    content["policy"]["age_bound"] = overview.policy.age_bound
    return to_jsonable(content)


def _jsonable_number(value: float) -> object:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def decode_untyped(payload: bytes) -> object:
    """Decode a payload of any type; arrays become numpy views. Raises WireError if it is not MessagePack."""
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
        reason = str(error) or type(error).__name__
        raise WireError(
            f"{len(payload):,} bytes are not valid MessagePack: {reason}. Another program wrote them"
        ) from error
    return _with_arrays(value, "")


def _with_arrays(value: object, name: str) -> object:
    if isinstance(value, dict):
        return {key: _with_arrays(element, str(key)) for key, element in value.items()}
    if isinstance(value, list):
        return [_with_arrays(element, name) for element in value]
    if isinstance(value, bytes):
        for suffix, dtype in _DTYPES.items():
            if name.endswith(suffix) and len(value) % dtype.itemsize == 0:
                return np.frombuffer(value, dtype)
    return value


async def export_groups(
    inspector: Inspector, groups: Sequence[GroupFacts], file: Path, advance: Callable[[], None]
) -> int:
    """Write the groups to `file`, completely or not at all, and return the number written.

    Skips groups that have ended since they were listed. Keeps only a few groups in memory, and calls `advance` after
    each. Raises ConfigError if the file exists or its name ends in neither .jsonl nor .msgpack, WireError for a payload
    that is not a record.
    """
    pack = _packer_for(file)
    by_seq = {group.seq: group for group in groups}
    written = 0
    with atomic_file(file) as stream:
        async for seq, payload in inspector.payloads([by_seq[seq] for seq in sorted(by_seq)]):
            if payload is not None:
                stream.write(pack(by_seq[seq], payload))
                written += 1
            advance()
    return written


def _packer_for(file: Path) -> Callable[[GroupFacts, bytes], bytes]:
    """Choose the format by the file's suffix."""
    if file.suffix not in (".jsonl", ".msgpack"):
        raise ConfigError(f"{file} ends neither in .jsonl nor in .msgpack, so its format is unknown. Rename it")
    if file.exists():
        raise ConfigError(f"{file} exists already and is not overwritten. Choose another name or remove it")
    return _pack_jsonl if file.suffix == ".jsonl" else _pack_msgpack


def _header_fields(group: GroupFacts) -> dict[str, Any]:
    return {"seq": group.seq, "state": group.state.value, "step": group.step}


def _pack_jsonl(group: GroupFacts, payload: bytes) -> bytes:
    content = {**_header_fields(group), "group": to_jsonable(decode_untyped(payload))}
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"


def _pack_msgpack(group: GroupFacts, payload: bytes) -> bytes:
    # An invalid payload in the middle of the stream would make the rest of the file unreadable.
    decode_untyped(payload)

    # Packed field by field, because `group` has to be the stored bytes and not a re-encoded copy.
    packer = msgpack.Packer()
    fields = _header_fields(group)
    parts = [packer.pack_map_header(len(fields) + 1)]
    for name, value in fields.items():
        parts += [packer.pack(name), packer.pack(value)]
    return b"".join([*parts, packer.pack("group"), payload])
