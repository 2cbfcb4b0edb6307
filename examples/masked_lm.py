"""A bidirectional masked language model on the text that ships with equitape: bytes, 15 % of them hidden.

python examples/masked_lm.py --out masked-lm.json
"""

import torch
from blocks import Encoder, accuracy
from results import compare, parse, report
from torch import nn
from torch.nn import functional as F
from train_gpt import read_bytes

MASK, VOCABULARY, SHARE = 256, 257, 0.15


class MaskedModel(nn.Module):
    def __init__(self, kind, width, layers):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embed.weight, std=0.5)
        self.encoder = Encoder(kind, width, layers=layers, theta=10000.0)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens), torch.arange(tokens.shape[1])))


def draw(text, batch, length, generator):
    """Rows of the text [batch, length] and which of their bytes to hide."""
    starts = torch.randint(len(text) - length, (batch,), generator=generator)
    rows = torch.stack([text[start : start + length] for start in starts])
    return rows, torch.rand(rows.shape, generator=generator) < SHARE


def loss_of(model, rows, hidden):
    return F.cross_entropy(model(rows.masked_fill(hidden, MASK))[hidden], rows[hidden])


def main(arguments=None):
    chosen = parse(__doc__, arguments, ("none", "rope", "tape"), steps=1000, length=128, width=64, layers=3)
    texts = {split: read_bytes(split) for split in ("train", "valid")}
    test = draw(texts["valid"], 64, chosen.length, torch.Generator().manual_seed(1))

    def run(kind, seed):
        model = MaskedModel(kind, chosen.width, chosen.layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(chosen.steps):
            loss = loss_of(model, *draw(texts["train"], 16, chosen.length, generator))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        with torch.no_grad():
            return {"accuracy": accuracy_of(model, *test), "loss": loss_of(model, *test).item()}

    return report(compare(chosen.kinds, chosen.seeds, run), chosen, "python examples/masked_lm.py")


def accuracy_of(model, rows, hidden):
    """In per cent of the hidden bytes."""
    return accuracy(model(rows.masked_fill(hidden, MASK))[hidden], rows[hidden])


if __name__ == "__main__":
    main()
