"""What vendors state of their devices: dense FLOP/s by name and precision.

From the data sheets, without sparsity. float32 is that of ordinary units: TensorFloat-32 is off here. Ascend devices
are not listed: one name stands for bins of different speed; `trainer.device_peak_tflops` says it for one's own.
"""

from __future__ import annotations

from collections.abc import Mapping

TERA = 1e12

PEAK_TFLOPS: Mapping[str, Mapping[str, float]] = {
    "B200": {"bfloat16": 2250, "float32": 75},
    "GH200": {"bfloat16": 989, "float32": 67},
    "H200": {"bfloat16": 989, "float32": 67},
    "H100 PCIe": {"bfloat16": 756, "float32": 51},
    "H100 NVL": {"bfloat16": 835, "float32": 60},
    "H100": {"bfloat16": 989, "float32": 67},
    "H800": {"bfloat16": 989, "float32": 67},
    "H20": {"bfloat16": 148, "float32": 44},
    "A100": {"bfloat16": 312, "float32": 19.5},
    "A800": {"bfloat16": 312, "float32": 19.5},
    "L40S": {"bfloat16": 362, "float32": 91.6},
    "A10G": {"bfloat16": 70, "float32": 35},
    "A10": {"bfloat16": 125, "float32": 31.2},
    "L4": {"bfloat16": 121, "float32": 30.3},
    "RTX 4090": {"bfloat16": 165, "float32": 82.6},
    "RTX 3090": {"bfloat16": 71, "float32": 35.6},
}
"""By a word of the name that torch reports, such as `NVIDIA H100 80GB HBM3`."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of one device; None for one that is not listed.

    >>> peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16")
    312000000000000.0
    """
    words = device_name.replace("-", " ").split()
    for name in sorted(PEAK_TFLOPS, key=len, reverse=True):  # the longer name is the more exact one
        parts = name.split()
        if all(part in words for part in parts):
            stated = PEAK_TFLOPS[name].get(precision)
            return None if stated is None else stated * TERA
    return None
