"""Does `async-grpo why` name what made a run slow? Ten real runs, each with one planted cause."""
