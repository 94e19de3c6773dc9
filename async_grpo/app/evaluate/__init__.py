"""async_grpo/app/evaluate"""
