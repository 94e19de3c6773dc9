"""A trainer of several machines, as far as one process can tell: layout, environment, agreement, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner, Result

from async_grpo.app.cli.main import app
from async_grpo.config.trainer import TrainerConfig
from trainer.ranks.agreement import Claim, find_difference, fingerprint
from trainer.ranks.local_ranks import network_environment, rank_environments

CONFIGS = Path(__file__).parents[3] / "configs"
MEETING = {"address": "10.0.0.5"}
TWO_NODES = ("trainer.nodes=2", "trainer.processes=4", "trainer.rendezvous.address=10.0.0.5")


def type_in(*words: str, **environment: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "400", **environment})


def with_overrides(*overrides: str) -> list[str]:
    return [str(CONFIGS / "quickstart.yaml"), *(part for override in overrides for part in ("-o", override))]


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        ({"nodes": 3, "processes": 4, "rendezvous": MEETING}, "processes (4) is not a multiple of nodes (3)"),
        ({"rendezvous": {"address": "10.0.0.5:29500"}}, "rendezvous.address"),
        ({"rendezvous": {"port": 65535}}, "rendezvous.port"),
    ],
)
def test_nodes_that_could_not_meet_are_refused(keys: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainerConfig(**keys)
    assert fix in str(caught.value)


def test_every_rank_is_told_its_number_among_all_and_on_its_machine() -> None:
    config = TrainerConfig(nodes=2, processes=4, rendezvous={**MEETING, "port": 29500})
    environments = [
        environment for node in (0, 1) for environment in rank_environments(config, node, ("10.0.0.5", 29501))
    ]
    found = [(told["RANK"], told["LOCAL_RANK"], told["GROUP_RANK"]) for told in environments]
    assert found == [("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1")]
    assert {told["MASTER_ADDR"] + ":" + told["MASTER_PORT"] for told in environments} == {"10.0.0.5:29501"}


def test_collectives_are_sent_over_the_card_that_reaches_the_others() -> None:
    assert network_environment("cpu", "127.0.0.2", {}) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert network_environment("cuda", "127.0.0.1", {}) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert network_environment("npu", "127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth1"}) == {"HCCL_SOCKET_IFNAME": "=lo"}
    assert network_environment("cpu", "203.0.113.9", {}) == {}, "no card has this address"


def test_where_a_machine_finds_the_others_is_its_own_affair() -> None:
    one = said("{seed: 1, redis: {url: a}, runs_dir: /mnt/runs, trainer: {nodes: 2}}")
    same = said("{seed: 1, redis: {url: b}, runs_dir: /runs, trainer: {nodes: 2}}")
    other = said("{seed: 2, trainer: {nodes: 3}, steps: 4}")
    assert find_difference(one, same, rank=1) is None
    assert "seed, steps, trainer.nodes, " in str(find_difference(one, other, rank=1))


def said(config: str) -> Claim:
    return Claim(config=config, model="the same", folder="", nonce="")


@pytest.mark.parametrize("place", [0, -1])
def test_models_of_equal_sizes_and_other_values_are_told_apart(tmp_path: Path, place: int) -> None:
    weights = bytearray(3 << 20)
    fingerprints = set()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        (tmp_path / name / "config.json").write_text("{}")
        fingerprints.add(fingerprint(tmp_path / name))
        weights[place] ^= 1
    assert len(fingerprints) == 2


def test_run_explains_how_several_machines_are_started() -> None:
    result = type_in("run", *with_overrides(*TWO_NODES))
    assert result.exit_code == 1
    assert "async-grpo trainer CONFIG --node-rank R" in result.output


def test_a_dry_run_of_several_machines_shows_the_plan() -> None:
    result = type_in("run", *with_overrides(*TWO_NODES), "--dry-run")
    assert result.exit_code == 0, result.output
    assert "2 nodes" in result.output
    assert "x 2 rank(s)" in result.output


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        ((), {}, "Pass --node-rank 0"),
        (("--node-rank", "2"), {}, "--node-rank is 2, but trainer.nodes is 2"),
        ((), {"ASYNC_GRPO_NODE_RANK": "7"}, "--node-rank is 7"),
    ],
)
def test_a_node_must_be_one_of_the_nodes(options: tuple[str, ...], environment: dict[str, str], words: str) -> None:
    words_typed = ["trainer", *with_overrides(*TWO_NODES, "redis.url=redis://127.0.0.1:1"), *options]
    result = type_in(*words_typed, **environment)
    assert result.exit_code == 1
    assert words in result.output
