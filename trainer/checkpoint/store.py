"""RunStore: a copy of a run in a bucket (`runs_store`), from which another machine goes on.

    NAME/checkpoints/00000010-00000003/   checkpoint of version 10, by the trainer of epoch 3: files, then manifest.json
      server/                             the embedded server's files of that moment; without redis.url
    NAME/checkpoints/latest-00000003      the folder of the newest whole checkpoint of that trainer
    NAME/run/config.yaml, metrics.jsonl   the other files of the run

    trainer   checkpoint on disk --push_checkpoint--> files, manifest, marker --> the buffer forgets what it holds
    launcher  bare machine       --pull-->            files of the run, newest checkpoint --> starts the roles

A checkpoint counts from its marker on, which is written last; a torn upload has none. Every trainer has a marker of its
own and the newest epoch's is believed, so one that was thought dead cannot replace its successor's checkpoint. The
store is never behind what the buffer has forgotten, because the buffer is told after the marker is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from async_grpo.errors import CheckpointError, ConfigError
from async_grpo.utils.files import sync, write_atomic
from async_grpo.weights.folder.objects import Objects, open_location
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.manifest import File, describe, read_manifest

KEY = "runs_store"
LATEST = "latest"
CHOSEN = "resume-from"
"""The version that a person chose to resume from; `latest` names it too."""
_PIECE_BYTES = 16 << 20
_READS_AT_ONCE = 4
_TRIES = 5
_SAYINGS = 10
"""Times that the progress of a checkpoint is told."""
_SERVER_FILES = "server/appendonlydir"
_RUN_FILES = (
    *("config.yaml", "run.id", "run.json", "metrics.jsonl", "report.md", "summary.json", "timeline.json"),
    *("evaluations/*.jsonl", "samples/*.jsonl", "timeline/*.jsonl", "plots/*", "roles/*.jsonl"),
)
"""What is copied beside checkpoints: all that `async-grpo runs` reads, and nothing that belongs to a machine."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, order=True)
class StoredCheckpoint:
    """A checkpoint on the store; the greatest is the newest."""

    epoch: int
    version: int

    @property
    def folder(self) -> str:
        """Its folder below `checkpoints`."""
        return f"{self.version:08d}-{self.epoch:08d}"

    @classmethod
    def of(cls, folder: Path) -> StoredCheckpoint:
        """The complete checkpoint in a local folder. Raises CheckpointError."""
        found = read_manifest(folder)
        return cls(found.epoch, found.version)

    @classmethod
    def parse(cls, text: str) -> StoredCheckpoint | None:
        """That of a folder's name; None for another name."""
        version, _, epoch = text.partition("-")
        return cls(int(epoch), int(version)) if version.isdigit() and epoch.isdigit() else None


