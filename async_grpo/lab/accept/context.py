"""What the stages of `async-grpo accept` share: configurations, the model and two child programs.

    stage --request--> rank program     first device: layers, steps, checkpoints, publisher
          --request--> engine program   last device: engine, receiver

A program starts with its first request and handles one request at a time. A program that fails a request is killed, so
that the next stage that needs it starts a fresh one.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.app.launch.first_policy import prepare_model
from async_grpo.app.launch.role_process import RoleProcess, RoleSpec, find_last_error
from async_grpo.app.launch.role_specs import trainer_environment
from async_grpo.config import RunConfig, dump, validate
from async_grpo.config.trainer import VLLM_PLATFORMS
from async_grpo.errors import ConfigError, RoleFailed
from async_grpo.lab.bench.rig import LineChild
from async_grpo.utils.child_process import MARK_VARIABLE
from async_grpo.utils.processes import end_family, mark
from async_grpo.weights.shared_memory import remove_stores
from trainer.platform import Platform
from trainer.platform.base import visible_devices

TEMPERATURE = 0.8
"""Not 1: at 1, raw log-probabilities equal those of the sampled distribution, and a mix-up would pass."""
STEPS = 10
REQUEST_TIMEOUT_S = 900.0
"""Maximum seconds per request. At least as long as any stage's limit, which ends the stage first."""
HOST_RANKS = 2
"""Ranks of the collectives on a CPU."""
_TINY_MODEL = {"hidden_size": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 256, "vocab_size": 320}
_SMALL_MODEL = {
    "hidden_size": 1024,
    "layers": 8,
    "heads": 16,
    "kv_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 32768,
}
"""120 million parameters: large enough to time a publication."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Modules of the two child programs. Tests replace them with faulty ones."""

    rank: str = "async_grpo.lab.accept.rank"
    engine: str = "async_grpo.lab.accept.engine"


def select_devices(platform: Platform, requested: str | None) -> list[str]:
    """Return the devices to use: the requested ones, otherwise all visible ones; [] on the CPU.

    Raises ConfigError if there is none.
    """
    if not platform.visible_variable:
        if requested:
            raise ConfigError("--devices names accelerators, but the platform is cpu. Remove --devices")
        return []

    present = [str(device.index) for device in platform.list_devices()]
    allowed = visible_devices(platform, os.environ)
    usable = present
    if allowed is not None:
        # The variable may name a device by UUID or MIG instance, which the tool's indices cannot confirm.
        usable = [device for device in allowed if device in present or not device.isdigit()]
    if not present or not usable:
        raise ConfigError(
            f"this machine has no usable {platform.name} device: {platform.tool} lists {len(present)}, and "
            f"{platform.visible_variable} is {os.environ.get(platform.visible_variable, 'not set')}. Run "
            f"async-grpo doctor --platform {platform.name}"
        )
    if not requested:
        return usable

    devices = [device.strip() for device in requested.split(",")]
    absent = [device for device in devices if device not in usable]
    if absent:
        raise ConfigError(f"--devices names {', '.join(absent)}, but the usable devices are {', '.join(usable)}")
    return devices


