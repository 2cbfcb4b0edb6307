"""Training: settings, one run on transformers' Trainer, recipes, and the comparison of many runs."""
