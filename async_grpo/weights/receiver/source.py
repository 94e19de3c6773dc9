"""The receiver's line to the one that it fetches chunks from, and whether that one is still there."""

from __future__ import annotations

import time

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from async_grpo.weights.keys import Keys
from async_grpo.weights.messages import Assignment, ChunkAnswer, ChunkReply, ChunkRequest, Done, Gone, Waiting
from async_grpo.weights.sockets import Context, Socket, connect
from async_grpo.wire import encode

_FRAME_OVERHEAD_BYTES = 4096
_answers = msgspec.msgpack.Decoder(ChunkAnswer)


class Source:
    """One DEALER socket to a parent, and the monitor that tells when its connection breaks."""

    def __init__(self, context: Context, assignment: Assignment, chunk_bytes: int, keys: Keys | None) -> None:
        """Connects in the background."""
        self.endpoint, self.is_relay = assignment.parent, assignment.relay
        self.heard_s = time.monotonic()
        self.broken = False
        self.dealer = context.socket(zmq.DEALER)
        self.monitor: Socket = self.dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        connect(self.dealer, self.endpoint, chunk_bytes + _FRAME_OVERHEAD_BYTES, keys)

    @property
    def sockets(self) -> list[Socket]:
        """To be polled."""
        return [self.dealer, self.monitor]

    def ask(self, request: ChunkRequest | Done) -> None:
        """Dropped if nothing can be sent: chunks are asked for again."""
        try:
            self.dealer.send(encode(request), zmq.DONTWAIT)
        except zmq.Again:
            return

    def receive(self) -> tuple[ChunkReply | Gone | Waiting, memoryview] | None:
        """The next answer and its payload; None if there is none."""
        try:
            frames = self.dealer.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        self.heard_s = time.monotonic()
        return _answers.decode(frames[0].buffer), frames[-1].buffer

    def watch(self) -> None:
        """The monitor has an event: the connection broke."""
        recv_monitor_message(self.monitor)
        self.broken = True

    def close(self) -> None:
        """Close the sockets."""
        self.dealer.disable_monitor()
        self.monitor.close()
        self.dealer.close()
