"""The objects of `async-grpo launch kubernetes`, held against the published schemas of the API and of its operators."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from async_grpo.app.launch.clusters.kubernetes import apply_objects, dump_objects, make_objects, resolve_for_cluster
from async_grpo.app.launch.role_specs import make_stoppable
from async_grpo.config import RunConfig, load
from async_grpo.errors import ConfigError, DependencyError
from trainer.metrics_server import TrainerCollector

ROOT = Path(__file__).parents[5]
API_VERSION = "1.33"
API_KINDS = {
    "ConfigMap",
    "PersistentVolumeClaim",
    "Service",
    "StatefulSet",
    "Deployment",
    "Job",
    "PodDisruptionBudget",
    "NetworkPolicy",
}
OPERATORS = {"JobSet": "jobset.x-k8s.io_jobsets.yaml", "ScaledObject": "keda.sh_scaledobjects.yaml"}
"""Custom resources, and the files in which kubernetes-sigs/jobset and kedacore/keda publish them (config/**/crd/bases).
"""
CRDS_VARIABLE = "ASYNC_GRPO_TEST_CRDS"
TWO_NODES = [
    "trainer.nodes=2",
    "trainer.processes=8",
    "launch.kubernetes.max_servers=8",
    "launch.kubernetes.claims.models=/models",
]


def config(name: str = "qwen2.5_7b_gsm8k_cuda", *overrides: str) -> RunConfig:
    return resolve_for_cluster(ROOT / "configs" / f"{name}.yaml", [*TWO_NODES, *overrides], None)


def strict(schema: Any) -> Any:
    """The schema of a custom resource, refusing unknown fields as `kubectl apply` does."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return {**closed, **{key: strict(value) for key, value in schema.items()}}


@cache
def schema_of_operator(kind: str) -> dict[str, Any]:
    """The schema that the operator publishes for its newest version of this kind."""
    folder = os.environ.get(CRDS_VARIABLE)
    if folder is None:
        pytest.skip(f"{CRDS_VARIABLE} names no folder with {OPERATORS[kind]}")
    versions = yaml.safe_load((Path(folder) / OPERATORS[kind]).read_text())["spec"]["versions"]
    schema: dict[str, Any] = versions[-1]["schema"]["openAPIV3Schema"]
    schema = {**schema, "properties": {key: strict(value) for key, value in schema["properties"].items()}}
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def faults(found: dict[str, Any]) -> list[str]:
    kind = found["kind"]
    if kind in OPERATORS:
        validator = jsonschema.Draft7Validator(schema_of_operator(kind))
        return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(found)]
    try:
        kubernetes_validate.validate(found, API_VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{list(error.path)}: {error.message[:200]}"]
    return []


def faulty(name: str, *, of_operators: bool) -> dict[str, list[str]]:
    rendered = list(yaml.safe_load_all(dump_objects(config(name))))
    assert {each["kind"] for each in rendered} == {*API_KINDS, *OPERATORS}
    checked = [each for each in rendered if (each["kind"] in OPERATORS) == of_operators]
    return {each["metadata"]["name"]: faults(each) for each in checked if faults(each)}


CONFIGS = ["quickstart", "qwen2.5_7b_gsm8k_cuda", "qwen2.5_7b_gsm8k_ascend"]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_object_is_what_the_api_publishes(name: str) -> None:
    assert faulty(name, of_operators=False) == {}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_custom_resource_is_what_its_operator_publishes(name: str) -> None:
    assert faulty(name, of_operators=True) == {}


@pytest.mark.parametrize("kind", ["Deployment", "NetworkPolicy", "JobSet", "ScaledObject"])
def test_the_schemas_notice_a_misspelt_field(kind: str) -> None:
    found = kinds(config())[kind]
    assert not faults(found)
    found["spec"]["replicsa"] = 1
    assert faults(found)


def kinds(config: RunConfig) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in make_objects(config)}


def test_pods_read_the_run_with_the_addresses_of_the_cluster(tmp_path: Path) -> None:
    written = kinds(config())["ConfigMap"]["data"]["config.yaml"]
    (tmp_path / "config.yaml").write_text(written)
    read = load(tmp_path / "config.yaml")
    assert read == config()
    assert read.redis.url == f"redis://{instance(read)}-redis:6379"
    assert read.trainer.rendezvous.address == read.weights.advertise == f"{instance(read)}-trainer-0-0.{instance(read)}"


def instance(config: RunConfig) -> str:
    name: str = kinds(config)["JobSet"]["metadata"]["name"]
    return name


@pytest.mark.parametrize(
    "runs",
    [
        [("qwen2.5_7b_deepscaler_cuda", ["max_staleness=0"]), ("qwen2.5_7b_deepscaler_cuda", ["max_staleness=4"])],
        [("quickstart", ["name=a_b"]), ("quickstart", ["name=a-b"]), ("quickstart", ["name=A-b"])],
        [("quickstart", ["name=7b"]), ("quickstart", ["name=run-7b"])],
        [("quickstart", [f"name={'x' * 39}-{tail}"]) for tail in ("0", "4", "4-seed.2")],
        [("quickstart", [f"max_staleness={s}", "trainer.optimizer.lr=0.00012345", "trainer.micro_batch_tokens=4096",
            "sampling.temperature=0.75", "eval.every_steps=12"]) for s in (0, 4)],
    ],
)  # fmt: skip
def test_two_runs_never_share_objects(runs: list[tuple[str, list[str]]]) -> None:
    names = [instance(config(name, *overrides)) for name, overrides in runs]
    assert len(set(names)) == len(runs), names
    for name in names:
        assert re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name), "no Service may have this name"


