"""Timings estimated from what devices can do at most (rooflines). For a machine that one does not have yet.

    a decoding step   reads the weights once, and the keys and values of every token in the cache:   bytes / bandwidth
    a prompt          2 FLOP a parameter and token                                                   / (peak * share)
    a training step   6 FLOP a parameter and token, 8 with recomputation                             / (peak * share)
    weights           bytes / link to the servers, and bytes / bandwidth of the host link to load them

The shares say how near real programs come to the peak. They are assumptions, printed with the estimate, and one run
of a few steps (`--from`) is worth more than all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from async_grpo.app.launch.memory_plan import model_shape
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from async_grpo.lab.simulate.lengths import LengthModel
from async_grpo.lab.simulate.timings import EngineTimings, SyncTimings, Timings, TrainerTimings


@dataclass(frozen=True, slots=True)
class DeviceRoofline:
    """What one device can do at most."""

    tflops: float
    """Dense bfloat16 (float16 where the source has no other)."""
    bandwidth_tb_s: float
    """Memory bandwidth, TB/s."""
    source: str


_NVIDIA = "NVIDIA's data sheet, SXM, dense"
DEVICES: Mapping[str, DeviceRoofline] = {
    "a100": DeviceRoofline(312, 2.0, f"{_NVIDIA}, 80 GB"),
    "a800": DeviceRoofline(312, 2.0, "as the A100, with slower links"),
    "h100": DeviceRoofline(989, 3.35, _NVIDIA),
    "h800": DeviceRoofline(989, 3.35, "as the H100, with slower links"),
    "h200": DeviceRoofline(989, 4.8, _NVIDIA),
    "h20": DeviceRoofline(148, 4.0, "NVIDIA's figures as vendors of servers list them"),
    "910b": DeviceRoofline(320, 1.6, "as reported by the press; Huawei publishes no data sheet"),
    "910c": DeviceRoofline(390, 1.6, "one of the two dies: half of 780 TFLOPS and 3.2 TB/s (TechPowerUp, 2025-04-21)"),
}
DECODE_SHARE = 0.6
"""Share of the memory bandwidth that decoding reaches."""
PREFILL_SHARE = 0.5
"""Share of the peak that reading prompts reaches."""
TRAIN_SHARE = 0.35
"""Share of the peak that training reaches."""
STEP_OVERHEAD_S = 0.002
"""Python, sampling and launches of a decoding step."""
LINK_BYTES_S = 10e9
"""Bytes a second from the trainer to a server: 100 Gbit/s, less some."""
HOST_LINK_BYTES_S = 20e9
"""Bytes a second from a machine's memory to its devices."""
MEAN_SHARE = 0.3
"""Mean length of a completion as a share of sampling.max_tokens, with a p99 at the limit."""
_BYTES = 2


def estimate(config: RunConfig, device: str) -> Timings:
    """Timings of the run on such devices. Raises ConfigError if the device or the model's shape is not known."""
    if device not in DEVICES:
        raise ConfigError(f"--device {device!r} is not known. Known: {', '.join(DEVICES)}")
    shape = model_shape(config)
    if shape is None:
        raise ConfigError(
            "the model's shape is not known: model.path names no folder on this machine with a config.json. Set "
            "model.architecture (such as qwen2.5-7b), or give timings of a run with --from"
        )
    roofline, limits, trainer = DEVICES[device], config.rollout.limits, config.trainer
    bandwidth = roofline.bandwidth_tb_s * 1e12 * DECODE_SHARE * limits.devices
    flops = roofline.tflops * 1e12
    parameters = shape.parameters
    active = shape.active_parameters
    cache_bytes = 2 * shape.layers * shape.key * _BYTES
    train_flop = (8 if trainer.recompute == "full" else 6) * active
    top = config.sampling.max_tokens
    return Timings(
        source=f"estimated: {device}, {roofline.tflops:g} TFLOPS and {roofline.bandwidth_tb_s:g} TB/s "
        f"({roofline.source}), of which decoding reaches {DECODE_SHARE:.0%} of the bandwidth, prompts "
        f"{PREFILL_SHARE:.0%} and training {TRAIN_SHARE:.0%} of the peak; completions of {MEAN_SHARE:.0%} of "
        "sampling.max_tokens in the mean",
        prompt_tokens=min(512, config.data.max_prompt_tokens),
        lengths=LengthModel(kind="lognormal", mean=max(1.0, MEAN_SHARE * top), sigma=0.8, cap=top),
        engine=EngineTimings(
            step_s=_BYTES * active / bandwidth + STEP_OVERHEAD_S,
            request_s=2 * active / (flops * PREFILL_SHARE * limits.devices),
            context_s=cache_bytes / bandwidth,
            prefill_s=2 * active / (flops * PREFILL_SHARE * limits.devices),
        ),
        trainer=TrainerTimings(base_s=0.5, token_s=train_flop / (flops * TRAIN_SHARE * trainer.processes)),
        sync=SyncTimings(
            stall_s=_BYTES * parameters / HOST_LINK_BYTES_S,
            transfer_s=_BYTES * parameters / LINK_BYTES_S,
            load_s=_BYTES * parameters / (HOST_LINK_BYTES_S * limits.devices),
        ),
    )
