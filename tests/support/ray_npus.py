"""A program that joins a Ray cluster (its first argument) as `async-grpo launch ray` does, places a trainer of four
NPUs and a server of two by the launcher's own plan, and prints as JSON which NPUs each role sees."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import ray

from async_grpo.app.launch.clusters.ray import RayRunner, plan_bundles
from async_grpo.app.launch.role_process import RoleSpec
from async_grpo.config import validate

RAW = {
    "name": "npus",
    "model": {"path": "any"},
    "redis": {"url": "redis://127.0.0.1:6379"},
    "trainer": {"platform": "npu", "processes": 4},
    "rollout": {"servers": 1, "vllm": {"platform": "ascend", "tensor_parallel": 2}},
}
SHOW = [sys.executable, "-c", "import os; print(os.environ['ASCEND_RT_VISIBLE_DEVICES'])"]


def main() -> None:
    """Print {role: [index of an NPU, ...]}."""
    config = validate(RAW, "test")
    ray.init(address=sys.argv[1], namespace="async-grpo", logging_level="error")
    groups = plan_bundles(config, 1)
    seen = {}
    for role, bundles in groups.items():
        runner = RayRunner(config, ray, role, bundles, print)
        group = ray.util.placement_group(bundles)
        ray.get(group.ready(), timeout=60)
        log = Path(tempfile.mkdtemp()) / f"{role}.log"
        spec = RoleSpec(role, SHOW, log, 0)
        code, explanation = ray.get(runner.make_actor(group, 0).run.remote(spec, config.name), timeout=60)
        assert code == 0, explanation
        seen[role] = log.read_text().strip().split(",")
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
