"""What MkDocs needs to build the site from pages that also read well on a forge.

README.md is the first page, and pages outside of docs/ join under their own paths; links between them are rewritten.
Headings get the anchors that forges give them.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

import jieba
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "deploy/README.md": "deploy/README.md",
    "benchmarks/trl/README.md": "benchmarks/trl/README.md",
}
"""Pages outside of docs/, by their path in the repository, and their place in the site."""

jieba.setLogLevel(logging.WARNING)  # it cuts Chinese text into words for the search, and says so at every start
for word in ("陈旧度", "推理服务", "训练端", "对数概率", "检查点", "留出集", "优化步", "缓冲区"):
    jieba.add_word(word)

_LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_config(config: Any) -> Any:
    """Anchors as forges make them: `## What holds` is #what-holds."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside of docs/, and the files of examples/ that pages link to."""
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    for example in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{example.name}", content=example.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links that leave docs/, or come into it, to places of the site."""
    place = page.file.src_uri
    source = next((path for path, where in OUTSIDE.items() if where == place), f"docs/{place}")

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match.group(2)))
        there = OUTSIDE.get(target, target.removeprefix("docs/"))
        return f"{match.group(1)}{posixpath.relpath(there, posixpath.dirname(place) or '.')}"

    return _LINK.sub(moved, markdown)
