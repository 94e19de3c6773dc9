"""Checkpoints written beside the training: whole or not there, the same bytes, the best kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import dump, validate
from tests.support.trainer_programs.models import make_model

ROOT = Path(__file__).parents[3]

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    folder = tmp_path_factory.mktemp("checkpoints")
    raw: dict[str, Any] = {
        "name": "facts",
        "runs_dir": str(folder),
        "model": {"random": {}},
        "rollout": {"vllm": {"max_model_len": 110}},
        "trainer": {"micro_batch_tokens": 110, "optimizer": {"lr": 1e-3, "weight_decay": 0.1}},
    }
    files = [folder / "config.yaml", make_model(folder, "qwen2-untied"), folder / "facts.json"]
    files[0].write_text(dump(validate(raw, "test")))
    command = [sys.executable, "-m", "tests.support.trainer_programs.checkpoint_facts", *map(str, files)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: Facts = json.loads(files[2].read_text())
    return found


def test_a_kill_at_any_moment_costs_no_checkpoint_that_was_safe(facts: Facts) -> None:
    safe = -1
    for life in facts["lives"]:
        assert int(life["resumed"]) >= safe
        safe = max(int(life["resumed"]), life["safe"] or -1)
    assert safe > 0
    assert any(life["draft"] for life in facts["lives"]), "no kill came while a checkpoint was being written"
    assert max(int(life["resumed"]) for life in facts["lives"]) > 0


def test_a_trainer_that_replays_reports_it_and_is_ready_only_when_it_has_published(facts: Facts) -> None:
    report = "coordinator.report_replay"
    replayed = ["logger.log_takeover", report, report, "logger.log_step"]
    assert facts["replay"] == [*replayed, report, "exporter.publish_weights", "logger.mark_serving", "logger.log_step"]


def test_one_written_during_steps_has_the_bytes_of_one_written_in_peace(facts: Facts) -> None:
    found = facts["background"]
    assert found["still"] == found["busy"] != {}
    assert (found["unsettled"], found["settled"]) == (None, 1)


def test_the_buffer_is_told_to_forget_only_what_two_checkpoints_on_disk_contain(facts: Facts) -> None:
    assert facts["order"] == [[[], None], [[0], 4]]


def test_a_full_disk_is_named_and_costs_nothing_that_was_there(facts: Facts) -> None:
    found = facts["full_disk"]
    assert "the checkpoint of version 2 could not be written" in found["refused"]
    assert "Earlier checkpoints are intact" in found["refused"]
    assert found["newest"] == 1
    assert "00000001" in found["names"]
    assert found["afterwards"] == ["00000001", "00000003"]


def test_rank_0_hears_of_a_rank_that_cannot_write_and_does_not_wait_for_ever_for_a_silent_one(facts: Facts) -> None:
    found = facts["other_rank"]
    assert found["broken"] == "no space left on device"
    assert found["heard"] == "rank 3: no space left on device"
    assert "waited 0.1 s for rank 2's part of" in found["silent"]


def test_a_trainer_that_was_thought_dead_does_not_replace_the_newer_ones_checkpoint(facts: Facts) -> None:
    assert "a newer trainer (epoch 2) has taken over from this one (1)" in facts["overtaken"]["refused"]
    assert facts["overtaken"]["newest"] == 8


def test_of_two_trainers_that_write_the_same_version_at_once_the_newer_one_is_believed(facts: Facts) -> None:
    found = facts["rivals"]
    assert "a newer trainer (epoch 2) has taken over from this one (1)" in found["old"]["refused"]
    assert found["new"]["refused"] == ""
    assert found["files"] == found["new"]["files"] != found["old"]["files"]
    assert (found["names"], found["latest"], found["epoch"]) == (["00000001"], "1", 2)


def test_a_changed_byte_is_found_and_a_renamed_folder_refused(facts: Facts) -> None:
    assert "is damaged: __0_0.distcp does not hold what was written" in facts["damaged"]["changed"]
    assert "holds version 1, not 2. It was renamed" in facts["damaged"]["renamed"]


def test_a_damaged_checkpoint_gives_way_to_the_one_before_it_and_at_last_to_the_first_policy(facts: Facts) -> None:
    version, same, damage = facts["fallback"]["without 2"]
    assert (version, same) == (1, True) and "00000002 is damaged: __0_0.distcp" in damage
    version, same, damage = facts["fallback"]["without 1"]
    assert (version, same) == (0, True) and "00000002 is damaged" in damage


def test_a_copy_that_fails_is_a_warning_and_the_next_one_makes_up_for_it(facts: Facts) -> None:
    found = facts["copies"]
    assert found["safe"] == [[1, None], [None, 2], [None, 3], [4, None], [None, 4]]
    assert [("the bucket is unreachable" in warning) for warning in found["warnings"]] == [True] * 3
    assert found["stored"][-1] == 4


def test_an_old_folder_that_cannot_be_deleted_is_a_warning(facts: Facts) -> None:
    found = facts["stuck"]
    assert found["safe"] == [1, 2, 3]
    assert ["00000001 could not be deleted" in warning for warning in found["warnings"]] == [True]
    assert (found["left"], found["afterwards"]) == (["00000001", "00000002", "00000003"], ["00000003", "00000004"])


def test_the_newest_two_and_the_best_stay_as_checkpoints_and_as_exports(facts: Facts) -> None:
    found = facts["kept"]
    for version, names in enumerate(found["after"], start=1):
        stay = {version, version - 1, 2 if version > 2 else version} - {0}
        folders = [f"{v:08d}" for v in sorted(stay)]
        assert names == [*folders, *(f"hf-{name}" for name in folders)]
    assert found["best"] == "2"


def test_the_final_evaluation_can_still_change_which_one_is_the_best(facts: Facts) -> None:
    found = facts["kept"]
    assert found["new_best"] == "6"
    assert [name for name in found["judged"] if name.isdigit()] == ["00000005", "00000006"]


def test_matrices_decay_and_norms_and_biases_do_not(facts: Facts) -> None:
    decayed, spared = facts["decay"]["decayed"], facts["decay"]["spared"]
    assert all(name.endswith(".weight") and "norm" not in name for name in decayed)
    assert all(name.endswith(".bias") or "norm" in name for name in spared)
    assert any("embedding" in name for name in decayed)
    assert any("output_layer" in name for name in decayed)
    assert {name.rsplit(".", 2)[-2] for name in spared} == {
        "linear_qkv",
        "input_layernorm",
        "pre_mlp_layernorm",
        "final_layernorm",
    }


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_steps_with_offload_are_the_same_to_the_last_bit_also_after_a_resumption(facts: Facts, precision: str) -> None:
    found = facts["offload"]
    assert found[f"{precision}-True"] == found[f"{precision}-False"]
    assert found[f"{precision}-True-state"] == found[f"{precision}-False-state"]


def test_an_update_brings_each_offloaded_master_to_the_device_once(facts: Facts) -> None:
    assert facts["brought"] == [1]


def test_the_optimizer_is_saved_and_loaded_in_its_own_memory(facts: Facts) -> None:
    assert facts["in_place"] == {"save": [], "load": []}


def test_an_offloaded_optimizer_is_not_copied_and_stays_as_it_is_until_it_is_written(facts: Facts) -> None:
    found = facts["lent"]
    assert found["copied"] == 0
    assert found["still"] == found["busy"] != {}
