"""Stored records as plain values, read by the `msgpack` package alone, so that a record of a newer format, with
fields that this release does not know, can be read all the same.

Raw bytes are arrays where the name of their field says so: `...tokens` are little-endian int32,
`...logprobs` float32. All other bytes stay bytes.
"""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np

from async_grpo.errors import WireError
from async_grpo.wire.codec import MAX_RECORD_BYTES
from async_grpo.wire.records import LOGPROB_DTYPE, TOKEN_DTYPE

_DTYPES: dict[str, np.dtype[Any]] = {"tokens": TOKEN_DTYPE, "logprobs": LOGPROB_DTYPE}


def unpack(payload: bytes) -> object:
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
        dtype = _dtype_of(name)
        if dtype is not None and len(value) % dtype.itemsize == 0:
            return np.frombuffer(value, dtype)
    return value


def _dtype_of(name: str) -> np.dtype[Any] | None:
    return next((dtype for suffix, dtype in _DTYPES.items() if name.endswith(suffix)), None)
