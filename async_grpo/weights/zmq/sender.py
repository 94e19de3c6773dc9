"""Trainer side of the ZMQ transport: hands versions in shared memory to the publisher process.

begin_version   --Prepare--> publisher (waits for its encoder, at most encode_wait_s) --Cleared--> slot
                all ranks copy their tensors into the slot
commit_version  --Publish--> publisher --Published--> returns; hashing, encoding and announcing follow there
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TypeVar

import msgspec
import zmq

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import PublisherLost, WaitTimeout
from async_grpo.utils.child_process import child_argv
from async_grpo.weights.manifest import TensorLayout, WeightVersion
from async_grpo.weights.sender import WeightSender
from async_grpo.weights.zmq.messages import (
    Cleared,
    Prepare,
    Publish,
    Published,
    PublisherReady,
    PublisherStats,
    StatsRequest,
)
from async_grpo.weights.zmq.sockets import keys_for
from async_grpo.wire import decode, encode
from async_grpo.wire.board import PublisherAddress

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_LIVENESS_MS = 100

R = TypeVar("R", bound=msgspec.Struct)


class ZmqWeightSender(WeightSender):
    """Starts and controls the publisher process.

    >>> with ZmqWeightSender(layout, "my-run", epoch=0, config=WeightsConfig()) as sender:  # doctest: +SKIP
    ...     await board.set_publisher(sender.address)
    ...     sender.publish_weights(0, tensors)

    Use it from one thread at a time. The thread that creates it must outlive it: Linux kills the publisher process when
    that thread ends.
    """

    def __init__(self, layout: TensorLayout, run: str, epoch: int, config: WeightsConfig) -> None:
        """Allocate the store and start the process. Raises ConfigError, WeightsError, PublisherLost, WaitTimeout."""
        keys_for(config)  # a missing secret is reported here, not in the process's log
        super().__init__(layout, run, epoch, config)
        self._control_path = self._store.path.parent / f"ctl-{os.getpid()}"
        self._control: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._control.setsockopt(zmq.LINGER, 0)
        self._control.bind(f"ipc://{self._control_path}")
        self._process = self._start_process()
        try:
            ready = self._receive(PublisherReady, "the publisher process to start", _START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        self.address = PublisherAddress(epoch=epoch, announce=ready.announce, requests=ready.requests)

    @property
    def process_id(self) -> int:
        """PID of the publisher process."""
        return self._process.pid

    def check_publisher(self) -> None:
        """Raise PublisherLost if the publisher process has ended. Callable from any thread."""
        if self._process.poll() is not None:
            raise PublisherLost(
                f"the publisher process ended with code {self._process.returncode}; see its messages in the trainer's "
                "log. Restart the trainer."
            )

    def fetch_stats(self) -> PublisherStats:
        """Request the publisher's counters. Raises PublisherLost, WaitTimeout."""
        return self._request(StatsRequest(), PublisherStats, "the publisher's counters")

    def close(self) -> None:
        """Terminate the process and remove the store. Safe to call twice."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._control.close()
        self._control_path.unlink(missing_ok=True)
        self._store.unlink()

    def _clear_slot(self) -> WeightVersion | None:
        cleared = self._request(Prepare(), Cleared, "the publisher to clear a slot")
        return WeightVersion(*cleared.spare) if cleared.spare else None

    def _publish_stored(self, version: WeightVersion) -> None:
        self._request(Publish(**version._asdict()), Published, f"the publisher to accept {version}")

    def _start_process(self) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-m", "async_grpo.weights.zmq.publisher"]
        control = f"ipc://{self._control_path}"
        config = self.config.model_dump_json()
        return subprocess.Popen(child_argv([*program, str(self._store.path), str(self._epoch), control, config]))

    def _request(self, order: msgspec.Struct, kind: type[R], waited_for: str) -> R:
        self._wait(zmq.POLLOUT, waited_for, self.config.update_timeout_s)
        self._control.send(encode(order))
        return self._receive(kind, waited_for, self.config.update_timeout_s)

    def _receive(self, kind: type[R], waited_for: str, timeout_s: float) -> R:
        self._wait(zmq.POLLIN, waited_for, timeout_s)
        return decode(self._control.recv(), kind)

    def _wait(self, event: int, waited_for: str, timeout_s: float) -> None:
        """Wait until the control socket is ready. Raises PublisherLost if the process ends, WaitTimeout."""
        deadline = time.monotonic() + timeout_s
        while not self._control.poll(_LIVENESS_MS, event):
            self.check_publisher()
            if time.monotonic() > deadline:
                raise WaitTimeout(waited_for, timeout_s)
