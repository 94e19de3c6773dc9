"""Ids of a hub, with the real client of Hugging Face against a hub on the loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_grpo.errors import ConfigError, DependencyError, HubUnreachable
from async_grpo.models.hub import HubRepo, hub_repo, huggingface
from async_grpo.models.hub_dataset import fetch_split, select_split_files
from tests.support.hub_server import FIRST, SECOND, HubServer, Repo, hub_for_this_process

WEIGHTS = bytes(range(256)) * 12_000
FILES = {
    "config.json": b"{}",
    "tokenizer_config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickled",
    "onnx/config.json": b"{}",
    "README.md": b"hello",
}
MODEL = HubRepo("acme/tiny", "model")
FETCH = """
import sys
from async_grpo.models.hub import HubRepo
print(HubRepo(sys.argv[1], "model").pin_revision().fetch_files(lambda line: None))
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with the model acme/tiny."""
    with hub_for_this_process(tmp_path, monkeypatch) as server:
        server.repos["models/acme/tiny"] = Repo({FIRST: FILES})
        yield server


def fetched(repo: HubRepo = MODEL) -> Path:
    return repo.pin_revision().fetch_files(lambda line: None)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_a_model_needs_is_fetched_and_nothing_pickled(hub: HubServer) -> None:
    said: list[str] = []
    folder = MODEL.pin_revision().fetch_files(said.append)
    assert names(folder) == ["config.json", "model.safetensors", "tokenizer_config.json"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert said[0] == "downloading the model acme/tiny@" + FIRST + " on Hugging Face: 3 files, 3.1 MB"
    assert said[-1] == "downloaded 3 of 3 MB"  # the test's standard error is no terminal


def test_the_second_time_nobody_is_asked_for_a_file(hub: HubServer) -> None:
    folder = fetched()
    hub.requests.clear()
    assert HubRepo("acme/tiny", "model", revision=FIRST).fetch_files(lambda line: None) == folder
    assert hub.requests == []


def test_without_the_hub_the_commit_that_was_last_seen_is_taken(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    folder = fetched()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetched() == folder
    with pytest.raises(HubUnreachable, match="HF_HUB_OFFLINE"):
        fetched(HubRepo("acme/other", "model"))


def test_a_commit_stays_what_it_was_when_the_branch_moves_on(hub: HubServer) -> None:
    repo = hub.repos["models/acme/tiny"]
    pinned = MODEL.pin_revision()
    repo.commits[SECOND] = {**FILES, "config.json": b'{"new": 1}'}
    repo.head = SECOND
    assert pinned.fetch_files(lambda line: None).name == FIRST
    assert MODEL.pin_revision().revision == SECOND
    assert json.loads((fetched() / "config.json").read_text()) == {"new": 1}


def test_an_interrupted_download_goes_on_where_it_was(hub: HubServer) -> None:
    hub.cut_after = 1_000_000
    folder = fetched()
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_files_that_are_not_all_there_are_no_model(hub: HubServer) -> None:
    folder = fetched()
    (folder / "model.safetensors").resolve().unlink()
    (folder / "model.safetensors").unlink()
    assert MODEL.pin_revision().find_folder() is None
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS


def test_files_that_another_program_left_in_the_cache_are_no_model(hub: HubServer) -> None:
    from huggingface_hub import hf_hub_download

    hf_hub_download("acme/tiny", "config.json")
    assert MODEL.pin_revision().find_folder() is None
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_model_that_another_program_has_downloaded_needs_no_hub(hub: HubServer) -> None:
    from huggingface_hub import snapshot_download

    downloaded = snapshot_download("acme/tiny", revision=FIRST)
    hub.requests.clear()
    assert HubRepo("acme/tiny", "model", revision=FIRST).fetch_files(lambda line: None) == Path(downloaded)
    assert hub.requests == []


def test_two_processes_at_once_download_once(hub: HubServer, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FETCH, "acme/tiny"]
    both = [subprocess.Popen(command, env={**os.environ}, stdout=subprocess.PIPE) for _ in range(2)]
    folders = {process.communicate(timeout=60)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(folders) == 1
    assert len([path for path in hub.downloads() if path.endswith(".safetensors")]) == 1


@pytest.mark.parametrize(
    ("repo", "refusal", "words"),
    [
        (HubRepo("acme/none", "model"), None, "no such folder.* no such model"),
        (HubRepo("acme/tiny", "model", revision="v9"), None, "acme/tiny@v9"),
        (MODEL, (403, "GatedRepo"), "terms.*HF_TOKEN"),
        (MODEL, (401, "Unauthorized"), "HF_TOKEN.*valid"),
        (MODEL, (403, "Forbidden"), "HF_TOKEN.*valid"),
        (MODEL, (503, "Busy"), "HF_ENDPOINT"),
    ],
)
def test_what_cannot_be_had_is_explained(
    hub: HubServer, repo: HubRepo, refusal: tuple[int, str] | None, words: str
) -> None:
    hub.repos["models/acme/tiny"].refusal = refusal
    with pytest.raises(ConfigError, match=words):
        repo.pin_revision()


def test_a_file_that_is_not_what_the_hub_said_is_refused(hub: HubServer) -> None:
    hub.short_by = 1
    with pytest.raises(ConfigError, match=r"model\.safetensors.*SHA-256"):
        fetched()
    hub.short_by, hub.flips = 0, True
    with pytest.raises(ConfigError, match=r"model\.safetensors.*acme/tiny@1+ .*SHA-256"):
        fetched()
    hub.flips = False
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_repository_without_safetensors_is_refused_before_a_download(hub: HubServer) -> None:
    hub.repos["models/acme/old"] = Repo({FIRST: {"pytorch_model.bin": b"pickled"}})
    with pytest.raises(ConfigError, match="safetensors only"):
        fetched(HubRepo("acme/old", "model"))


@pytest.mark.parametrize(
    ("refusal", "words"),
    [((410, "Gone"), "HF_ENDPOINT"), ((403, "GatedRepo"), "terms")],
)
def test_files_that_are_refused_after_the_facts_are_explained(
    hub: HubServer, refusal: tuple[int, str], words: str
) -> None:
    hub.file_refusal = refusal
    with pytest.raises(ConfigError, match=words):
        fetched()


def test_a_hub_that_is_silent_is_waited_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("ASYNC_GRPO_CACHE", str(tmp_path))
        monkeypatch.setattr(huggingface, "_REQUEST_TIMEOUT_S", 0.05)
        for reason in ("timed out", "last request has just timed out"):
            with pytest.raises(HubUnreachable, match=reason):
                MODEL.pin_revision()


def test_a_hub_that_does_not_answer_names_the_mirror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("ASYNC_GRPO_CACHE", str(tmp_path))
    with pytest.raises(HubUnreachable, match="HF_ENDPOINT"):
        MODEL.pin_revision()


@pytest.mark.parametrize("path", ["here/model", "models/tiny", "/abs/model", "one", "a/b/c", "~/m"])
def test_paths_of_this_machine_are_no_ids(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert hub_repo(Path(path), "model", "huggingface", "model.path") is None


def test_a_missing_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    with pytest.raises(DependencyError, match=r"async-grpo\[modelscope\]"):
        HubRepo("acme/tiny", "model", "modelscope").pin_revision().find_folder()


def test_an_id_may_have_a_revision() -> None:
    repo = hub_repo(Path("Qwen/Qwen2.5-7B@abc"), "model", "huggingface", "model.path")
    assert repo is not None and (repo.id, repo.revision) == ("Qwen/Qwen2.5-7B", "abc")


GSM8K = [
    "README.md",
    "main/test-00000-of-00001.parquet",
    "main/train-00000-of-00001.parquet",
    "socratic/train-00000-of-00001.parquet",
]
SEVERAL = ["data/train_gen-00000-of-00001.parquet", "data/train_sft-00000-of-00001.parquet"]


@pytest.mark.parametrize(
    ("files", "split", "subset", "found"),
    [
        (GSM8K[1:], "train", "main", ["main/train-00000-of-00001.parquet"]),
        (GSM8K[1:], "test", "main", ["main/test-00000-of-00001.parquet"]),
        (["deepscaler.json"], "train", "", ["deepscaler.json"]),
        (["data/dapo-math-17k.parquet"], "train", "", ["data/dapo-math-17k.parquet"]),
        (["train.jsonl", "test.jsonl"], "train", "", ["train.jsonl"]),
        (SEVERAL, "train_sft", "", SEVERAL[1:]),
    ],
)
def test_the_files_of_a_split_are_told_by_their_names(
    files: list[str], split: str, subset: str, found: list[str]
) -> None:
    assert select_split_files(files, split, subset) == found


def test_two_splits_of_one_word_are_not_mixed() -> None:
    with pytest.raises(ConfigError, match=r"\['train_gen', 'train_sft'\]"):
        select_split_files(SEVERAL, "train", "")


@pytest.mark.parametrize(("split", "subset"), [("train", ""), ("validation", "main")])
def test_a_split_that_is_not_there_or_twice_lists_what_is(split: str, subset: str) -> None:
    with pytest.raises(ConfigError, match=r"main/test-00000-of-00001\.parquet.*--split.*--subset"):
        select_split_files(GSM8K[1:], split, subset)


def test_only_the_files_of_the_split_are_downloaded(hub: HubServer) -> None:
    rows = {name: b'{"question": "1+1", "answer": "#### 2"}\n' for name in ("train.jsonl", "test.jsonl")}
    hub.repos["datasets/acme/sums"] = Repo({FIRST: {**rows, "README.md": b"x"}})
    repo = hub_repo(Path("acme/sums"), "dataset", "huggingface", "data.path")
    assert repo is not None
    (file,) = fetch_split(repo.pin_revision(), "train", "", lambda line: None)
    assert file.name == "train.jsonl"
    assert [path.rpartition("/")[2] for path in hub.downloads()] == ["train.jsonl"]
