"""Train the GPT of gpt.py, with learned positions and without, and the one of gpt_tape.py, on the shipped text.

python examples/train_gpt.py --out gpt.json
"""

import gpt
import gpt_tape
import torch
from results import compare, parse, report

from equitape.data.text import read_documents


def read_bytes(split):
    """The shipped novels as bytes."""
    text = "".join(document.text for document in read_documents(f"shipped:{split}"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def build(kind, config):
    model = (gpt_tape if kind == "tape" else gpt).GPT(config)
    if kind == "none":
        torch.nn.init.zeros_(model.wpe.weight.requires_grad_(False))
    return model


def draw(text, rows, length, generator):
    """Rows of the text and the same one byte further, [rows, length] each."""
    starts = torch.randint(len(text) - length - 1, (rows,), generator=generator)
    found = torch.stack([text[start : start + length + 1] for start in starts])
    return found[:, :-1], found[:, 1:]


def train(model, text, steps, seed, batch=16, rate=2e-3):
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=rate)
    for _ in range(steps):
        _, loss = model(*draw(text, batch, model.config.block_size, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def main(arguments=None):
    chosen = parse(__doc__, arguments, ("none", "learned", "tape"), steps=1000, length=128)
    text, config = read_bytes("train"), gpt.GPTConfig(block_size=chosen.length)
    test = draw(read_bytes("valid"), 256, chosen.length, torch.Generator().manual_seed(1))

    def run(kind, seed):
        model = build(kind, config)
        train(model, text, chosen.steps, seed)
        with torch.no_grad():
            return {"validation loss": model(*test)[1].item()}

    return report(compare(chosen.kinds, chosen.seeds, run), chosen, "python examples/train_gpt.py")


if __name__ == "__main__":
    main()
