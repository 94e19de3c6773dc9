"""async_grpo/telemetry/trackers"""
