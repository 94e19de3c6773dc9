"""rollout_server/engines/vllm"""
