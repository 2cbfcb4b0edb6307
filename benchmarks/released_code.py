"""What some differences between TAPE's released code and its paper change, as far as a CPU can tell.

python benchmarks/released_code.py leak                                  # the state's update summed over queries
python benchmarks/released_code.py adapter ADAPTER BASE book.txt         # the map over heads of a trained adapter
python benchmarks/released_code.py training book.txt                     # small models with a map that only rescales
"""

import argparse
import math
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from equitape import EquitapeConfig, EquitapeForCausalLM
from equitape.adapt import load_adapter
from equitape.inspect import frozen_state
from equitape.pretrained.loading import load_tokenizer_of

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


def encodings_with_a_map(model):
    return [part for layer in model.model.layers if hasattr(part := layer.self_attn.encoding, "carry")]


def leak(given):
    """Change the second half of a text and look at the first. Random weights, float64."""

    def logits(over_queries, tokens):
        torch.manual_seed(0)
        config = EquitapeConfig(vocab_size=64, encoding={"kind": "tape"}, attn_implementation="eager", **SIZES)
        model = EquitapeForCausalLM(config).double().eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        for layer in model.model.layers:
            part, seen = layer.self_attn.encoding, {}
            if not hasattr(part, "carry"):
                continue
            layer.self_attn.register_forward_hook(lambda _, __, out, seen=seen: seen.update(attention=out[1]))

            def update(state, attended_state, *others, written=part.update, seen=seen):
                attention = seen["attention"]
                by_keys = attention @ state
                assert (by_keys - attended_state).abs().max() < 1e-12
                return written(state, attention.mT @ state if over_queries else by_keys, *others)

            part.update = update
        with torch.no_grad():
            return model(tokens, use_cache=False).logits

    generator = torch.Generator().manual_seed(0)
    text = torch.randint(64, (1, 32), generator=generator)
    other = text.clone()
    other[:, 16:] = torch.randint(64, (1, 16), generator=generator)
    for over_queries in (False, True):
        first, second = logits(over_queries, text), logits(over_queries, other)
        change = float((first - second)[:, :16].abs().max() / first.std())
        name = "queries" if over_queries else "keys"
        print(f"summed over {name}: logits of the first half change by {change:.3g} of their spread")


def adapter(given):
    """Perplexity of four windows with the map over heads of a trained adapter, and with others in its place."""
    model = load_adapter(given.base, given.adapter, dtype=torch.float32).eval()
    tokenizer = load_tokenizer_of(given.adapter, given.base, None)
    tokens = tokenizer(Path(given.text).read_text())["input_ids"]
    windows = [torch.tensor([tokens[start : start + 2048]]) for start in range(10_000, 70_000, 15_000)]
    parts = encodings_with_a_map(model)
    trained = [part.carry.detach().clone() for part in parts]
    groups, heads = trained[0].shape
    own = torch.eye(groups).repeat_interleave(heads // groups, dim=1)

    def perplexity():
        with torch.no_grad():
            losses = [cross_entropy(model(row).logits[0, :-1], row[0, 1:]).item() for row in windows]
        return math.exp(sum(losses) / len(losses))

    variants = {
        "as trained": lambda weight: weight,
        "each head rescaled by the sum of its row (pre-training code)": lambda weight: (
            own * weight.sum(1, keepdim=True) * groups / heads
        ),
        "zero (extension code)": torch.zeros_like,
    }
    for name, change in variants.items():
        with torch.no_grad():
            for part, weight in zip(parts, trained, strict=True):
                part.carry.copy_(change(weight))
        print(f"{name}: perplexity {perplexity():.2f}", flush=True)
    with frozen_state(model):
        print(f"no update at all: perplexity {perplexity():.2f}")


def training(given):
    """Bits per byte on a tenth of a text, at 128 and 512 tokens, of models trained on the rest at 128; three seeds."""
    text = torch.tensor(list(Path(given.text).read_bytes()))
    cut = len(text) * 9 // 10
    trained, held = text[:cut], text[cut:]
    for seed in range(3):
        for name, kind, rescales in (
            ("rope", "rope", False),
            ("tape", "tape", False),
            ("tape, rescaling", "tape", True),
        ):
            torch.manual_seed(seed)
            config = EquitapeConfig(vocab_size=256, max_position_embeddings=512, encoding={"kind": kind}, **SIZES)
            model = EquitapeForCausalLM(config)
            if rescales:
                for part in encodings_with_a_map(model):
                    # what is off the diagonal starts at zero and stays there
                    part.carry.register_hook(lambda gradient: gradient * torch.eye(len(gradient)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=given.steps, pct_start=0.1)
            generator = torch.Generator().manual_seed(seed)
            for _ in range(given.steps):
                starts = torch.randint(len(trained) - 128, (16,), generator=generator).tolist()
                rows = torch.stack([trained[start : start + 128] for start in starts])
                optimizer.zero_grad()
                model(rows, labels=rows).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
            model.eval()
            found = []
            for length in (128, 512):
                rows = held[:16_384].view(-1, length)
                with torch.no_grad():
                    found.append(model(rows, labels=rows).loss.item() / math.log(2))
            print(f"{name}, seed {seed}: {found[0]:.3f} bits per byte at 128, {found[1]:.3f} at 512", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    for run in (leak, adapter, training):
        part = parts.add_parser(run.__name__, help=run.__doc__)
        part.set_defaults(run=run)
        if run is adapter:
            part.add_argument("adapter")
            part.add_argument("base")
        if run is not leak:
            part.add_argument("text", help="a file of plain text, a book at least")
        if run is training:
            part.add_argument("--steps", type=int, default=500)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
