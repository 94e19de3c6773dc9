"""Telemetry of all processes: log lines, rows, scalars and a timeline.

    trainer, servers --> metrics.jsonl, samples/*.jsonl, timeline/*.jsonl, tensorboard/, logs

- `metrics`          table of step metrics and server metrics
- `charts`           table of charts, for all displays
- `rows`             kinds of rows, and functions that read them
- `jsonl`            files of rows that survive a crash
- `timeline`         spans of every process for Perfetto, durations of a step
- `logging`          log lines, without secrets
- `trackers`         TensorBoard and other places for scalars
- `idle`, `contention`, `weight_updates`   measurements of waits
- `bottleneck`       rules and thresholds for what waits mean
- `servers_wanted`   number of rollout servers that a run can use
- `role_history`     starts and failures of roles that are started separately
"""
