"""vLLM as the engine. Nothing outside this package imports vllm."""
