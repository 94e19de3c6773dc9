"""`async-grpo tune`: searches the settings that reach a goal by simulation, and checks the best by short real runs.

    CONFIG, --vary, --fix --> axes --> Optuna <--> simulations --> Pareto front --> choice --> recommended.yaml
                                                                                      |
                                             --real N: a sweep of short runs of the best points and the present one

- `space`     keys to vary, and their values
- `goals`     what is best: throughput, cost or time to a reward, within bounds on age and effective sample size
- `search`    simulates points that Optuna proposes
- `advice`    the recommendation with a reason per change; table, plot and YAML
- `tune`      from the options to the files; short real runs, through the runner of sweeps
"""
