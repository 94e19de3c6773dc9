"""Every error that this project raises on purpose, in one tree.

AsyncGrpoError
├── ConfigError            a value that breaks a rule; names key, value, rule and fix
│   └── HubUnreachable     a hub that does not answer, for files that are not in its cache
├── DataError              a dataset row, file or field that cannot be used
├── WireError              bytes that are not the record that was expected
├── DependencyError        something that is not installed; names the extra to install
├── WaitTimeout            a wait that ended; says for whom and how long
│   └── SampleOverdue      a workflow that has not returned by the deadline of its sample
├── BufferFault            the replay buffer
│   ├── ServerRefused      the Redis server is too old, may drop data, or refuses this client
│   ├── ServerLost         the Redis server cannot be reached (any more)
│   ├── ServerFull         the Redis server has no memory left, and nothing drains it
│   ├── ReplicasBehind     too few replicas of the Redis server have confirmed a change
│   ├── StreamGap          tasks that leave out some of the stream: it is shorter than their feeder thinks
│   ├── LeaseLost          this ticket now belongs to another holder (or has ended)
│   ├── Fenced             a message of an older epoch
│   ├── StepsForgotten     a resumption at steps whose groups the buffer has deleted
│   └── RunEnded           the run is over: nothing will be admitted or delivered any more
├── WeightsError           the weight plane
│   ├── WeightsCorrupt     a chunk or tensor that fails its hash, shape or dtype
│   ├── WeightsReplaced    a version that the store does not hold any more: a newer one took its place
│   ├── PublisherLost      the publisher has been silent for too long
│   ├── PeerUnreadable     a publisher or relay sent a message that this release cannot read
│   └── FetchInterrupted   a fetch that cannot be finished; the receiver starts over with the newest version
├── EngineError            the inference engine failed
├── RequestRefused         a request that the inference engine cannot take; the engine itself is well
├── WorkflowFailed         a workflow that ended in a way that leaves no sample to train
├── LogprobsWrong          an engine whose log-probabilities are not of the distribution that it samples from
├── TrainingError          the trainer cannot go on (too many non-finite steps in a row)
│   ├── NonFiniteStep      a loss or gradient that is not finite; the trainer skips the rest of the step
│   ├── CheckpointError    a checkpoint that cannot be written, or is damaged, of another model or too new
│   │   └── CheckpointDamaged  one that does not hold what was written
│   ├── NodeLost           a machine of the trainer is gone, silent, or has failed
│   ├── RankFailed         a rank of the trainer has ended with an exit code above 0
│   └── Terminated         SIGTERM has ended a rank of the trainer before it joined the run
└── RoleFailed             a supervised process ended when it should not have

Signals, caught by the package that raises them or by the caller: Overtaken (async_grpo.utils.aio), StoppedEarly
(trainer.ranks.peers), RejectedRow (async_grpo.data), HubSilent (async_grpo.models.hub), VendorError
(async_grpo.lab.view), HttpError (rollout_server.http), ToolHangs (rollout_server.workflows).
"""

from __future__ import annotations


class AsyncGrpoError(Exception):
    """Base of all errors raised on purpose; the message says what, where and how to mend it."""


class ConfigError(AsyncGrpoError):
    """A configuration value breaks a rule."""


class DataError(AsyncGrpoError):
    """A dataset file, row or field cannot be used."""


class WireError(AsyncGrpoError):
    """Bytes that are not the record that was expected."""


class HubUnreachable(ConfigError):
    """A hub does not answer or must not be asked, and the required files are not cached."""


class DependencyError(AsyncGrpoError):
    """Something that this command needs is not installed."""


class WaitTimeout(AsyncGrpoError):
    """A wait ended without what was waited for.

    >>> raise WaitTimeout("weights of version 3 from the publisher", 30.0)  # doctest: +SKIP
    """

    def __init__(self, waited_for: str, timeout_s: float, fix: str = "") -> None:
        super().__init__(f"waited {timeout_s:g} s for {waited_for}. {fix}".rstrip(". ") + ".")
        self.waited_for = waited_for
        self.timeout_s = timeout_s


class SampleOverdue(WaitTimeout):
    """The workflow of a sample has not returned by its deadline; says where it waits."""

    def __init__(self, sample: str, deadline_s: float, stack: str) -> None:
        fix = "Give what can hang there a timeout; if samples do take that long, raise rollout.sample_deadline_s"
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
    """A change has happened on the primary, but too few replicas have confirmed it: a failover could undo it."""


class StreamGap(BufferFault):
    """Tasks that do not continue the stream: the feeder has left some out, or a failover has lost some."""


class LeaseLost(BufferFault):
    """Another holder has the ticket, or its group has already ended."""


class Fenced(BufferFault):
    """The caller belongs to an older epoch: a newer trainer has taken over."""


class StepsForgotten(BufferFault):
    """A trainer wants to resume at steps whose groups are deleted. A restart would want the same."""


class RunEnded(BufferFault):
    """The run is over; there is nothing more to admit or to take."""


class WeightsError(AsyncGrpoError):
    """Weights could not be published, received or loaded."""


class WeightsCorrupt(WeightsError):
    """Bytes do not match their manifest; none of them were applied."""


class WeightsReplaced(WeightsError):
    """The store does not hold this version, or no longer does; nothing was changed."""


class PublisherLost(WeightsError):
    """The publisher has been silent for longer than its heartbeat allows."""


class EngineError(AsyncGrpoError):
    """The inference engine failed or cannot be started as configured."""


class RequestRefused(AsyncGrpoError):
    """The inference engine cannot take this request: an unknown token, or a prompt that is too long. Others go on."""


class WorkflowFailed(AsyncGrpoError):
    """A workflow was cancelled by something of its own, or returned no finished sample without an interruption."""


class LogprobsWrong(AsyncGrpoError):
    """The engine's log-probabilities are not of the distribution that it samples from; the server joins no run."""


class TrainingError(AsyncGrpoError):
    """The trainer cannot go on."""


class NonFiniteStep(TrainingError):
    """A loss or gradient is not finite, on all ranks. Its update has changed no weight; earlier updates of the same
    step (trainer.mini_batches, trainer.num_iterations) stay."""


class CheckpointError(TrainingError):
    """A checkpoint could not be written, or cannot be resumed from; those before it are untouched."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint does not hold what was written. A restart would meet it again."""

    def __init__(self, message: str, *, partly_loaded: bool = False) -> None:
        super().__init__(message)
        self.partly_loaded = partly_loaded
        """True if some of it may be in the policy already."""


class NodeLost(TrainingError):
    """The trainer cannot go on without one of its machines; the newest checkpoint is untouched."""


class RoleFailed(AsyncGrpoError):
    """A supervised process ended when it should not have."""


CONFIG_FAULTS = (ConfigError, DataError, DependencyError, LogprobsWrong, CheckpointDamaged, StepsForgotten)
"""Errors in what a role was given: it would fail again if it were restarted."""

EXIT_CONFIG = 78
"""Exit code of a role that ends with one of CONFIG_FAULTS (EX_CONFIG of sysexits.h); it is not restarted."""
