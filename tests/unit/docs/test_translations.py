"""Chinese pages beside the English ones: the same sections, commands, pictures and keys.

A section of a Chinese page names its English heading in a comment above its own: `<!-- en: Versions -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from async_grpo.app.importers.translation import all_keys
from async_grpo.config import RunConfig
from tests.support.doc_commands import ROOT, commands

CHINESE = sorted((ROOT / "docs/zh").glob("*.md"))


def english(page: Path) -> Path:
    return ROOT / "README.md" if page.name == "README.md" else ROOT / "docs" / page.name


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_there_are_chinese_pages() -> None:
    assert {page.name for page in CHINESE} == {"README.md", "quickstart.md", "configuration.md", "platforms.md"}


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_a_chinese_page_has_every_section_of_the_english_one(page: Path) -> None:
    sections = re.findall(r"^##+ (.*)$", without_code(english(page)), re.MULTILINE)
    named = re.findall(r"^<!-- en: (.*) -->\n##+ ", without_code(page), re.MULTILINE)
    assert [heading for heading in sections if heading not in named] == [], f"sections that {page} lacks"
    assert named == sections, "other sections, or in another order"


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_a_chinese_page_has_the_same_commands(page: Path) -> None:
    shown = {
        file: [command.text for command in commands() if command.page == str(file.relative_to(ROOT))]
        for file in (page, english(page))
    }
    assert sorted(set(shown[page])) == sorted(set(shown[english(page)]))


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_a_chinese_page_has_the_same_pictures_and_figures(page: Path) -> None:
    def figures(file: Path) -> tuple[list[str], list[str]]:
        text = without_code(file).split("<!-- only here -->")[0].replace("、", ", ")
        pictures = [Path(target).name for target in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text)]
        cells = [cell for line in re.findall(r"^\|.*", text, re.MULTILINE) for cell in line.split("|")]
        return pictures, [cell.strip() for cell in cells if re.fullmatch(r"\W*\d[\d.,e>* \-]*", cell)]

    assert figures(page) == figures(english(page))


@pytest.mark.parametrize("page", ["docs/configuration.md", "docs/zh/configuration.md"])
def test_the_keys_of_the_configuration_page_exist_and_its_example_is_valid(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    (example,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert RunConfig.model_validate(yaml.safe_load(example)).name == "my-run"
    keys = [key for cell in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for key in re.findall(r"`([^`]*)`", cell)]
    known = set(all_keys())
    assert len(keys) > 30
    for key in keys:
        assert key in known or (key[0] == "." and any(name.endswith(key) for name in known)), f"there is no {key}"
