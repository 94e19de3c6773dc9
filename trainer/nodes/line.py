"""A connection between two nodes, on which records travel."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeVar

import msgspec

from async_grpo.errors import NodeLost, WireError
from async_grpo.wire import encode
from trainer.nodes.messages import LENGTH, MAX_FRAME_BYTES, Message

_decoder = msgspec.msgpack.Decoder(Message)
M = TypeVar("M", bound=Message)


class Line:
    """One end. `peer` names the other one in errors: `node 1 (10.0.0.6)`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
        self.peer = peer
        self._reader, self._writer = reader, writer

    @property
    def own_address(self) -> str:
        """Of this machine, on the network that reaches the other end."""
        address: str = self._writer.get_extra_info("sockname")[0]
        return address

    def send(self, message: Message) -> None:
        """Does not wait: frames are small, and an end that takes none is found silent."""
        payload = encode(message)
        self._writer.write(LENGTH.pack(len(payload)) + payload)

    async def receive(self) -> Message:
        """The next one. Raises NodeLost when the connection ends, WireError for what is no message."""
        try:
            (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if size > MAX_FRAME_BYTES:
                raise WireError(f"{self.peer} announces a message of {size} bytes; the limit is {MAX_FRAME_BYTES}")
            payload = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise NodeLost(f"{self.peer} is gone: its connection has ended ({error})") from None
        try:
            return _decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise WireError(f"{self.peer} sends what is no message of this release: {error}") from None

    async def expect(self, kind: type[M]) -> M:
        """The next message, which must be of that kind. Raises NodeLost, WireError."""
        message = await self.receive()
        if not isinstance(message, kind):
            raise WireError(f"{self.peer} sent {type(message).__name__} where {kind.__name__} was to come")
        return message

    async def close(self) -> None:
        """What was sent goes out first, if the other end takes it within a second."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
