"""Unpacked records and overviews as values that JSON knows."""

from __future__ import annotations

import base64
import math
from dataclasses import asdict

import numpy as np

from buffer.inspect import Overview


def plain(value: object) -> object:
    """Arrays become lists of numbers, other bytes {"base64": ...}, and numbers that JSON does not know their
    names: "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, np.ndarray):
        return [_number(each) for each in value.tolist()]
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return _number(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def plain_overview(overview: Overview) -> object:
    """All of an overview, with the counters that follow from others."""
    stats = overview.stats
    derived = {"active": stats.active, "released_total": stats.released_total, "balanced": stats.balanced}
    content = asdict(overview)
    content["stats"] |= derived
    content["policy"]["age_bound"] = overview.policy.age_bound
    return plain(content)


def _number(value: float) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
