"""Layer 1: advantages and losses as pure functions of arrays: no model, no config, no I/O."""
