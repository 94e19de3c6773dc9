"""Links between pages, also to their headings, and the navigation of the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DOCS = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/zh").glob("*.md"))]
OUTSIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "deploy/README.md", ROOT / "benchmarks/trl/README.md"]


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(page: Path) -> set[str]:
    """The anchors that forges give to headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", [*OUTSIDE, *DOCS], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target}: there is no such file"
        assert not anchor or anchor in anchors(file), f"{target}: there is no such heading"


def test_the_readme_leads_into_every_section_of_the_navigation() -> None:
    """One link per section at least: a reader must find each part of the site from the README."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = {target.partition("#")[0].removeprefix("docs/") for target in re.findall(r"\]\(([^)]*)\)", text)}
    linked |= {"index.md"} | ({"contributing.md"} if "CONTRIBUTING.md" in linked else set())
    assert [name for section in nav for name, pages in section.items() if not linked & set(leaves(pages))] == []


def test_the_readme_is_at_most_80_lines() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 80


def leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(part)


def test_every_page_stands_once_in_the_navigation() -> None:
    found = sorted(leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    outside = ["index.md", "contributing.md", "deploy/README.md", "benchmarks/trl/README.md"]
    assert found == sorted([*outside, *(str(page.relative_to(ROOT / "docs")) for page in DOCS)]), (
        "name new pages in mkdocs.yml"
    )


@pytest.mark.parametrize("page", [*OUTSIDE, *DOCS], ids=lambda page: str(page.relative_to(ROOT)))
def test_lists_and_tables_follow_a_blank_line_as_the_site_needs(page: Path) -> None:
    before = ""
    for number, line in enumerate(without_code(page.read_text(encoding="utf-8")).split("\n"), 1):
        if before.strip() and re.match(r"([-*]|1\.) ", line):
            assert re.match(r"\s*([-*]|\d+\.) |  ", before), f"line {number}: a list needs a blank line before it"
        if before.strip() and line.startswith("|"):
            assert before.startswith("|"), f"line {number}: a table needs a blank line before it"
        before = line
