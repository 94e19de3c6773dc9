"""All errors that this project raises on purpose, in one tree.

AsyncGrpoError
├── ConfigError            a value that breaks a rule; names key, value, rule and fix
│   └── HubUnreachable     a hub that does not answer, for files that are not in its cache
├── DataError              an unusable dataset row, file or field
├── WireError              bytes that are not the expected record
├── DependencyError        a missing package or program; names the extra to install
├── WaitTimeout            a wait that timed out; names what it waited for and how long
│   └── SampleOverdue      a workflow that missed the deadline of its sample
├── BufferFault            the replay buffer
│   ├── ServerRefused      the Redis server is too old, may drop data, or refuses this client
│   ├── ServerLost         the Redis server cannot be reached (any more)
│   ├── ServerFull         the Redis server has no memory left, and nothing drains it
│   ├── ReplicasBehind     too few replicas of the Redis server have confirmed a change
│   ├── StreamGap          tasks that would leave a gap in the stream
│   ├── LeaseLost          the ticket has another holder now, or has ended
│   ├── Fenced             a call of a trainer whose epoch is over
│   ├── StepsForgotten     resuming at steps whose groups the buffer has deleted
│   └── RunEnded           the run is over: no more groups are admitted or delivered
├── WeightsError           the weight plane
│   ├── WeightsCorrupt     a chunk or tensor that fails its hash, shape or dtype
│   ├── WeightsReplaced    a version that a newer one has replaced in the store
│   ├── PublisherLost      the publisher has been silent for too long
│   ├── PeerUnreadable     a publisher or relay sent a message that this release cannot read
│   └── FetchInterrupted   a fetch that cannot be completed; the receiver restarts with the newest version
├── EngineError            the inference engine failed
├── RequestRefused         a request that the inference engine rejects; the engine itself is fine
├── WorkflowFailed         a workflow that ended without a sample to train
├── LogprobsWrong          an engine whose log-probabilities do not match its sampling distribution
├── TrainingError          the trainer cannot continue (too many consecutive non-finite steps)
│   ├── NonFiniteStep      a loss or gradient that is not finite; the trainer skips the rest of the step
│   ├── CheckpointError    a checkpoint that cannot be written or resumed from (another model, too new)
│   │   └── CheckpointDamaged  a checkpoint whose content is not what was written
│   ├── NodeLost           a machine of the trainer is gone, silent, or has failed
│   ├── RankFailed         a rank of the trainer has ended with an exit code above 0
│   └── Terminated         SIGTERM has ended a rank of the trainer before it joined the run
└── RoleFailed             a supervised process ended when it should not have

Signals, caught by the package that raises them or by the caller: Overtaken (async_grpo.utils.aio), StoppedEarly
(trainer.ranks.peers), RejectedRow (async_grpo.data), HubNotQueried (async_grpo.models.hub), VendorError
(async_grpo.lab.view), HttpError (rollout_server.http), ToolHangs (rollout_server.workflows).
"""

from __future__ import annotations


class AsyncGrpoError(Exception):
    """Base of all errors raised on purpose; the message has the problem, the place and the fix."""


class ConfigError(AsyncGrpoError):
    """A configuration value breaks a rule."""


class DataError(AsyncGrpoError):
    """A dataset file, row or field cannot be used."""


class WireError(AsyncGrpoError):
    """Bytes are not the expected record."""


class HubUnreachable(ConfigError):
    """A hub does not answer or must not be contacted, and the required files are not cached."""


class DependencyError(AsyncGrpoError):
    """A package or program that this command needs is not installed."""


class WaitTimeout(AsyncGrpoError):
    """A wait timed out.

    >>> raise WaitTimeout("weights of version 3 from the publisher", 30.0)  # doctest: +SKIP
    """

    def __init__(self, waited_for: str, timeout_s: float, fix: str = "") -> None:
        super().__init__(f"waited {timeout_s:g} s for {waited_for}. {fix}".rstrip(". ") + ".")
        self.waited_for = waited_for
        self.timeout_s = timeout_s


class SampleOverdue(WaitTimeout):
    """The workflow of a sample has missed its deadline; the message has the line where it waits."""

    def __init__(self, sample: str, deadline_s: float, stack: str) -> None:
        fix = "Add a timeout to the call that hangs; if samples do take that long, raise rollout.sample_deadline_s"
        super().__init__(f"{sample}, which waits at {stack}", deadline_s, fix)


class BufferFault(AsyncGrpoError):
    """The replay buffer refused an operation, or failed."""


class ServerRefused(BufferFault):
    """The Redis server cannot hold a run safely."""


class ServerLost(BufferFault):
    """The Redis server did not answer within its timeout, or could not be started."""


class ServerFull(BufferFault):
    """The Redis server is at its memory limit and stayed there."""


class ReplicasBehind(BufferFault):
    """The primary has made a change, but too few replicas have confirmed it: a failover could undo it."""


class StreamGap(BufferFault):
    """Tasks that do not continue the stream: the feeder has left some out, or a failover has lost some."""


class LeaseLost(BufferFault):
    """The ticket has another holder, or its group has already ended."""


class Fenced(BufferFault):
    """The caller belongs to an older epoch: a newer trainer has taken over."""


class StepsForgotten(BufferFault):
    """A trainer tries to resume at steps whose groups are deleted. A restart would fail in the same way."""


class RunEnded(BufferFault):
    """The run is over; there are no more groups to admit or to take."""


class WeightsError(AsyncGrpoError):
    """Weights could not be published, received or loaded."""


class WeightsCorrupt(WeightsError):
    """Bytes do not match their manifest; none of them were applied."""


class WeightsReplaced(WeightsError):
    """The store does not have this version (any more); nothing was changed."""


class PublisherLost(WeightsError):
    """The publisher has been silent for longer than its heartbeat allows."""


class EngineError(AsyncGrpoError):
    """The inference engine failed or cannot be started as configured."""


class RequestRefused(AsyncGrpoError):
    """The inference engine cannot take this request: an unknown token, or a prompt that is too long. Other requests
    continue."""


class WorkflowFailed(AsyncGrpoError):
    """A workflow was cancelled by its own code, or returned no finished sample without an interruption."""


class LogprobsWrong(AsyncGrpoError):
    """The engine's log-probabilities do not match its sampling distribution; the server joins no run."""


class TrainingError(AsyncGrpoError):
    """The trainer cannot continue."""


class NonFiniteStep(TrainingError):
    """A loss or gradient is not finite, on all ranks.

    Its update has changed no weight. Earlier updates of the same step (trainer.mini_batches, trainer.num_iterations)
    stay.
    """


class CheckpointError(TrainingError):
    """A checkpoint could not be written, or cannot be resumed from; those before it are untouched."""


class CheckpointDamaged(CheckpointError):
    """The content of a checkpoint is not what was written. A restart would find it again."""

    def __init__(self, message: str, *, partly_loaded: bool = False) -> None:
        super().__init__(message)
        self.partly_loaded = partly_loaded
        """True if parts of it may have been loaded into the policy."""


class NodeLost(TrainingError):
    """The trainer cannot continue without one of its machines; the newest checkpoint is untouched."""


class RoleFailed(AsyncGrpoError):
    """A supervised process ended when it should not have."""


CONFIG_FAULTS = (ConfigError, DataError, DependencyError, LogprobsWrong, CheckpointDamaged, StepsForgotten)
"""Errors in the input of a role: a restart would fail again."""

EXIT_CONFIG = 78
"""Exit code of a role that ends with one of CONFIG_FAULTS (EX_CONFIG of sysexits.h); it is not restarted."""