@dataclass(slots=True)
class RunStore:
    """The copy of one run. Every failure of the store is an OSError, which names it and holds no credentials."""

    objects: Objects
    name: str
    url: str
    _pushed: dict[str, tuple[int, int]] = field(default_factory=dict, init=False)
    """Time (ns) and size (bytes) of the files of the run as they were last copied."""

    @classmethod
    def open(cls, url: str, name: str) -> RunStore:
        """The copy of the run `name` below `url`. Raises ConfigError, DependencyError."""
        return cls(open_location(url, KEY), name, f"{url.rstrip('/')}/{name}")

    def check(self) -> str:
        """Write, read and remove a small object; says where. Raises ConfigError."""
        trial = f"{self.name}/.trial"
        try:
            self.objects.write(trial, [b"trial"])
            self.objects.read(trial)
            self.objects.remove([trial])
        except OSError as error:
            raise ConfigError(
                f"{KEY} ({self.url}) is not usable: {error}. Check that the bucket exists and that the environment has "
                "its endpoint and credentials (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
            ) from error
        return f"{self.url} can be written to, read and listed"

    def newest(self) -> StoredCheckpoint | None:
        """The newest whole checkpoint; None if there is none. Raises OSError."""
        markers = sorted(name for name in self._names("checkpoints") if name.rpartition("/")[2].startswith(LATEST))
        return StoredCheckpoint.parse(self.objects.read(markers[-1]).decode().strip()) if markers else None

    def checkpoints(self) -> list[StoredCheckpoint]:
        """All checkpoints of which there is anything, torn ones too. Raises OSError."""
        folders = {name.split("/")[2] for name in self._names("checkpoints")}
        return sorted(found for folder in folders if (found := StoredCheckpoint.parse(folder)) is not None)

    def push_checkpoint(self, folder: Path, run_dir: Path) -> None:
        """Copy the complete checkpoint in `folder`, and the embedded server's files, then mark it. Raises OSError,
        CheckpointError."""
        held = StoredCheckpoint.of(folder)
        for name in (*sorted(read_manifest(folder).files), manifests.FILE):
            self.objects.write(self._at(held, name), _pieces(folder / name))
        self._push_server(held, run_dir / _SERVER_FILES)
        self.objects.write(self._marker(held.epoch), [held.folder.encode()])

    def prune(self, held: StoredCheckpoint, kept: Collection[int]) -> None:
        """Remove what trainers up to the epoch of `held` have left there, except `held` and the versions `kept`. Raises
        OSError."""
        mine = [found for found in self.checkpoints() if found.epoch <= held.epoch and found != held]
        gone = [found for found in mine if found.version not in kept or found.version == held.version]
        names = [name for found in gone for name in self._names(f"checkpoints/{found.folder}")]
        older = {self._marker(found.epoch) for found in mine if found.epoch < held.epoch}
        self.objects.remove([*(older & set(self._names("checkpoints"))), *names])

    def push_files(self, run_dir: Path) -> None:
        """Copy the other files of the run that have changed since the last call, or are not there any more: `--fresh`
        elsewhere may have deleted the copy, which without config.yaml and run.id is neither listed nor resumed. Raises
        OSError."""
        there = set(self._names("run"))
        for path in sorted(found for pattern in _RUN_FILES for found in run_dir.glob(pattern) if found.is_file()):
            name, stat = path.relative_to(run_dir).as_posix(), path.stat()
            target = f"{self.name}/run/{name}"
            if self._pushed.get(name) != (stat.st_mtime_ns, stat.st_size) or target not in there:
                self.objects.write(target, _pieces(path))
                self._pushed[name] = (stat.st_mtime_ns, stat.st_size)

    def pull(self, run_dir: Path, say: Say) -> None:
        """Bring the run into `run_dir` if the store has a newer checkpoint than that; else do nothing.

        Raises OSError if the store fails (the next call goes on where this one ended), CheckpointError for a copy that
        does not hold what was written.
        """
        if (run_dir / "checkpoints" / CHOSEN).exists():
            return  # a person has chosen the one that is here
        newest = self.newest()
        if newest is None or newest <= (_local(run_dir) or StoredCheckpoint(-1, -1)):
            return
        self.pull_files(run_dir)
        self._pull_server(newest, run_dir / _SERVER_FILES)
        self.pull_checkpoint(newest, run_dir / "checkpoints", say)

    def pull_files(self, run_dir: Path) -> int:
        """Bring the files of the run, without checkpoints; returns their number. Raises OSError."""
        root = f"{self.name}/run/"
        names = [name.removeprefix(root) for name in self._names("run")]
        for name in names:
            path = run_dir / name
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise OSError(f"{self.url} holds a file {name!r}, which would lie outside the folder of the run")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, self.objects.read(root + name))
        return len(names)

    def pull_checkpoint(self, wanted: StoredCheckpoint, checkpoints: Path, say: Say) -> None:
        """Bring a checkpoint, compare it with its manifest, and let `latest` name it; see `pull`."""
        draft, target = checkpoints / f".pull-{wanted.folder}", checkpoints / f"{wanted.version:08d}"
        draft.mkdir(parents=True, exist_ok=True)
        for old in set(checkpoints.glob(".pull-*")) - {draft}:
            shutil.rmtree(old)
        raw = self.objects.read(self._at(wanted, manifests.FILE))
        files = manifests.parse(raw, f"{self.url}/checkpoints/{wanted.folder}").files
        if outside := [name for name in files if Path(name).name != name]:
            raise CheckpointError(
                f"{self.url}/checkpoints/{wanted.folder}: its manifest names {outside[0]!r}, which would lie outside "
                "the folder of the checkpoint. Nothing was fetched. Restore the manifest"
            )
        total, done = sum(file.bytes for file in files.values()), 0
        for name, file in sorted(files.items()):
            for piece_bytes in self._fetch(self._at(wanted, name), draft / name, file):
                done += piece_bytes
                if done * _SAYINGS // total > (done - piece_bytes) * _SAYINGS // total:
                    say(
                        f"fetching version {wanted.version} from {self.url}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
                    )
        write_atomic(draft / manifests.FILE, raw, synced=True)
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        sync(checkpoints)
        write_atomic(checkpoints / LATEST, f"{wanted.version}\n", synced=True)

    def id(self) -> str | None:
        """The run's unique id (run.id); None if there is no copy. Raises OSError."""
        content = self._read_file("run.id")
        return None if content is None else content.decode()

    def read_config(self) -> bytes | None:
        """Content of the run's config.yaml; None if there is no copy. Raises OSError."""
        return self._read_file("config.yaml")

    def _read_file(self, name: str) -> bytes | None:
        try:
            return self.objects.read(f"{self.name}/run/{name}")
        except FileNotFoundError:
            return None

    def holds_anything(self) -> bool:
        """True if there is any object of a run of this name, also of a torn copy. Raises OSError."""
        return bool(self.objects.list_names(self.name))

    def remove(self) -> None:
        """Remove the whole copy, its markers first. Raises OSError."""
        names = self.objects.list_names(self.name)
        self.objects.remove([name for name in names if f"/{LATEST}-" in name])
        self.objects.remove(names)

    def _push_server(self, held: StoredCheckpoint, files: Path) -> None:
        """Copy the append-only file of the embedded server, which goes on writing.

        Its parts only grow, and a server cuts off a command that was copied in part; they are replaced only together,
        by a rewrite, which the list of parts shows.
        """
        for _ in range(_TRIES if files.is_dir() else 0):
            with suppress(FileNotFoundError):
                before = {path.name for path in files.iterdir()}
                for name in sorted(name for name in before if not name.startswith("temp-")):
                    self.objects.write(self._at(held, f"server/{name}"), _pieces(files / name))
                if before == {path.name for path in files.iterdir()}:
                    return
        if files.is_dir():
            raise OSError(f"{files} was rewritten {_TRIES} times while it was copied")

    def _pull_server(self, wanted: StoredCheckpoint, files: Path) -> None:
        root = self._at(wanted, "server/")
        if names := [name.removeprefix(root) for name in self._names(f"checkpoints/{wanted.folder}/server")]:
            shutil.rmtree(files, ignore_errors=True)
            files.mkdir(parents=True, mode=0o700)
            for name in names:
                write_atomic(files / Path(name).name, self.objects.read(root + name), synced=True)

    def _fetch(self, name: str, path: Path, file: File) -> Iterator[int]:
        """Bring a file, after what an earlier attempt has left of it; yields the bytes of each piece."""
        there = path.stat().st_size if path.exists() else 0
        if there > file.bytes:
            path.unlink()
            there = 0
        if there:
            yield there
        starts = range(there, file.bytes, _PIECE_BYTES)
        with path.open("ab") as target, ThreadPoolExecutor(_READS_AT_ONCE) as pool:
            for first in range(0, len(starts), _READS_AT_ONCE):
                spans = [(start, min(start + _PIECE_BYTES, file.bytes)) for start in starts[first:][:_READS_AT_ONCE]]
                for piece in pool.map(lambda span: self.objects.read(name, *span), spans):
                    target.write(piece)
                    yield len(piece)
        sync(path)
        if describe(path) != file:
            path.unlink()
            raise CheckpointError(
                f"{self.url}: {name} does not hold what was written ({file.bytes} bytes, xxh3 {file.xxh3}). Nothing "
                "was put in place. Give the same command again; if that does not help, restore the object"
            )

    def _names(self, below: str) -> list[str]:
        return self.objects.list_names(f"{self.name}/{below}")

    def _at(self, found: StoredCheckpoint, file: str) -> str:
        return f"{self.name}/checkpoints/{found.folder}/{file}"

    def _marker(self, epoch: int) -> str:
        return f"{self.name}/checkpoints/{LATEST}-{epoch:08d}"


def runs_at(url: str) -> list[str]:
    """Names of the runs below `url`. Raises ConfigError, DependencyError, OSError."""
    names = open_location(url, "URL").list_names("")
    return sorted({name.partition("/")[0] for name in names if name.endswith("/run/config.yaml")})


def _local(run_dir: Path) -> StoredCheckpoint | None:
    """The local checkpoint to resume from; None if there is none that is whole."""
    marker = run_dir / "checkpoints" / LATEST
    try:
        return StoredCheckpoint.of(marker.parent / f"{int(marker.read_text()):08d}")
    except (OSError, ValueError, CheckpointError):
        return None


def _pieces(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
