"""TAPE's family solves the word problem of S5: the theorem as runnable weights (docs/explanation/theory.md).

The alphabet is the ten transpositions of five points; each word starts with a start token. Four blocks of the shipped
`TensorTapeLayer`, with weights set by hand, read the letter, solve for the coefficients of the reflections, sum them,
and compare with the identity. Two things differ from the shipped code: the state starts from a table instead of
positions, and the second block's attention weights solve a linear system instead of being a softmax.

Shapes: B words, N tokens with the start token, C token features, G = 2 heads, L rows of R = 6 state components.
"""

from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .encodings.options import Geometry
from .encodings.tensor_tape import TensorTapeLayer, TensorTapeOptions

POINTS = 5
SWAPS = tuple(combinations(range(POINTS), 2))
"""The letters: letter n swaps the two points SWAPS[n]."""
BEGIN = len(SWAPS)
"""The start token of a word."""

# the sixth component is equal for all permutations: it holds the constant of the identity test
COMPONENTS = POINTS + 1
OWN_HEAD, GATHERED_HEAD, HEADS = 0, 1, 2
# rows of the state: a vector per letter, the identity matrix, the token's letter, and the matrix to compute
LETTER_ROWS = slice(0, BEGIN)
UNIT_ROWS = slice(BEGIN, BEGIN + COMPONENTS)
OWN_ROW = BEGIN + COMPONENTS
PRODUCT_ROWS = slice(OWN_ROW + 1, OWN_ROW + 1 + COMPONENTS)
ROWS = OWN_ROW + 1 + COMPONENTS
# token features: one-hot letter or start token, then 1 / (tokens so far), which the third block computes
SHARE = BEGIN + 1
FEATURES = BEGIN + 2

OPEN = 64.0
"""A gate input at which silu(x) equals x to the last bit in float64; silu(0) = 0 closes the gate."""
SHARPNESS = 2.0**20
"""Scale of the last scores: words equal to the identity win by 50 or more up to ten thousand letters."""

Weigh = Callable[[Tensor, Tensor], Tensor]
"""(scores [B, G, N, N], mask [N, N] of ones and zeros) -> attention weights [B, G, N, N]."""


