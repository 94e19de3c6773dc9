"""async_grpo/rewards/verifiers"""
