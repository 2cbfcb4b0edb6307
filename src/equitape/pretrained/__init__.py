"""Pretrained models: read, convert to an Equitape decoder, adapt, save and load them."""
