"""The policy and its reference on Megatron: model, optimizer, and weights in Hugging Face's names."""
