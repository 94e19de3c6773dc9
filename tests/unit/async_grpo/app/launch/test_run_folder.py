"""A run folder belongs to one experiment."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from async_grpo.app.launch.first_policy import read_warmup_s
from async_grpo.app.launch.run_folder import RunFolder, RunState, choose_checkpoint, open_run, run_name, write_config
from async_grpo.config import RunConfig, load
from async_grpo.errors import CheckpointDamaged, ConfigError
from trainer.checkpoint.manifest import CheckpointManifest, RankLayout, complete_folder


def config(folder: Path, **changes: object) -> RunConfig:
    return RunConfig.model_validate({"name": "a", "runs_dir": str(folder), "model": {"random": {}}, **changes})


def write(folder: RunFolder, made: RunConfig) -> None:
    write_config(folder, made, for_roles=made)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["seed=3", "max_staleness=0"], "q-max_staleness.0-seed.3"),  # in alphabetical order
        (["trainer.optimizer.lr=1"], "q-lr.1"),
        (["trainer.micro_batch_tokens=9"], "q-micro_batch_tokens.9"),
        (["trainer.processes_of=1"], "q-processes_of.1"),
        (["name=q", "seed=3"], "q"),
        # Where a run is and how it is laid out does not change its name.
        (["redis.url=redis://h:1", "launch.stop_timeout_s=3"], "q"),
        (["trainer.processes=8", "trainer.tensor_parallel=2", "trainer.optimizer.offload=true"], "q"),
        (["trainer.checkpoint.every_steps=5", "trainer.recompute=full"], "q"),
        (["weights.bind=tcp://0.0.0.0:5600", "rollout.http.port=8000"], "q"),
    ],
)
def test_what_a_run_learns_from_is_part_of_its_name(overrides: list[str], name: str) -> None:
    assert run_name("q", overrides) == name


@pytest.mark.parametrize(
    ("spellings", "part"),
    [
        (["1e-4", "1.0e-4", "0.0001", "1E-4"], "lr.1e-4"),
        (["3e-4", "3.0e-4", "0.0003"], "lr.3e-4"),
        (["1.25e-6", "0.00000125"], "lr.1.25e-6"),
        (["0.5", "5e-1", "0.50"], "lr.0.5"),
        (["2", "2.0", "2e0"], "lr.2"),
        (["1e20", "1.0e+20"], "lr.1e20"),
        (["-1", "-1.0"], "lr.-1"),
        (["true", "True", "yes"], "lr.true"),
        (["null", "~"], "lr.null"),
    ],
)
def test_equal_values_make_one_folder_and_stay_readable(spellings: list[str], part: str) -> None:
    assert {run_name("q", [f"trainer.optimizer.lr={text}"]) for text in spellings} == {f"q-{part}"}


def test_lists_are_one_value_however_they_are_spaced_and_of_a_repeated_key_the_last_counts() -> None:
    assert run_name("q", ["a.b=[1,2]"]) == run_name("q", ["a.b=[1, 2]"]) != run_name("q", ["a.b=[2, 1]"])
    assert run_name("q", ["seed=1", "seed=2"]) == "q-seed.2"


def test_long_names_of_different_runs_differ() -> None:
    shared = [f"section.a_key_with_a_long_name_{index}=1" for index in range(3)]
    names = {run_name("q", [*shared, f"seed={seed}"]) for seed in (1, 2)}
    assert len(names) == 2 and {len(name) for name in names} == {64}


def test_a_path_in_an_override_is_shortened_to_something_that_a_file_name_may_hold(tmp_path: Path) -> None:
    name = run_name("gsm8k", ["data.path=../data/train.jsonl"])
    assert config(tmp_path, name=name).name.startswith("gsm8k-path.")


def test_a_run_is_resumed_with_another_layout_of_the_trainer(tmp_path: Path) -> None:
    began = config(tmp_path, trainer={"processes": 4, "tensor_parallel": 2, "pipeline_parallel": 2})
    write(open_run(began), began)
    open_run(config(tmp_path, trainer={"processes": 2, "optimizer": {"offload": True}}))
    with pytest.raises(ConfigError, match=r"other values of trainer\.optimizer\.lr\. "):
        open_run(config(tmp_path, trainer={"processes": 2, "optimizer": {"lr": 0.5}}))


def test_the_same_experiment_is_resumed(tmp_path: Path) -> None:
    folder = open_run(config(tmp_path))
    write(folder, config(tmp_path))
    folder.write_state(RunState(wall_s=3.0, restarts={"trainer": 1}))
    again = open_run(config(tmp_path, steps=200))
    assert again.read_state() == RunState(wall_s=3.0, restarts={"trainer": 1})


def test_a_run_of_a_release_that_knew_fewer_keys_is_resumed(tmp_path: Path) -> None:
    folder = open_run(config(tmp_path))
    write(folder, config(tmp_path))
    stored = yaml.safe_load(folder.config_file.read_text())
    del stored["trainer"]["streaming"], stored["trainer"]["num_iterations"]
    del stored["trainer"]["objective"]["kl_to"]
    folder.config_file.write_text(yaml.safe_dump(stored))
    assert open_run(config(tmp_path)).path == folder.path
    with pytest.raises(ConfigError, match=r"other values of trainer\.objective\.advantage_norm, trainer\.streaming\. "):
        open_run(config(tmp_path, trainer={"streaming": True}))


def test_another_experiment_under_the_same_name_is_refused_by_the_key_that_differs(tmp_path: Path) -> None:
    write(open_run(config(tmp_path)), config(tmp_path))
    with pytest.raises(ConfigError, match="max_staleness"):
        open_run(config(tmp_path, max_staleness=4))


def test_fresh_starts_over_even_where_a_run_was_stopped_before_it_had_a_configuration(tmp_path: Path) -> None:
    folder = open_run(config(tmp_path))
    with folder.locked():
        pass
    assert open_run(config(tmp_path), fresh=True) == folder
    write(folder, config(tmp_path))
    folder.write_state(RunState(wall_s=3.0))
    assert open_run(config(tmp_path, max_staleness=4), fresh=True).read_state() == RunState()


def test_two_processes_never_work_in_one_run(tmp_path: Path) -> None:
    folder = open_run(config(tmp_path))
    write(folder, config(tmp_path))
    with folder.locked():
        with pytest.raises(ConfigError, match="another `async-grpo run`"), folder.locked():
            pass
        with pytest.raises(ConfigError, match="another `async-grpo run`"):
            open_run(config(tmp_path), fresh=True)
    with folder.locked():
        pass


def test_the_copy_beside_the_run_does_not_name_its_embedded_server(tmp_path: Path) -> None:
    folder = open_run(config(tmp_path))
    with_server = config(tmp_path, redis={"url": "unix:///tmp/s.sock"})
    write_config(folder, config(tmp_path), for_roles=with_server)
    assert load(folder.config_file).redis.url is None
    assert load(folder.roles_file) == with_server


def test_fresh_never_removes_a_folder_that_is_not_a_run(tmp_path: Path) -> None:
    precious = tmp_path / "a" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    with pytest.raises(ConfigError, match="not a run"):
        open_run(config(tmp_path), fresh=True)
    assert precious.exists()


def test_a_run_of_an_earlier_release_is_resumed_although_keys_and_defaults_have_changed_since(tmp_path: Path) -> None:
    made = config(tmp_path)
    write(open_run(made), made)
    folder = RunFolder(made.run_dir)
    values = yaml.safe_load(folder.config_file.read_text())
    del values["rollout"]["engine"], values["weights"]["transport"], values["redis"]["durable"]
    values["rollout"]["lease_s"] = 15.0
    folder.config_file.write_text(yaml.safe_dump(values))
    assert open_run(made).read_config() == made


def test_a_cached_policy_took_what_its_warm_up_says(tmp_path: Path) -> None:
    assert read_warmup_s(tmp_path) == 0.0
    (tmp_path / "warmup.json").write_text('{"seed": 1, "elapsed_s": 76.5}')
    assert read_warmup_s(tmp_path) == 76.5


def test_a_whole_checkpoint_can_be_chosen_to_resume_from(tmp_path: Path) -> None:
    folder = open_run(config(tmp_path))
    write(folder, config(tmp_path))
    for version in (2, 4):
        checkpoint = folder.path / "checkpoints" / f"{version:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "__0_0.distcp").write_bytes(b"weights")
        layout = RankLayout(tensor=1, pipeline=1, context=1, expert=1, data=1)
        complete_folder(checkpoint, CheckpointManifest(version=version, epoch=1, model={}, layout=layout), {})
    latest = folder.path / "checkpoints" / "latest"
    latest.write_text("4\n")
    with pytest.raises(ConfigError, match=r"version 3\b.*2, 4"):
        choose_checkpoint(folder.path, "3")
    assert choose_checkpoint(folder.path, str(folder.path / "checkpoints/00000002")) == 2
    assert latest.read_text() == (folder.path / "checkpoints/resume-from").read_text() == "2\n"
    (folder.path / "checkpoints/00000004/__0_0.distcp").write_bytes(b"Weights")
    with pytest.raises(CheckpointDamaged, match="00000004"):
        choose_checkpoint(folder.path, "4")
    assert latest.read_text() == "2\n"
