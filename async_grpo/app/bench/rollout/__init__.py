"""async_grpo/app/bench/rollout"""
