"""The parts of vLLM that a weight update needs, whichever release is installed.

    0.23, 0.24   the worker runs the layerwise reload itself, unless told `is_checkpoint_format=False`,
                 and hands `receive_weights` a function to load with
    from 0.25    the transfer engine runs it in `start_weight_update` and `finish_weight_update`
    from 0.28    `finish_weight_update` takes the version, and finished requests report their spans

One engine class fits all of them because it does the whole reload inside `receive_weights`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from async_grpo.errors import EngineError

KNOWN_RELEASES = "0.23 to 0.32"
"""Every one of these has what is looked for here."""

_TRANSFER = "vllm.distributed.weight_transfer"
_RELOAD = "vllm.model_executor.model_loader.reload"


@dataclass(frozen=True, slots=True)
class VllmApi:
    """What was found. `layer_info` tells how much of a layer was loaded; None where it cannot be asked."""

    transfer_engine: type
    factory: Any
    initialize_reload: Callable[..., None]
    finalize_reload: Callable[..., None]
    layer_info: Callable[..., Any] | None


def find_vllm_api() -> VllmApi:
    """Raises EngineError, naming what is missing, for a vLLM whose weights cannot be updated."""
    return VllmApi(
        transfer_engine=_find(f"{_TRANSFER}.base", "WeightTransferEngine"),
        factory=_find(f"{_TRANSFER}.factory", "WeightTransferEngineFactory"),
        initialize_reload=_find(_RELOAD, "initialize_layerwise_reload"),
        finalize_reload=_find(_RELOAD, "finalize_layerwise_reload"),
        layer_info=_layer_info(),
    )


def check_async_llm(async_llm: type) -> None:
    """Raise EngineError unless vLLM's front end can pause and take weights."""
    needed = (
        "pause_generation",
        "resume_generation",
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    )
    for name in needed:
        if not hasattr(async_llm, name):
            raise _missing(f"{async_llm.__name__}.{name}")


def start_arguments(start_weight_update: Callable[..., Any]) -> dict[str, Any]:
    """Arguments that leave the reload to the transfer engine."""
    takes_format = "is_checkpoint_format" in inspect.signature(start_weight_update).parameters
    return {"is_checkpoint_format": False} if takes_format else {}


def finish_arguments(finish_weight_update: Callable[..., Any], version: int) -> dict[str, Any]:
    """Arguments that make vLLM label the tokens that follow, where it can."""
    takes_version = "weight_version" in inspect.signature(finish_weight_update).parameters
    return {"weight_version": str(version)} if takes_version else {}


def _find(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _missing(f"{module}.{name}") from error


def _layer_info() -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module(f"{_RELOAD}.layerwise"), "get_layerwise_info", None)
    except ImportError:
        return None


def _missing(what: str) -> EngineError:
    return EngineError(
        f"vLLM {_version()} has no {what}, without which its weights cannot be updated while it runs. "
        f"Releases {KNOWN_RELEASES} have it: install one of them."
    )


def _version() -> str:
    try:
        return str(importlib.import_module("vllm").__version__)
    except (ImportError, AttributeError):
        return "(of unknown version)"
