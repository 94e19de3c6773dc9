"""The copy of a run in a bucket: only complete checkpoints count, the newest trainer's wins, bytes stay the same."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import xxhash

from async_grpo.app.launch.run_copy import pull_run
from async_grpo.config import validate
from async_grpo.errors import CONFIG_FAULTS, CheckpointDamaged, ConfigError
from async_grpo.weights.folder.objects import FolderObjects, Objects
from tests.support.s3_server import SECRET, s3_server
from trainer.checkpoint.manifest import CheckpointManifest, RankLayout, complete_folder
from trainer.checkpoint.store import RunStore, StoredCheckpoint

LAYOUT = RankLayout(tensor=1, pipeline=1, context=1, expert=1, data=1)
BYTES = 200_001


class Torn(FolderObjects):
    """A store whose process dies after `left` writes, or reads."""

    left = 0

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError("the machine is gone")

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        self._count()
        super().write(name, parts)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if ".distcp" in name:
            self._count()
        return super().read(name, start, stop)


def checkpoint(run_dir: Path, version: int, epoch: int = 1, files: int = 2) -> Path:
    folder = run_dir / "checkpoints" / f"{version:08d}"
    folder.mkdir(parents=True)
    for number in range(files):
        (folder / f"__{number}_0.distcp").write_bytes(os.urandom(BYTES))
    complete_folder(folder, CheckpointManifest(version=version, epoch=epoch, model={"layers": 2}, layout=LAYOUT), {})
    (run_dir / "checkpoints" / "latest").write_text(f"{version}\n")
    (run_dir / "config.yaml").write_text("name: run\n")
    (run_dir / "metrics.jsonl").write_text(f'{{"step": {version}}}\n')
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {path.name: xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in folder.iterdir()}


def push(store: RunStore, folder: Path) -> None:
    store.push_files(folder.parent.parent)
    store.push_checkpoint(folder, folder.parent.parent)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here" / "run"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there" / "run"


def store_in(objects: Objects) -> RunStore:
    return RunStore(objects, "run", "file:///store/run")


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunStore]:
    if request.param == "folder":
        yield RunStore.open(f"file://{tmp_path}/store", "run")
        return
    with s3_server() as url:
        yield RunStore.open(f"{url}/runs", "run")


def test_an_empty_folder_gets_the_newest_checkpoint_bit_for_bit(store: RunStore, here: Path, there: Path) -> None:
    assert "can be written to" in store.check_access()
    assert store.newest_checkpoint() is None
    push(store, checkpoint(here, 10))
    newest = checkpoint(here, 20)
    push(store, newest)
    messages: list[str] = []
    store.pull_run(there, messages.append)
    assert digests(there / "checkpoints/00000020") == digests(newest)
    assert (there / "checkpoints/latest").read_text() == "20\n"
    assert (there / "metrics.jsonl").read_bytes() == (here / "metrics.jsonl").read_bytes()
    assert f"fetching version 20 from {store.url}" in messages[-1]


def test_pruning_removes_old_checkpoints_and_keeps_those_of_a_newer_trainer(store: RunStore, here: Path) -> None:
    for version in (10, 20, 30):
        push(store, checkpoint(here, version, epoch=2 if version == 30 else 1))
    store.prune(StoredCheckpoint(1, 20), keep_versions=[20])  # by a trainer that was thought dead
    assert store.list_checkpoints() == [StoredCheckpoint(1, 20), StoredCheckpoint(2, 30)]
    assert store.newest_checkpoint() == StoredCheckpoint(2, 30)
    store.prune(StoredCheckpoint(2, 30), keep_versions=[30, 20])
    assert store.list_checkpoints() == [StoredCheckpoint(1, 20), StoredCheckpoint(2, 30)]
    assert store.newest_checkpoint() == StoredCheckpoint(2, 30)
    store.remove()
    assert store.newest_checkpoint() is None and store.list_checkpoints() == []


def test_a_trainer_that_was_thought_dead_cannot_take_the_marker_back(store: RunStore, here: Path) -> None:
    push(store, checkpoint(here, 10, epoch=2))
    push(store, checkpoint(here, 40, epoch=1))
    assert store.newest_checkpoint() == StoredCheckpoint(2, 10)


@pytest.mark.parametrize("writes", range(4))
def test_an_interrupted_upload_never_counts(writes: int, tmp_path: Path, here: Path, there: Path) -> None:
    torn = Torn(tmp_path / "store")
    store = store_in(torn)
    torn.left = 99
    whole = checkpoint(here, 10)
    push(store, whole)
    torn.left = writes  # two files, the manifest, the marker
    with pytest.raises(OSError, match="the machine is gone"):
        store.push_checkpoint(checkpoint(here, 20), here)
    torn.left = 99
    assert store.newest_checkpoint() == StoredCheckpoint(1, 10)
    store.pull_run(there, print)
    assert digests(there / "checkpoints/00000010") == digests(whole)


def test_an_interrupted_fetch_continues_with_the_pieces_it_has(
    tmp_path: Path, here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.checkpoint.store._PIECE_BYTES", BYTES // 4)
    torn = Torn(tmp_path / "store")
    store, torn.left = store_in(torn), 99
    folder = checkpoint(here, 10)
    push(store, folder)
    torn.left = 7  # of ten pieces, five a file
    with pytest.raises(OSError, match="the machine is gone"):
        store.pull_run(there, print)
    assert not (there / "checkpoints/00000010").exists()
    torn.left = 5  # the first file is not fetched again
    store.pull_run(there, print)
    assert digests(there / "checkpoints/00000010") == digests(folder)
    assert not list((there / "checkpoints").glob(".pull-*"))


def test_a_copy_with_a_changed_byte_is_rejected_as_damaged(tmp_path: Path, here: Path, there: Path) -> None:
    objects = FolderObjects(tmp_path / "store")
    store = store_in(objects)
    push(store, checkpoint(here, 10))
    name = "run/checkpoints/00000010-00000001/__1_0.distcp"
    raw = bytearray(objects.read(name))
    raw[7] ^= 1
    objects.write(name, [raw])
    with pytest.raises(CheckpointDamaged, match=r"__1_0\.distcp") as refused:
        store.pull_run(there, print)
    assert isinstance(refused.value, CONFIG_FAULTS), "a supervisor must not restart the run to fetch it again"
    assert not (there / "checkpoints/latest").exists()


def test_a_folder_that_is_up_to_date_is_not_changed(tmp_path: Path, here: Path) -> None:
    store = store_in(FolderObjects(tmp_path / "store"))
    folder = checkpoint(here, 10)
    push(store, folder)
    (here / "metrics.jsonl").write_text("newer\n")
    store.pull_run(here, print)
    assert (here / "metrics.jsonl").read_text() == "newer\n"
    (folder / "__0_0.distcp").unlink()  # a damaged one is fetched again
    store.pull_run(here, print)
    assert (folder / "__0_0.distcp").stat().st_size == BYTES


def test_only_files_that_changed_are_copied_again(tmp_path: Path, here: Path) -> None:
    torn = Torn(tmp_path / "store")
    store, torn.left = store_in(torn), 9
    checkpoint(here, 10)
    store.push_files(here)
    (here / "metrics.jsonl").write_text("two rows\nof them\n")
    torn.left = 1
    store.push_files(here)
    store.pull_files(tmp_path / "other")
    assert (tmp_path / "other/metrics.jsonl").read_text() == "two rows\nof them\n"


def test_pull_names_the_runs_that_are_there(tmp_path: Path, here: Path) -> None:
    url = f"file://{tmp_path}/store"
    checkpoint(here, 10)
    RunStore.open(url, "run").push_files(here)
    with pytest.raises(ConfigError, match=r"/other\b.*: run\b.*PLACE/NAME"):
        pull_run(f"{url}/other", tmp_path / "runs", print, checkpoint=False)
    assert (pull_run(f"{url}/run", tmp_path / "runs", print, checkpoint=True) / "config.yaml").is_file()


@pytest.mark.parametrize("url", ["memory://x", "runs", "s3://key:secret@bucket", "s3://bucket/x?token=1"])
def test_a_url_without_storage_or_with_a_secret_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="runs_store"):
        validate({"name": "run", "model": {"random": {}}, "runs_store": url}, "test")


@pytest.mark.slow
def test_an_unreachable_bucket_is_named_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    with pytest.raises(ConfigError, match=r"runs_store \(s3://bucket/run\)") as refused:
        RunStore.open("s3://bucket", "run").check_access()
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "below/file"])
def test_a_manifest_with_files_outside_the_checkpoint_is_rejected(
    tmp_path: Path, here: Path, there: Path, name: str
) -> None:
    objects = FolderObjects(tmp_path / "store")
    store = store_in(objects)
    push(store, checkpoint(here, 10))
    manifest = "run/checkpoints/00000010-00000001/manifest.json"
    objects.write(manifest, [objects.read(manifest).replace(b"__0_0.distcp", name.encode())])
    with pytest.raises(CheckpointDamaged, match="outside"):
        store.pull_run(there, print)
    assert not (there / "checkpoints/latest").exists()


def test_a_checkpoint_that_the_user_chose_is_not_replaced_by_a_newer_copy(tmp_path: Path, here: Path) -> None:
    store = store_in(FolderObjects(tmp_path / "store"))
    checkpoint(here, 10)
    push(store, checkpoint(here, 20))
    for name in ("latest", "resume-from"):
        (here / "checkpoints" / name).write_text("10\n")
    store.pull_run(here, print)
    assert (here / "checkpoints/latest").read_text() == "10\n"
