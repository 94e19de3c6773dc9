"""Records that travel between processes and are stored in the buffer, as MessagePack.

The records:

- `Task`         one prompt with its reference answer
- `Ticket`       the leased right to generate one group
- `Sample`       one completion: tokens, behaviour log-probabilities, version spans, rewards
- `Partial`      the samples so far of a group that is being generated
- `Group`        a finished group of G samples
- `Batch`        P groups handed to the trainer for one optimizer step

Structs are tagged and have named fields, so the plain `msgpack` package can read all of them. Arrays are raw
little-endian bytes (int32 token ids, float32 log-probabilities).

`encode` has a size limit, and the errors of `decode` name the wrong field.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from async_grpo.errors import WireError
from async_grpo.wire.sampling_mask import SamplingMask

FORMAT = 1
"""Incremented when a record changes in a way that an older reader would misread."""

TOKEN_DTYPE = np.dtype("<i4")
LOGPROB_DTYPE = np.dtype("<f4")

LOGPROB_ROUNDING = 1e4 * float(np.finfo(LOGPROB_DTYPE).eps)
"""Largest accepted log-probability, in nats. It is 0 in exact arithmetic; log-softmax in float32 exceeds that by up to
the rounding error of its logits, which are below 1e4."""

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
R = TypeVar("R", bound=msgspec.Struct)

MAX_RECORD_BYTES = 512 << 20
"""Maximum size of a record. Redis refuses larger values as well, with a less helpful message."""

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder[msgspec.Struct]] = {}


class ReleaseReason(StrEnum):
    """Reason why a group ended. Every admitted group ends exactly once, for one of these reasons."""

    TRAINED = "trained"
    STALE = "stale"
    FILTERED = "filtered"
    UNVERIFIABLE = "unverifiable"
    FAILED = "failed"
    EXPIRED = "expired"


class Record(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of all records: immutable, keyword-only, tagged with their kind."""


class Task(Record, frozen=True, kw_only=True, tag="task"):
    """One prompt. `index` is its position in the (shuffled, repeated) data stream of the run."""

    index: NonNegative
    prompt: str
    prompt_tokens: bytes
    answer: str
    metadata: dict[str, str] = {}

    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """Token ids of the prompt, int32 [prompt_len]; a read-only view, no copy."""
        return np.frombuffer(self.prompt_tokens, TOKEN_DTYPE)


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of one completion were sampled from policy `version`."""

    version: int
    start: int
    end: int


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of one completion, written by the policy or by its environment (a tool's answer).

    `finish_reason`: reason why the policy stopped; "" while it has not.
    """

    start: int
    end: int
    by_policy: bool
    finish_reason: str = ""


