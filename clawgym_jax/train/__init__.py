"""Layer 4: from batches to new weights, with checkpoints and the loop that closes the circle."""
