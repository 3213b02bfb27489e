"""Parts of experiments/bench/proxy.py: conversations, a load, and the servers under it."""
