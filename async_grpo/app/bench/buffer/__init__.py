"""async_grpo/app/bench/buffer"""