class StageContext:
    """Child programs, model and configurations of one `async-grpo accept` command."""

    def __init__(self, platform: Platform, devices: list[str], work: Path, logs: Path, programs: Programs) -> None:
        """`work` is deleted after the command; `logs` is kept."""
        self.platform = platform
        self.devices = devices
        self.work = work
        self.logs = logs
        self.programs = programs
        self.precision = "bfloat16" if devices else "float32"
        self._children: dict[str, tuple[LineChild, AsyncExitStack]] = {}
        self._mark = mark("accept", work.name)
        self._model: Path | None = None
        self._store_names: set[str] = set()  # runs whose shared memory is removed at the end

    @property
    def model_sizes(self) -> dict[str, int]:
        """Dimensions of the model."""
        return _SMALL_MODEL if self.devices else _TINY_MODEL

    def build_config(self, name: str, *, ranks: int = 1, servers: int = 1) -> RunConfig:
        """Return the configuration of a run called `name`."""
        raw: dict[str, Any] = {
            "name": name,
            "runs_dir": str(self.work / "runs"),
            "steps": STEPS,
            "max_staleness": 1,
            "group_size": 4,
            "groups_per_step": 4,
            "model": {"random": self.model_sizes, "precision": self.precision},
            "data": {"kind": "arithmetic"},
            # A random policy never answers correctly, so accuracy alone gives no gradient. The length reward does: it
            # prefers completions that end early.
            "rewards": {"overlong": "soft", "soft_overlong_tokens": 48},
            "sampling": {"temperature": TEMPERATURE, "max_tokens": 64},
            "rollout": {
                "servers": servers,
                "max_concurrency": 16,
                "vllm": {"platform": VLLM_PLATFORMS[self.platform.name], "kv_cache_bytes": 256 << 20},
            },
            "trainer": {
                "platform": self.platform.name,
                "processes": ranks,
                "micro_batch_tokens": 512,
                "optimizer": {"lr": 1e-3},
                "checkpoint": {"every_steps": 5},
            },
            "launch": {"share_devices": "off"},
            "eval": {"prompts": 8, "samples": 1, "greedy": False},
            "telemetry": {"tensorboard": False, "samples_every": 1},
        }
        if len(self.devices) == 1:  # trainer and engine share it
            raw["launch"]["share_devices"] = "split"
            raw["rollout"]["vllm"]["gpu_memory_utilization"] = 0.4
            raw["trainer"]["device_memory_share"] = 0.4
        return validate(raw, "async-grpo accept")

    def write_config(self, config: RunConfig) -> Path:
        """Write a configuration and return its file."""
        self._store_names.add(config.name_with_digest)
        path = self.work / f"{config.name}-{config.trainer.processes}.yaml"
        path.write_text(dump(config))
        return path

    async def load_model(self) -> Path:
        """Return the Hugging Face folder of the model, creating it on the first call."""
        if self._model is None:
            self._model = await prepare_model(self.build_config("accept"), lambda line: None)
        return self._model

    async def request(self, side: str, what: str, **arguments: Any) -> Any:
        """Send a request to the program of a side ("rank" or "engine") and return its answer.

        Raises RoleFailed with the program's error.
        """
        if side not in self._children:
            await self._start_program(side)
        self.send_request(side, what, **arguments)

        child, _ = self._children[side]
        line = await child.read_line(f"the {side} program to {what}", REQUEST_TIMEOUT_S)
        if line:
            answer = json.loads(line)
        else:
            answer = {"error": find_last_error(self._log_file(side)) or "the program ended without an error message"}
        if "error" in answer:
            await self.stop_program(side)
            raise RoleFailed(f"{what}: {answer['error']} (logs/{self._log_file(side).name})")
        return answer["found"]

    def send_request(self, side: str, what: str, **arguments: Any) -> None:
        """Send a request to a running program without waiting for the answer."""
        child, _ = self._children[side]
        child.write_line(json.dumps({"ask": what, **arguments}).encode() + b"\n")

    async def stop_program(self, side: str) -> None:
        """Kill the program of a side and all processes that it has started. Does nothing if it is not running."""
        if side not in self._children:
            return
        child, stack = self._children.pop(side)
        child.kill()
        await stack.aclose()
        end_family(self._mark + side, child.process_id)

    async def stop_all_programs(self) -> None:
        """Kill all programs and remove their shared memory. Programs start again with their next request."""
        for side in (*self._children,):
            await self.stop_program(side)
        for name in self._store_names:
            remove_stores(name)

    async def run_program(self, name: str, argv: list[str], *, trains: bool) -> None:
        """Run a program on all devices until it exits; with `trains` in the environment of a trainer rank.

        Raises RoleFailed if it fails. Kills it if this call is cancelled.
        """
        spec = RoleSpec(name, argv, self._log_file(name), 0, env=self._environment(self.devices, trains=trains))
        process = await RoleProcess.start(spec, self._mark)
        try:
            code = await process.wait()
            if code:
                raise RoleFailed(process.explain(code))
        except BaseException:
            process.kill()
            await process.wait()
            raise

    def program_argv(self, module: str, config: RunConfig, model: Path, *arguments: str) -> list[str]:
        """Return the command line of a side's program."""
        files = ["--config", str(self.write_config(config)), "--model", str(model)]
        return [sys.executable, "-m", *module.split(), *files, *arguments]

    async def _start_program(self, side: str) -> None:
        trains = side == "rank"
        devices = self.devices[:1] if trains else self.devices[-1:]
        module = self.programs.rank if trains else self.programs.engine
        argv = self.program_argv(module, self.build_config("accept"), await self.load_model())
        environment = {**os.environ, **self._environment(devices, trains=trains), MARK_VARIABLE: self._mark + side}

        stack = AsyncExitStack()
        log = stack.enter_context(self._log_file(side).open("a"))
        arguments = argv[2:]  # LineChild adds `python -m` itself
        child = await stack.enter_async_context(LineChild(*arguments, env=environment, stderr=log))
        self._children[side] = child, stack

    def _environment(self, devices: list[str], *, trains: bool) -> dict[str, str]:
        environment = {"CUDA_VISIBLE_DEVICES": ""}
        if devices:
            environment = {self.platform.visible_variable: ",".join(devices)}
        if trains:
            environment |= trainer_environment(self.build_config("accept"), os.environ)
        return environment

    def _log_file(self, name: str) -> Path:
        self.logs.mkdir(parents=True, exist_ok=True)
        return self.logs / f"{name}.log"
