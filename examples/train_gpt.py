"""Train the GPT of gpt.py, with learned positions and without, and the one of gpt_tape.py, on the shipped text.

python examples/train_gpt.py --steps 1000
"""

import argparse

import gpt
import gpt_tape
import torch

from equitape.data.text import read_documents


def read_bytes(split):
    """The shipped novels as bytes."""
    text = "".join(document.text for document in read_documents(f"shipped:{split}"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def build(kind, config, seed):
    torch.manual_seed(seed)
    model = (gpt_tape if kind == "tape" else gpt).GPT(config)
    if kind == "none":
        torch.nn.init.zeros_(model.wpe.weight.requires_grad_(False))
    return model


def train(model, text, steps, seed, batch=16, rate=2e-3):
    """Returns the mean loss of the last quarter of the steps."""
    generator, length = torch.Generator().manual_seed(seed), model.config.block_size
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=rate)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - length - 1, (batch,), generator=generator)
        rows = torch.stack([text[start : start + length + 1] for start in starts])
        _, loss = model(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-(steps // 4) :]) / (steps // 4)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--kinds", nargs="+", default=["none", "learned", "tape"])
    chosen = parser.parse_args(arguments)
    text, config = read_bytes("train"), gpt.GPTConfig(block_size=chosen.length)
    losses = {}
    for kind in chosen.kinds:
        losses[kind] = train(build(kind, config, chosen.seed), text, chosen.steps, chosen.seed)
        print(f"{kind:8} loss {losses[kind]:.3f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
