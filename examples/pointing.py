"""Look into a trained TAPE model: the field of every token after every block, attention, and updates switched off."""

import copy

import torch
from torch import Tensor

from equitape import EquitapeForCausalLM

PARTS = {"move": "move_gain", "carry": "carry", "mix": "mix_out"}
"""Parts of the update, and the parameter that switches each off when it is zero."""


def fields(model: EquitapeForCausalLM, tokens: Tensor) -> list[Tensor]:
    """The field of every token after each block: complex, [n, G, T, M]."""
    states: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda module, inputs, output: states.append(output[1]))
        for block in model.model.layers
    ]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return [torch.complex(*state.chunk(2, dim=-1)) for state in states]


def attentions(model: EquitapeForCausalLM, tokens: Tensor) -> tuple[Tensor, ...]:
    """Attention of every block: [n, H, T, T]."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(tokens, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return found


def without(model: EquitapeForCausalLM, parts: list[str], blocks: list[int]) -> EquitapeForCausalLM:
    """A copy of the model with these parts of the update switched off in these blocks."""
    changed = copy.deepcopy(model)
    for block in blocks:
        encoding = changed.model.layers[block].self_attn.encoding
        for part in parts:
            weight = getattr(encoding, PARTS[part], None)
            if weight is not None:
                weight.data.zero_()
    return changed


def ablations(model: EquitapeForCausalLM) -> dict[str, EquitapeForCausalLM]:
    """The model with every part switched off in all blocks, all parts in one block, and everything."""
    blocks = list(range(model.config.num_hidden_layers))
    return {
        "all updates": model,
        **{f"without {part}": without(model, [part], blocks) for part in PARTS},
        **{f"without block {block + 1}": without(model, list(PARTS), [block]) for block in blocks[:-1]},
        "no update": without(model, list(PARTS), blocks),
    }
