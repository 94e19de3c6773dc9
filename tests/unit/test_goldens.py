"""What users, other processes and files on disk rely on, frozen in tests/goldens.

A name that changes here breaks a script, a dashboard, a stored run or a rolling upgrade. If a change is meant, run the
tests once with UPDATE_GOLDENS=1, read the difference, and say so in CHANGELOG.md.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import async_grpo
import buffer
import trainer
from async_grpo.config import RunConfig
from async_grpo.telemetry.metrics import METRICS, SERVER_METRICS
from async_grpo.telemetry.rows import TIME_KEYS
from async_grpo.telemetry.trackers import TAGS
from async_grpo.wire.records import Record
from buffer.redis.scripts import RunKeys
from tests.unit.async_grpo.app.report.test_run_report import run_dir, summary  # noqa: F401  (fixtures)
from trainer.metrics_server import TrainerCollector, TrainerProgress

GOLDENS = Path(__file__).parents[1] / "goldens"


def assert_golden(name: str, found: str) -> None:
    """Compare with tests/goldens/NAME, or write it where UPDATE_GOLDENS is set."""
    path = GOLDENS / name
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8"), f"{path} differs; see the docstring of this file"


def lines(value: Any) -> str:
    """JSON with one entry a line, so that a difference is short."""
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {json.dumps(value[key], sort_keys=True, default=str)}" for key in sorted(value)]
        return "{\n" + ",\n".join(rows) + "\n}\n"
    return "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]\n"


def flattened(schema: dict[str, Any], node: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Dotted key -> type, default and bounds; without titles and class names."""
    if "$ref" in node:
        node = {**schema["$defs"][node["$ref"].rsplit("/", 1)[1]], **{k: v for k, v in node.items() if k != "$ref"}}
    for name, child in node.get("properties", {}).items():
        yield from flattened(schema, child, f"{path}.{name}" if path else name)
    for kind in ("anyOf", "oneOf"):
        for number, child in enumerate(node.get(kind, [])):
            yield from flattened(schema, child, f"{path}|{number}")
    if isinstance(node.get("items"), dict):
        yield from flattened(schema, node["items"], f"{path}[]")
    kept = {k: v for k, v in node.items() if k not in ("properties", "title", "description", "anyOf", "oneOf", "items")}
    yield path, {k: v for k, v in kept.items() if k not in ("$defs", "discriminator")}


def test_every_key_of_the_configuration() -> None:
    schema = RunConfig.model_json_schema()
    assert_golden("config.json", lines(dict(flattened(schema, schema, ""))))


def subclasses(kind: type) -> Iterator[type]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def test_tags_and_fields_of_every_record() -> None:
    for package in (async_grpo, buffer, trainer):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if any(part in found.name for part in (".bench", ".platform", ".model", "vllm")):
                continue
            importlib.import_module(found.name)
    records = [
        (msgspec.inspect.type_info(kind).tag, [field.encode_name for field in msgspec.structs.fields(kind)])
        for kind in subclasses(Record)
        if kind.__module__.split(".")[0] in ("async_grpo", "buffer", "trainer") and not kind.__subclasses__()
    ]
    assert_golden("records.json", lines(sorted(records)))


def test_names_of_redis_keys() -> None:
    keys = RunKeys("RUN")
    named = [*keys.state_keys, keys.key("task:1"), keys.key("partial:2"), keys.group(3, 4), keys.pattern]
    assert_golden("redis_keys.json", lines(named))


def test_keys_of_the_files_of_a_run(run_dir: Path, summary: dict[str, Any]) -> None:  # noqa: F811
    files = {
        str(path.relative_to(run_dir)): sorted(
            {key for line in path.read_text().splitlines() for key in json.loads(line)}
        )
        for path in sorted(run_dir.rglob("*.jsonl"))
    }
    nested = {f"summary.json: {key}": sorted(value) for key, value in summary.items() if isinstance(value, dict)}
    files |= {
        "summary.json": sorted(summary),
        "step row": sorted(metric.key for metric in METRICS),
        "times": list(TIME_KEYS),
    }
    assert_golden("run_files.json", lines(files | nested | {"tensorboard": dict(TAGS)}))


def test_names_of_the_servers_metrics() -> None:
    assert_golden("server_metrics.json", lines(sorted(f"async_grpo_{metric.key}" for metric in SERVER_METRICS)))


def test_names_of_the_trainers_metrics() -> None:
    collector = TrainerCollector(RunConfig.model_validate({"name": "golden", "model": {"random": {}}}))
    row = {metric.key: 1.0 for metric in METRICS} | {"groups": 1, "skipped_steps": 0, "replayed": False}
    collector.servers_wanted = 1
    collector.progress = TrainerProgress().after_step(row | {"reward_by_function": {"right": 1.0}})
    assert_golden("trainer_metrics.json", lines(sorted(family.name for family in collector.collect())))
