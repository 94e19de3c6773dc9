"""What a checkpoint says of itself, and which ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from async_grpo.errors import CheckpointError
from trainer.checkpoint.manifest import (
    FILE,
    FORMAT,
    CheckpointManifest,
    RankLayout,
    check_matches_run,
    complete_folder,
    find_changed_files,
    read_manifest,
)

MODEL = {"model_type": "qwen2", "hidden_size": 32, "precision": "float32"}
LAYOUT = RankLayout(tensor=2, pipeline=1, context=1, expert=1, data=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint of version 5."""
    (tmp_path / "__0_0.distcp").write_bytes(b"0123456789")
    (tmp_path / ".metadata").write_bytes(b"index")
    complete_folder(tmp_path, CheckpointManifest(version=5, epoch=2, model=MODEL, layout=LAYOUT), {})
    return tmp_path


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_whole_checkpoint_says_what_it_is(folder: Path) -> None:
    found = read_manifest(folder)
    assert (found.version, found.epoch, found.layout) == (5, 2, LAYOUT)
    assert {name: file.bytes for name, file in found.files.items()} == {"__0_0.distcp": 10, ".metadata": 5}
    assert find_changed_files(folder, found, found.files) == []
    check_matches_run(folder, found, version=5, model=MODEL)


def test_a_byte_that_changed_is_found(folder: Path) -> None:
    (folder / "__0_0.distcp").write_bytes(b"0123X56789")
    found = read_manifest(folder)
    assert find_changed_files(folder, found, found.files) == ["__0_0.distcp"]


@pytest.mark.parametrize(
    ("name", "left", "reason"),
    [
        ("__0_0.distcp", None, "is missing"),
        (".metadata", None, "is missing"),
        (FILE, None, "is missing"),
        ("__0_0.distcp", b"0123", "has 4 bytes, 10"),
    ],
)
def test_a_checkpoint_that_lost_a_file_or_a_part_of_one_is_refused(
    folder: Path, name: str, left: bytes | None, reason: str
) -> None:
    (folder / name).unlink() if left is None else (folder / name).write_bytes(left)
    with pytest.raises(CheckpointError, match=f"{name} {reason}"):
        read_manifest(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": "one"}'])
def test_a_manifest_that_cannot_be_read_is_refused(folder: Path, text: str) -> None:
    (folder / FILE).write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_manifest(folder)


def test_a_newer_format_is_refused_whatever_else_it_says(folder: Path) -> None:
    rewrite(folder, format=FORMAT + 1, layout="a new notation", novelty=1)
    with pytest.raises(CheckpointError, match=rf"format {FORMAT + 1}\b.*\b{FORMAT}\b"):
        read_manifest(folder)


def test_facts_that_a_later_version_adds_to_this_format_do_no_harm(folder: Path) -> None:
    rewrite(folder, novelty=1)
    assert read_manifest(folder).version == 5


@pytest.mark.parametrize(
    ("version", "changes", "reason"),
    [
        (5, {"hidden_size": 64}, "hidden_size 32 .*64"),
        (6, {}, "version 5, .*6"),
    ],
)
def test_another_model_and_a_folder_that_was_renamed_are_refused_by_what_differs(
    folder: Path, version: int, changes: dict[str, int], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        check_matches_run(folder, read_manifest(folder), version=version, model={**MODEL, **changes})


def test_a_trait_that_older_checkpoints_lack_is_compared_only_if_the_manifest_has_it(folder: Path) -> None:
    manifest = read_manifest(folder)
    check_matches_run(folder, manifest, version=5, model={**MODEL, "num_experts_per_tok": 2})
    newer = msgspec.structs.replace(manifest, model={**MODEL, "num_experts_per_tok": 2})
    with pytest.raises(CheckpointError, match="num_experts_per_tok 2 instead of 4"):
        check_matches_run(folder, newer, version=5, model={**MODEL, "num_experts_per_tok": 4})
