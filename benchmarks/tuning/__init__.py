"""Is the choice of `async-grpo tune` as good as the best point of a grid of real runs?"""
