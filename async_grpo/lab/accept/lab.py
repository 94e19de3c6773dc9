"""What the stages of `async-grpo accept` work with: the configurations, the model, and the two programs of the sides.

    stage --ask--> rank program     the first device: layers, steps, checkpoints, publisher
          --ask--> engine program   the last device: engine, receiver

A program starts with the first question to it, and answers one after the other. One that fails an answer is ended, so
that the next stage that needs it starts it again.
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
from trainer.platform.base import visible

TEMPERATURE = 0.8
"""Not 1: at 1, log-probabilities of the logits and those of the sampled distribution are the same."""
STEPS = 10
LONGEST_ANSWER_S = 900.0
"""Beyond the limit of every stage."""
HOST_RANKS = 2
"""Ranks of the collectives on a CPU."""
_TINY = {"hidden_size": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 256, "vocab_size": 320}
_SMALL = {"hidden_size": 1024, "layers": 8, "heads": 16, "kv_heads": 4, "intermediate_size": 2816, "vocab_size": 32768}
"""120 million parameters: large enough to time a publication."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Modules of the sides; tests put faulty ones in their place."""

    rank: str = "async_grpo.lab.accept.rank"
    engine: str = "async_grpo.lab.accept.engine"


def chosen_devices(platform: Platform, wanted: str | None) -> list[str]:
    """The devices to use: those asked for, else the visible ones; [] for the CPU. Raises ConfigError if there is
    none."""
    if not platform.visible_variable:
        if wanted:
            raise ConfigError("--devices names accelerators, and the platform is cpu. Leave it out")
        return []
    there = [str(device.index) for device in platform.devices()]
    allowed = visible(platform, os.environ)
    usable = there if allowed is None else [each for each in allowed if each in there or not each.isdigit()]
    if not there or not usable:
        raise ConfigError(
            f"this machine has no {platform.name} device that can be used: {platform.tool} lists {len(there)}, and "
            f"{platform.visible_variable} is {os.environ.get(platform.visible_variable, 'not set')}. Run "
            f"async-grpo doctor --platform {platform.name}"
        )
    devices = [each.strip() for each in wanted.split(",")] if wanted else usable
    if absent := [each for each in devices if each not in usable]:
        raise ConfigError(f"--devices names {', '.join(absent)}, but the usable ones are {', '.join(usable)}")
    return devices


