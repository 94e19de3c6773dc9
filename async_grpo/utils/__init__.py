"""async_grpo/utils"""
