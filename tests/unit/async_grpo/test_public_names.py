"""What `import async_grpo` gives."""

from __future__ import annotations

import subprocess
import sys

import pytest

import async_grpo
import async_grpo.config

LOADED = """
import sys, typing
before = set(sys.modules)
import async_grpo
print(sorted(set(sys.modules) - before))
"""


def test_every_public_name_is_there() -> None:
    assert async_grpo.RunConfig is async_grpo.config.RunConfig
    assert async_grpo.load is async_grpo.config.load
    assert async_grpo.__version__.count(".") == 2
    assert all(hasattr(async_grpo, name) for name in async_grpo.__all__)


def test_any_other_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = async_grpo.nonsense


def test_importing_the_package_imports_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['async_grpo']"
