"""Dashboard and alerts of deploy/: every metric that they name is shown by the code, and promtool accepts the rules."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_grpo.config import RunConfig
from async_grpo.telemetry.bottleneck import WAITS
from async_grpo.telemetry.metrics import METRICS, SERVER_METRICS
from buffer import BufferStats
from tests.support.deploy_files import DEPLOY, ROOT, services_of
from trainer.metrics_server import TrainerCollector, TrainerProgress

ALERTS = DEPLOY / "prometheus" / "alerts.yml"
RULES = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "async-grpo.json"
PROMETHEUS_OWN = {"process_resident_memory_bytes"}


def queries() -> Iterator[str]:
    yield from (rule["expr"] for rule in RULES)
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))


def test_the_dashboard_is_what_its_table_makes() -> None:
    module = runpy.run_path(str(DEPLOY / "grafana" / "make_dashboard.py"))
    assert DASHBOARD.read_text() == module["format_dashboard"](), "run python deploy/grafana/make_dashboard.py"


def test_every_metric_of_a_query_is_one_that_the_code_shows(tmp_path: Path) -> None:
    collector = TrainerCollector(
        RunConfig.model_validate({"name": "run", "runs_dir": tmp_path, "model": {"random": {}}})
    )
    counters = ("epoch", "version", "tasks_put", "waiting", "inflight", "ready", "taken", "admitted")
    collector.stats = BufferStats(**dict.fromkeys(counters, 0))
    collector.servers_wanted = 1
    row: dict[str, Any] = {metric.key: 1.0 for metric in METRICS} | {"replayed": False, "reward_by_function": {}}
    collector.progress = TrainerProgress().after_step(row)
    trainer = [family.name for family in collector.collect()]
    shown = {name for family in trainer for name in (family, f"{family}_total")}
    shown |= {f"async_grpo_{metric.key}" for metric in SERVER_METRICS} | PROMETHEUS_OWN
    named = {name for query in queries() for name in re.findall(r"\b(?:async_grpo|process)_\w+", query)}
    assert len(named) > 40
    assert named <= shown, named - shown


def test_every_alert_says_what_to_do_and_is_in_the_table_of_the_documentation() -> None:
    page = (ROOT / "docs" / "watching.md").read_text()
    assert "\n## Alerts\n" in page
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "action", "runbook"}
        assert rule["annotations"]["runbook"] == "docs/watching.md#alerts"
        assert f"| `{rule['alert']}` |" in page


def test_no_alert_takes_an_age_within_the_bound_for_a_fault() -> None:
    """A run whose trainer is the slower side has a mean age close to its bound: 0.95 of 1, 7.87 of 8."""
    assert [rule["alert"] for rule in RULES if "age_bound" in rule["expr"]] == ["AgeAboveBound"]
    assert [rule["alert"] for rule in RULES if "age_mean" in rule["expr"]] == []


def test_servers_are_advised_only_where_the_run_can_use_more() -> None:
    (expr,) = [rule["expr"] for rule in RULES if rule["alert"] == "TrainerIdle"]
    assert "async_grpo_trainer_servers_wanted" in expr and "async_grpo_ready" in expr
    assert f"> {WAITS:g})" in expr, "the alert and the report blame generation for the same runs"


def test_grafana_is_given_the_dashboard_and_its_source() -> None:
    mounted = dict(volume.split(":")[:2] for volume in services_of("monitoring")["grafana"]["volumes"])
    provisioning = DEPLOY / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "async-grpo.yml").read_text())["providers"]
    assert mounted["./grafana/dashboards"] == provider["options"]["path"]
    assert mounted["./grafana/provisioning"] == "/etc/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert {panel["datasource"]["uid"] for panel in panels if "datasource" in panel} == {source["uid"]}


@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", DEPLOY / "prometheus" / "prometheus.yml"),
        ("test", "rules", Path(__file__).parent / "alerts_test.yml"),
    ],
    ids=["the configuration is valid", "all alerts fire in a bad run and none in a good one"],
)
def test_promtool(words: tuple[str | Path, ...]) -> None:
    if not shutil.which("promtool"):
        pytest.skip("there is no promtool (Debian: apt-get install prometheus)")
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
