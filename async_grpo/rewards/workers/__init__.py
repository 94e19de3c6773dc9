"""async_grpo/rewards/workers"""
