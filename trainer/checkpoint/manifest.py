"""What a checkpoint says about itself: `manifest.json`, written last and read first.

A folder without a manifest was never finished. The manifest names every file with its size and hash, so that a damaged
folder (a full disk, an interrupted copy, bit rot) is recognized before any of it is loaded. It describes the model, so
that weights of another model are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import xxhash

from async_grpo.errors import CheckpointDamaged, CheckpointError
from async_grpo.utils.files import sync, write_atomic

FORMAT = 1
"""Increased when an older trainer could no longer read what is written."""

FILE = "manifest.json"
_PIECE_BYTES = 1 << 22

Traits = Mapping[str, str | int | bool | None]
"""What two models must share for the weights of one to fit the other."""


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Number of ranks of each kind that wrote a checkpoint; any other layout can read it."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int


class File(msgspec.Struct, frozen=True):
    """Size and hash of a file when it was written."""

    bytes: int
    xxh3: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a complete checkpoint."""

    version: int
    """Version of the policy, which is also the position in the buffer and in the learning rate's schedule."""
    epoch: int
    model: dict[str, str | int | bool | None]
    layout: RankLayout
    format: int = FORMAT
    files: dict[str, File] = {}
    """Size and hash of every file, by name."""


def seal(folder: Path, manifest: CheckpointManifest, known: Mapping[str, File]) -> None:
    """Sync everything in `folder`, then write its manifest, which completes it.

    `known` files need not be hashed again.
    """
    paths = sorted(path for path in folder.iterdir() if path.name != FILE)
    for path in paths:
        sync(path)
    files = {path.name: known.get(path.name) or describe(path) for path in paths}
    whole = msgspec.structs.replace(manifest, files=files)
    write_atomic(folder / FILE, msgspec.json.format(msgspec.json.encode(whole), indent=2), synced=True)


def describe(path: Path) -> File:
    """The size and hash of a file; reads all of it."""
    digest, size = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
    return File(size, digest.hexdigest())


def changed(folder: Path, manifest: CheckpointManifest, names: Iterable[str]) -> list[str]:
    """The named files whose content is not what was written."""
    return [name for name in names if describe(folder / name) != manifest.files[name]]


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a folder that has all its files. Raises CheckpointError for a damaged one or a newer format."""
    try:
        raw = (folder / FILE).read_bytes()
    except OSError as error:
        raise unreadable(folder, f"its {FILE} is missing or cannot be read ({error})") from error
    manifest = parse(raw, folder)
    for name, file in manifest.files.items():
        path = folder / name
        there = path.stat().st_size if path.is_file() else None
        if there != file.bytes:
            fact = "is missing" if there is None else f"has {there} bytes"
            raise unreadable(folder, f"{name} {fact}, {file.bytes} bytes were written")
    return manifest


def parse(raw: bytes, folder: Path | str) -> CheckpointManifest:
    """The manifest of `folder`, whose files are not looked at. Raises CheckpointError like `read_manifest`."""
    try:
        found = msgspec.json.decode(raw, type=dict)
        if found["format"] > FORMAT:
            raise CheckpointError(
                f"{folder} has format {found['format']}; this version reads up to {FORMAT}. It was written by a newer "
                "async-grpo: install that one, or start over with --fresh"
            )
        return msgspec.convert(found, CheckpointManifest)
    except (KeyError, TypeError, msgspec.DecodeError) as error:
        raise unreadable(folder, f"its {FILE} cannot be read ({error})") from error


def check_fits(folder: Path, manifest: CheckpointManifest, *, version: int, model: Traits) -> None:
    """Raises CheckpointError if it is of another version or another model."""
    if manifest.version != version:
        raise CheckpointError(
            f"{folder} holds version {manifest.version}, not {version}. It was renamed; restore its name"
        )
    differing = sorted(key for key in manifest.model.keys() | model.keys() if manifest.model.get(key) != model.get(key))
    if differing:
        values = ", ".join(f"{key} {manifest.model.get(key)} instead of {model.get(key)}" for key in differing)
        raise CheckpointError(
            f"{folder} is of another model: {values}. Set model to the one that this run was started with, or give "
            "the new run a name of its own (-o name=...)"
        )


def unreadable(folder: Path | str, reason: str, *, partly_loaded: bool = False) -> CheckpointDamaged:
    """The error for a checkpoint that does not hold what was written, or what is needed."""
    return CheckpointDamaged(
        f"{folder} is damaged: {reason}. Restore the folder from a copy, or resume from an older checkpoint "
        "(async-grpo resume RUN --from VERSION)",
        partly_loaded=partly_loaded,
    )
