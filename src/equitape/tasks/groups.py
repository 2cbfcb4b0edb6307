"""Word problems of groups: after every permutation, the product of all so far.

The word problem of S5, and of A5, is complete for NC1: no fixed depth of plain attention is believed to solve it for
all lengths. Permutations are numbered in the order of `itertools.permutations`; the product p q is "first q, then p",
as that of their matrices, and a word is multiplied from left to right. Shapes: n words, S steps.
"""

from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..registry import describe_choices
from .states import StepOptions, StepTask

POINTS = 5
Permutation = tuple[int, ...]


def is_even(permutation: Permutation) -> bool:
    """Whether a permutation is even."""
    pairs = ((i, j) for j in range(len(permutation)) for i in range(j))
    return sum(permutation[i] > permutation[j] for i, j in pairs) % 2 == 0


def count_moved(permutation: Permutation) -> int:
    """Points that a permutation moves."""
    return sum(place != point for place, point in enumerate(permutation))


@dataclass(frozen=True, kw_only=True)
class GroupOptions(StepOptions):
    """Words of the group."""

    generators: str = "all"
    """Elements in words: "all", "transpositions" (S5), or "three_cycles" (A5)."""


class GroupTask(StepTask):
    """Tokens: the elements of the group, as steps and as answers, then begin and padding."""

    options_class = GroupOptions
    options: GroupOptions
    only_even: ClassVar[bool]
    """Whether the group has only even permutations."""
    generator_sets: ClassVar[tuple[str, ...]]

    def __init__(self, options: Any):
        super().__init__(options)
        if options.generators not in self.generator_sets:
            raise ValueError(
                f"Task {self.name!r} has no generators {options.generators!r}."
                f"{describe_choices(options.generators, self.generator_sets)}"
            )
        self.elements, self.products = build_group(self.only_even)
        moved = {"all": None, "transpositions": 2, "three_cycles": 3}[options.generators]
        self.letters = torch.tensor(
            [number for number, element in enumerate(self.elements) if moved in (None, count_moved(element))]
        )
        self.bos_token_id, self.pad_token_id = len(self.elements), len(self.elements) + 1
        self.vocab_size = len(self.elements) + 2

    def draw_steps(self, count: int, steps: int, generator: torch.Generator) -> Tensor:
        return self.letters[torch.randint(0, len(self.letters), (count, steps), generator=generator)]

    def follow(self, steps: Tensor) -> Tensor:
        """By doubling: products of up to k steps combine to products of up to 2 k."""
        products, reach = steps.clone(), 1
        while reach < steps.shape[1]:
            products[:, reach:] = self.products[products[:, :-reach], products[:, reach:]]
            reach *= 2
        return products


@cache
def build_group(only_even: bool) -> tuple[list[Permutation], Tensor]:
    """The elements, and the index of the product of every pair."""
    elements = [p for p in permutations(range(POINTS)) if not only_even or is_even(p)]
    number = {element: index for index, element in enumerate(elements)}
    table = [[number[tuple(p[point] for point in q)] for q in elements] for p in elements]
    return elements, torch.tensor(table)


class S5(GroupTask):
    """All 120 permutations of five points."""

    name = "s5"
    idea = "after every permutation of five points: the product so far; longer words than in training"
    only_even = False
    generator_sets = ("all", "transpositions")


class A5(GroupTask):
    """The 60 even permutations, the smallest group whose word problem is as hard."""

    name = "a5"
    idea = "after every even permutation of five points: the product so far; longer words than in training"
    only_even = True
    generator_sets = ("all", "three_cycles")
