"""A hub on the loopback that speaks the HTTP that huggingface_hub 2.4 asks: repository facts, the tree, files by range.

Found in its sources (hf_api.py, file_download.py, _snapshot_download.py) and by its requests to this server.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

FIRST = "1" * 40
SECOND = "2" * 40


@dataclass
class Repo:
    """A repository: commit -> its files. `head` is the commit of the branch main."""

    commits: dict[str, dict[str, bytes]]
    head: str = FIRST
    refusal: tuple[int, str] | None = None
    """Status and error code of every answer, such as (403, "GatedRepo")."""


@dataclass
class HubServer:
    """`repos`: `models/OWNER/NAME` or `datasets/OWNER/NAME`. `requests`: method and path of each, in order."""

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    cut_after: int | None = None
    """Bytes after which the body of the next file breaks off, once."""
    short_by: int = 0
    """Bytes that each file has less than the facts of the repository say."""
    file_refusal: tuple[int, str] | None = None
    """Status and error code of every answer to a question for a file, while the facts are open."""
    flips: bool = False
    """Whether the last byte of each file comes as another."""
    url: str = ""

    def downloads(self) -> list[str]:
        """Files whose bodies were asked for."""
        return [path for method, path in self.requests if method == "GET" and "/resolve/" in path]


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A server until the block ends."""
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requests.append((self.command, path))
        parts = path.split("/")
        if parts[0] == "api":
            self._facts("/".join(parts[1:4]), parts[4:], body)
        else:
            kind = "datasets" if parts[0] == "datasets" else "models"
            rest = parts[1:] if kind == "datasets" else parts
            self._file(f"{kind}/{'/'.join(rest[:2])}", rest[3], "/".join(rest[4:]), body)

    def _repo(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repo = self.hub.repos.get(name)
        if repo is None:
            self._error(404, "RepoNotFound")
            return None
        if repo.refusal:
            self._error(*repo.refusal)
            return None
        commit = repo.head if revision == "main" else revision
        if commit not in repo.commits:
            self._error(404, "RevisionNotFound")
            return None
        return commit, repo.commits[commit]

    def _facts(self, name: str, rest: list[str], body: bool) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        if (found := self._repo(name, revision)) is None:
            return
        commit, files = found
        if rest[:1] == ["tree"]:
            listed: Any = [
                {"type": "file", "path": path, "size": len(data), "oid": _oid(data), **_lfs(path, data, "oid")}
                for path, data in files.items()
            ]
        else:
            siblings = [
                {"rfilename": path, "size": len(data), "blobId": _oid(data), **_lfs(path, data, "sha256")}
                for path, data in files.items()
            ]
            listed = {"id": name.partition("/")[2], "sha": commit, "siblings": siblings}
        self._send(200, json.dumps(listed).encode(), {"content-type": "application/json"}, body)

    def _file(self, name: str, revision: str, path: str, body: bool) -> None:
        if (found := self._repo(name, revision)) is None:
            return
        commit, files = found
        if self.hub.file_refusal or path not in files:
            self._error(*(self.hub.file_refusal or (404, "EntryNotFound")))
            return
        data = files[path][: len(files[path]) - self.hub.short_by]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        data = data[:-1] + bytes([data[-1] ^ self.hub.flips])
        start = int((self.headers.get("range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        status = 206 if self.headers.get("range") else 200
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(status, data[start:], headers, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "content-length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if not body:
            return
        if "/resolve/" in self.path and self.hub.cut_after is not None and len(data) > self.hub.cut_after:
            data = data[: self.hub.cut_after]
            self.hub.cut_after = None
            self.close_connection = True
        self.wfile.write(data)

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code}, self.command == "GET")


def _lfs(path: str, data: bytes, key: str) -> dict[str, Any]:
    """What the hub tells of a large file: weights, in these tests."""
    facts = {key: hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return {"lfs": facts} if path.endswith(".safetensors") else {}


def _oid(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@contextmanager
def hub_for_this_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub that the client of this process and of its children asks; files and locks stay in `folder`."""
    from huggingface_hub import constants

    with hub_server() as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {"ENDPOINT": server.url, "HUGGINGFACE_CO_URL_TEMPLATE": template}.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        for name, path in {"HF_HUB_CACHE": folder / "hub", "ASYNC_GRPO_CACHE": folder / "cache"}.items():
            monkeypatch.setenv(name, str(path))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