class Block(nn.Module):
    """One block: eq. 6 to 8 by the shipped layer, and a plain residual attention for the tokens."""

    def __init__(self, weigh: Weigh):
        super().__init__()
        self.weigh = weigh
        options = TensorTapeOptions(
            channels=ROWS, components=COMPONENTS, mix_over="heads+channels", mixer_size=2 * COMPONENTS
        )
        geometry = Geometry(hidden_size=FEATURES, num_heads=HEADS, num_kv_heads=HEADS, head_dim=ROWS, num_layers=4)
        self.encoding = TensorTapeLayer(options, geometry, updates=True)
        self.query = nn.Parameter(torch.empty(HEADS, ROWS, FEATURES))
        self.key = nn.Parameter(torch.empty(HEADS, ROWS, FEATURES))
        self.value = nn.Parameter(torch.empty(HEADS, FEATURES, FEATURES))
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor, state: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, N, C] and state [B, G, N, L R] after the block, and its scores [B, G, N, N]."""
        query, key = (torch.einsum("hlc,bnc->bhnl", weight, x) for weight in (self.query, self.key))
        query, key = self.encoding("rotate", query, key, state)
        scores = query @ key.mT
        weights = self.weigh(scores, mask)
        x = x + torch.einsum("bhnj,bjc,hdc->bnd", weights, x, self.value)
        attended_state = weights @ self.encoding("extra_values", state)
        return x, self.encoding("update", state, attended_state, x, x), scores

    def connect(self, gate: int, source: tuple[int, int], target: tuple[int, slice | int], row: Tensor) -> None:
        """Let a gate add `row` times one row of one head to rows of another."""
        mix_in, mix_out = self.encoding.mix_in, self.encoding.mix_out
        mix_in.view(-1, HEADS, ROWS)[gate][source] = 1.0
        mix_out.view(HEADS, ROWS, -1)[..., gate][target] = row


def softmax_weights(scores: Tensor, mask: Tensor) -> Tensor:
    """Standard softmax attention."""
    return scores.masked_fill(mask == 0, -torch.inf).softmax(-1)


def solved_weights(scores: Tensor, mask: Tensor) -> Tensor:
    """(I + S)^-1 for the scores S of the other tokens that the mask allows.

    The paper prints the mask with its diagonal; then even one transposition fails (docs/explanation/theory.md).
    """
    unit = torch.eye(len(mask), dtype=scores.dtype)
    return torch.linalg.inv(unit + (mask - unit) * scores)


class Trace(NamedTuple):
    """The results of the construction."""

    is_identity: Tensor
    """[B, N]: 1 if the letters so far multiply to the identity, else 0: the last attention to the start token."""
    scores: tuple[Tensor, ...]
    """Scores of each block, [B, G, N, N]."""
    states: tuple[Tensor, ...]
    """The initial state and the state after each of the first three blocks, [B, G, N, L, R]."""
    products: Tensor
    """[B, N, 5, 5]: the matrices of the products so far, read from inner products of the states."""


class WordProblem(nn.Module):
    """The construction: maps words of transpositions [B, N], each with its start token, to a `Trace`."""

    def __init__(self) -> None:
        super().__init__()
        self.reflections = reflection_vectors()
        weights = (softmax_weights, solved_weights, softmax_weights, softmax_weights)
        blocks = [Block(weigh) for weigh in weights]
        self.blocks = nn.ModuleList(blocks).double()
        with torch.no_grad():
            for block, set_weights in zip(blocks, (read, solve, add_up, compare), strict=True):
                set_weights(block, self.reflections)

    @torch.no_grad()
    def forward(self, words: Tensor, turn: Tensor | None = None, mask: Tensor | None = None) -> Trace:
        """turn: orthogonal matrix [R, R] applied to the initial state. mask: visible tokens [N, N]. Default: causal."""
        batch, length = words.shape
        x = torch.zeros(batch, length, FEATURES, dtype=torch.float64)
        x.scatter_(2, words[..., None], 1.0)
        start = torch.zeros(ROWS, COMPONENTS, dtype=torch.float64)
        start[LETTER_ROWS], start[UNIT_ROWS] = self.reflections, torch.eye(COMPONENTS, dtype=torch.float64)
        start = start if turn is None else start @ turn
        state = start.flatten().expand(batch, HEADS, length, -1)
        mask = torch.ones(length, length).tril() if mask is None else mask
        mask = mask.double()

        scores, states = [], [state]
        for block in self.blocks:
            before = x
            x, state, own_scores = block(x, state, mask)
            scores.append(own_scores)
            states.append(state)
        tensors = tuple(each.unflatten(-1, (ROWS, COMPONENTS)) for each in states[:-1])
        # what the last block writes into the feature of the start token
        is_identity = (x - before)[..., BEGIN]
        return Trace(is_identity, tuple(scores), tensors, self.read_products(words, tensors[-1], before))

    def read_products(self, words: Tensor, state: Tensor, x: Tensor) -> Tensor:
        """e_i e_1^T is the transposed product over the number of tokens, for any rotation of the initial state."""
        matrices = state[:, GATHERED_HEAD, :, PRODUCT_ROWS]
        first = matrices[torch.arange(len(words)), (words == BEGIN).long().argmax(1)]
        products = torch.einsum("bnkr,blr->bnlk", matrices, first) / x[..., SHARE, None, None]
        return products[..., :POINTS, :POINTS]


def reflection_vectors() -> Tensor:
    """xi = delta_a - delta_b for every letter, [10, R]: I - xi xi^T swaps a and b."""
    vectors = torch.zeros(len(SWAPS), COMPONENTS, dtype=torch.float64)
    for letter, (a, b) in enumerate(SWAPS):
        vectors[letter, a], vectors[letter, b] = 1.0, -1.0
    return vectors


def read(block: Block, reflections: Tensor) -> None:
    """Block 1: the gate of a letter copies that letter's row to the token's row."""
    for letter in range(len(SWAPS)):
        block.encoding.gate.weight[letter, letter] = OPEN
        block.connect(letter, (OWN_HEAD, letter), (OWN_HEAD, OWN_ROW), torch.tensor(1 / OPEN))


def solve(block: Block, reflections: Tensor) -> None:
    """Block 2: scores are xi_i xi_j^T, and the weights that solve their system carry eta_i to the other head.

    The gate of the letter then writes xi_i eta_i^T.
    """
    block.query[OWN_HEAD, OWN_ROW, :SHARE] = 1.0
    block.key[OWN_HEAD, OWN_ROW, :SHARE] = 1.0
    block.encoding.carry[GATHERED_HEAD, OWN_HEAD] = 1.0
    for letter in range(len(SWAPS)):
        block.encoding.gate.weight[letter, letter] = OPEN
        block.connect(letter, (GATHERED_HEAD, OWN_ROW), (OWN_HEAD, PRODUCT_ROWS), reflections[letter] / OPEN)


def add_up(block: Block, reflections: Tensor) -> None:
    """Block 3: the mean of xi_j eta_j^T, and of the start token, which is 1 / i; then I / i minus the former.

    silu(a) - silu(-a) = a makes the gate linear.
    """
    block.value[OWN_HEAD, SHARE, BEGIN] = 1.0
    block.encoding.carry[GATHERED_HEAD, OWN_HEAD] = -1.0
    for component in range(COMPONENTS):
        source, target = UNIT_ROWS.start + component, PRODUCT_ROWS.start + component
        for gate, sign in ((2 * component, 1.0), (2 * component + 1, -1.0)):
            block.encoding.gate.weight[gate, SHARE] = sign
            block.connect(gate, (OWN_HEAD, source), (GATHERED_HEAD, target), torch.tensor(sign))


def compare(block: Block, reflections: Tensor) -> None:
    """Block 4: the score of the start token is (sum_v v pi(v) - 54.5) / i, above 0 only for the identity."""
    points = torch.arange(1.0, POINTS + 1, dtype=torch.float64)
    constant = (points @ points).item() - 0.5
    query = SHARPNESS * torch.cat((points, torch.tensor([constant])))
    key = torch.cat((points, torch.tensor([-1.0])))
    block.query[GATHERED_HEAD, PRODUCT_ROWS, :SHARE] = query[:, None]
    block.key[GATHERED_HEAD, PRODUCT_ROWS, BEGIN] = key
    block.value[GATHERED_HEAD, BEGIN, BEGIN] = 1.0
