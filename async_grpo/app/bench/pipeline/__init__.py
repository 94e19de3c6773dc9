"""async_grpo/app/bench/pipeline"""
