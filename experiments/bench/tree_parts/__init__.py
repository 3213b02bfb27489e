"""Parts of experiments/bench/tree_step.py: trees recorded and synthetic, and the contestants."""
