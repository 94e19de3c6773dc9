"""async_grpo/app/report"""
