"""A run of the replay buffer whose processes are killed with SIGKILL at random moments.

    boss --fork, SIGKILL, fork again--> 4 producers, 2 trainers (one holds the epoch), a watcher
         --SIGKILL, start again-------> the server, on its append-only file

The workers are those of a run without models: what they insert is random, so no two attempts of a group
are alike, and a trainer's checkpoint is the mere number of its version. Each writes down what it was
about to ask and what was acknowledged. At the end the books are closed twice, once with everything
killed in the middle of its work and once when the run has reached its horizon: nothing that was
acknowledged may be missing, nothing may be there twice.

- `plan`       what to do, and where its files are
- `journal`    what a worker knows, line by line
- `producer`, `trainer`, `watcher`    the workers
- `crew`       the processes
- `crash_run`  the course of events
- `books`      what the server holds, key by key, and whether that fits together
- `account`    journals against books: what was lost, what is there twice
"""
