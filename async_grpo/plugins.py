"""Loads the user's code, named `module:attribute` in the configuration."""

from __future__ import annotations

import importlib
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigError


def is_plugin(name: str) -> bool:
    """True if the name has the form `module:attribute`."""
    module, colon, attribute = name.partition(":")
    return bool(module and colon and attribute)


def load_plugin(name: str, *, key: str, expected: str = "a function or class") -> Any:
    """Import `module:attribute` from the Python path or the working folder; it must be callable.

    `key`: configuration key with the name. `expected`: kind of object, for the message of ConfigError.
    """
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        plugin = attrgetter(attribute)(importlib.import_module(module_name))
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(
            f"{key}: {name!r} cannot be imported ({type(error).__name__}: {error}). Check the name, and that the "
            "module is in the working folder or on PYTHONPATH"
        ) from error
    if not callable(plugin):
        raise ConfigError(
            f"{key}: {name!r} is a value of type {type(plugin).__name__}, not {expected}. Name a callable"
        )
    return plugin
