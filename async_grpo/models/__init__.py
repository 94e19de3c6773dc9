"""async_grpo/models"""