def test_a_name_that_fits_is_left_as_it_is() -> None:
    assert instance(config("quickstart")) == "quickstart"


def containers(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Role -> its container."""
    found = kinds(config)
    pods = {
        "trainer": found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"],
        "rollout": found["Deployment"]["spec"]["template"],
        "report": found["Job"]["spec"]["template"],
    }
    return {role: pod["spec"]["containers"][0] for role, pod in pods.items()}


@pytest.mark.parametrize(
    ("name", "resource", "engine"),
    [("qwen2.5_7b_gsm8k_cuda", "nvidia.com/gpu", "1"), ("qwen2.5_7b_gsm8k_ascend", "huawei.com/Ascend910", "4")],
)
def test_devices_are_those_of_the_plug_ins(name: str, resource: str, engine: str) -> None:
    found = containers(config(name))
    assert kinds(config(name))["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == 2
    assert found["trainer"]["resources"] == {"requests": {resource: "4"}, "limits": {resource: "4"}}
    assert found["rollout"]["resources"] == {"requests": {resource: engine}, "limits": {resource: engine}}
    assert found["report"]["resources"] == {}


def test_npus_go_by_the_name_that_the_site_gives_them() -> None:
    found = containers(config("qwen2.5_7b_gsm8k_ascend", "launch.kubernetes.npu_resource=huawei.com/ascend-1980"))
    assert found["rollout"]["resources"]["limits"] == {"huawei.com/ascend-1980": "4"}


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("quickstart", "async-grpo:cpu"),
        ("qwen2.5_7b_gsm8k_cuda", "async-grpo:cuda"),
        ("qwen2.5_7b_gsm8k_ascend", "async-grpo:ascend"),
    ],
)
def test_the_image_is_that_of_the_platform_unless_one_is_named(name: str, image: str) -> None:
    assert {container["image"] for container in containers(config(name)).values()} == {image}
    named = containers(config(name, "launch.kubernetes.image=registry/own:1")).values()
    assert {container["image"] for container in named} == {"registry/own:1"}


def test_pods_keep_the_entrypoint_of_the_image_which_sets_up_cann() -> None:
    for container in containers(config("qwen2.5_7b_gsm8k_ascend")).values():
        assert "command" not in container
        assert "async-grpo" in " ".join(container["args"])


def test_the_ascend_runtime_shows_no_npu_to_a_pod_that_has_requested_none() -> None:
    environments = {
        role: {entry["name"]: entry.get("value") for entry in container["env"]}
        for role, container in containers(config("qwen2.5_7b_gsm8k_ascend")).items()
    }
    assert environments["report"]["ASCEND_VISIBLE_DEVICES"] == "void"
    assert "ASCEND_VISIBLE_DEVICES" not in {**environments["trainer"], **environments["rollout"]}


def test_a_server_of_the_users_own_is_not_started_again() -> None:
    assert "StatefulSet" not in kinds(config("quickstart", "redis.url=rediss://10.0.0.5:6379"))


def test_no_secret_is_in_the_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_GRPO_REDIS_PASSWORD", "xyzzy-plugh")
    assert "xyzzy-plugh" not in dump_objects(config())


def test_what_the_cluster_refuses_is_passed_on_with_what_it_may_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DependencyError, match="kubectl"):
        apply_objects(config())
    (tmp_path / "kubectl").write_text('#!/bin/bash\nread -r; echo "no matches for kind JobSet" >&2; exit 1\n')
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(ConfigError, match="JobSet operator"):
        apply_objects(config())


@pytest.mark.parametrize(("at_the_end", "code"), [("exit 0", 75), ("exit 1", 75), ("exit 78", 78)])
def test_a_role_that_was_stopped_is_told_from_one_that_is_done(tmp_path: Path, at_the_end: str, code: int) -> None:
    ready = tmp_path / "ready"
    line = make_stoppable(f"bash -c \"trap '{at_the_end}' TERM; touch {ready}; sleep 9 & wait\"")
    stop = f"until [ -e {ready} ]; do sleep 0.02; done; kill -TERM $$"
    line = line.replace("& role=$!", f"& role=$!; {stop}")
    assert subprocess.run(["bash", "-c", line], timeout=30).returncode == code


@pytest.mark.parametrize("code", [0, 1, 78])
def test_a_role_that_was_not_stopped_ends_with_its_own_code(code: int) -> None:
    assert subprocess.run(["bash", "-c", make_stoppable(f"bash -c 'exit {code}'")], timeout=5).returncode == code


def test_the_autoscaler_follows_the_trainers_gauge() -> None:
    scaled = kinds(config())["ScaledObject"]["spec"]
    (trigger,) = scaled["triggers"]
    gauge = TrainerCollector(config())
    gauge.servers_wanted = 1
    assert "async_grpo_trainer_servers_wanted" in {family.name for family in gauge.collect()}
    assert "async_grpo_trainer_servers_wanted{" in trigger["metadata"]["query"]
    assert f"{instance(config())}-trainer-.*" in trigger["metadata"]["query"]


def test_a_rollout_server_is_not_restarted_while_its_engine_may_still_load() -> None:
    found = config("qwen2.5_7b_gsm8k_cuda", "launch.ready_timeout_s=1800")
    (server,) = [each for each in make_objects(found) if each["kind"] == "Deployment"]
    (container,) = server["spec"]["template"]["spec"]["containers"]
    for name in ("startupProbe", "livenessProbe"):
        probe = container[name]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800
