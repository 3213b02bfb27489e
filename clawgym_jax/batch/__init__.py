"""Layer 2: episodes become the arrays that one training step reads."""
