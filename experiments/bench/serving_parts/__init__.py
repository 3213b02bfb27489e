"""Parts of experiments/bench/serving.py: the contestants, each in a process of its own."""
