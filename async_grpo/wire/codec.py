"""Records to MessagePack and back, with a size limit and errors that name the wrong field."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from async_grpo.errors import WireError

R = TypeVar("R", bound=msgspec.Struct)

MAX_RECORD_BYTES = 512 << 20
"""Limit on the size of a record. Redis refuses larger values too, with a less helpful message."""

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder[msgspec.Struct]] = {}


def encode(record: msgspec.Struct) -> bytes:
    """Record -> MessagePack bytes. Raises WireError above MAX_RECORD_BYTES."""
    payload = _encoder.encode(record)
    if len(payload) > MAX_RECORD_BYTES:
        raise WireError(
            f"{type(record).__name__} takes {len(payload)} bytes, the limit is {MAX_RECORD_BYTES}. "
            "Lower group_size or sampling.max_tokens."
        )
    return payload


def decode(payload: bytes | memoryview, kind: type[R]) -> R:
    """MessagePack bytes -> record of type `kind`. Raises WireError naming the field that is wrong."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        record = decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a {kind.__name__} of this version: {error}") from error
    assert isinstance(record, kind)
    return record
