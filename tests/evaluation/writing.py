"""Prompts, and answers to them written in a chosen way."""

import torch

from equitape.tasks.decoding import FirstLine, write_tokens


def prompts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(97, 123, (length,), generator=generator).tolist() for length in lengths]


def write(who, way, given, count, ends=(256,), newlines=None):
    """newlines: tokens that end an answer as lines do."""
    who.writing = way
    stop = None if newlines is None else FirstLine(Lines(newlines), len(given))
    return write_tokens(who, given, count, list(ends), stop)


class Lines:
    """Decodes some tokens to an end of line and all others to a letter."""

    def __init__(self, newlines):
        self.newlines = newlines

    def decode(self, tokens):
        return "".join("\n" if token in self.newlines else "a" for token in tokens)
