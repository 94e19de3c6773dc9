"""Description of a checkpoint: `manifest.json`, written last and read first.

A folder without a manifest was never finished. The manifest lists every file with its size and hash, so that a damaged
folder (a full disk, an interrupted copy, bit rot) is detected before any of it is loaded. It also lists the traits of
the model, so that an error can name the ones in which another model differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import xxhash

from async_grpo.errors import CheckpointDamaged, CheckpointError
from async_grpo.utils.files import sync, write_atomic

FORMAT = 1
"""Increased when older trainers can no longer read new checkpoints."""

FILE = "manifest.json"
_PIECE_BYTES = 1 << 22

Traits = Mapping[str, str | int | bool | None]
"""Values in which two models must agree for the weights of one to fit the other."""

LATER_TRAITS = frozenset({"num_experts_per_tok"})
"""Traits that older checkpoints of the same format do not have. They are compared only if the manifest has them."""


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Number of ranks of each kind that wrote a checkpoint; any other layout can read it."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int


class FileDigest(msgspec.Struct, frozen=True):
    """Size and hash of a file when it was written."""

    bytes: int
    xxh3: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a complete checkpoint."""

    version: int
    """Version of the policy; also the position in the buffer and in the learning rate schedule."""
    epoch: int
    model: dict[str, str | int | bool | None]
    layout: RankLayout
    format: int = FORMAT
    files: dict[str, FileDigest] = {}
    """Size and hash of every file, by name."""


def complete_folder(folder: Path, manifest: CheckpointManifest, known: Mapping[str, FileDigest]) -> None:
    """Sync all files of `folder`, then write its manifest, which makes it a complete checkpoint.

    Files in `known` are not hashed again.
    """
    paths = sorted(path for path in folder.iterdir() if path.name != FILE)
    for path in paths:
        sync(path)
    files = {path.name: known.get(path.name) or hash_file(path) for path in paths}
    manifest = msgspec.structs.replace(manifest, files=files)
    write_atomic(folder / FILE, msgspec.json.format(msgspec.json.encode(manifest), indent=2), synced=True)


def hash_file(path: Path) -> FileDigest:
    """Return the size and hash of a file; reads all of it."""
    digest = xxhash.xxh3_64()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
    return FileDigest(size, digest.hexdigest())


def find_changed_files(folder: Path, manifest: CheckpointManifest, names: Iterable[str]) -> list[str]:
    """Return those of the named files whose content differs from the manifest."""
    return [name for name in names if hash_file(folder / name) != manifest.files[name]]


def read_manifest(folder: Path) -> CheckpointManifest:
    """Return the manifest of a folder, after checking that all its files are there with their sizes.

    Raises CheckpointDamaged if one is not, CheckpointError for a newer format.
    """
    try:
        raw = (folder / FILE).read_bytes()
    except OSError as error:
        raise damaged_checkpoint(folder, f"its {FILE} is missing or cannot be read ({error})") from error
    manifest = parse_manifest(raw, folder)
    for name, file in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise damaged_checkpoint(folder, f"{name} is missing, {file.bytes} bytes were written")
        size = path.stat().st_size
        if size != file.bytes:
            raise damaged_checkpoint(folder, f"{name} has {size} bytes, {file.bytes} bytes were written")
    return manifest


def parse_manifest(raw: bytes, folder: Path | str) -> CheckpointManifest:
    """Decode the manifest of `folder`, without checking its files.

    Raises CheckpointDamaged if it cannot be decoded, CheckpointError for a newer format.
    """
    try:
        fields = msgspec.json.decode(raw, type=dict)
        # Check the format before the fields: a newer format may have other fields.
        if fields["format"] > FORMAT:
            raise CheckpointError(
                f"{folder} has format {fields['format']}; this version reads up to {FORMAT}. It was written by a newer "
                "async-grpo: install that one, or start over with --fresh"
            )
        return msgspec.convert(fields, CheckpointManifest)
    except (KeyError, TypeError, msgspec.DecodeError) as error:
        raise damaged_checkpoint(folder, f"its {FILE} cannot be read ({error})") from error


def check_matches_run(folder: Path, manifest: CheckpointManifest, *, version: int, model: Traits) -> None:
    """Raise CheckpointError if the checkpoint has another version, or belongs to another model."""
    if manifest.version != version:
        raise CheckpointError(
            f"{folder} holds version {manifest.version}, not {version}. It was renamed; restore its name"
        )
    differing = []
    for key in sorted(manifest.model.keys() | model.keys()):
        if key in LATER_TRAITS and key not in manifest.model:
            continue
        if manifest.model.get(key) != model.get(key):
            differing.append(f"{key} {manifest.model.get(key)} instead of {model.get(key)}")
    if differing:
        raise CheckpointError(
            f"{folder} is of another model: {', '.join(differing)}. Set model to the one that this run was started "
            "with, or give the new run another name (-o name=...)"
        )


def damaged_checkpoint(folder: Path | str, reason: str, *, partly_loaded: bool = False) -> CheckpointDamaged:
    """Return the error for a checkpoint whose content is not what was written, or not what is needed."""
    return CheckpointDamaged(
        f"{folder} is damaged: {reason}. Restore the folder from a copy, or resume from an older checkpoint "
        "(async-grpo resume RUN --from VERSION)",
        partly_loaded=partly_loaded,
    )
