"""docs/reference.md is what the code says."""

from __future__ import annotations

from pathlib import Path

from async_grpo.app.cli.reference import configuration, reference
from async_grpo.telemetry.metrics import METRICS

PAGE = Path(__file__).parents[5] / "docs/reference.md"


def test_the_page_is_what_the_code_would_write() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run `make reference` and commit docs/reference.md"


def test_every_kind_of_entry_is_on_the_page() -> None:
    page = reference()
    assert "| `max_staleness` | int | `2` |" in page
    assert "| `rewards.functions[].name` | str | required |" in page
    assert all(f"| `{metric.key}` |" in page for metric in METRICS)
    assert "### `async-grpo buffer drain`" in page


def test_every_configuration_key_has_a_meaning() -> None:
    assert [line for line in configuration() if line.startswith("| `") and line.endswith("|  |")] == []
