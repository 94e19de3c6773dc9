"""`async-grpo sweep`: a grid of real runs and one report that compares them.

    --grid, --seeds --> points --> `async-grpo run` each, N at a time --> DIR/runs/<point>/
                                                                              |
                    DIR/report.md, sweep.json, plots/  <-- metrics, settings, recommendation

A point is one combination of the grid with one seed; a setting is that combination over all of its seeds. The sweep
only waits for its runs. Each run waits and resumes by itself.

- `sweep`       from the options to the report
- `plan`        the axes and seeds, the points and their names, and which points are rejected
- `folder`      the files of a sweep; one process at a time
- `runner`      starts the runs, assigns devices, waits for the runs to end, stops them all
- `progress`    the live table
- `results`     the metrics of one run
- `settings`    metrics over seeds
- `recommend`   which setting is recommended, and why
- `report`, `plots`   the files that remain
"""
