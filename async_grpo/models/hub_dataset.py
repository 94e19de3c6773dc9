"""Data sets of a hub as local files for runs and `prepare`.

    OWNER/NAME@COMMIT --fetch_split--> Parquet or JSON files of one split
                                       --write_training_files--> one JSON-lines file of questions and answers

A run with `data.path: OWNER/NAME` reads the JSON-lines file from the cache of this package; `async-grpo prepare` reads
the hub's files. Rows are read one at a time, so memory does not depend on the size of the data set.
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
    """A public data set: its id and the format of its rows."""

    id: str
    format: str
    subset: str = ""
    held_out: str = ""
    """Name of the held-out split; "" if there is none."""


KNOWN_DATASETS = {
    "gsm8k": KnownDataset("openai/gsm8k", "gsm8k", subset="main", held_out="test"),
    "deepscaler": KnownDataset("agentica-org/DeepScaleR-Preview-Dataset", "deepscaler"),
    "dapo-math": KnownDataset("BytedTsinghua-SIA/DAPO-Math-17k", "dapo"),
}
"""Names that `async-grpo prepare` accepts. dapo-math has each question about a hundred times; repeats are dropped."""


def describe_dataset(data_id: str) -> KnownDataset:
    """Return the KnownDataset with this id; for other ids one with the format `auto`, to be detected from its rows."""
    for dataset in KNOWN_DATASETS.values():
        if dataset.id == data_id:
            return dataset
    return KnownDataset(data_id, "auto")


def select_split_files(names: Iterable[str], split: str, subset: str) -> list[str]:
    """Return the files of one split by their names, such as `main/train-00000-of-00001.parquet`.

    If no file name contains the name of a split, all files are training data. Raises ConfigError with the files that
    exist if none or several candidates match.
    """
    names = sorted(names)
    candidates = [name for name in names if not subset or subset in Path(name).parts[:-1] or Path(name).stem == subset]

    # An exact name first: `train` must not select `train_sft`, which also contains the word.
    selected = [name for name in candidates if split == _shard_prefix(name)]
    if not selected:
        selected = [name for name in candidates if split in _name_words(name)]
    if not selected and split == "train" and not any(set(SPLITS) & _name_words(name) for name in candidates):
        selected = candidates

    folders = {str(Path(name).parent) for name in selected}
    prefixes = {prefix for prefix in map(_shard_prefix, selected) if prefix and split in _name_words(prefix)}
    if not selected:
        problem = f"has no files of the split {split!r}"
    elif len(folders) > 1:
        problem = f"has that split in {sorted(folders)}"
    elif len(prefixes) > 1:
        problem = f"has that split in {sorted(prefixes)}"
    else:
        return selected
    if subset:
        problem += f" in {subset!r}"
    raise ConfigError(
        f"the data set {problem}. Its files: {', '.join(names[:20])}. Choose with data.split and data.subset (--split "
        "and --subset)"
    )


def _shard_prefix(name: str) -> str | None:
    """`train_sft` of `data/train_sft-00000-of-00003.parquet`; None for other forms of names."""
    match = re.fullmatch(r"(.+)-\d{5}-of-\d{5}", Path(name).stem)
    return match and match[1]


def _name_words(name: str) -> set[str]:
    """Words in the name of a file and of its folder."""
    path = Path(name)
    return set(re.split(r"[^a-z0-9]+", f"{path.parent.name} {path.stem}".lower()))


def fetch_split(repo: HubRepo, split: str, subset: str, report_progress: Callable[[str], None]) -> list[Path]:
    """Return the files of a split, downloaded if needed. Raises ConfigError."""
    # Keep the list of files, so that a cached data set needs no request.
    listing = cache_dir() / "hub" / f"{repo.hub}-{repo}.json".replace("/", "--")
    if not listing.exists():
        names = list(repo.list_file_sizes())
        listing.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(listing, json.dumps(names))

    names = select_split_files(json.loads(listing.read_text()), split, subset)
    folder = replace(repo, allow_patterns=tuple(names)).fetch_files(report_progress)
    return [folder / name for name in names]


@dataclass(frozen=True, slots=True)
class DatasetFiles:
    """The hub's files of a data set, and the format of their rows."""

    train: list[Path]
    held_out: list[Path]
    format: str


