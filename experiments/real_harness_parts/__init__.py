"""What experiments/real_harness.py is made of: scripted policies, rollouts, one update, tables."""
