"""Data sets of a hub as files that runs and `prepare` read.

    OWNER/NAME@COMMIT --fetch--> Parquet or JSON of one split --rows--> one JSON-lines file: question, answer, once each

A run with `data.path: OWNER/NAME` reads that file from the cache of this package; `async-grpo prepare` reads the files
of the hub themselves. Rows are read one after the other, so that memory does not depend on the size.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from async_grpo.config.data import DataConfig
from async_grpo.config.model import Hub
from async_grpo.data.base import RejectedRow
from async_grpo.data.prepare.formats import FORMATS, FieldMap, detect_format, parse_example
from async_grpo.data.prepare.readers import read_raw_rows
from async_grpo.errors import ConfigError, DataError
from async_grpo.models.hub import HubRepo, cache_dir, hub_repo
from async_grpo.utils.files import atomic_file, write_atomic

SPLITS = ("train", "test", "validation", "valid", "val", "dev")
"""Words in file names that identify a split."""


@dataclass(frozen=True, slots=True)
class KnownDataset:
    """A public data set: its id and how to read its rows."""

    id: str
    format: str
    subset: str = ""
    held_out: str = ""
    """The split that is held out; "" if it has none."""


KNOWN = {
    "gsm8k": KnownDataset("openai/gsm8k", "gsm8k", subset="main", held_out="test"),
    "deepscaler": KnownDataset("agentica-org/DeepScaleR-Preview-Dataset", "deepscaler"),
    "dapo-math": KnownDataset("BytedTsinghua-SIA/DAPO-Math-17k", "dapo"),
}
"""Names that `async-grpo prepare` takes. dapo-math holds each question about a hundred times; repeats are dropped."""


def known(data_id: str) -> KnownDataset:
    """The KnownDataset with this id; for any other id, one whose format is found from its rows."""
    found = (each for each in KNOWN.values() if each.id == data_id)
    return next(found, KnownDataset(data_id, "auto"))


def split_files(names: Iterable[str], split: str, subset: str) -> list[str]:
    """The files of one split among those of a data set, by their names: `main/train-00000-of-00001.parquet`.

    A data set whose files name no split is all training data. Raises ConfigError that lists what there is.
    """
    names = sorted(names)
    below = [name for name in names if not subset or subset in Path(name).parts[:-1] or Path(name).stem == subset]
    found = [name for name in below if split == _shard_of(name)] or [name for name in below if split in _words(name)]
    if not found and split == "train" and not any(set(SPLITS) & _words(name) for name in below):
        found = below
    folders = {str(Path(name).parent) for name in found}
    shards = {shard for shard in map(_shard_of, found) if shard and split in _words(shard)}
    if not found or len(folders) > 1 or len(shards) > 1:
        several = sorted(folders if len(folders) > 1 else shards)
        problem = f"has no files of the split {split!r}" if not found else f"has that split in {several}"
        raise ConfigError(
            f"the data set {problem}{f' in {subset!r}' if subset else ''}. Its files: {', '.join(names[:20])}. Choose "
            "with data.split and data.subset (--split and --subset)"
        )
    return found


def _shard_of(name: str) -> str | None:
    """`train_sft` of `data/train_sft-00000-of-00003.parquet`; None for a file that is named otherwise."""
    found = re.fullmatch(r"(.+)-\d{5}-of-\d{5}", Path(name).stem)
    return found and found[1]


def _words(name: str) -> set[str]:
    """Words of a file's name and of the folder it lies in."""
    path = Path(name)
    return set(re.split(r"[^a-z0-9]+", f"{path.parent.name} {path.stem}".lower()))


def fetch_split(repo: HubRepo, split: str, subset: str, report_progress: Callable[[str], None]) -> list[Path]:
    """The files of a split, downloaded if they are not here. Raises ConfigError."""
    listing = cache_dir() / "hub" / f"{repo.hub}-{repo}.json".replace("/", "--")
    if not listing.exists():
        names = list(repo.files())
        listing.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(listing, json.dumps(names))
    wanted = split_files(json.loads(listing.read_text()), split, subset)
    folder = replace(repo, wanted=tuple(wanted)).fetch(report_progress)
    return [folder / name for name in wanted]


