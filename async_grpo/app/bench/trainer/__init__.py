"""async_grpo/app/bench/trainer"""
