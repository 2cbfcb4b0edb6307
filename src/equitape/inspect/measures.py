"""What positional states say: products, norms, phases, and the distance that two phasor fields amount to.

Shapes: G key-value heads, N tokens, E width of the state, M frequencies; fields of phasors are [G, N, 2 M], half-split.
"""

import torch
from torch import Tensor

from ..encodings import PositionalEncoding, Positions


def as_complex(field: Tensor) -> Tensor:
    """[G, N, 2 M] real -> [G, N, M] complex."""
    return torch.complex(*field.to(torch.promote_types(field.dtype, torch.float32)).chunk(2, dim=-1))


def state_products(state: Tensor) -> Tensor:
    """Products of all pairs of tokens, over heads and frequencies: the sum of Re(conj z_i z_j), [G, N, E] -> [N, N]."""
    flat = state.transpose(0, 1).flatten(1).to(torch.promote_types(state.dtype, torch.float32))
    return flat @ flat.mT


def phasor_norms(field: Tensor) -> Tensor:
    """Root mean square of |z| over frequencies: [G, N]."""
    return as_complex(field).abs().square().mean(-1).sqrt()


def phase_displacement(field: Tensor, start: Tensor) -> Tensor:
    """How far phases moved from where they started: the mean over frequencies of |arg(conj z_start z)|, [G, N]."""
    return (as_complex(start).conj() * as_complex(field)).angle().abs().mean(-1)


def rotary_frequencies(encoding: PositionalEncoding, num_tokens: int) -> Tensor:
    """theta_m [M] in float64, read off the phasors that an encoding starts with at ids 0 and 1."""
    ids, span = torch.tensor([[0, 1]]), torch.tensor([[num_tokens]])
    start = encoding.initial_state(Positions(ids=ids, origin=torch.zeros_like(span), span=span), torch.float64)
    assert start is not None
    first = as_complex(start[0])[0]
    return (first[0].conj() * first[1]).angle()


def effective_distances(queries: Tensor, keys: Tensor, frequencies: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """At which distance plain rotary phasors would be most like these: ([P], [P]) for pairs of tokens.

    The distance d that maximises Re sum_m conj(k_m) q_m exp(-i theta_m d), looked for from -reach to 2 reach and
    refined between whole numbers by a parabola; and how like it is, from 0 to 1 (1 for unchanged rotary phasors). Only
    products conj(k) q enter, so a turn of all phasors of a frequency changes nothing. queries, keys: [P, M] complex.
    """
    relative = queries * keys.conj()
    grid = torch.arange(-reach, 2 * reach + 1, dtype=torch.float64)
    angles = grid[:, None] * frequencies.double()
    # Re(a exp(-i x)) = Re a cos x + Im a sin x, for all pairs and distances in one product
    waves = torch.cat((angles.cos(), angles.sin()), dim=1).to(relative.real.dtype)
    likeness = torch.cat((relative.real, relative.imag), dim=1) @ waves.mT
    best = likeness.argmax(1)
    inner = best.clamp(1, len(grid) - 2)
    left, middle, right = (likeness.gather(1, (inner + step)[:, None])[:, 0] for step in (-1, 0, 1))
    curvature = left - 2 * middle + right
    offset = torch.where(curvature < 0, (left - right) / (2 * curvature), 0.0).clamp(-0.5, 0.5)
    offset = torch.where(inner == best, offset, 0.0)
    size = relative.abs().sum(1).clamp(min=torch.finfo(likeness.dtype).tiny)
    return grid[best].to(likeness.dtype) + offset, (likeness.gather(1, best[:, None])[:, 0] / size).clamp(min=0.0)
