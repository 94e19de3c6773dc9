"""What a run tells people: log lines, rows, scalars, a timeline, the live view and the report.

    trainer, servers --> metrics.jsonl, samples/*.jsonl, timeline/*.jsonl, tensorboard/, logs
    supervisor       --> live view;  at the end summary.json, plots/*.png, timeline.json, report.md

The cast:

- `log`        log lines for people, without secrets
- `jsonl`      files of rows that survive a crash
- `rows`       the keys of every row, in one place
- `scalars`    TensorBoard
- `timeline`   who did what when, for Perfetto
- `state`, `waits`, `panel`, `live`   progress while the run goes on
- `summary`, `plots`, `escape`, `report`   what remains of it
"""
