"""At the end of `make upstream`: what has moved, a paragraph for each contract that does not hold."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    failed = [each for each in terminalreporter.getreports("failed") if "tests/upstream" in each.nodeid]
    if failed:
        terminalreporter.section("what has moved")
    for report in failed:
        terminalreporter.write_line(report.nodeid.partition("::")[2])
        terminalreporter.write_line(f"  {report.longreprtext.strip()}")
