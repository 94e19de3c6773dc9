"""A configuration whose model and data are ids: planned, pinned, fetched, prepared and started, against a local hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from async_grpo.app.cli.main import app
from async_grpo.app.launch.first_policy import prepare_model
from async_grpo.app.launch.inputs import fetch
from async_grpo.app.launch.preflight import describe, resolve
from async_grpo.app.launch.run_folder import open_run, write_config
from async_grpo.config.model import RandomModelConfig
from async_grpo.models.random_model import make_random_model
from tests.support.hub_server import FIRST, SECOND, HubServer, Repo, hub_for_this_process

SHAPE = RandomModelConfig(hidden_size=64, layers=1, heads=2, kv_heads=1, intermediate_size=64, vocab_size=320)
ROWS = [{"question": f"What is {n} + {n}?", "answer": f"Twice {n}. #### {2 * n}"} for n in range(40)]


def lines(rows: list[dict[str, str]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_random_model(SHAPE, [row["question"] for row in ROWS], folder, 1)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(tmp_path: Path, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with a model and with the published data set of grade-school mathematics, in JSON lines."""
    monkeypatch.chdir(tmp_path)
    with hub_for_this_process(tmp_path, monkeypatch) as server:
        data = {"main/train.jsonl": lines([*ROWS[:32], *ROWS[:4]]), "main/test.jsonl": lines(ROWS[32:])}
        server.repos["models/acme/tiny"] = Repo({FIRST: model_files})
        server.repos["datasets/openai/gsm8k"] = Repo({FIRST: data, SECOND: {}})
        yield server


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    settings = {
        "name": "from-hub",
        "model": {"path": "acme/tiny"},
        "data": {"kind": "jsonl", "path": "openai/gsm8k"},
        "rewards": {"functions": [{"name": "gsm8k"}]},
        "rollout": {"vllm": {"max_model_len": 256}},
        "eval": {"prompts": 4},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "250"})


def test_a_dry_run_says_what_would_be_downloaded_and_downloads_nothing(hub: HubServer, config_file: Path) -> None:
    shown = invoke("run", config_file, "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert f"model.path (model acme/tiny@{FIRST} on Hugging Face, 0." in shown.output.replace("\n", "")
    assert "data.path (dataset openai/gsm8k" in shown.output
    assert [path.rpartition("/")[2] for path in hub.downloads()] == ["config.json"]


def test_a_run_keeps_its_commits_and_its_roles_get_local_files(
    hub: HubServer, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = resolve(config_file, [])
    assert (str(config.model.path), str(config.data.path)) == (f"acme/tiny@{FIRST}", f"openai/gsm8k@{FIRST}")
    assert "downloading the model acme/tiny" in capsys.readouterr().out
    folder = open_run(config)
    write_config(folder, config, for_roles=fetch(config, print))
    for repo in hub.repos.values():
        repo.commits[SECOND], repo.head = repo.commits[FIRST], SECOND
    assert resolve(config_file, []).model.path == config.model.path
    assert resolve(config_file, [], steps=9).data.path == config.data.path
    of_roles = yaml.safe_load(folder.roles_file.read_text())
    assert Path(of_roles["model"]["path"], "config.json").is_file()
    trained, held_out = (Path(of_roles["data"][key]).read_text().splitlines() for key in ("path", "eval_path"))
    assert [json.loads(line)["answer"] for line in trained] == [str(2 * n) for n in range(32)]
    assert len(held_out) == 8


async def test_the_first_policy_is_the_downloaded_one(hub: HubServer, config_file: Path) -> None:
    config = resolve(config_file, [], planning=True)
    model = await prepare_model(config, print)
    assert (model / "model.safetensors").is_file()
    assert describe(resolve(config_file, [], planning=True)).row_count


def test_everything_starts_without_the_hub_after_the_first_time(
    hub: HubServer, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    first = fetch(resolve(config_file, []), print)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert fetch(resolve(config_file, []), print) == first
    assert hub.requests == []


def test_prepare_takes_a_name_an_id_and_a_model_of_the_hub(hub: HubServer, tmp_path: Path) -> None:
    done = invoke("prepare", "gsm8k", "--model", "acme/tiny", "--out", tmp_path / "named")
    assert done.exit_code == 0, done.output
    manifest = json.loads((tmp_path / "named" / "prepared.json").read_text())
    assert manifest["rows"] == {"train": 32, "held_out": 8}
    assert not [path for path in hub.downloads() if path.endswith(".safetensors")]
    again = invoke(
        *("prepare", "--dataset", "openai/gsm8k", "--split", "test", "--subset", "main"),
        *("--held-out", 2, "--model", "acme/tiny", "--out", tmp_path / "split"),
    )
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "split" / "prepared.json").read_text())["rows"] == {"train": 6, "held_out": 2}


@pytest.mark.parametrize("words", [(), ("gsm8k", "--dataset", "a/b")])
def test_prepare_wants_files_or_one_data_set(words: tuple[str, ...], tmp_path: Path) -> None:
    refused = invoke("prepare", *words, "--model", "m", "--out", tmp_path / "out")
    assert refused.exit_code == 1
    assert "prepare needs FILEs, one of the names gsm8k, deepscaler, dapo-math" in refused.output
