"""Models for tests of scoring: one that answers by a function of the tokens, and one that has learnt a little."""

from functools import cache
from itertools import dropwhile

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from equitape import EquitapeConfig, EquitapeForCausalLM
from equitape.tasks import build_task


def tiny_model(task, kind="rope", **changes):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": max(64, task.tested_length),
        "initializer_range": 0.1,
    }
    return EquitapeForCausalLM(
        EquitapeConfig(
            **{**sizes, **changes},
            vocab_size=task.vocab_size,
            pad_token_id=task.pad_token_id,
            eos_token_id=task.eos_token_id,
            bos_token_id=task.bos_token_id,
            encoding=kind,
        )
    ).eval()


class Oracle(EquitapeForCausalLM):
    """Decodes by transformers' own `generate`; `follow(tokens so far)` says which token comes next."""

    def __init__(self, task, follow):
        super().__init__(tiny_model(task).config)
        self.follow = follow
        self.rows = 0
        self.steps = 0
        # without a cache every call brings all tokens
        self.generation_config.use_cache = False

    def forward(self, input_ids, logits_to_keep=0, **_):
        self.rows, self.steps = self.rows + len(input_ids), self.steps + 1
        length = input_ids.shape[1]
        ends = range(length - (logits_to_keep or length) + 1, length + 1)
        following = torch.tensor([[self.follow(self.strip(row[:end])) for end in ends] for row in input_ids.tolist()])
        return CausalLMOutputWithPast(logits=torch.nn.functional.one_hot(following, self.config.vocab_size).double())

    def strip(self, tokens):
        """Without the padding before them."""
        return list(dropwhile(lambda token: token == self.config.pad_token_id, tokens))


@cache
def trained_copier(kind="rope", steps=60):
    """A task of copying three symbols, and a model that does so now and then."""
    task = build_task("copy", {"alphabet": 4, "trained_symbols": 3, "tested_symbols": 5, "samples": 24})
    torch.manual_seed(1)
    model, examples = tiny_model(task, kind).train(), task.training_set(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        model(**task.collate([examples[64 * step + row] for row in range(64)])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return task, model.eval()
