"""Chinese pages beside the English ones: the same sections, commands, pictures and figures.

A section of a Chinese page names its English heading in a comment above its own: `<!-- en: Versions -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.doc_commands import ROOT, commands

SUMMARY = ROOT / "docs/zh/several-machines.md"
"""A short page about several English ones, so it has sections of its own."""
CHINESE = sorted({*(ROOT / "docs/zh").glob("*.md")} - {SUMMARY})


def english(page: Path) -> Path:
    return ROOT / "README.md" if page.name == "README.md" else ROOT / "docs" / page.name


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_there_are_chinese_pages() -> None:
    assert SUMMARY.exists()
    assert {page.name for page in CHINESE} == {
        "README.md",
        "quickstart.md",
        "configuration.md",
        "platforms.md",
        "accept.md",
    }


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
