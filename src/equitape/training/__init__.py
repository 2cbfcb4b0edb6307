"""Training: settings, one run on transformers' Trainer, recipes, and comparisons of many runs."""
