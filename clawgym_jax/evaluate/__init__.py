"""Layer 4: how good a policy is, per harness."""
