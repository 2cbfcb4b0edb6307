"""The version, in its own file so that building the package does not import torch."""

__version__ = "0.2.0.dev0"
