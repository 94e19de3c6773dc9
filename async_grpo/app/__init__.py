"""async_grpo/app"""
