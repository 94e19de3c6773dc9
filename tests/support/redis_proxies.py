"""Between a client and a server: a proxy that encrypts, cuts or silences connections; and certificates to encrypt
with."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Proxy:
    """In front of a server: passes everything on, with TLS if asked; can swallow the reply to a request, and stop
    forwarding without closing, as a dropped NAT entry does."""

    def __init__(self, upstream_port: int, tls: ssl.SSLContext | None = None) -> None:
        self._upstream_port = upstream_port
        self._tls = tls
        self._swallow: bytes | None = None
        self.swallowed = 0
        self._silences = 0
        self._over = asyncio.Event()
        self.port = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self._over.set()
            await asyncio.sleep(0.05)  # silent connections end, instead of being cancelled with the loop

    def lead_to(self, port: int) -> None:
        """From now on new connections reach another server."""
        self._upstream_port = port

    def swallow_next_reply_to(self, request: bytes) -> None:
        """The next request with these bytes reaches the server, and the connection is cut in place of the reply."""
        self._swallow = request

    def fall_silent(self) -> None:
        """The connections of now stay open and pass nothing on, in either direction. Those to come work."""
        self._silences += 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cut = asyncio.Event()
        with contextlib.suppress(OSError):
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
            pumps = [
                asyncio.create_task(self._requests(self._pieces(reader), up_writer, cut)),
                asyncio.create_task(self._replies(self._pieces(up_reader), writer, cut)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            up_writer.close()
        writer.close()

    async def _pieces(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        """What comes in, until its end or the next silence."""
        silences = self._silences
        while (data := await reader.read(1 << 16)) or silences < self._silences:
            if silences < self._silences:
                await self._over.wait()  # what comes is neither read nor refused
                return
            yield data

    async def _requests(self, pieces: AsyncIterator[bytes], up: asyncio.StreamWriter, cut: asyncio.Event) -> None:
        async for data in pieces:
            if self._swallow is not None and self._swallow in data:
                self._swallow = None
                cut.set()
            up.write(data)
            await up.drain()

    async def _replies(self, pieces: AsyncIterator[bytes], writer: asyncio.StreamWriter, cut: asyncio.Event) -> None:
        async for data in pieces:
            if cut.is_set():
                self.swallowed += 1
                return
            writer.write(data)
            await writer.drain()


class Authority:
    """A certificate authority of our own, and what it has signed, as files."""

    def __init__(self, dir: Path, name: str) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl, which makes the certificates, is not installed")
        dir.mkdir(parents=True, exist_ok=True)
        self._dir = dir
        self.ca = str(dir / "ca.crt")
        self._openssl("req", "-x509", "-keyout", "ca.key", "-out", "ca.crt", "-subj", f"/CN={name}", *_KEY)

    def sign(self, name: str, host: str) -> tuple[str, str]:
        """Certificate and key for a host (or a client), by path."""
        self._openssl("req", "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}", *_KEY)
        (self._dir / f"{name}.ext").write_text(f"subjectAltName={host}\n")
        ca = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
        request = ("-in", f"{name}.csr", "-out", f"{name}.crt", "-extfile", f"{name}.ext")
        self._openssl("x509", "-req", *request, *ca, "-days", "2")
        return str(self._dir / f"{name}.crt"), str(self._dir / f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._dir, check=True, capture_output=True)
