"""async_grpo/data/prepare"""
