"""Timings estimated from the peak performance of devices (rooflines), for machines that are not available yet.

    decoding step    reads the weights once, and keys and values of every token in the cache:   bytes / bandwidth
    prompt           2 FLOP per parameter and token                                   / (peak * fraction)
    training step    6 FLOP per parameter and token, 8 with recomputation             / (peak * fraction)
    weights          bytes / link to the servers, and bytes / bandwidth of the host link to load them

The fractions of the peak that real programs reach are assumptions, printed with the estimate. A calibration on one run
of a few steps (`--from`) is worth more than all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from async_grpo.app.launch.memory_plan import find_model_shape
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigError
from async_grpo.lab.simulate.lengths import LengthModel
from async_grpo.lab.simulate.timings import EngineTimings, SyncTimings, Timings, TrainerTimings


@dataclass(frozen=True, slots=True)
class DeviceRoofline:
    """Peak performance of one device."""

    tflops: float
    """Dense bfloat16, or float16 if the source has no other."""
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
    "h20": DeviceRoofline(148, 4.0, "NVIDIA's numbers as listed by server vendors"),
    "910b": DeviceRoofline(320, 1.6, "as reported by the press; Huawei publishes no data sheet"),
    "910c": DeviceRoofline(390, 1.6, "one of the two dies: half of 780 TFLOPS and 3.2 TB/s (TechPowerUp, 2025-04-21)"),
}
DECODE_FRACTION = 0.6
"""Fraction of the memory bandwidth that decoding reaches."""
PREFILL_FRACTION = 0.5
"""Fraction of the peak that prefill reaches."""
TRAIN_FRACTION = 0.35
"""Fraction of the peak that training reaches."""
STEP_OVERHEAD_S = 0.002
"""Python, sampling and kernel launches per decoding step."""
LINK_BYTES_S = 10e9
"""Bytes per second from the trainer to a server: 100 Gbit/s, less overhead."""
HOST_LINK_BYTES_S = 20e9
"""Bytes per second from a machine's memory to its devices."""
MEAN_LENGTH_FRACTION = 0.3
"""Mean length of a completion as a fraction of sampling.max_tokens. The p99 is then at the limit."""
_BYTES_PER_VALUE = 2


def estimate_timings(config: RunConfig, device: str) -> Timings:
    """Estimate the timings of the run on these devices. Raises ConfigError for an unknown device or model shape."""
    if device not in DEVICES:
        raise ConfigError(f"--device {device!r} is unknown. Known devices: {', '.join(DEVICES)}")
    shape = find_model_shape(config)
    if shape is None:
        raise ConfigError(
            "the model's shape is unknown: model.path is not a folder on this machine with a config.json. Set "
            "model.architecture (such as qwen2.5-7b), or use the timings of a run with --from"
        )

    roofline = DEVICES[device]
    engine_devices = config.rollout.limits.devices
    trainer = config.trainer
    bandwidth = roofline.bandwidth_tb_s * 1e12 * DECODE_FRACTION * engine_devices
    flops = roofline.tflops * 1e12

    active = shape.active_parameters
    weight_bytes = _BYTES_PER_VALUE * shape.parameters
    cache_bytes = 2 * shape.layers * shape.key * _BYTES_PER_VALUE  # keys and values per token
    train_flop = (8 if trainer.recompute == "full" else 6) * active
    forward_s = 2 * active / (flops * PREFILL_FRACTION * engine_devices)
    max_tokens = config.sampling.max_tokens

    return Timings(
        source=f"estimated: {device}, {roofline.tflops:g} TFLOPS and {roofline.bandwidth_tb_s:g} TB/s "
        f"({roofline.source}), of which decoding reaches {DECODE_FRACTION:.0%} of the bandwidth, prompts "
        f"{PREFILL_FRACTION:.0%} and training {TRAIN_FRACTION:.0%} of the peak; mean completion length "
        f"{MEAN_LENGTH_FRACTION:.0%} of sampling.max_tokens",
        prompt_tokens=min(512, config.data.max_prompt_tokens),
        lengths=LengthModel(
            kind="lognormal", mean=max(1.0, MEAN_LENGTH_FRACTION * max_tokens), sigma=0.8, cap=max_tokens
        ),
        engine=EngineTimings(
            step_s=_BYTES_PER_VALUE * active / bandwidth + STEP_OVERHEAD_S,
            request_s=forward_s,
            context_s=cache_bytes / bandwidth,
            prefill_s=forward_s,
        ),
        trainer=TrainerTimings(base_s=0.5, token_s=train_flop / (flops * TRAIN_FRACTION * trainer.processes)),
        sync=SyncTimings(
            stall_s=weight_bytes / HOST_LINK_BYTES_S,
            transfer_s=weight_bytes / LINK_BYTES_S,
            load_s=weight_bytes / (HOST_LINK_BYTES_S * engine_devices),
        ),
    )
