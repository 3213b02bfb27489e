"""Layer 2: the engine that samples from the current policy, and the driver that feeds it."""
