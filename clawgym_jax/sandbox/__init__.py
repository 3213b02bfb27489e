"""Layer 1: temporary places for agent programs. See `select.make_sandboxes` for the way in."""
