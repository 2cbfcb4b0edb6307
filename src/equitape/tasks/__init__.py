"""Tasks: make examples, score outputs."""
