"""Programs that run beside or inside sandboxes. Standard library only; never imported by us."""
