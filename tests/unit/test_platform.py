"""A platform is chosen explicitly, and refuses what it was not written for."""

from __future__ import annotations

import importlib.metadata
import sys
import types

import pytest

from async_grpo.errors import ConfigError
from trainer.platform import select_platform
from trainer.platform.cpu import PINNED_MEGATRON


@pytest.mark.parametrize("name", ["cuda", "npu"])
def test_a_platform_that_is_not_there_is_refused_not_replaced(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*not available in this version"):
        select_platform(name)


def test_the_cpu_platform_refuses_to_come_after_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    with pytest.raises(ConfigError, match="before megatron is imported"):
        select_platform("cpu").activate(1)


def test_the_cpu_platform_refuses_another_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)  # another test may have imported it
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.0")
    with pytest.raises(ConfigError, match=r"pip install megatron-core=="):
        select_platform("cpu").activate(1)


def test_the_installed_megatron_is_the_one_that_the_cpu_platform_is_written_for() -> None:
    assert importlib.metadata.version("megatron-core") == PINNED_MEGATRON