def fetch_dataset(
    data_id: str, hub: Hub, split: str, subset: str, report_progress: Callable[[str], None]
) -> DatasetFiles:
    """Download the data set `data_id` (OWNER/NAME or OWNER/NAME@REVISION) for `prepare`. Raises ConfigError."""
    repo = hub_repo(Path(data_id), "dataset", hub, "--dataset")
    if repo is None:
        raise ConfigError(f"--dataset {data_id!r} is no id of a hub (OWNER/NAME). Name a local file as FILE instead")
    dataset = describe_dataset(repo.id)
    subset = subset or dataset.subset

    # Pin once for both splits: the branch may move between the two downloads.
    pinned = repo.pin_revision()
    train = fetch_split(pinned, split, subset, report_progress)
    held_out = []
    if dataset.held_out not in ("", split):
        held_out = fetch_split(pinned, dataset.held_out, subset, report_progress)
    return DatasetFiles(train, held_out, dataset.format)


def find_training_files(data: DataConfig, repo: HubRepo) -> tuple[Path, Path | None] | None:
    """Return the files of `write_training_files` if they exist, else None. Makes no requests."""
    paths = [_split_path(data, repo, split) for split in _used_splits(data, repo)]
    if not all(path.exists() for path in paths):
        return None
    return paths[0], paths[1] if len(paths) > 1 else None


def write_training_files(
    data: DataConfig, repo: HubRepo, report_progress: Callable[[str], None]
) -> tuple[Path, Path | None]:
    """Write JSON-lines files with the training rows and the held-out rows, if the data set is known to have some.

    Raises ConfigError for a data set that has neither the fields of a known format nor those of `data.prompt_field`
    and `data.answer_field`.
    """
    paths = [_write_split(data, repo, split, report_progress) for split in _used_splits(data, repo)]
    return paths[0], paths[1] if len(paths) > 1 else None


def _used_splits(data: DataConfig, repo: HubRepo) -> list[str]:
    """Return the split to train on and, unless `data.eval_path` is set, the known held-out split."""
    held_out = describe_dataset(repo.id).held_out
    if held_out in ("", data.split) or data.eval_path is not None:
        return [data.split]
    return [data.split, held_out]


def _split_path(data: DataConfig, repo: HubRepo, split: str) -> Path:
    subset = data.subset or describe_dataset(repo.id).subset
    parts = [repo.hub, repo.id, repo.revision, subset, split, data.prompt_field, data.answer_field]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    return cache_dir() / "data" / f"{repo.id.replace('/', '--')}-{split}-{digest}.jsonl"


def _write_split(data: DataConfig, repo: HubRepo, split: str, report_progress: Callable[[str], None]) -> Path:
    path = _split_path(data, repo, split)
    if path.exists():
        return path

    subset = data.subset or describe_dataset(repo.id).subset
    files = fetch_split(repo, split, subset, report_progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as out:
        for row in _read_unique_rows(files, data):
            out.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        if not out.tell():
            raise ConfigError(
                f"data.path: no row of {repo.description} has the fields of a known format, or both "
                f"data.prompt_field ({data.prompt_field!r}) and data.answer_field ({data.answer_field!r})"
            )
    return path


def _read_unique_rows(files: Sequence[Path], data: DataConfig) -> Iterator[dict[str, str]]:
    """Yield question and answer of every row that has both, each question once."""
    configured = FieldMap(data.prompt_field, data.answer_field, after_hashes=True)
    seen: set[bytes] = set()  # digests: the questions of a large data set take too much memory
    for file in files:
        fields: FieldMap | None = None
        for row in read_raw_rows(file):
            if row.problem:
                continue
            if fields is None and configured.required_fields <= row.fields.keys():
                fields = configured
            if fields is None:
                fields = FORMATS.get(detect_format(row.fields) or "")
            if fields is None:
                continue

            try:
                example = parse_example(row.fields, fields)
            except (RejectedRow, DataError):
                continue
            digest = hashlib.blake2b(example.identity.encode(), digest_size=16).digest()
            if digest not in seen:
                seen.add(digest)
                yield {data.prompt_field: example.question, data.answer_field: example.answer}


def data_repo(data: DataConfig) -> HubRepo | None:
    """Return the repository of `data.path`; None if it is a local path or not used."""
    if data.kind != "jsonl" or data.path is None:
        return None
    return hub_repo(data.path, "dataset", data.hub, "data.path")
