"""Benches: each measures values together with their baselines in the same run.

A bench is a module or package here with

    async def measure(progress: Progress, *, quick: bool, ...) -> list[Measurement]

and a short command in `async_grpo/app/cli/bench.py`, or, if users do not need it, a `__main__` that calls
`benchmarks.harness`.

- `measure`    measurements, alternating rounds, the table and the JSON file
- `rig`        the Redis server and the child processes
- `pipeline`   whole runs at several values of max_staleness
- `rollout`    a rollout server compared with bare vLLM
- `trainer`    a training step compared with baselines

A bench with a plot has the parameter `picture` and calls it with a function that draws into a file. The command draws
after the results have been printed and written. A module-level `view` replaces the usual table.
"""
