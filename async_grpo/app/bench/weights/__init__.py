"""async_grpo/app/bench/weights"""
