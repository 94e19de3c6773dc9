"""The trainer's end: copy the weights into shared memory, tell the publisher process, and go on.

begin  --Prepare--> process (waits for its encoder, at most encode_wait_s) --Cleared--> a slot
       copy all tensors into it
commit --Publish--> process --Published--> return;  hashing, encoding and the announcement follow
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import PublisherLost, WaitTimeout, WeightsError
from async_grpo.utils.child_process import child_argv
from async_grpo.weights.base import Publication, fill
from async_grpo.weights.manifest import TensorLayout, WeightVersion
from async_grpo.weights.shared_memory import store_path
from async_grpo.weights.store import WeightStore
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


class ZmqWeightSender:
    """Publishes the versions of one epoch. Owns a weight store and the publisher process.

    >>> with ZmqWeightSender(layout, "my-run", epoch=0, config=WeightsConfig()) as publisher:  # doctest: +SKIP
    ...     await board.set_publisher(publisher.address)
    ...     publisher.publish(0, tensors)

    Use it from one thread at a time, and keep the one that made it alive: the publisher process dies with it.
    """

    def __init__(self, layout: TensorLayout, run: str, epoch: int, config: WeightsConfig) -> None:
        """Allocate the store and start the process. Raises ConfigError, WeightsError, PublisherLost, WaitTimeout."""
        keys_for(config)  # raises here for a missing secret, instead of in the process
        self._epoch = epoch
        self._config = config
        self._newest: int | None = None
        self._begun, self._begun_s, self._cleared_s = 0, 0.0, 0.0
        self._store = WeightStore.create(store_path(run, "trainer"), layout)
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
    def store(self) -> Path:
        """Path of the trainer's weight store."""
        return self._store.path

    @property
    def process_id(self) -> int:
        """PID of the publisher process."""
        return self._process.pid

    def publish(self, version: int, tensors: Iterable[tuple[str, npt.NDArray[np.generic]]]) -> Publication:
        """Copy all tensors and have `version` published; it is announced as soon as it can be served.

        Otherwise as `WeightSender.publish` says.
        """
        fill(self._store.slot(self.begin(version)), self._store.layout, tensors)
        return self.commit()

    def begin(self, version: int) -> int:
        """As `WeightSender.begin` says."""
        if self._newest is not None and version <= self._newest:
            raise WeightsError(f"version {version} was published after version {self._newest}; versions only rise.")
        self._begun_s = time.monotonic()
        cleared = self._ask(Prepare(), Cleared, "the publisher to clear a slot")
        self._cleared_s = time.monotonic()
        self._store.begin(WeightVersion(*cleared.spare) if cleared.spare else None)
        self._begun = version
        return self._store.writing

    def commit(self) -> Publication:
        """As `WeightSender.commit` says. Not while another thread asks for something."""
        identity = WeightVersion(self._epoch, self._begun)
        self._store.commit(identity)
        self._newest = self._begun
        order = Publish(epoch=self._epoch, version=identity.version)
        self._ask(order, Published, f"the publisher to take {identity}")
        return Publication(time.monotonic() - self._begun_s, self._cleared_s - self._begun_s)

    def check_publisher(self) -> None:
        """As `WeightSender.check_publisher`."""
        if self._process.poll() is not None:
            raise PublisherLost(
                f"the publisher process ended with code {self._process.returncode}; its messages are in the trainer's "
                "log. Restart the trainer."
            )

    def stats(self) -> PublisherStats:
        """The publisher's counters. Raises PublisherLost, WaitTimeout."""
        return self._ask(StatsRequest(), PublisherStats, "the publisher's counters")

    def close(self) -> None:
        """End the process and remove the store. Safe to call twice."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._control.close()
        self._control_path.unlink(missing_ok=True)
        self._store.unlink()

    def __enter__(self) -> ZmqWeightSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_process(self) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-m", "async_grpo.weights.zmq.publisher"]
        control, config = f"ipc://{self._control_path}", self._config.model_dump_json()
        return subprocess.Popen(child_argv([*program, str(self._store.path), str(self._epoch), control, config]))

    def _ask(self, order: msgspec.Struct, kind: type[R], waited_for: str) -> R:
        self._wait(zmq.POLLOUT, waited_for, self._config.update_timeout_s)
        self._control.send(encode(order))
        return self._receive(kind, waited_for, self._config.update_timeout_s)

    def _receive(self, kind: type[R], waited_for: str, timeout_s: float) -> R:
        self._wait(zmq.POLLIN, waited_for, timeout_s)
        return decode(self._control.recv(), kind)

    def _wait(self, event: int, waited_for: str, timeout_s: float) -> None:
        """Wait until the control socket is ready, the process has ended or the time is up."""
        deadline = time.monotonic() + timeout_s
        while not self._control.poll(_LIVENESS_MS, event):
            self.check_publisher()
            if time.monotonic() > deadline:
                raise WaitTimeout(waited_for, timeout_s)
