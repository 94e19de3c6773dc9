"""RunStore: a copy of a run in a bucket (`runs_store`), from which another machine can resume.

    NAME/checkpoints/00000010-00000003/   checkpoint of version 10, by the trainer of epoch 3: files, then manifest.json
      server/                             files of the embedded server at that moment; without redis.url
    NAME/checkpoints/latest-00000003      marker: the folder of the newest complete checkpoint of that trainer
    NAME/run/config.yaml, metrics.jsonl   the other files of the run

    trainer   checkpoint on disk --push_checkpoint--> files, manifest, marker --> the buffer may forget the groups
    launcher  bare machine       --pull_run-->        files of the run, newest checkpoint --> starts the roles

A checkpoint counts once its marker is written, which comes last; an interrupted upload has none. Each trainer has its
own marker, and the one of the newest epoch wins, so a trainer that was thought dead cannot replace its successor's
checkpoint. The store is never behind what the buffer has forgotten, because commits follow the marker.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from async_grpo.errors import CheckpointDamaged, CheckpointError, ConfigError
from async_grpo.utils.files import sync, write_atomic
from async_grpo.weights.folder.objects import Objects, open_location
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.manifest import FileDigest, hash_file, read_manifest

KEY = "runs_store"
LATEST = "latest"
CHOSEN = "resume-from"
"""File with the version that the user chose to resume from; `latest` has it too."""
_PIECE_BYTES = 16 << 20
_READS_AT_ONCE = 4
_TRIES = 5
_PROGRESS_REPORTS = 10
"""Number of progress reports per checkpoint."""
_SERVER_FILES = "server/appendonlydir"
_RUN_FILES = (
    "config.yaml",
    "run.id",
    "run.json",
    "metrics.jsonl",
    "report.md",
    "summary.json",
    "timeline.json",
    "evaluations/*.jsonl",
    "samples/*.jsonl",
    "timeline/*.jsonl",
    "plots/*",
    "roles/*.jsonl",
)
"""Files that are copied next to checkpoints: all that `async-grpo runs` reads, and none that belongs to a machine."""

Report = Callable[[str], None]
"""Shows a progress message to the user."""


@dataclass(frozen=True, slots=True, order=True)
class StoredCheckpoint:
    """A checkpoint in the store, ordered by age: the largest is the newest."""

    epoch: int
    version: int

    @property
    def folder(self) -> str:
        """Name of its folder below `checkpoints`."""
        return f"{self.version:08d}-{self.epoch:08d}"

    @classmethod
    def of(cls, folder: Path) -> StoredCheckpoint:
        """Identify the complete checkpoint in a local folder. Raises CheckpointError."""
        manifest = read_manifest(folder)
        return cls(manifest.epoch, manifest.version)

    @classmethod
    def parse(cls, text: str) -> StoredCheckpoint | None:
        """Parse the name of a folder; None for any other name."""
        version, _, epoch = text.partition("-")
        if not (version.isdigit() and epoch.isdigit()):
            return None
        return cls(int(epoch), int(version))


@dataclass(slots=True)
class RunStore:
    """The copy of one run. Every failure of the store is an OSError that names the object, without credentials."""

    objects: Objects
    name: str
    url: str
    _pushed: dict[str, tuple[int, int]] = field(default_factory=dict, init=False)
    """Modification time (ns) and size (bytes) of the files of the run when they were last copied."""

    @classmethod
    def open(cls, url: str, name: str) -> RunStore:
        """Open the copy of the run `name` below `url`. Raises ConfigError, DependencyError."""
        return cls(open_location(url, KEY), name, f"{url.rstrip('/')}/{name}")

    def check_access(self) -> str:
        """Write, read and remove a small object. Returns a sentence with the result. Raises ConfigError."""
        trial = f"{self.name}/.trial"
        try:
            self.objects.write(trial, [b"trial"])
            self.objects.read(trial)
            self._list("")
            self.objects.remove([trial])
        except OSError as error:
            raise ConfigError(
                f"{KEY} ({self.url}) is not usable: {error}. Check that the bucket exists and that the environment has "
                "its endpoint and credentials (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
            ) from error
        return f"{self.url} can be written to, read, listed and removed from"

    def newest_checkpoint(self) -> StoredCheckpoint | None:
        """Return the newest complete checkpoint; None if there is none. Raises OSError, CheckpointDamaged."""
        markers = [name for name in self._list("checkpoints") if name.rpartition("/")[2].startswith(LATEST)]
        if not markers:
            return None
        newest_epoch = max(markers)  # epochs have leading zeros, so their order is that of the names
        named = self.objects.read(newest_epoch).decode(errors="replace").strip()
        checkpoint = StoredCheckpoint.parse(named)
        if checkpoint is None:
            raise CheckpointDamaged(
                f"{self.url}: the marker {newest_epoch} names no checkpoint ({named[:80]!r}), so it is unknown which "
                "one is the newest. Restore the marker, or write the name of a folder below checkpoints/ into it"
            )
        return checkpoint

    def list_checkpoints(self) -> list[StoredCheckpoint]:
        """Return all checkpoints that have any object, including interrupted uploads. Raises OSError."""
        folders = {name.split("/")[2] for name in self._list("checkpoints")}
        parsed = [StoredCheckpoint.parse(folder) for folder in folders]
        return sorted(checkpoint for checkpoint in parsed if checkpoint is not None)

    def push_checkpoint(self, folder: Path, run_dir: Path) -> None:
        """Copy the complete checkpoint in `folder` and the embedded server's files, then write the marker.

        Raises OSError, CheckpointError.
        """
        pushed = StoredCheckpoint.of(folder)
        for name in (*sorted(read_manifest(folder).files), manifests.FILE):
            self.objects.write(self._object_name(pushed, name), _pieces(folder / name))
        self._push_server(pushed, run_dir / _SERVER_FILES)
        # The marker comes last: it makes the checkpoint count.
        self.objects.write(self._marker(pushed.epoch), [pushed.folder.encode()])

    def prune(self, newest: StoredCheckpoint, keep_versions: Collection[int]) -> None:
        """Remove older markers, and all checkpoints of this and earlier trainers but `newest` and `keep_versions`.

        Those of a newer epoch than `newest` belong to a trainer that has taken over, and stay. Raises OSError.
        """
        markers = set()
        names = []
        for checkpoint in self.list_checkpoints():
            if checkpoint.epoch > newest.epoch or checkpoint == newest:
                continue
            if checkpoint.epoch < newest.epoch:
                markers.add(self._marker(checkpoint.epoch))
            # The same version of an earlier epoch is superseded by `newest`.
            if checkpoint.version not in keep_versions or checkpoint.version == newest.version:
                names += self._list(f"checkpoints/{checkpoint.folder}")
        # Markers first: while one exists, the checkpoint that it names must be complete.
        existing_markers = markers & set(self._list("checkpoints"))
        self.objects.remove(list(existing_markers))
        self.objects.remove(names)

    def push_files(self, run_dir: Path) -> None:
        """Copy the other files of the run that have changed since the last call. Raises OSError."""
        # Also copy unchanged files that are missing in the store: `--fresh` on another machine may have deleted them,
        # and without config.yaml and run.id the copy is neither listed nor resumed.
        stored = set(self._list("run"))
        paths = [path for pattern in _RUN_FILES for path in run_dir.glob(pattern) if path.is_file()]
        for path in sorted(paths):
            name = path.relative_to(run_dir).as_posix()
            stat = path.stat()
            target = f"{self.name}/run/{name}"
            if self._pushed.get(name) != (stat.st_mtime_ns, stat.st_size) or target not in stored:
                self.objects.write(target, _pieces(path))
                self._pushed[name] = (stat.st_mtime_ns, stat.st_size)

    def pull_run(self, run_dir: Path, report: Report) -> None:
        """Fetch the run into `run_dir` if the store has a newer checkpoint than that folder; else do nothing.

        Raises OSError if the store fails (the next call continues where this one stopped), and CheckpointDamaged if the
        copy is not what was written.
        """
        if (run_dir / "checkpoints" / CHOSEN).exists():
            return  # the user has chosen a local checkpoint
        newest = self.newest_checkpoint()
        local = _find_local(run_dir)
        if newest is None or (local is not None and newest <= local):
            return
        # The checkpoint comes last, and its version in `latest` makes it count. If this is interrupted before, the next
        # call fetches everything again.
        self.pull_files(run_dir)
        self._pull_server(newest, run_dir / _SERVER_FILES)
        self.pull_checkpoint(newest, run_dir / "checkpoints", report)

    def pull_files(self, run_dir: Path) -> int:
        """Fetch the files of the run, without checkpoints, and return their number. Raises OSError."""
        root = f"{self.name}/run/"
        names = [name.removeprefix(root) for name in self._list("run")]
        for name in names:
            path = run_dir / name
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise OSError(f"{self.url} has a file {name!r}, whose path is outside the folder of the run")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, self.objects.read(root + name))
        return len(names)

    def pull_checkpoint(self, wanted: StoredCheckpoint, checkpoints: Path, report: Report) -> None:
        """Fetch a checkpoint, compare it with its manifest, and write its version to `latest`.

        Raises OSError, CheckpointDamaged.
        """
        # The draft keeps its name, so that a later attempt continues with the files that are here.
        draft = checkpoints / f".pull-{wanted.folder}"
        target = checkpoints / f"{wanted.version:08d}"
        draft.mkdir(parents=True, exist_ok=True)
        for old in set(checkpoints.glob(".pull-*")) - {draft}:
            shutil.rmtree(old)
        raw = self.objects.read(self._object_name(wanted, manifests.FILE))
        files = manifests.parse_manifest(raw, f"{self.url}/checkpoints/{wanted.folder}").files
        for name in files:
            if Path(name).name != name or name == "..":
                raise CheckpointDamaged(
                    f"{self.url}/checkpoints/{wanted.folder}: its manifest names {name!r}, which is outside the folder "
                    "of the checkpoint. Nothing was fetched. Restore the manifest"
                )
        total = sum(file.bytes for file in files.values())
        done = 0
        for name, file in sorted(files.items()):
            for piece_bytes in self._fetch(self._object_name(wanted, name), draft / name, file):
                done += piece_bytes
                if done * _PROGRESS_REPORTS // total > (done - piece_bytes) * _PROGRESS_REPORTS // total:
                    report(
                        f"fetching version {wanted.version} from {self.url}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
                    )
        write_atomic(draft / manifests.FILE, raw, synced=True)
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        sync(checkpoints)
        write_atomic(checkpoints / LATEST, f"{wanted.version}\n", synced=True)

    def read_run_id(self) -> str | None:
        """Return the run's unique id (run.id); None if there is no copy. Raises OSError."""
        content = self._read_file("run.id")
        return None if content is None else content.decode()

    def read_config(self) -> bytes | None:
        """Return the content of the run's config.yaml; None if there is no copy. Raises OSError."""
        return self._read_file("config.yaml")

    def _read_file(self, name: str) -> bytes | None:
        try:
            return self.objects.read(f"{self.name}/run/{name}")
        except FileNotFoundError:
            return None

    def has_objects(self) -> bool:
        """True if the store has any object of a run of this name, even of an interrupted copy. Raises OSError."""
        return bool(self.objects.list_names(self.name))

    def remove(self) -> None:
        """Remove the copy. Raises OSError."""
        # Markers first: if the removal is interrupted, no marker names an incomplete checkpoint.
        names = self.objects.list_names(self.name)
        self.objects.remove([name for name in names if f"/{LATEST}-" in name])
        self.objects.remove(names)

    def _push_server(self, pushed: StoredCheckpoint, files: Path) -> None:
        """Copy the append-only file of the embedded server, which keeps writing to it."""
        if not files.is_dir():
            return
        # The file consists of several parts. They only grow, and a server drops a command at the end that was copied
        # incompletely. A rewrite replaces all of them, which shows in their names: then copy again.
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):
                before = {path.name for path in files.iterdir()}
                for name in sorted(before):
                    if not name.startswith("temp-"):
                        self.objects.write(self._object_name(pushed, f"server/{name}"), _pieces(files / name))
                if before == {path.name for path in files.iterdir()}:
                    return
        if files.is_dir():
            raise OSError(f"{files} was rewritten {_TRIES} times while it was copied")

    def _pull_server(self, wanted: StoredCheckpoint, files: Path) -> None:
        root = self._object_name(wanted, "server/")
        names = [name.removeprefix(root) for name in self._list(f"checkpoints/{wanted.folder}/server")]
        if names:
            shutil.rmtree(files, ignore_errors=True)
            files.mkdir(parents=True, mode=0o700)
            for name in names:
                write_atomic(files / Path(name).name, self.objects.read(root + name), synced=True)

    def _fetch(self, name: str, path: Path, file: FileDigest) -> Iterator[int]:
        """Fetch a file, continuing after the bytes of an earlier attempt. Yields the number of bytes of each piece.

        Raises OSError, and CheckpointDamaged if the file is not what was written.
        """
        present_bytes = path.stat().st_size if path.exists() else 0
        if present_bytes > file.bytes:
            path.unlink()
            present_bytes = 0
        if present_bytes:
            yield present_bytes
        starts = range(present_bytes, file.bytes, _PIECE_BYTES)
        with path.open("ab") as target, ThreadPoolExecutor(_READS_AT_ONCE) as pool:
            for first in range(0, len(starts), _READS_AT_ONCE):
                spans = [
                    (start, min(start + _PIECE_BYTES, file.bytes)) for start in starts[first : first + _READS_AT_ONCE]
                ]
                # `map` starts all reads immediately, so these few bound the memory.
                for piece in pool.map(lambda span: self.objects.read(name, *span), spans):
                    target.write(piece)
                    yield len(piece)
        sync(path)
        if hash_file(path) != file:
            path.unlink()
            raise CheckpointDamaged(
                f"{self.url}: {name} does not have the content that was written ({file.bytes} bytes, xxh3 "
                f"{file.xxh3}). The local checkpoints are unchanged. Run the same command again; if that does not "
                "help, restore the object"
            )

    def _list(self, below: str) -> list[str]:
        return self.objects.list_names(f"{self.name}/{below}")

    def _object_name(self, checkpoint: StoredCheckpoint, file: str) -> str:
        return f"{self.name}/checkpoints/{checkpoint.folder}/{file}"

    def _marker(self, epoch: int) -> str:
        return f"{self.name}/checkpoints/{LATEST}-{epoch:08d}"


def list_stored_runs(url: str) -> list[str]:
    """Return the names of the runs below `url`. Raises ConfigError, DependencyError, OSError."""
    names = open_location(url, "URL").list_names("")
    return sorted({name.partition("/")[0] for name in names if name.endswith("/run/config.yaml")})


def _find_local(run_dir: Path) -> StoredCheckpoint | None:
    """Return the local checkpoint to resume from; None if there is none or it is damaged."""
    marker = run_dir / "checkpoints" / LATEST
    try:
        return StoredCheckpoint.of(marker.parent / f"{int(marker.read_text()):08d}")
    except (OSError, ValueError, CheckpointError):
        return None


def _pieces(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
