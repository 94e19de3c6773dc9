"""What processes record about themselves: log lines, rows, scalars and a timeline.

    trainer, servers --> metrics.jsonl, samples/*.jsonl, timeline/*.jsonl, tensorboard/, logs

- `metrics`    the table of step metrics
- `charts`     the table of charts: which curves are drawn together, and how
- `rows`       the other rows, and how to read rows
- `jsonl`      files of rows that survive a crash
- `timeline`   spans of every process for Perfetto, durations of a step
- `logging`    log lines for people, without secrets
- `trackers`   where scalars go (TensorBoard)
"""
