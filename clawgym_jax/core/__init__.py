"""Layer 0: the vocabulary every other layer speaks. Imports nothing of ours, and never jax."""
