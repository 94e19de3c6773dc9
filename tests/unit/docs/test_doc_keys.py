"""Configuration keys in the pages: they exist, and tables have the defaults of reference.md, which the code writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from async_grpo.config import RunConfig
from async_grpo.config.basics import FIRST_RUN_KEYS
from async_grpo.config.load import dotted_keys
from tests.support.doc_commands import DOCS, ROOT

KEYS = set(dotted_keys(RunConfig))
PAGES = [page for page in DOCS if page.name != "reference.md" and not page.name.startswith("coming-from-")]
DEFAULTS = {
    key: default.strip('"')
    for key, default in re.findall(
        r"^\| `([\w.]+)` \| .*? \| `([^`]*)` \| ", (ROOT / "docs/reference.md").read_text(), re.MULTILINE
    )
}
SECTIONS = {key.split(".")[0] for key in KEYS if "." in key}
FILES = re.compile(r".*\.(py|md|yaml|jsonl?|log)")
NOT_KEYS = ("model.norm.weight", "model.embed_tokens.weight")
"""Tensors of a checkpoint."""


def simple_rows(page: Path) -> Iterator[tuple[str, str]]:
    """Key and default of each row of a table of keys that has one key and a number or a word."""
    for table in re.findall(r"^\| key[^|\n]*\| default[^\n]*\n\|.*\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE):
        yield from re.findall(r"^\| `([\w.]+)` \| `?([\w.-]+)`? \|", table, re.MULTILINE)


def plain(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_keys_in_the_text_exist(page: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_.]+[a-z])(?:: [^`]*)?`", page.read_text())
    known = [name for name in named if not FILES.fullmatch(name) and name not in NOT_KEYS]
    assert [name for name in known if not any(f"{key}.".startswith(f"{name}.") for key in KEYS)] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "deploy/prometheus/alerts.yml"], ids=lambda page: page.name)
def test_keys_outside_backticks_exist(page: Path) -> None:
    text = re.sub(
        r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)|https?://\S+", "", page.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    named = re.findall(rf"(?<![\w./$-])(?:{'|'.join(SECTIONS)})\.[a-z_.]+[a-z](?![\w/-])", text)
    known = [name for name in named if not FILES.fullmatch(name)]
    assert [name for name in known if not any(f"{key}.".startswith(f"{name}.") for key in KEYS)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if list(simple_rows(page))], ids=lambda page: page.name)
def test_tables_have_the_defaults_of_the_code(page: Path) -> None:
    wrong = [
        f"{key}: {shown}"
        for key, shown in simple_rows(page)
        if (known := [plain(value) for name, value in DEFAULTS.items() if f".{name}".endswith(f".{key}")])
        and not any(isinstance(value, str) and value[:1] in "[{" for value in known)
        and plain(shown) not in known
    ]
    assert wrong == []


@pytest.mark.parametrize("page", ["docs/configuration.md", "docs/zh/configuration.md"])
def test_the_configuration_page_names_keys_that_exist_and_a_valid_example(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    (example,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert RunConfig.model_validate(yaml.safe_load(example)).name == "my-run"
    keys = [key for cell in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for key in re.findall(r"`([^`]*)`", cell)]
    assert len(keys) > 30
    for key in keys:
        assert key in KEYS or (key[0] == "." and any(name.endswith(key) for name in KEYS)), f"there is no {key}"


@pytest.mark.parametrize("page", ["docs/configuration.md", "docs/zh/configuration.md"])
def test_the_configuration_page_opens_with_the_keys_of_a_first_run(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    keys = re.findall(r"^\| `([^`]*)` \|", text, re.MULTILINE)
    assert tuple(keys[: len(FIRST_RUN_KEYS)]) == FIRST_RUN_KEYS


@pytest.mark.parametrize("page", ["README.md", "docs/zh/README.md"])
def test_the_first_configuration_of_the_readme_is_valid(page: str) -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    config = RunConfig.model_validate(yaml.safe_load(example))
    assert (config.max_staleness, config.rewards.functions[0].name) == (2, "mine:score")
