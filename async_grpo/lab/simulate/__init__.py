"""Predict a run by discrete-event simulation around the replay buffer's own decisions.

The simulation

- `simulation`   connects the simulated roles and runs them to the last step
- `buffer`       the real buffer state, with waiting and the cost of calls
- `server`, `engine`, `group`, `evaluation`   rollout servers and what they generate
- `trainer`      takes batches, trains, publishes weights
- `processors`   slows engines and trainer while they share a machine
- `context`, `events`, `settings`   what all roles share: clock, random numbers, settings of the run
- `results`      metrics of a simulated run

Its inputs

- `timings`, `lengths`   the speed of each part of a run and the lengths of completions, as a file
- `devices`      timings estimated from a device's data sheet
- `recorded`, `calibrate`, `engine_fit`   timings fitted to the files of recorded runs

Its uses

- `prediction`, `uncertainty`   `async-grpo simulate`: predictions and their ranges
- `whatif`       the simulated effect of single changes
- `why`          `async-grpo why`: where the time of a recorded run went
"""
