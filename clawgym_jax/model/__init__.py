"""The policy: Qwen3 (dense and mixture of experts) in Flax, its attentions and its weights."""