class Lab:
    """The programs, model and configurations of one call of the command."""

    def __init__(self, platform: Platform, devices: list[str], work: Path, logs: Path, programs: Programs) -> None:
        """`work`: a folder that is deleted afterwards. `logs`: one that stays."""
        self.platform, self.devices, self.work, self.logs = platform, devices, work, logs
        self.programs = programs
        self._children: dict[str, tuple[LineChild, AsyncExitStack]] = {}
        self._mark = mark("accept", work.name)
        self._model: Path | None = None
        self._local_names: set[str] = set()  # of the runs whose files in shared memory are removed at the end
        self.precision = "bfloat16" if devices else "float32"

    @property
    def sizes(self) -> dict[str, int]:
        """Dimensions of the model."""
        return _SMALL if self.devices else _TINY

    def config(self, name: str, *, ranks: int = 1, servers: int = 1) -> RunConfig:
        """The configuration `name`, which `file` writes."""
        shared = len(self.devices) == 1
        half = {"gpu_memory_utilization": 0.4} if shared else {}
        raw: dict[str, Any] = {
            "name": name,
            "runs_dir": str(self.work / "runs"),
            "steps": STEPS,
            "max_staleness": 1,
            "group_size": 4,
            "groups_per_step": 4,
            "model": {"random": self.sizes, "precision": self.precision},
            "data": {"kind": "arithmetic"},
            # A random policy is never right, and gets a gradient all the same: completions that end early are better.
            "rewards": {"overlong": "soft", "soft_overlong_tokens": 48},
            "sampling": {"temperature": TEMPERATURE, "max_tokens": 64},
            "rollout": {
                "servers": servers,
                "max_concurrency": 16,
                "vllm": {"platform": VLLM_PLATFORMS[self.platform.name], "kv_cache_bytes": 256 << 20, **half},
            },
            "trainer": {
                "platform": self.platform.name,
                "processes": ranks,
                "micro_batch_tokens": 512,
                "optimizer": {"lr": 1e-3},
                "checkpoint": {"every_steps": 5},
                **({"device_memory_share": 0.4} if shared else {}),
            },
            "launch": {"share_devices": "split" if shared else "off"},
            "eval": {"prompts": 8, "samples": 1, "greedy": False},
            "telemetry": {"tensorboard": False, "samples_every": 1},
        }
        return validate(raw, "async-grpo accept")

    def file(self, config: RunConfig) -> Path:
        """Write a configuration; returns its file."""
        self._local_names.add(config.local_name)
        path = self.work / f"{config.name}-{config.trainer.processes}.yaml"
        path.write_text(dump(config))
        return path

    async def model(self) -> Path:
        """The Hugging Face folder of the model, made at the first call."""
        if self._model is None:
            self._model = await prepare_model(self.config("accept"), lambda line: None)
        return self._model

    async def ask(self, side: str, what: str, **facts: Any) -> Any:
        """The answer of the program of a side (rank, engine). Raises RoleFailed with its error."""
        if side not in self._children:
            await self._start(side)
        child, _ = self._children[side]
        child.tell(json.dumps({"ask": what, **facts}).encode() + b"\n")
        line = await child.read(f"the {side} program to {what}", LONGEST_ANSWER_S)
        answer = json.loads(line) if line else {"error": find_last_error(self._log(side)) or "it ended without a word"}
        if "error" in answer:
            await self.end(side)
            raise RoleFailed(f"{what}: {answer['error']} (logs/{self._log(side).name})")
        return answer["found"]

    def tell(self, side: str, what: str, **facts: Any) -> None:
        """Ask without waiting: the program is about to be killed."""
        self._children[side][0].tell(json.dumps({"ask": what, **facts}).encode() + b"\n")

    async def end(self, *sides: str) -> None:
        """Kill the programs of these sides (none: of all), and everything that they have started."""
        for side in sides or (*self._children,):
            if side in self._children:
                child, stack = self._children.pop(side)
                child.kill()
                await stack.aclose()
                end_family(self._mark + side, child.process_id)
        if not sides:
            for name in self._local_names:
                remove_stores(name)

    async def run_program(self, name: str, argv: list[str], *, trains: bool) -> None:
        """Run a program on all devices to its end; `trains`: as ranks of the trainer. Raises RoleFailed with its error
        if it fails; ends it if this is cancelled."""
        spec = RoleSpec(name, argv, self._log(name), 0, env=self._environment(self.devices, trains=trains))
        process = await RoleProcess.start(spec, self._mark)
        try:
            if code := await process.wait():
                raise RoleFailed(process.explain(code))
        except BaseException:
            process.kill()
            await process.wait()
            raise

    def program(self, module: str, config: RunConfig, model: Path, *arguments: str) -> list[str]:
        """The command of a program of a side."""
        files = ["--config", str(self.file(config)), "--model", str(model)]
        return [sys.executable, "-m", *module.split(), *files, *arguments]

    async def _start(self, side: str) -> None:
        trains = side == "rank"
        devices = self.devices[:1] if trains else self.devices[-1:]
        argv = self.program(getattr(self.programs, side), self.config("accept"), await self.model())[2:]
        environment = {**os.environ, **self._environment(devices, trains=trains), MARK_VARIABLE: self._mark + side}
        stack = AsyncExitStack()
        log = stack.enter_context(self._log(side).open("a"))
        child = await stack.enter_async_context(LineChild(*argv, env=environment, stderr=log))
        self._children[side] = child, stack

    def _environment(self, devices: list[str], *, trains: bool) -> dict[str, str]:
        seen = {self.platform.visible_variable: ",".join(devices)} if devices else {"CUDA_VISIBLE_DEVICES": ""}
        return seen | (trainer_environment(self.config("accept"), os.environ) if trains else {})

    def _log(self, name: str) -> Path:
        self.logs.mkdir(parents=True, exist_ok=True)
        return self.logs / f"{name}.log"
