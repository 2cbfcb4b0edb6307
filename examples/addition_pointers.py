"""How does a trained addition model line up digits? docs/explanation/pointers.md explains the picture.

    equitape train addition-20 "encodings=[{kind: tape2, decay_heads: 0.5, jumps: {rate: 0.06, shape: log, size: 2.0}}]"
    python examples/addition_pointers.py runs/addition-20/... addition.png

Two tokens whose fields are alike are in the same place for attention. Their likeness is the modulus of the product of
their phasors, 1 if the fields differ by one angle at most. Before the first block only neighbours are alike.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from pointing import PARTS, ablations, attentions, fields, without
from torch import Tensor

from equitape import EquitapeForCausalLM
from equitape.tasks.addition import PAD, make_sums


def draw(digits: tuple[int, int], rows: int, seed: int = 0) -> Tensor:
    """Random sums of numbers with so many digits: [n, T]."""
    lengths = [torch.full((rows,), count) for count in digits]
    return make_sums(*lengths, torch.Generator().manual_seed(seed)).tokens.long()


def prompt_length(digits: tuple[int, int]) -> int:
    return sum(digits) + 2


def accuracy(model: EquitapeForCausalLM, digits: tuple[int, int], tokens: Tensor) -> Tensor:
    """Share of right tokens at every place of the answer."""
    start = prompt_length(digits)
    with torch.no_grad():
        predicted = model(tokens).logits[:, start - 1 : -1].argmax(-1)
    expected = tokens[:, start:]
    counted = (expected != PAD).float()
    return ((predicted == expected) * counted).sum(0) / counted.sum(0)


def likeness(field: Tensor) -> Tensor:
    """How alike the fields [n, G, T, M] of two tokens are, averaged over rows: [G, T, T]."""
    unit = field / field.norm(dim=-1, keepdim=True)
    return (unit @ unit.mH).abs().mean(0)


def attention_to_place(model: EquitapeForCausalLM, digits: tuple[int, int], tokens: Tensor) -> dict[str, Tensor]:
    """Attention of the token that writes place k to place k of both numbers: [blocks, heads, places] each."""
    places = torch.arange(min(digits))
    writers = prompt_length(digits) - 1 + places
    found = torch.stack([each.mean(0) for each in attentions(model, tokens)])
    return {"first": found[:, :, writers, places], "second": found[:, :, writers, digits[0] + 1 + places]}


@contextmanager
def held(model: EquitapeForCausalLM, frequencies: list[int], tokens: Tensor) -> Iterator[None]:
    """Keep these frequencies of the field as they start, in every block."""
    start = fields(without(model, list(PARTS), list(range(model.config.num_hidden_layers))), tokens)[0]

    def put_back(module: object, inputs: object, output: tuple) -> tuple:
        field = torch.complex(*output[1].chunk(2, dim=-1))
        field[..., frequencies] = start[..., frequencies]
        return output[0], torch.cat((field.real, field.imag), dim=-1), *output[2:]

    hooks = [block.register_forward_hook(put_back) for block in model.model.layers]
    yield
    for hook in hooks:
        hook.remove()


def measure(model: EquitapeForCausalLM, shown: tuple[int, int], lengths: list[int], rows: int) -> dict:
    """All figures of the picture. `shown`: digits of the sums whose fields are shown; `lengths`: digits of both numbers
    of other sums, of which the first is inside the trained lengths.
    """
    found: dict = {"digits": list(shown), "rows": rows, "lengths": lengths}
    trained = (lengths[0], lengths[0])
    tokens = draw(trained, rows)
    both = attention_to_place(model, trained, tokens)
    # for each number the block and head that look at the right place most
    found["heads"] = {
        name: [int(index) for index in torch.unravel_index(each.mean(-1).argmax(), each.shape[:2])]
        for name, each in both.items()
    }
    # the fields that the last of these blocks reads
    late = max(1, *(block for block, _ in found["heads"].values())) - 1
    states = fields(model, draw(shown, rows))
    found["likeness"] = {block + 1: likeness(states[block]).mean(0).tolist() for block in (0, late)}
    found["attention"], found["accuracy"] = {}, {}
    for length in lengths:
        sums = draw((length, length), rows)
        both = attention_to_place(model, (length, length), sums)
        found["attention"][length] = {name: each[tuple(found["heads"][name])].tolist() for name, each in both.items()}
        found["accuracy"][length] = accuracy(model, (length, length), sums).tolist()
    found["ablations"] = {
        name: accuracy(changed, trained, tokens).mean().item() for name, changed in ablations(model).items()
    }
    count = model.config.geometry.head_dim // 2
    found["held"] = {}
    for first in range(0, count, count // 4):
        with held(model, list(range(first, first + count // 4)), tokens):
            score = accuracy(model, trained, tokens).mean().item()
        found["held"][f"{first + 1} to {first + count // 4}"] = score
    return found


def draw_picture(found: dict, path: Path) -> None:
    """Which fields are alike at the start and late, attention by place, and what each part of the update is worth."""
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(2, 2, figsize=(12.5, 10.5), width_ratios=(1.1, 1))
    panels = grid.flatten()
    left, right = found["digits"]
    ends = (left + 0.5, left + right + 1.5)
    for axes, (block, alike) in zip(panels, found["likeness"].items(), strict=False):
        axes.imshow(alike, cmap="viridis")
        for end in ends:
            axes.axhline(end - 0.5, color="white", linewidth=0.6)
            axes.axvline(end - 0.5, color="white", linewidth=0.6)
        middles = [left / 2, left + right / 2, left + right + 1.5 + max(left, right) / 2]
        axes.set_xticks(middles, ["first", "second", "answer"])
        axes.set_yticks(middles, ["first", "second", "answer"], rotation=90, va="center")
        axes.set_title(f"Which fields are alike after block {block}\n{left} + {right} digits, mean of all heads")
    for (length, curves), colour in zip(found["attention"].items(), ("#1f5fa8", "#a80000", "#c77700"), strict=False):
        mean = torch.tensor([curves["first"], curves["second"]]).mean(0)
        panels[2].plot(range(1, len(mean) + 1), mean, color=colour, label=f"attention, {length} + {length} digits")
        score = found["accuracy"][length][: len(mean)]
        panels[2].plot(range(1, len(mean) + 1), score, ".", color=colour, label="digits right")
    panels[2].set(title="Attention to the digits of the same place", xlabel="place, 1 = units", ylim=(0, 1.02))
    panels[2].legend(frameon=False, fontsize=8)
    scores = {**found["ablations"], **{f"frequencies {name} fixed": value for name, value in found["held"].items()}}
    panels[3].barh(list(scores)[::-1], [100 * value for value in scores.values()][::-1], color="#a80000", height=0.6)
    panels[3].set(title="When parts of the update are off", xlabel="digits right, per cent", xlim=(0, 100))
    for axes in panels[2:]:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(run: str, picture: str, rows: str = "32") -> None:
    """Measure a run of the recipe `addition-20`, write the figures as JSON and draw them."""
    folder = Path(run)
    model = EquitapeForCausalLM.from_pretrained(folder / "model" if (folder / "model").exists() else folder).eval()
    found = measure(model, (14, 18), [20, 28, 36], int(rows))
    rounded = json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 4))
    Path(picture).with_suffix(".json").write_text(json.dumps(rounded) + "\n")
    draw_picture(found, Path(picture))
    for name, (block, head) in found["heads"].items():
        print(f"the {name} number is read by block {block + 1}, head {head + 1}")
    for length in found["lengths"]:
        for name, places in found["attention"][length].items():
            print(f"{length} digits, attention to the {name} number: {' '.join(f'{each:.2f}' for each in places)}")
        print(f"{length} digits, right: {' '.join(f'{each:.2f}' for each in found['accuracy'][length])}")
    for name, share in found["ablations"].items():
        print(f"{name}: {100 * share:.1f} % of the digits")
    for name, share in found["held"].items():
        print(f"frequencies {name} fixed: {100 * share:.1f} % of the digits")


if __name__ == "__main__":
    main(*sys.argv[1:])
