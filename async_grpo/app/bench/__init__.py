"""Benches: each measures figures together with their baselines in the same run.

A bench is a module (or package) here with

    async def measure(progress: Progress, *, quick: bool, ...) -> list[Figure]

and a command of two lines in `async_grpo/app/cli/bench.py`. One that has a picture to draw takes `picture`, and calls
it with what draws it into a file: that is done when the figures have been shown and written.
"""
