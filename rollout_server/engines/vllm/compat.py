"""Differences between vLLM releases in weight updates, samplers and the output layer.

    0.23, 0.24   the worker runs the layerwise reload itself, unless `is_checkpoint_format=False`,
                 and passes `receive_weights` a function to load with
    from 0.25    the transfer engine runs it in `start_weight_update` and `finish_weight_update`
    from 0.26    `head_dtype` also applies to models that generate
    from 0.28    `finish_weight_update` takes the version, and finished requests report their spans

`worker.WeightLoader` supports all of them because it does the whole reload inside `receive_weights`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from async_grpo.errors import ConfigError
from async_grpo.utils.private_names import check_private_names, explain_missing

LOGPROBS_MODE = "processed_logprobs"
"""vLLM's mode for log-probabilities after temperature and all other changes of the logits."""
_HEAD_DTYPE = "vllm.model_executor.layers.logits_processor:LogitsProcessor.head_dtype"
_TRANSFER = "vllm.distributed.weight_transfer"
_RELOAD = "vllm.model_executor.model_loader.reload"


@dataclass(frozen=True, slots=True)
class VllmCompat:
    """The parts of vLLM that a weight update uses."""

    transfer_engine: type
    factory: Any
    initialize_reload: Callable[..., None]
    finalize_reload: Callable[..., None]
    layer_info: Callable[..., Any] | None
    """Returns how much of a layer is loaded; None if this release has no such function."""


def find_vllm_api() -> VllmCompat:
    """Import the parts from the installed vLLM. Raises DependencyError with the missing names."""
    check_private_names("engine worker")
    reload = importlib.import_module(_RELOAD)
    return VllmCompat(
        transfer_engine=importlib.import_module(f"{_TRANSFER}.base").WeightTransferEngine,
        factory=importlib.import_module(f"{_TRANSFER}.factory").WeightTransferEngineFactory,
        initialize_reload=reload.initialize_layerwise_reload,
        finalize_reload=reload.finalize_layerwise_reload,
        layer_info=_layer_info(),
    )


def accepted_arguments(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return the arguments that the function accepts in this release."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def report_sampled_logprobs(sampler: Any) -> None:
    """Make a vLLM sampler report log-probabilities of the distribution that it samples from.

    vllm-ascend 0.23 creates its sampler without the engine's `logprobs_mode`, so it would report those of
    temperature 1.
    """
    for part in (sampler, getattr(sampler, "topk_topp_sampler", None)):
        if part is not None:
            part.logprobs_mode = LOGPROBS_MODE


def check_float32_head() -> None:
    """Raise ConfigError if this vLLM would ignore `head_dtype` and compute logits in the model's data type."""
    if explain_missing(_HEAD_DTYPE):
        raise ConfigError(
            "model.fp32_head is true, but the installed vLLM computes logits in the model's data type: float32 needs "
            "0.26 or newer. Install a newer vLLM, or set model.fp32_head to false"
        )


def _layer_info() -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module(f"{_RELOAD}.layerwise"), "get_layerwise_info", None)
    except ImportError:
        return None
