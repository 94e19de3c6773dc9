"""A grid of real runs, and one report that compares them: which staleness, which objective, at what price.

    --grid, --seeds --> points --> `async-grpo run` each, N at a time --> DIR/runs/<point>/
                                                                              |
                    DIR/report.md, sweep.json, plots/  <-- figures, settings, recommendation

A point is one combination of the grid with one seed; a setting is that combination over all of its seeds. The sweep
waits for its runs only; what a run waits for, and how it is resumed, is the run's own business.

The cast:

- `grid`       what the options say: axes, values, seeds
- `plan`       which points there are, what each is called, and which are refused
- `folder`     the files of a sweep; one process at a time
- `devices`    which accelerators each of several runs at once gets
- `crew`       starts the runs, sees each to its end, stops them all
- `progress`   how far they are, for people
- `idle`, `figures`   what one run has come to
- `settings`   figures over seeds
- `choice`     which setting is recommended, and why
- `plots`, `report`   what remains
- `sweep`      the command
"""