@dataclass(frozen=True, slots=True)
class HubFiles:
    """Files of a data set as its hub has them, and the format of their rows."""

    train: list[Path]
    held_out: list[Path]
    format: str


def hub_files(data_id: str, hub: Hub, split: str, subset: str, report_progress: Callable[[str], None]) -> HubFiles:
    """What `prepare` reads of the data set `data_id` (OWNER/NAME or OWNER/NAME@REVISION), downloaded if it is not here.

    Raises ConfigError.
    """
    repo = hub_repo(Path(data_id), "dataset", hub, "--dataset")
    if repo is None:
        raise ConfigError(f"--dataset {data_id!r} is no id of a hub (OWNER/NAME). Name a local file as FILE instead")
    facts, pinned = known(repo.id), repo.pinned()
    subset = subset or facts.subset
    train = fetch_split(pinned, split, subset, report_progress)
    held_out = fetch_split(pinned, facts.held_out, subset, report_progress) if facts.held_out not in ("", split) else []
    return HubFiles(train, held_out, facts.format)


def written_files(data: DataConfig, repo: HubRepo) -> tuple[Path, Path | None] | None:
    """`training_files` if they have been written before, else None. Asks nobody."""
    paths = [_target(data, repo, split) for split in _splits(data, repo)]
    return (paths[0], paths[1] if len(paths) > 1 else None) if all(path.exists() for path in paths) else None


def training_files(data: DataConfig, repo: HubRepo, report_progress: Callable[[str], None]) -> tuple[Path, Path | None]:
    """JSON-lines files with the training rows and, if a split is known to be held out, its rows.

    Raises ConfigError for a data set that has neither the known fields nor those of `data.prompt_field` and
    `data.answer_field`.
    """
    paths = [_written(data, repo, split, report_progress) for split in _splits(data, repo)]
    return paths[0], paths[1] if len(paths) > 1 else None


def _splits(data: DataConfig, repo: HubRepo) -> list[str]:
    """The split to train on and, if another is known to be held out and is wanted, that one."""
    held_out = known(repo.id).held_out
    wanted = held_out not in ("", data.split) and data.eval_path is None
    return [data.split, held_out] if wanted else [data.split]


def _target(data: DataConfig, repo: HubRepo, split: str) -> Path:
    subset = data.subset or known(repo.id).subset
    parts = [repo.hub, repo.id, repo.revision, subset, split, data.prompt_field, data.answer_field]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    return cache_dir() / "data" / f"{repo.id.replace('/', '--')}-{split}-{digest}.jsonl"


def _written(data: DataConfig, repo: HubRepo, split: str, report_progress: Callable[[str], None]) -> Path:
    target = _target(data, repo, split)
    if target.exists():
        return target
    files = fetch_split(repo, split, data.subset or known(repo.id).subset, report_progress)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) as out:
        for row in _rows(files, data):
            out.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        if not out.tell():
            raise ConfigError(
                f"data.path: no row of {repo.where} has the fields of a known format, or both "
                f"data.prompt_field ({data.prompt_field!r}) and data.answer_field ({data.answer_field!r})"
            )
    return target


def _rows(files: Sequence[Path], data: DataConfig) -> Iterator[dict[str, str]]:
    """Question and answer of every row that has both, each question once."""
    seen: set[bytes] = set()
    named = FieldMap(data.prompt_field, data.answer_field, after_hashes=True)
    for file in files:
        where: FieldMap | None = None
        for row in read_raw_rows(file):
            if row.problem:
                continue
            if where is None:
                fitting = FORMATS.get(detect_format(row.fields) or "")
                where = named if named.required_fields <= row.fields.keys() else fitting
            if where is None:
                continue
            try:
                example = parse_example(row.fields, where)
            except (RejectedRow, DataError):
                continue
            digest = hashlib.blake2b(example.identity.encode(), digest_size=16).digest()
            if digest not in seen:
                seen.add(digest)
                yield {data.prompt_field: example.question, data.answer_field: example.answer}


def data_repo(data: DataConfig) -> HubRepo | None:
    """The repository of `data.path`; None if it is a path of this machine, or not used."""
    if data.kind != "jsonl" or data.path is None:
        return None
    return hub_repo(data.path, "dataset", data.hub, "data.path")
