"""A configuration whose model and data are ids: planned, pinned, fetched, prepared and started, against a local hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from async_grpo.app.cli.main import app
from async_grpo.app.launch import first_policy, single_role
from async_grpo.app.launch.first_policy import prepare_model
from async_grpo.app.launch.inputs import fetch_inputs, pin_inputs
from async_grpo.app.launch.plan import load_run_config, plan_run
from async_grpo.app.launch.plan_table import plan_table
from async_grpo.app.launch.run_folder import RunFolder, open_run, write_config
from async_grpo.config import RunConfig, load
from async_grpo.config.model import RandomModelConfig
from async_grpo.errors import ConfigError
from async_grpo.lab.doctor import run_checks
from async_grpo.lab.evaluate import evaluate as evaluating
from async_grpo.lab.evaluate.policy_source import Checkpoint, differences, load_chosen_run
from async_grpo.lab.sweep.folder import SweepRecord
from async_grpo.lab.sweep.sweep import SweepOptions, make_plan
from async_grpo.models.tiny.random_qwen2 import make_random_model
from tests.support.hub_server import FIRST, SECOND, HubServer, Repo, hub_for_this_process
from trainer.checkpoint.store import RunStore

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
    folder = begun(config)
    move_on(hub)
    assert resolve(config_file, []).model.path == config.model.path
    assert resolve(config_file, [], steps=9).data.path == config.data.path
    of_roles = yaml.safe_load(folder.roles_file.read_text())
    assert Path(of_roles["model"]["path"], "config.json").is_file()
    trained, held_out = (Path(of_roles["data"][key]).read_text().splitlines() for key in ("path", "eval_path"))
    assert [json.loads(line)["answer"] for line in trained] == [str(2 * n) for n in range(32)]
    assert len(held_out) == 8


def test_a_bare_machine_takes_the_commits_of_the_copy(hub: HubServer, config_file: Path, tmp_path: Path) -> None:
    store = f"runs_store=file://{tmp_path / 'bucket'}"
    config = resolve(config_file, [store])
    folder = begun(config)
    assert config.runs_store is not None and folder.origin
    RunStore.open(config.runs_store, config.name).push_files(folder.path)

    move_on(hub)
    bare = load_run_config(config_file, [store]).model_copy(update={"runs_dir": tmp_path / "another machine"})
    assert pin_inputs(bare).model.path == config.model.path


async def test_the_first_policy_is_the_downloaded_one(hub: HubServer, config_file: Path) -> None:
    plan = plan_run(config_file, [], download=False)
    model = await prepare_model(plan.inputs, print)
    assert (model / "model.safetensors").is_file()
    assert plan_table(plan_run(config_file, [], download=False)).row_count


def test_everything_starts_without_the_hub_after_the_first_time(
    hub: HubServer, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    first = fetch_inputs(resolve(config_file, []), print)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert fetch_inputs(resolve(config_file, []), print) == first
    assert hub.requests == []


REFERENCE = ("trainer.reference.path=acme/ref", "trainer.reference.source=frozen", "trainer.objective.kl_beta=0.1")


def resolve(file: Path, overrides: Sequence[str], steps: int | None = None) -> RunConfig:
    return plan_run(file, overrides, download=True, steps=steps).config


def begun(config: RunConfig) -> RunFolder:
    folder = open_run(config)
    write_config(folder, config, for_roles=fetch_inputs(config, print))
    return folder


def move_on(hub: HubServer) -> None:
    """A new commit of every repository, with the same files."""
    for repo in hub.repos.values():
        repo.commits[SECOND], repo.head = repo.commits[FIRST], SECOND


def test_a_reference_by_id_is_pinned_fetched_and_checked(
    hub: HubServer, config_file: Path, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.repos["models/acme/ref"] = Repo({FIRST: model_files})
    assert "trainer.reference.path (model acme/ref@1" in invoke(
        "run", config_file, "--dry-run", *(word for one in REFERENCE for word in ("-o", one))
    ).output.replace("\n", "")
    config = resolve(config_file, REFERENCE)
    assert str(config.trainer.reference.path) == f"acme/ref@{FIRST}"
    reference = fetch_inputs(config, print).trainer.reference.path
    assert reference is not None and (reference / "model.safetensors").is_file()
    make_random_model(SHAPE.model_copy(update={"hidden_size": 32}), ["1 + 1"], tmp_path / "small", 1)
    with pytest.raises(ConfigError, match=r"trainer\.reference\.path .*small"):
        resolve(config_file, [f"trainer.reference.path={tmp_path / 'small'}", *REFERENCE[1:]])
    with pytest.raises(ConfigError, match=r"trainer\.reference\.path.*/nowhere"):
        resolve(config_file, ["trainer.reference.path=/nowhere", *REFERENCE[1:]])


def test_roles_that_start_alone_get_the_same_local_files(
    hub: HubServer, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(single_role.os, "execve", lambda path, argv, environment: started.append(argv))
    server = ["redis.url=redis://127.0.0.1:1"]
    single_role.run_trainer(config_file, server, None)
    move_on(hub)
    single_role.run_rollout(config_file, server, "rollout-0")
    models = [argv[argv.index("--model") + 1] for argv in started]
    files = [load(Path(argv[argv.index("--config") + 1])) for argv in started]
    assert models[0] == models[1] and Path(models[0]).name == FIRST
    assert files[0].data.path == files[1].data.path and str(files[0].model.path) == models[0]
    assert len([path for path in hub.downloads() if path.endswith(".safetensors")]) == 1


def test_a_run_on_a_branch_resumes_with_its_commit(hub: HubServer, config_file: Path) -> None:
    on_main = ["model.path=acme/tiny@main", "name=on-main"]
    folder = begun(resolve(config_file, on_main))
    move_on(hub)
    again = resolve(config_file, on_main)
    assert str(again.model.path) == f"acme/tiny@{FIRST}"
    assert open_run(again) == folder


async def test_an_evaluation_reads_the_data_and_finds_the_commits_of_the_run(
    hub: HubServer, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun(resolve(config_file, []))
    move_on(hub)
    config, found = load_chosen_run(config_file, [], None)
    assert differences(config, found) == []
    read: list[RunConfig] = []

    def no_policy(config: RunConfig, *_: object) -> None:
        read.append(config)
        raise ConfigError("far enough")

    monkeypatch.setattr(evaluating, "open_policy", no_policy)
    plan = evaluating.make_eval_plan(config, prompts=None, samples=None, temperature=None)
    with pytest.raises(ConfigError, match="far enough"):
        await evaluating.evaluate(
            folder.read_config(), Checkpoint(folder.path, 1), plan, patience_s=1, report_progress=print, on_answer=print
        )
    assert read[0].data == load(folder.roles_file).data


async def test_a_model_made_for_data_of_a_hub_is_found_again(
    hub: HubServer, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    async def make(argv: object, report_progress: object) -> None:
        made.append(argv)

    monkeypatch.setattr(first_policy, "_run_generator", make)
    monkeypatch.setattr(first_policy, "check_model", lambda path: path)
    settings = yaml.safe_load(config_file.read_text()) | {"model": {"random": SHAPE.model_dump()}}
    config_file.write_text(yaml.safe_dump(settings))
    config = resolve(config_file, [])
    assert await prepare_model(config, print) == await prepare_model(fetch_inputs(config, print), print)


def test_a_sweep_keeps_its_commits(hub: HubServer, config_file: Path) -> None:
    first = SweepOptions(config_file, ["max_staleness=1"], None, [], None)
    folder, plan = make_plan(first)
    folder.write_configs(plan.points)
    folder.write_record(SweepRecord(command="", points=list(folder.point_records(plan.points).values())))
    move_on(hub)
    _, plan = make_plan(SweepOptions(config_file, ["max_staleness=1,2"], None, [], None))
    assert [str(point.config.model.path) for point in plan.points] == [f"acme/tiny@{FIRST}"] * 2


def test_what_is_in_the_cache_is_checked_before_a_start(hub: HubServer, config_file: Path) -> None:
    fetch_inputs(resolve(config_file, []), print)
    assert "not here yet" not in invoke("run", config_file, "--dry-run").output
    row = next(check for check in run_checks(load(config_file)) if "first_row" in repr(check))()
    assert "prompt 'What is 0 + 0?', answer '0'" in row.found


def test_an_id_can_be_converted(hub: HubServer, tmp_path: Path) -> None:
    refused = invoke("convert", "acme/none", tmp_path / "out")
    assert "SOURCE is acme/none: there is no such folder here, and no such model" in refused.output.replace("\n", " ")


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
    assert "one of the names gsm8k, deepscaler, dapo-math" in refused.output
