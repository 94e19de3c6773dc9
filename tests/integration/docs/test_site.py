"""The documentation as a site, built strictly; `make docs` has what it needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MKDOCS = shutil.which("mkdocs", path=os.pathsep.join([str(ROOT / ".venv-docs/bin"), os.environ.get("PATH", "")]))


@pytest.mark.slow
@pytest.mark.skipif(MKDOCS is None, reason="needs mkdocs and mkdocs-material: make docs installs them")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    words = [str(MKDOCS), "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    page = (tmp_path / "site/index.html").read_text(encoding="utf-8")
    assert 'href="staleness.html"' in page and 'src="images/bench-pipeline.png"' in page
    for name in ("index.html", "deploy/index.html", "coming-from.html"):
        text = (tmp_path / "site" / name).read_text(encoding="utf-8")
        assert not re.findall(r'(?:src|stylesheet" href)="(?:https?:)?//[^"]*', text), "the site works offline"
