"""Everything that the trainer reports: metrics.jsonl, trained.jsonl, scalars, log lines, timeline, /metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from async_grpo.auto_staleness import StalenessDecision
from async_grpo.config import RunConfig
from async_grpo.telemetry.jsonl import JsonLines
from async_grpo.telemetry.logging import configure_logging
from async_grpo.telemetry.timeline import PhaseTimer, Timeline
from async_grpo.telemetry.trackers import make_trackers
from trainer.metrics_server import MetricsServer
from trainer.ranks.distributed import is_rank_zero

ROLE = "trainer"


class TrainerLogger:
    """Writes on rank 0; on the other ranks calls do nothing, and only phases are timed."""

    def __init__(self, config: RunConfig) -> None:
        self._is_rank_zero = is_rank_zero()
        self._timeline: Timeline | None = None
        if self._is_rank_zero:
            self._log = configure_logging(ROLE)
            self._rows = JsonLines(config.run_dir / "metrics.jsonl")
            self._trained = JsonLines(config.run_dir / "trained.jsonl")
            self._trackers = make_trackers(config)
            self._timeline = Timeline(config.run_dir / "timeline" / f"{ROLE}.jsonl", ROLE)
            self._metrics = MetricsServer(config)
            self._open_metrics(config)
        self.phases = PhaseTimer(self._timeline)

    def _open_metrics(self, config: RunConfig) -> None:
        """Serve /metrics. If the port is taken, training continues without it."""
        try:
            address = self._metrics.start()
        except OSError as error:
            http = config.telemetry.http
            # `warn` also writes to metrics.jsonl, which reports and the live view show. During a run the trainer's log
            # is rarely read.
            self.warn(
                0,
                f"telemetry.http: cannot listen on {http.host!r}, port {http.port} ({error}), so the trainer has no "
                "metrics page. Set telemetry.http.port to another port, or to 0 for any free one",
            )
            return
        if address is not None:
            self._log.info("http", address=address)

    def log_step(self, row: dict[str, Any]) -> None:
        """Record a finished step."""
        if self._is_rank_zero:
            self._rows.write(row)
            self._trackers.log_step(row)
            self._metrics.record_step(row)
            shown = ("step", "reward_mean", "loss", "grad_norm", "age_max", "trained_tokens", "wait_s", "step_s")
            self._log.info("step trained", **{key: row[key] for key in shown if key in row})

    def log_trained_groups(self, make_row: Callable[[], dict[str, Any]]) -> None:
        """Record the advantages of the groups that a step trained; only rank 0 computes the row."""
        if self._is_rank_zero:
            self._trained.write(make_row())

    def log_takeover(self, epoch: int, version: int, head_version: int) -> None:
        """Record that this trainer has taken over the run at `version`; rollout servers have `head_version`."""
        if self._is_rank_zero:
            self._metrics.mark_joined(epoch, version)
            self._log.info("run joined", version=version, epoch=epoch, head_version=head_version)

    def mark_serving(self) -> None:
        """Record that rollout servers can fetch the weights of the trainer's version."""
        if self._is_rank_zero:
            self._metrics.mark_ready()

    def info(self, event: str, **facts: Any) -> None:
        """Write a log line."""
        if self._is_rank_zero:
            self._log.info(event, **facts)

    def log_probe(self, version: int, gap: dict[str, float]) -> None:
        """Record the log-probability gap of the final version."""
        if self._is_rank_zero:
            self._rows.write({"kind": "probe", "version": version, "time_s": time.time(), **gap})
            self._log.info("probe compared", version=version, **gap)

    def log_staleness_change(self, step: int, decision: StalenessDecision) -> None:
        """Record a change of the effective S and its reason."""
        if self._is_rank_zero:
            facts = {"staleness_before": decision.before, "staleness": decision.staleness, "reason": decision.reason}
            self._rows.write({"kind": "staleness", "step": step, "time_s": time.time(), **facts})
            self._log.info("effective S changed", step=step, **facts)

    def warn(self, step: int, message: str) -> None:
        """Record a warning for the user, in the log and in metrics.jsonl."""
        if self._is_rank_zero:
            self._rows.write({"kind": "warning", "step": step, "time_s": time.time(), "message": message})
            self._log.warning(message, step=step)

    def close(self) -> None:
        """Close the files and the metrics page."""
        if self._timeline is not None:
            self._metrics.close()
            self._rows.close()
            self._trained.close()
            self._trackers.close()
            self._timeline.close()