class Sample(Record, frozen=True, kw_only=True, tag="sample"):
    """One completion of the policy.

    Without turns, the policy wrote all tokens. Tokens of the environment have log-probability 0 and the version of the
    token before them. `reward` is None if no verifier could judge the sample, which is then masked, not scored 0;
    `unverifiable` has the reason. Only such a sample may have no tokens.

    Under truncated sampling, `mask_ids` (int32) and `mask_counts` (uint16, one per token) hold the tokens that could be
    sampled at each position, the sampled one included. Both are empty without truncation.

    `validate` checks the invariants:

    - There are as many log-probabilities as tokens. They are finite and, except for rounding, at most 0.
    - The spans cover [0, len(tokens)) in order, without gap or overlap, and their versions never decrease.
    - The turns, if there are any, cover [0, len(tokens)) in the same way.
    - The rows of the sampling mask fit the tokens, and contain each token that the policy sampled.
    """

    tokens: bytes
    logprobs: bytes
    spans: list[VersionSpan]
    turns: list[Turn] = []
    mask_ids: bytes = b""
    mask_counts: bytes = b""
    finish_reason: str = "stop"
    text: str = ""
    rewards: dict[str, float] = {}
    reward: float | None = None
    unverifiable: str = ""
    started_s: float = 0.0
    finished_s: float = 0.0

    def token_ids(self) -> npt.NDArray[np.int32]:
        """Token ids, int32 [completion_len]; a read-only view."""
        return np.frombuffer(self.tokens, TOKEN_DTYPE)

    def token_logprobs(self) -> npt.NDArray[np.float32]:
        """Log-probabilities under the sampling distribution, float32 [completion_len]."""
        return np.frombuffer(self.logprobs, LOGPROB_DTYPE)

    def token_versions(self) -> npt.NDArray[np.int32]:
        """Policy version of each token, int32 [completion_len]."""
        versions = np.array([span.version for span in self.spans], TOKEN_DTYPE)
        lengths = [span.end - span.start for span in self.spans]
        return np.repeat(versions, lengths)

    def written_by_policy(self) -> npt.NDArray[np.bool_]:
        """True for the tokens that the policy wrote, bool [completion_len]; the other tokens get no gradient."""
        written = np.ones(self.length, np.bool_)
        for turn in self.turns:
            written[turn.start : turn.end] = turn.by_policy
        return written

    def sampling_mask(self) -> SamplingMask | None:
        """The tokens that could be sampled at each position; None without truncation."""
        if not self.mask_counts:
            return None
        return SamplingMask.from_bytes(self.mask_ids, self.mask_counts)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token, from which the age is measured."""
        return min(span.version for span in self.spans)

    @property
    def newest_version(self) -> int:
        """Version of the newest token."""
        return max(span.version for span in self.spans)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // TOKEN_DTYPE.itemsize

    def validate(self) -> None:
        """Raise ValueError if the arrays, spans and turns are inconsistent."""
        tokens = self.token_ids()
        logprobs = self.token_logprobs()
        if len(tokens) == 0 and not self.unverifiable:
            raise ValueError("a sample has no tokens")
        if len(tokens) != len(logprobs):
            raise ValueError(f"{len(tokens)} tokens but {len(logprobs)} log-probabilities")
        invalid = np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= LOGPROB_ROUNDING)))
        if len(invalid):
            index = invalid[0]
            raise ValueError(
                f"token {index} of {len(tokens)} has log-probability {logprobs[index]}, one of {len(invalid)} such. "
                "It must be finite and at most 0, or the policy ratio is not a number. The engine has computed it: "
                "check rollout.vllm.quantization and the release of vLLM"
            )

        position = 0
        version = -1
        for span in self.spans:
            if span.start != position or span.end <= span.start or span.version < version:
                raise ValueError(f"version spans {self.spans} do not cover [0, {len(tokens)}) in order")
            position = span.end
            version = span.version
        if position != len(tokens):
            raise ValueError(f"version spans {self.spans} cover {position} of {len(tokens)} tokens")
        self._validate_turns()
        self._validate_mask()

    def _validate_mask(self) -> None:
        mask = self.sampling_mask()
        if mask is None:
            return
        if len(mask) != self.length or int(mask.counts.sum(dtype=np.int64)) != len(mask.token_ids):
            raise ValueError(
                f"the sampling mask has {len(mask)} rows with {mask.counts.sum(dtype=np.int64)} tokens, and there are "
                f"{self.length} tokens and {len(mask.token_ids)} ids"
            )
        empty = np.flatnonzero((mask.counts == 0) & self.written_by_policy())
        if len(empty):
            raise ValueError(f"the sampling mask is empty at token {empty[0]}, which the policy sampled")
        index = mask.find_row_without(self.token_ids())
        if index is not None:
            raise ValueError(f"token {index} was sampled, but its sampling mask does not contain it")

    def _validate_turns(self) -> None:
        if not self.turns:
            return
        position = 0
        for turn in self.turns:
            if turn.start != position:
                raise ValueError(f"turns {self.turns} do not cover [0, {self.length}) in order")
            position = turn.end
        if position != self.length:
            raise ValueError(f"turns {self.turns} cover {position} of {self.length} tokens")
        if not self.turns[0].by_policy:
            raise ValueError(f"turns {self.turns} start with the environment: those tokens belong to the prompt")


class Partial(Record, frozen=True, kw_only=True, tag="partial"):
    """The samples of a group so far. The `finish_reason` of a sample that is still being generated is ""."""

    seq: NonNegative
    attempt: NonNegative
    samples: list[Sample | None]

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest token; None if there is no token yet."""
        return min((sample.oldest_version for sample in self.samples if sample and sample.spans), default=None)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest completion so far."""
        return max((sample.length for sample in self.samples if sample), default=0)


class Ticket(Record, frozen=True, kw_only=True, tag="ticket"):
    """The leased right to generate the group of `task`.

    `seq` orders groups by admission. `version` is the policy version published at admission; no token of the group may
    be older. `attempt` counts the leases of this group from 1, and fences late messages of an earlier holder.
    `expired_leases` counts those that expired, or whose engine died.
    """

    seq: NonNegative
    task: Task
    version: int
    epoch: int
    attempt: int
    holder: str
    lease_s: float
    partial: Partial | None = None
    expired_leases: int = msgspec.field(default=0, name="strikes")
    """Named `strikes` on the wire."""


class Group(Record, frozen=True, kw_only=True, tag="group"):
    """A finished group: G samples of one task."""

    format: int = FORMAT
    seq: NonNegative
    attempt: int
    task: Task
    samples: list[Sample]
    server: str = ""
    admitted_version: int = 0
    started_s: float = 0.0
    finished_s: float = 0.0

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token in the group."""
        return min(sample.oldest_version for sample in self.samples if sample.spans)

    @property
    def newest_version(self) -> int:
        """Version of the newest token in the group."""
        return max(sample.newest_version for sample in self.samples if sample.spans)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest completion."""
        return max(sample.length for sample in self.samples)


class Batch(Record, frozen=True, kw_only=True, tag="batch"):
    """P groups for the optimizer step that turns `version` into `version + 1`.

    A `replayed` batch was delivered before, to a trainer that died: it has the same groups in the same order, and they
    are counted only once. Tokens of versions below `mask_below` are context and get no gradient. `missing`
    is the number of groups still to come if the step is taken in parts.
    """

    epoch: int
    version: int
    groups: list[Group]
    replayed: bool = False
    mask_below: int = 0
    missing: int = 0


def tokens_to_bytes(tokens: npt.ArrayLike) -> bytes:
    """Encode token ids as raw little-endian int32 bytes."""
    return np.asarray(tokens, TOKEN_DTYPE).tobytes()


def logprobs_to_bytes(logprobs: npt.ArrayLike) -> bytes:
    """Encode log-probabilities as raw little-endian float32 bytes."""
    return np.asarray(logprobs, LOGPROB_DTYPE).tobytes()


def encode(record: msgspec.Struct) -> bytes:
    """Encode a record as MessagePack. Raises WireError above MAX_RECORD_BYTES."""
    payload = _encoder.encode(record)
    if len(payload) > MAX_RECORD_BYTES:
        raise WireError(
            f"{type(record).__name__} takes {len(payload)} bytes, the limit is {MAX_RECORD_BYTES}. "
            "Lower group_size or sampling.max_tokens."
        )
    return payload


def decode(payload: bytes | memoryview, kind: type[R]) -> R:
    """Decode a record of type `kind`. Raises WireError, which names the wrong field."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        record = decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a {kind.__name__} of this version: {error}") from error
    assert isinstance(record, kind)
    return record
