"""`async-grpo tune`: the settings of a run that reach a goal, found by simulation, and checked by short real runs.

    CONFIG, --vary, --fix --> axes --> Optuna <--> simulations --> Pareto front --> choice --> recommended.yaml
                                                                                      |
                                                   --real N: a sweep of short runs of the best and the present one

- `space`     which keys are varied, and their values
- `goals`     what is best: throughput, cost or time to a reward, under bounds on age and effective sample size
- `search`    simulates points that Optuna proposes
- `advice`    why each line of the recommendation is as it is; table, plot and YAML
- `real`      short real runs, through the runner of sweeps
- `tune`      from the options to the files
"""
