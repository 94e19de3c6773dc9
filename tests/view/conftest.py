"""Chromium on the page that the real command serves. Skipped without Playwright or Chromium: `make test-view`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from tests.support.view_runs import write_run

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or ""
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
)
COMMAND = "from async_grpo.app.cli.main import app; app()"
WIDE = {"width": 1280, "height": 900}
NARROW = {"width": 390, "height": 844}
HOSTILE_RUN = "run <b>bold<∕b>"


@contextlib.contextmanager
def serving(runs: Path) -> Iterator[str]:
    """`async-grpo view RUNS`; gives its address."""
    command = [sys.executable, "-c", COMMAND, "view", str(runs), "--port", "0", "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, "the command said no address"
        yield found[0]
    finally:
        process.terminate()
        process.wait(timeout=20)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs, one of them with a name that would be markup."""
    root = tmp_path_factory.mktemp("view") / "runs"
    write_run(root / "plain")
    write_run(root / HOSTILE_RUN)
    return root


@pytest.fixture(scope="session")
def address(runs: Path) -> Iterator[str]:
    with serving(runs) as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make test-view")
    if not CHROMIUM:
        pytest.skip("needs Chromium (apt-get install chromium), or its path in CHROMIUM")
    with playwright.sync_playwright() as library:
        browser = library.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages. Afterwards: none of them complained, showed a dialog, or asked anything but the loopback."""
    complaints: list[str] = []
    contexts = []

    def asked(request: Any) -> None:
        host = urlsplit(request.url).hostname
        if host not in ("127.0.0.1", None):
            complaints.append(f"request to {host}")

    def said(message: Any) -> None:
        if message.type in ("error", "warning"):
            complaints.append(f"console: {message.text}")

    def dialog(shown: Any) -> None:
        complaints.append(f"dialog: {shown.message}")
        shown.dismiss()

    def make(url: str, *, viewport: dict[str, int] = WIDE, theme: str = "light") -> Any:
        context = browser.new_context(viewport=viewport, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("request", asked)
        page.on("console", said)
        page.on("dialog", dialog)
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.goto(url)
        return page

    yield make
    for context in contexts:
        context.close()
    assert complaints == []


def view_of(address: str, run: str, view: str) -> str:
    """The address of a view of a run."""
    return f"{address}/#/run/{quote(run, safe='')}/{view}"
