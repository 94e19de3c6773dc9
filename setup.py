"""The step of a build that pyproject.toml cannot state: the charts of `async-grpo view` come from npm into the wheel.

Without npm, or without its registry, the package is built without them, and the page says how to fetch them.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.build_py import build_py


def load_vendor() -> ModuleType:
    """Load the module that fetches the packages by its path, because the dependencies of its package are not
    installed."""
    path = Path(__file__).parent / "async_grpo" / "lab" / "view" / "vendor.py"
    spec = importlib.util.spec_from_file_location("vendor", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["vendor"] = importlib.util.module_from_spec(spec)  # where dataclasses look
    spec.loader.exec_module(module)
    return module


class BuildWithCharts(build_py):
    """build_py that first fetches the page's packages."""

    def run(self) -> None:
        load_vendor().main()
        super().run()


setup(cmdclass={"build_py": BuildWithCharts})
