"""Compares the choice of `async-grpo tune` with the best point of a grid of real runs."""
