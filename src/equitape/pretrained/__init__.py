"""Pretrained models: read, converted to an Equitape decoder, adapted, saved and loaded again."""
