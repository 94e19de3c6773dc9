"""A run of the replay buffer whose processes are killed with SIGKILL at random moments.

    boss --fork, SIGKILL, fork again--> 4 producers, 2 trainers (one holds the epoch), a watcher
         --SIGKILL, start again-------> the server, on its append-only file

The workers are those of a run without models: they insert random tokens, so no two attempts of a group are alike, and
a trainer's checkpoint is only the number of its version. Each worker journals its requests and the acknowledgements.
The journals are compared with the server's content twice: after all workers were killed in the middle of their work,
and when the run has reached its horizon. Nothing acknowledged may be missing, and nothing may exist twice.

- `plan`       settings of a crash run, and its files
- `journal`    requests and acknowledgements of a worker, line by line
- `producer`, `trainer`, `watcher`    the workers
- `crew`       the processes
- `crash_run`  the sequence of events
- `books`      the server's content, key by key, and its consistency
- `account`    compares journals with books: lost and duplicated groups
"""
