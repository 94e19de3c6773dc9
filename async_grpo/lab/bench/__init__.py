"""Benches: each measures figures together with their baselines in the same run.

A bench is a module (or package) here with

    async def measure(progress: Progress, *, quick: bool, ...) -> list[Measurement]

and a command of two lines in `async_grpo/app/cli/bench.py`, or, if users do not need it, a `__main__` that calls
`benchmarks.harness`. `measure.py` has measurements, turns, the table and the file; `rig.py` has the server and the
child processes. A bench with a picture takes `picture` and calls it with a function that draws into a file; that
happens after the figures have been shown and written. A bench with a `view` is shown in that instead of the usual
table.
"""
