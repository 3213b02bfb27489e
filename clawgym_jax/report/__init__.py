"""One static page about a run, and its calls in the terminal."""
