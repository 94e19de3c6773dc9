"""Ids of ModelScope with its real client (extra `modelscope`), against a server of the loopback that speaks its HTTP.

Paths and fields are those that modelscope_hub 0.5.1 asks for and reads (_legacy_api.py, _download.py).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from async_grpo.errors import ConfigError
from async_grpo.models.hub import HubRepo, hub_repo
from async_grpo.models.hub_dataset import fetch_split

pytest.importorskip("modelscope_hub", reason="the extra modelscope is not installed")

WEIGHTS = bytes(range(256)) * 4000
FILES = {
    "config.json": b"{}",
    "tokenizer_config.json": b"{ }",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickled",
}
ROWS = {"train.jsonl": b'{"question": "1+1", "answer": "2"}\n', "test.jsonl": b'{"question": "2+2", "answer": "4"}\n'}
MODEL = HubRepo("acme/tiny", "model", "modelscope")


@dataclass
class Site:
    """The server's repositories and the paths of what it was asked for."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        parts = address.path.strip("/").split("/")
        files = self.site.repos.get("/".join(parts[2:5]))
        if files is None:
            self._send(404, {"Code": 10010205001, "Message": "not found", "Success": False})
        elif parts[5:] in (["repo", "files"], ["repo", "tree"]):
            listed = [
                {"Path": name, "Type": "blob", "Size": len(data), "Sha256": hashlib.sha256(data).hexdigest()}
                for name, data in files.items()
            ]
            self._send(200, {"Code": 200, "Success": True, "Data": {"Files": listed}})
        elif parts[5:] == ["repo"] and query["FilePath"] in files:
            self.site.asked.append(query["FilePath"])
            self._body(files[query["FilePath"]])
        else:
            self._send(200, {"Code": 200, "Success": True, "Data": {"Id": 1, "Path": parts[3], "Name": parts[4]}})

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self, data: bytes) -> None:
        start = int((self.headers.get("range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("content-length", str(len(data) - start))
        if start:
            self.send_header("content-range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[start:])

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Path]]:
    """One server and one folder for all tests: the client reads its variables once."""
    site = Site()
    folder = tmp_path_factory.mktemp("modelscope")
    listener = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"site": site}))
    thread = threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELSCOPE_ENDPOINT", f"http://127.0.0.1:{listener.server_address[1]}")
        for name in ("MODELSCOPE_CACHE", "MODELSCOPE_HOME", "ASYNC_GRPO_CACHE"):
            patch.setenv(name, str(folder / name))
        yield site, folder
    listener.shutdown()
    listener.server_close()
    thread.join()


@pytest.fixture
def site(server: tuple[Site, Path]) -> Site:
    """The server with one model and one data set, and an empty cache."""
    site, folder = server
    for path in folder.iterdir():
        shutil.rmtree(path)
    site.repos = {"models/acme/tiny": dict(FILES), "datasets/acme/sums": dict(ROWS)}
    site.asked = []
    return site


def fetched(repo: HubRepo = MODEL) -> Path:
    return repo.pin_revision().fetch_files(lambda line: None)


def test_what_a_model_needs_is_fetched_once_and_nothing_pickled(site: Site) -> None:
    folder = fetched()
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert set(site.asked) == {"config.json", "tokenizer_config.json", "model.safetensors"}
    site.repos.clear()
    assert fetched() == folder


def test_a_copy_in_the_cache_stays_what_it_was(site: Site) -> None:
    folder = fetched()
    site.repos["models/acme/tiny"]["config.json"] = b'{"new": 1}'
    assert (fetched() / "config.json").read_bytes() == b"{}"
    assert fetched() == folder


def test_a_download_that_was_not_finished_is_no_model(site: Site) -> None:
    folder = fetched()
    (folder / "model.safetensors").unlink()
    assert MODEL.pin_revision().find_folder() is None
    assert fetched() == folder


def test_the_settings_alone_are_no_model(site: Site) -> None:
    folder = MODEL.pin_revision().with_only_config().fetch_files(lambda line: None)
    assert MODEL.pin_revision().find_folder() is None
    assert fetched() == folder
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert MODEL.pin_revision().with_only_config().find_folder() == folder


def test_a_second_split_is_fetched_beside_the_first(site: Site) -> None:
    repo = hub_repo(Path("acme/sums"), "dataset", "modelscope", "data.path")
    assert repo is not None
    for split in ("train", "test"):
        (file,) = fetch_split(repo.pin_revision(), split, "", lambda line: None)
        assert file.read_bytes() == ROWS[f"{split}.jsonl"]


def test_the_files_of_a_split_are_fetched(site: Site) -> None:
    repo = hub_repo(Path("acme/sums"), "dataset", "modelscope", "data.path")
    assert repo is not None
    (file,) = fetch_split(repo.pin_revision(), "train", "", lambda line: None)
    assert file.read_bytes() == ROWS["train.jsonl"]
    assert site.asked == ["train.jsonl"]


def test_what_is_not_there_is_named(site: Site) -> None:
    with pytest.raises(ConfigError, match=r"no such model.*ModelScope.*MODELSCOPE_API_TOKEN"):
        fetched(HubRepo("acme/none", "model", "modelscope"))
