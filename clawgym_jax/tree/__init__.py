"""Layer 1: the calls of a rollout as a prefix tree, filtered, flattened and packed. No jax."""
