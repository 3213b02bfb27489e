"""Layer 1: problems with an instruction, an initial workspace and a grader."""
