"""Stored groups into a file, one after the other in the order of their sequence. The run is only read.

Both formats hold one map a group:

    seq      position of its ticket
    state    ready, taken or kept, at the first look
    step     the newest step that it was taken for, or null
    group    the record as it is stored: kind, format, seq, attempt, task, samples, server, ...

`jsonl` is one JSON object a line, with arrays as lists of numbers. `msgpack` is a stream of maps in
which `group` has the very bytes of the server, arrays as raw bytes; `msgpack.Unpacker` reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgpack  # type: ignore[import-untyped]

from async_grpo.errors import ConfigError
from async_grpo.inspector.plain import plain
from async_grpo.inspector.unpack import unpack
from buffer.inspect import GroupFacts, Inspector, State

Format = Literal["jsonl", "msgpack"]
EXPORTABLE = (State.READY, State.TAKEN, State.KEPT)


@dataclass(frozen=True, slots=True)
class Exported:
    """`gone`: groups that ended between the first look and their turn."""

    groups: int
    gone: int
    size_bytes: int


def format_of(file: Path) -> Format:
    """By the ending of its name. Raises ConfigError."""
    formats: dict[str, Format] = {".jsonl": "jsonl", ".msgpack": "msgpack"}
    if file.suffix not in formats:
        raise ConfigError(f"{file} ends neither in .jsonl nor in .msgpack: which format is it to be? Rename it")
    return formats[file.suffix]


async def export(
    inspector: Inspector, groups: Sequence[GroupFacts], file: Path, advance: Callable[[], None]
) -> Exported:
    """Write `file`, whole or not at all; `advance` is called after every group. Only a few groups are in
    memory at a time. Raises ConfigError if it is there already, WireError for a payload that is no record."""
    pack = {"jsonl": _line, "msgpack": _packed}[format_of(file)]
    _check_absent(file)
    by_seq = {group.seq: group for group in groups}
    draft = file.with_name(f".{file.name}-{os.getpid()}")
    written = gone = 0
    try:
        with draft.open("xb") as stream:
            async for seq, payload in inspector.payloads([by_seq[seq] for seq in sorted(by_seq)]):
                if payload is None:
                    gone += 1
                else:
                    stream.write(pack(by_seq[seq], payload))
                    written += 1
                advance()
            size_bytes = stream.tell()
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
    return Exported(written, gone, size_bytes)


def _check_absent(file: Path) -> None:
    if file.exists():
        raise ConfigError(f"{file} is there already, and is not overwritten. Choose another name or remove it")


def _line(group: GroupFacts, payload: bytes) -> bytes:
    content = {"seq": group.seq, "state": group.state.value, "step": group.step, "group": plain(unpack(payload))}
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"


def _packed(group: GroupFacts, payload: bytes) -> bytes:
    """The map by hand, so that the stored bytes go in as they are. What is no record would spoil the rest."""
    unpack(payload)
    packer = msgpack.Packer()
    facts = {"seq": group.seq, "state": group.state.value, "step": group.step}
    parts = [packer.pack_map_header(len(facts) + 1)]
    parts += [packer.pack(part) for fact in facts.items() for part in fact]
    return b"".join([*parts, packer.pack("group"), payload])
