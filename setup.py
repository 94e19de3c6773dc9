"""Build step that pyproject.toml cannot express: fetch the chart library of `async-grpo view` from npm into the wheel.

Without npm or its registry, the package is built without charts, and the page explains how to fetch them.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.build_py import build_py


def load_vendor() -> ModuleType:
    """Load the module that fetches npm packages.

    It is loaded by path: importing it through `async_grpo` would need dependencies that a build environment lacks.
    """
    path = Path(__file__).parent / "async_grpo" / "lab" / "view" / "vendor.py"
    spec = importlib.util.spec_from_file_location("vendor", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["vendor"] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


class BuildWithCharts(build_py):
    """build_py that fetches the page's npm packages first."""

    def run(self) -> None:
        load_vendor().main()
        super().run()


setup(cmdclass={"build_py": BuildWithCharts})
